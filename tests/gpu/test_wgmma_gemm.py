"""The GEMM for 24 to 64 rows on Hopper against plain PyTorch, in the network, and compiled.

Without a GPU its numbers are those of Triton's interpreter, in float32, with shared memory, bulk copies and their
barriers simulated (`interpreted_gluon.py`).
"""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytest.importorskip("triton", reason="Triton is not installed")

from arpg import SamplingSettings, decode, make_plan, tasks
from arpg.kernels import dispatch, small_gemm, wgmma_gemm
from arpg.kernels.dispatch import KernelPolicy, kernel_policy
from arpg.kernels.wgmma_gemm import empty_sums, linear
from support.fused import fuse_everywhere
from support.interpreted import mend
from support.paths import ROOT
from support.small import SMALL, small_model

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
DEVICE = "cuda" if HOPPER else "cpu"
HALF, CLOSE = (torch.bfloat16, 6e-3) if HOPPER else (torch.float32, 1e-5)
EPS = 1e-5
mend()


def interpret(monkeypatch, folder, source):
    from support.interpreted_gluon import TensorMap, interpreted

    monkeypatch.setattr(wgmma_gemm, "_wgmma_gemm", interpreted(source, folder)._wgmma_gemm)
    monkeypatch.setattr(wgmma_gemm, "TensorDescriptor", TensorMap)
    (folder / "small").mkdir()
    monkeypatch.setattr(small_gemm, "_small_gemm", interpreted(small_gemm.__file__, folder / "small")._small_gemm)


@pytest.fixture
def anywhere(monkeypatch, tmp_path):
    """Without a GPU, the same source in the interpreter."""
    if HOPPER:
        return
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("neither a Hopper GPU nor the interpreter")
    interpret(monkeypatch, tmp_path, wgmma_gemm.__file__)


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, HALF)


def off(made, exact):
    return float((made.float() - exact.float()).norm() / exact.float().norm())


def squares_of(x, parts=3):
    """Sums of the squares of some channels each, `[P, M]`."""
    sums = torch.stack([part.float().square().sum(-1) for part in x.chunk(parts, -1)], 1)
    return sums.t()


def plain(x, weight, *, norm=None, add=None, swiglu=False):
    x, weight = x.float(), weight.float()
    if norm is not None:
        x = F.rms_norm(x, x.shape[-1:], eps=EPS) * norm.float()
    out = x @ weight.t()
    if swiglu:
        gate, up = out.chunk(2, -1)
        out = F.silu(gate) * up
    return out if add is None else out + add.float()


def few_inputs(monkeypatch, inputs, ring_bytes=None):
    """Let a program hold this many inputs; those of a longer weight are divided."""
    monkeypatch.setattr(wgmma_gemm, "MAX_WGMMA_INPUTS", inputs)
    if ring_bytes is not None:
        monkeypatch.setattr(wgmma_gemm, "RING_BYTES", ring_bytes)


@pytest.mark.parametrize("rows", [24, 33, 64] if HOPPER else [5, 33])
@pytest.mark.parametrize("inputs", [640, 336, 48])
@pytest.mark.parametrize("kind", ["norm", "swiglu", "sum", "sum, divided", "plain"])
def test_a_product(rows, inputs, kind, anywhere, monkeypatch):
    """Whole chunks and tiles and not; stages of 128 and 64 inputs that are filled again; one program and four."""
    few_inputs(monkeypatch, 32 if "divided" in kind else 1280, 32 * 1024)
    swiglu, outputs = kind == "swiglu", 72
    x, weight = 3 * draw(rows, inputs), draw(outputs * (2 if swiglu else 1), inputs, seed=1) / inputs**0.5
    norm = draw(inputs, seed=2) if kind in ("norm", "swiglu") else None
    add = draw(rows, outputs, seed=3) if "sum" in kind else None
    options = {} if norm is None else {"norm_D": norm, "eps": EPS, "squares_PM": squares_of(x)}
    made = linear(x, weight, add=add, swiglu=swiglu, **options)
    assert made.dtype == HALF
    assert off(made, plain(x, weight, norm=norm, add=add, swiglu=swiglu)) < CLOSE


@pytest.mark.parametrize("swiglu", [False, True])
def test_a_norm_whose_squares_are_not_known(swiglu, anywhere):
    """The first layer of a pass: the other kernel sums them; one row that is expanded, too."""
    norm, weight = draw(64, seed=2), draw(32, 64, seed=1) / 8
    for x in (draw(1, 24, 64), draw(1, 1, 64)):
        made = linear(x, weight, norm_D=norm, eps=EPS, swiglu=swiglu)
        assert off(made, plain(x, weight, norm=norm, swiglu=swiglu)) < CLOSE


@pytest.mark.parametrize("after", [wgmma_gemm, small_gemm])
def test_squares_that_are_summed_on_the_way(after, anywhere, monkeypatch):
    """A product leaves the sums of its squares, and the norm of the next takes them, in either kernel.

    The counters behind them are zero before and after a product that is divided takes them; rows may lie apart.
    """
    few_inputs(monkeypatch, 256)
    x, weight, add = draw(1, 24, 512)[..., :256], draw(144, 256, seed=1) / 16, draw(1, 24, 144, seed=2)
    sums = empty_sums(x, weight).fill_(float("nan"))
    counters = sums.as_strided((3,), (1,), sums.numel()).fill_(7)
    first = linear(x, weight, add=add, sums_PM=sums)
    assert off(first, plain(x, weight, add=add)) < CLOSE
    assert counters.tolist() == [0, 0, 0]
    hidden, down, later = draw(1, 24, 640, seed=5), draw(144, 640, seed=6) / 25, empty_sums(x, weight)
    for _ in range(2):
        made = linear(hidden, down, add=first, squares_PM=sums, sums_PM=later)
        assert counters.tolist() == [0, 0, 0]
    assert off(made, plain(hidden, down, add=first)) < CLOSE
    torch.testing.assert_close(later.sum(0)[:24], made[0].float().square().sum(-1), atol=1e-2, rtol=1e-4)
    norm, weight = draw(144, seed=3), draw(96, 144, seed=4) / 12
    normed = after.linear(made, weight, norm_D=norm, eps=EPS, squares_PM=later)
    assert off(normed, plain(made, weight, norm=norm)) < CLOSE


def on_hopper(monkeypatch):
    """The network chooses its products as on a Hopper GPU, whatever the device."""
    monkeypatch.setattr(dispatch, "supports_pdl", lambda x: True)
    monkeypatch.setattr(dispatch, "has_wgmma", lambda x: True)
    monkeypatch.setattr(dispatch, "kernel_works", lambda device, kernel: True)
    monkeypatch.setattr(dispatch, "QUACK_AVAILABLE", False)  # see test_large_gemm.py
    fuse_everywhere(monkeypatch)


@torch.no_grad()
def test_which_gemm_is_chosen(monkeypatch):
    """By the rows of the stream; where the kernel of Hopper cannot be had, as if it were not there."""

    def chosen(rows, width=64, inputs=None):
        gemm = dispatch.fused_gemm(torch.zeros(1, rows, width), nn.Linear(inputs or width, 16, bias=False))
        return None if gemm is None else gemm.__name__.rpartition(".")[2]

    rows = (1, 23, 24, 48, 49, 64, 65)
    small, wgmma = "small_gemm", "wgmma_gemm"
    assert chosen(24) is None  # a CPU has neither
    on_hopper(monkeypatch)
    assert [chosen(each) for each in rows] == [small, small, wgmma, wgmma, wgmma, wgmma, None]
    assert (chosen(24, 1280), chosen(24, 1280, 5120)) == (wgmma, wgmma)
    assert (chosen(24, 1536), chosen(24, 64, 5136), chosen(64, 1536)) == (small, small, None)  # too wide
    assert chosen(24, 24) is None  # no whole loads
    with kernel_policy(KernelPolicy(small_gemm=False)):
        assert chosen(24) is None
    with kernel_policy(KernelPolicy(wgmma_gemm=False)):
        assert [chosen(each) for each in rows] == [small, small, small, small, None, None, None]
    for missing in ({"has_wgmma": lambda x: False}, {"kernel_works": lambda device, kernel: kernel != wgmma}):
        with monkeypatch.context() as patch:
            for name, value in missing.items():
                patch.setattr(dispatch, name, value)
            assert [chosen(each) for each in rows] == [small, small, small, small, None, None, None]
    monkeypatch.setattr(dispatch, "kernel_works", lambda device, kernel: False)
    assert chosen(24) is None


@pytest.mark.parametrize(
    ("capability", "expected"), [((8, 9), False), ((9, 0), True), ((10, 0), False), ((12, 0), False)]
)
def test_only_hopper_has_wgmma(capability, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert dispatch.has_wgmma(SimpleNamespace(device=torch.device("cuda"))) == expected


@torch.no_grad()
def test_in_the_network(anywhere, monkeypatch):
    """All products of a pass but a first norm take the kernel, the guided head of half the rows the other one."""
    model = small_model(dataclasses.replace(SMALL, pass1_layers=2, pass2_layers=2)).to(DEVICE, HALF).eval()
    pos, x = draw(2, 13, 2, seed=1).float().abs(), draw(2, 13, model.config.width)
    scale = torch.full((1, 1), 3.0, device=DEVICE)

    def logits():
        cache = model.allocate_cache(2, 20)
        model.encode(x, pos, cache, causal=False)
        return model.predict(pos, None, cache, scale_BS=scale)

    with kernel_policy(KernelPolicy(small_gemm=False)):
        expected = logits()
    if not HOPPER:
        on_hopper(monkeypatch)
    with kernel_policy(KernelPolicy(pdl=False)):
        logits()  # tries the kernels
    counts = {}
    for module in (wgmma_gemm, small_gemm):
        counts[module] = []
        own = module.linear
        monkeypatch.setattr(
            module, "linear", lambda x, *a, own=own, to=counts[module], **k: to.append(x.shape[1]) or own(x, *a, **k)
        )
    few_inputs(monkeypatch, model.config.width)  # the last product of a layer is divided
    with kernel_policy(KernelPolicy(pdl=False)):
        made = logits()
    assert off(made, expected) < (0.03 if HOPPER else 1e-5)
    assert counts[wgmma_gemm].count(13) == 4 * 4 + 1 - 1  # one set of keys and values; one query for all slots
    assert sorted(counts[small_gemm]) == [1, 13, 13]  # that query, the first norm of Pass 1, the guided head


MISTAKES = {
    "a wait that is missing": ("mbarrier.wait(rows_ready.index(now), block // STAGES % 2)", "now + 0", None),
    "too many bytes": ("LINES * CHUNK * BYTES)", "LINES * CHUNK * BYTES + 16)", "waits forever"),
    "a stage that is still read": ("warpgroup_mma_wait(1, deps=(acc,))", "warpgroup_mma_wait(2, deps=(acc,))", "reads"),
}


@pytest.mark.skipif(HOPPER, reason="a GPU would hang")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_simulation_notices(mistake, monkeypatch, tmp_path):
    """A kernel with a mistake in its barriers gives no result, or a wrong one."""
    right, wrong, message = MISTAKES[mistake]
    source = Path(wgmma_gemm.__file__).read_text()
    assert right in source
    (tmp_path / "mistaken.py").write_text(source.replace(right, wrong))
    interpret(monkeypatch, tmp_path, tmp_path / "mistaken.py")
    few_inputs(monkeypatch, 1280, 16 * 1024)
    x, weight = draw(5, 640), draw(64, 640, seed=1)
    if message is None:
        assert linear(x, weight).isnan().any()
    else:
        with pytest.raises(Exception, match=message):
            linear(x, weight)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [24, 64])
def test_the_compiled_kernel(rows):
    """For sm_90: shared memory, registers, the instructions it is built on, and what comes before the barrier."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path])
    program = [sys.executable, "-m", "support.compile_wgmma", str(rows)]
    run = subprocess.run(program, cwd=ROOT / "tests", env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    made = json.loads(run.stdout)
    assert len(made) == 3 * 4
    for name, kernel in made.items():
        assert kernel["shared"] <= 227 * 1024, name
        assert kernel["registers"] <= 168, name
        assert kernel["stack"] == 0, name  # nothing is spilled
        before, after = kernel["before"], kernel["after"]
        assert before["launch_dependents"] == 1, name
        assert before["copies"] > 0, name  # the weights
        assert after["copies"] > 0, name  # the rows
        assert (before["products"], before["stores"]) == (0, 0), name
        assert after["products"] > 0, name
        assert (before["loads"] > 0) == kernel["norm"], name  # only the weight of the norm is read early
        assert before["fences"] == kernel["norm"], name  # what was multiplied is for the tensor cores to read


def layer_of(rows, dtype=HALF):
    """A function that runs a layer of ARPG-L, each product reading what the one before wrote; and its exact result."""
    x, norm = draw(1, rows, 1024).to(dtype), draw(1024, seed=2).to(dtype)
    sizes = {"qkv": (3072, 1024), "out": (1024, 1024), "gate_up": (5632, 1024), "down": (1024, 2816)}
    qkv, out, gate_up, down = (
        (draw(*size, seed=3 + i) / size[1] ** 0.5).to(dtype) for i, size in enumerate(sizes.values())
    )

    def layer():
        norms = {"norm_D": norm, "eps": EPS}
        projected = linear(x, qkv, **norms)
        sums, later = empty_sums(x, out), empty_sums(x, out)
        stream = linear(projected[..., :1024], out, add=x, sums_PM=sums)
        hidden = linear(stream, gate_up, **norms, squares_PM=sums, swiglu=True)
        made = linear(hidden, down, add=stream, squares_PM=sums, sums_PM=later)
        return made, linear(made, qkv, **norms, squares_PM=later)

    stream = x + plain(plain(x, qkv, norm=norm)[..., :1024], out)
    return layer, stream + plain(plain(stream, gate_up, norm=norm, swiglu=True), down)


gpu = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]


@pytest.mark.parametrize("dtype", [pytest.param(dtype, marks=gpu) for dtype in (torch.bfloat16, torch.float16)])
@pytest.mark.parametrize("rows", [24, 32, 48, 64])
def test_a_layer_as_it_is_used(rows, dtype):
    """The sizes of ARPG-L, with early launch and without."""
    layer, exact = layer_of(rows, dtype)
    with kernel_policy(KernelPolicy(pdl=False)):
        made = layer()
    assert off(made[0], exact) < 2 * CLOSE
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(layer(), made, strict=True))


@pytest.mark.parametrize("rows", [pytest.param(64, marks=gpu)])
def test_two_graphs_at_once(rows):
    """Replayed on two streams, graphs of the same products share no counters: neither changes the other's numbers."""
    runs = []
    for _ in range(2):
        layer, _ = layer_of(rows)
        expected, graph = layer(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            parts = [layer() for _ in range(20)]
        runs.append((layer, expected, graph, parts, torch.cuda.Stream()))  # the graph reads the weights of the layer
    torch.cuda.synchronize()
    for _ in range(50):
        for _, _, graph, _, stream in runs:
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for _, expected, _, parts, _ in runs:
        assert all(torch.equal(a, b) for made in parts for a, b in zip(made, expected, strict=True))


@pytest.mark.parametrize("num_images", [pytest.param(num, marks=gpu) for num in (1, 3, 8)])
def test_a_generation_with_and_without_pdl(num_images):
    """Steps of 2 to 128 rows, in all kernels: early launch changes no token."""
    config = dataclasses.replace(SMALL, width=256, num_heads=4, vocab_size=512, grid=(8, 8))
    model = small_model(config).to(DEVICE, HALF).eval()
    settings, seeds = SamplingSettings(steps=8, guidance=3.0), list(range(num_images))
    request = tasks.generate(model, [seed % 5 for seed in seeds], seeds)
    plan = make_plan(request.grid, request.known_BN, request.seeds, settings)

    def tokens():
        return list(decode(model, request, plan, settings))[-1].ids_BN

    made = tokens()
    for _ in range(5):
        assert torch.equal(tokens(), made)
    with kernel_policy(KernelPolicy(pdl=False)):
        assert torch.equal(tokens(), made)
