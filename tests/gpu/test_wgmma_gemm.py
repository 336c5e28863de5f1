"""The GEMM that holds its weights in shared memory (`benchmarks/wgmma_gemm.py`) against plain PyTorch, and compiled.

Without a GPU its numbers are those of Triton's interpreter, in float32, with shared memory, bulk copies and their
barriers simulated (`interpreted_gluon.py`).
"""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("triton", reason="Triton is not installed")

from arpg.kernels import dispatch
from arpg.kernels.dispatch import KernelPolicy, kernel_policy
from benchmarks import wgmma_gemm
from benchmarks.wgmma_gemm import VARIANTS, Tile, empty_sums, in_network, linear
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

    module = interpreted(source, folder)
    monkeypatch.setattr(wgmma_gemm, "_wgmma_gemm", module._wgmma_gemm)
    monkeypatch.setattr(wgmma_gemm, "TensorDescriptor", TensorMap)


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


@pytest.mark.parametrize("rows", [1, 17, 33, 64, 128] if HOPPER else [5, 33])
@pytest.mark.parametrize("inputs", [640, 336])
@pytest.mark.parametrize("kind", ["norm", "swiglu", "sum", "norm, split", "sum, split"])
def test_a_product(rows, inputs, kind, anywhere):
    """Whole chunks and tiles and not; stages of 128 and 64 inputs that are filled again; two and three partial sums."""
    swiglu, outputs, ring_kib = kind == "swiglu", 72, 32 if rows <= 16 else 16
    x, weight = 3 * draw(rows, inputs), draw(outputs * (2 if swiglu else 1), inputs, seed=1) / inputs**0.5
    norm = None if kind.startswith("sum") else draw(inputs, seed=2)
    add = draw(rows, outputs, seed=3) if norm is None else None
    split = 1 if "split" not in kind else 2 if norm is None else 3
    options = {} if norm is None else {"norm_D": norm, "eps": EPS, "squares_PM": squares_of(x)}
    exact = plain(x, weight, norm=norm, add=add, swiglu=swiglu)
    for _ in range(2):  # the first call leaves the counters as it found them
        made = linear(x, weight, add=add, swiglu=swiglu, tile=Tile(split, ring_kib), **options)
        assert made.dtype == HALF
        assert off(made, exact) < CLOSE


@pytest.mark.parametrize("split", [1, 2])
def test_squares_that_are_summed_on_the_way(split, anywhere):
    """A product leaves the sums of its squares, and the norm of the next takes them; rows may lie apart."""
    x, weight, add = draw(19, 512)[:, :256], draw(144, 256, seed=1) / 16, draw(19, 144, seed=2)
    norm, after = draw(144, seed=3), draw(96, 144, seed=4) / 12
    sums = empty_sums(x, weight)
    between = linear(x, weight, add=add, sums_PM=sums, tile=Tile(split))
    assert off(between, plain(x, weight, add=add)) < CLOSE
    torch.testing.assert_close(sums.sum(0), between.float().square().sum(-1), atol=1e-2, rtol=1e-4)
    made = linear(between, after, norm_D=norm, eps=EPS, squares_PM=sums)
    assert off(made, plain(between, after, norm=norm)) < CLOSE


@torch.no_grad()
def test_in_the_network(anywhere, monkeypatch):
    """The network of the benchmark takes the kernel for all products but the first norm and the head."""
    model = small_model(dataclasses.replace(SMALL, pass1_layers=2, pass2_layers=2)).to(DEVICE, HALF).eval()
    pos, x = draw(2, 5, 2, seed=1).float().abs(), draw(2, 5, model.config.width)

    def logits():
        cache = model.allocate_cache(2, 20)
        model.encode(x, pos, cache, causal=False)
        return model.predict(pos, None, cache)

    with kernel_policy(KernelPolicy(small_gemm=False)):
        expected = logits()
    products = []
    monkeypatch.setattr(wgmma_gemm, "linear", lambda x, *a, **k: products.append(len(x)) or linear(x, *a, **k))
    if not HOPPER:
        monkeypatch.setattr(dispatch, "supports_pdl", lambda x: True)
        monkeypatch.setattr(dispatch, "gluon_works", lambda device: True)
        fuse_everywhere(monkeypatch)
    with kernel_policy(KernelPolicy(pdl=False)), in_network(VARIANTS["split"]):
        made = logits()
    assert off(made, expected) < (0.03 if HOPPER else 1e-5)
    assert products == [10] * (4 * 4 + 2 - 2)  # two sets of keys and values from Pass 1; less both first norms


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
    x, weight = draw(5, 640), draw(64, 640, seed=1)
    if message is None:
        assert linear(x, weight, tile=Tile(1, 16)).isnan().any()
    else:
        with pytest.raises(Exception, match=message):
            linear(x, weight, tile=Tile(1, 16))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [16, 128])
def test_the_compiled_kernel(rows):
    """For sm_90: shared memory, registers, the instructions it is built on, and what comes before the barrier."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path])
    program = [sys.executable, "-m", "support.compile_wgmma", str(rows)]
    run = subprocess.run(program, cwd=ROOT / "tests", env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    made = json.loads(run.stdout)
    assert len(made) == 4 * len(VARIANTS)
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


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("rows", [2, 16, 24, 48, 64, 96, 128])
def test_a_layer_as_it_is_used(rows, variant):
    """The sizes of ARPG-L, each reading what the one before wrote, with early launch and without."""
    x, norm = draw(rows, 1024), draw(1024, seed=2)
    tiles = VARIANTS[variant]
    qkv, out = draw(3072, 1024, seed=3) / 32, draw(1024, 1024, seed=4) / 32
    gate_up, down = draw(5632, 1024, seed=5) / 32, draw(1024, 2816, seed=6) / 53

    def layer():
        norms = {"norm_D": norm, "eps": EPS}
        projected = linear(x, qkv, **norms, squares_PM=squares_of(x), tile=tiles["plain"])
        sums, later = empty_sums(x, out), empty_sums(x, out)
        stream = linear(projected[:, :1024], out, add=x, sums_PM=sums, tile=tiles["out"])
        hidden = linear(stream, gate_up, **norms, squares_PM=sums, swiglu=True, tile=tiles["swiglu"])
        return linear(hidden, down, add=stream, sums_PM=later, tile=tiles["down"]), later

    stream = x + plain(plain(x, qkv, norm=norm)[:, :1024], out)
    exact = stream + plain(plain(stream, gate_up, norm=norm, swiglu=True), down)
    with kernel_policy(KernelPolicy(pdl=False)):
        made, sums = layer()
    assert off(made, exact) < 2 * CLOSE
    torch.testing.assert_close(sums.sum(0), made.float().square().sum(-1), atol=1e-2, rtol=1e-3)
    for _ in range(20):
        assert torch.equal(layer()[0], made)
