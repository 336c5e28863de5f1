"""The GEMM for small batches against its plain twin, and the network that uses it.

Without a GPU the kernel's numbers are those of Triton's interpreter (`interpreted_gluon.py`), in float32.
"""

import dataclasses
import os
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytest.importorskip("triton", reason="Triton is not installed")

from arpg.kernels import dispatch, small_gemm
from arpg.kernels.dispatch import KernelPolicy, kernel_policy
from arpg.kernels.ops import guide
from arpg.kernels.small_gemm import Tile, linear
from arpg.quantization.precision import to_precision
from support.fused import fuse_everywhere
from support.interpreted import mend
from support.small import SMALL, small_model

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
HALF, CLOSE = (torch.bfloat16, 6e-3) if GPU else (torch.float32, 1e-5)
EPS = 1e-5
mend()
gpu = [pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="needs an NVIDIA GPU")]


@pytest.fixture(autouse=True)
def anywhere(monkeypatch, tmp_path_factory):
    """Without a GPU, the same source in the interpreter."""
    if GPU:
        return
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("neither a GPU nor the interpreter")
    from support.interpreted_gluon import interpreted

    module = interpreted(small_gemm.__file__, tmp_path_factory.mktemp("kernel"))
    monkeypatch.setattr(small_gemm, "_small_gemm", module._small_gemm)


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def plain(x, weight, *, norm=None, add=None, swiglu=False):
    """In float32."""
    x, weight = x.float(), weight.float()
    if norm is not None:
        x = F.rms_norm(x, x.shape[-1:], eps=EPS) * norm.float()
    out = x @ weight.t()
    if swiglu:
        gate, up = out.chunk(2, -1)
        out = F.silu(gate) * up
    return out if add is None else out + add.float()


def off(made, exact):
    return float((made.float() - exact.float()).norm() / exact.float().norm())


@pytest.mark.parametrize("rows", [1, 3, 10, 16, 17, 32] if GPU else [3, 17])
@pytest.mark.parametrize(("inputs", "outputs"), [(1024, 48), (2816, 17), (1280, 24), (48, 40)])
@pytest.mark.parametrize("kind", ["norm", "norm and swiglu", "sum"])
@pytest.mark.parametrize("staged", [False, True])
def test_a_product(rows, inputs, outputs, kind, staged, monkeypatch):
    """Whole parts of the inputs and not, whole groups of outputs and not; one block of rows and several."""
    monkeypatch.setattr(small_gemm, "TILES", dict.fromkeys(small_gemm.TILES, Tile(8, 3, 8, staged, 2, 255)))
    monkeypatch.setattr(small_gemm, "num_processors", lambda device: 2)
    swiglu = kind == "norm and swiglu"
    x = 3 * draw(1, rows, inputs, dtype=HALF)
    weight = (draw(outputs * (2 if swiglu else 1), inputs, seed=1) / inputs**0.5).to(HALF)
    norm = None if kind == "sum" else draw(inputs, seed=2, dtype=HALF)
    add = draw(1, rows, outputs, seed=3, dtype=HALF) if kind == "sum" else None
    made = linear(x, weight, norm_D=norm, eps=EPS, add=add, swiglu=swiglu)
    assert made.dtype == HALF
    assert off(made, plain(x, weight, norm=norm, add=add, swiglu=swiglu)) < CLOSE


@pytest.mark.parametrize("rows", [1, 10, 19, 32])
@pytest.mark.parametrize("swiglu", [False, True])
def test_squares_that_are_summed_on_the_way(rows, swiglu):
    """A product leaves the sums of its squares, and a norm of its outputs takes them; with the tiles of the table."""
    x, weight, add = draw(1, rows, 128, dtype=HALF), draw(144, 128, seed=1, dtype=HALF), draw(1, rows, 144, dtype=HALF)
    norm, after = draw(144, seed=3, dtype=HALF), (draw(32, 144, seed=4) / 12).to(HALF)
    sums = small_gemm.empty_sums(x, weight)
    between = linear(x, weight, add=add, sums_PM=sums)
    torch.testing.assert_close(sums.sum(0)[:rows], between[0].float().square().sum(-1), atol=1e-2, rtol=1e-4)
    made = linear(between, after, norm_D=norm, eps=EPS, swiglu=swiglu, squares_PM=sums)
    assert off(made, plain(between, after, norm=norm, swiglu=swiglu)) < CLOSE


def test_one_row_for_all():
    """Slots that are one and the same are expanded, not copied; so is what is added."""
    x, weight = draw(1, 1, 32, dtype=HALF).expand(2, 5, 32), draw(32, 32, seed=1, dtype=HALF)
    assert off(linear(x, weight, add=x), plain(x, weight, add=x)) < CLOSE


@pytest.mark.parametrize("rows", [pytest.param(rows, marks=gpu) for rows in (2, 10, 16, 24, 32)])
def test_a_layer_as_it_is_used(rows):
    """The sizes of ARPG-L, with the tiles of the table."""
    x, norm = draw(rows, 1024, dtype=HALF), draw(1024, seed=2, dtype=HALF)
    for lines, swiglu in ((3072, False), (1024, False), (16384, False), (5632, True)):
        weight = (draw(lines, 1024, seed=1) / 32).to(HALF)
        made = linear(x, weight, norm_D=norm, eps=EPS, swiglu=swiglu)
        assert off(made, plain(x, weight, norm=norm, swiglu=swiglu)) < CLOSE
    hidden, down = draw(rows, 2816, seed=5, dtype=HALF), (draw(1024, 2816, seed=6) / 50).to(HALF)
    assert off(linear(hidden, down, add=x), plain(hidden, down, add=x)) < CLOSE


def allow_pdl(monkeypatch):
    """The network takes these kernels, whatever the device."""
    monkeypatch.setattr(dispatch, "supports_pdl", lambda x: True)
    monkeypatch.setattr(dispatch, "kernel_works", lambda device, kernel: True)


def test_when_the_small_gemm_is_used(monkeypatch):
    monkeypatch.setattr(dispatch, "can_fuse_inference", lambda x: not torch.is_grad_enabled())
    most = dispatch.SMALL_BATCH_ROWS

    def use(x, layer):
        return dispatch.fused_gemm(x, layer) is small_gemm

    layer, x = nn.Linear(32, 32, bias=False), torch.zeros(2, most // 2, 32)
    with torch.no_grad():
        assert not use(x, layer)  # a CPU has no programmatic dependent launch
        allow_pdl(monkeypatch)
        assert use(x, layer)
        with kernel_policy(KernelPolicy(small_gemm=False)):
            assert not use(x, layer)
        with monkeypatch.context() as without:
            without.setattr(dispatch, "kernel_works", lambda device, kernel: False)
            assert not use(x, layer)
        assert not use(torch.zeros(1, most + 1, 32), layer)  # too many rows
        assert not use(x.half(), layer)
        assert not use(torch.zeros(1, 1, 24), nn.Linear(24, 32, bias=False))  # no whole loads
        model = to_precision(small_model(), "int8", torch.device("cpu"))
        assert not use(torch.zeros(1, 1, model.config.width), model.pass1[0].ffn.down)
    assert not use(x, layer)  # a gradient may be wanted


@pytest.mark.parametrize(("capability", "expected"), [((8, 9), False), ((9, 0), True), ((12, 0), True)])
def test_programmatic_dependent_launch(capability, expected, monkeypatch):
    """Hopper and later. What torch.compile traces cannot ask for it."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    x = SimpleNamespace(is_cuda=True, device=torch.device("cuda"))
    assert dispatch.supports_pdl(x) == dispatch.prefetch_weights(x) == expected
    with kernel_policy(KernelPolicy(pdl=False)):
        assert dispatch.supports_pdl(x) == expected
        assert not dispatch.prefetch_weights(x)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not dispatch.supports_pdl(x)


@pytest.mark.slow
@pytest.mark.skipif(GPU, reason="a GPU multiplies these in half precision: see the next test")
def test_decoding_in_five_kernels_a_layer(monkeypatch):
    """The whole loop, ragged and guided, gives the tokens that it gives without them, and goes through them."""
    from arpg import SamplingSettings, decode, make_plan, tasks

    model = small_model(dataclasses.replace(SMALL, pass1_layers=1, pass2_layers=2)).to(DEVICE).eval()
    known = torch.zeros(2, 16, dtype=torch.bool)
    known[0, :5] = True
    request = tasks.fill(model, 2, [5, 6], ids_N=torch.arange(16) % 24, known_N=known)
    settings = SamplingSettings(steps=2, guidance=3.0)
    plan = make_plan((4, 4), known, request.seeds, settings)
    *_, plain_step = decode(model, request, plan, settings)
    products = []
    monkeypatch.setattr(small_gemm, "TILES", dict.fromkeys(small_gemm.TILES, Tile(8, 16, 2, False, 1, 255)))
    monkeypatch.setattr(small_gemm, "num_processors", lambda device: 1)  # few programs: the interpreter is slow
    monkeypatch.setattr(small_gemm, "linear", lambda x, *a, **k: products.append(x.shape) or linear(x, *a, **k))
    monkeypatch.setattr(dispatch, "SMALL_BATCH_ROWS", 64)
    allow_pdl(monkeypatch)
    fuse_everywhere(monkeypatch)
    with kernel_policy(KernelPolicy(pdl=False)):  # the interpreter knows no dependency barrier
        *_, step = decode(model, request, plan, settings)
    assert step.ids_BN.tolist() == plain_step.ids_BN.tolist()
    # Four for a layer, one between the passes, the head. Pass 1 reads the class, what is known and the first step.
    assert len(products) == 3 * (4 + 1) + 2 * (2 * 4 + 1)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs an NVIDIA GPU")
@torch.no_grad()
def test_a_step_of_the_network_on_a_gpu():
    """No further from float32 than the library's products, and the same with and without PDL."""
    exact = small_model().to(DEVICE).eval()
    model = small_model().to(DEVICE, HALF).eval()

    def logits(model, scale=None):
        cache, pos = model.allocate_cache(2, 40), draw(2, 5, 2, seed=1).abs()
        x = draw(2, 5, model.config.width).to(model.dtype)
        for _ in range(3):
            model.encode(x, pos, cache, causal=False)
        return model.predict(pos, None, cache, scale_BS=scale)

    true, made = logits(exact), logits(model)
    with kernel_policy(KernelPolicy(pdl=False)):
        assert torch.equal(logits(model), made)
    with kernel_policy(KernelPolicy(small_gemm=False)):
        assert off(made, true) < 1.5 * off(logits(model), true)
    scale = torch.tensor([[4.0]], device=DEVICE)
    guided = logits(model, scale)
    assert off(guided, guide(true, scale)) < 1.5 * off(guide(made, scale), guide(true, scale))
    with kernel_policy(KernelPolicy(pdl=False)):
        assert torch.equal(logits(model, scale), guided)
    with kernel_policy(KernelPolicy(small_gemm=False)):
        assert off(guided, guide(true, scale)) < 1.5 * off(logits(model, scale), guide(true, scale))


@pytest.mark.parametrize("decode_with", ["steps", "exact", "speculative"])
def test_only_planned_steps_are_read_before_the_dependency_barrier(decode_with, monkeypatch):
    """Exact and speculative decoding gather positions just before a step: their kernels must wait first."""
    from arpg import SamplingSettings, decode, make_plan, tasks

    model, seen = small_model(), set()
    attention = "block" if decode_with == "steps" else "causal"
    settings = SamplingSettings(steps=4, guidance=3.0, decode=decode_with, attention=attention, draft=2)
    request = tasks.generate(model, [1, 2], [5, 6])
    plan = make_plan(request.grid, request.known_BN, request.seeds, settings)

    def hook(state, step, logits, sampled):
        seen.add(step.predict.static)
        if step.encode is not None:
            seen.add(step.encode.static)

    list(decode(model, request, plan, settings, hook=hook))
    assert seen == {decode_with == "steps"}


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("decode_with", ["exact", "speculative"])
def test_speculative_decoding_with_and_without_pdl(decode_with):
    """Fifty images, one at a time: a position that is read before it is written would change some of them."""
    from arpg import SamplingSettings, decode, make_plan, tasks

    config = dataclasses.replace(SMALL, width=256, num_heads=4, vocab_size=512, grid=(8, 8))
    model = small_model(config).to(DEVICE, HALF).eval()
    settings = SamplingSettings(guidance=3.0, decode=decode_with, attention="causal", draft=6)

    def tokens(seed):
        request = tasks.generate(model, [seed % 5], [seed])
        plan = make_plan(request.grid, request.known_BN, request.seeds, settings)
        return list(decode(model, request, plan, settings))[-1].ids_BN.tolist()

    for seed in range(50):
        early = tokens(seed)
        with kernel_policy(KernelPolicy(pdl=False)):
            assert tokens(seed) == early, seed


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("num_images", [1, 5])
def test_a_continuous_batch_with_and_without_pdl(num_images):
    """Images that join at different steps: early launch changes no token."""
    from arpg import SamplingSettings, make_plan, tasks
    from arpg.decode.continuous import ContinuousBatch

    model, settings = small_model().to(DEVICE, HALF).eval(), SamplingSettings(steps=6, guidance=3.0)

    def run():
        parts = [tasks.generate(model, [seed % 5], [seed]) for seed in range(num_images)]
        made = [(part, make_plan(part.grid, part.known_BN, part.seeds, settings)) for part in parts]
        running = ContinuousBatch(model, *made[0], settings)
        for part in made[1:]:
            running.step()
            running.add(*part)
        while not all(row.finished for row in running.rows):
            running.step()
        return running.fetch(range(num_images)).wait()[0]

    expected = run()
    for _ in range(5):
        assert torch.equal(run(), expected)
    with kernel_policy(KernelPolicy(pdl=False)):
        assert torch.equal(run(), expected)
