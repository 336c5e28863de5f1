"""Products of a handful of rows against their plain twins, and the network that uses them. Without a GPU, Triton's
interpreter runs them (`conftest.py` switches it on)."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytest.importorskip("triton", reason="Triton is not installed")

from arpg import kernels
from arpg.decode import sampling, state
from arpg.kernels import few_rows
from arpg.kernels.few_rows import Tile, linear
from arpg.model import layers
from arpg.precision import to_precision
from conftest import SMALL, small_model
from interpreted import mend

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-5
mend()
SMALL_TILES = {kind: {4: Tile(16, 2, 16, 128), 8: Tile(8, 4, 32, 128)} for kind in few_rows.TILES}


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


@pytest.mark.parametrize("rows", [1, 2, 7, 10, 19])
@pytest.mark.parametrize(("inputs", "outputs"), [(32, 16), (40, 24), (144, 17)])
@pytest.mark.parametrize("kind", ["norm", "norm and swiglu", "sum"])
def test_a_product_of_few_rows(rows, inputs, outputs, kind, monkeypatch):
    """One part of the inputs and several, whole and not; one block of rows and several."""
    monkeypatch.setattr(few_rows, "TILES", SMALL_TILES)
    swiglu = kind == "norm and swiglu"
    x, weight = 3 * draw(1, rows, inputs), draw(outputs * (2 if swiglu else 1), inputs, seed=1) / inputs**0.5
    norm = None if kind == "sum" else draw(inputs, seed=2)
    add = draw(1, rows, outputs, seed=3) if kind == "sum" else None
    fused = linear(x, weight, norm_D=norm, eps=EPS, add=add, swiglu=swiglu)
    torch.testing.assert_close(fused, plain(x, weight, norm=norm, add=add, swiglu=swiglu), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rows", [1, 7, 19])
@pytest.mark.parametrize("swiglu", [False, True])
def test_squares_that_are_summed_on_the_way(rows, swiglu, monkeypatch):
    """A product leaves the sums of its squares, and a norm of its outputs takes them; 40 outputs: the last program has
    fewer."""
    monkeypatch.setattr(few_rows, "TILES", SMALL_TILES)
    x, weight, add, norm = 3 * draw(1, rows, 48), draw(40, 48, seed=1), draw(1, rows, 40, seed=2), draw(40, seed=3)
    sums = few_rows.empty_sums(x, weight)
    between = linear(x, weight, add=add, sums_PM=sums)
    torch.testing.assert_close(sums.sum(0)[:rows], between[0].square().sum(-1), atol=1e-3, rtol=1e-5)
    after = draw(32, 40, seed=4)
    fused = linear(between, after, norm_D=norm, eps=EPS, swiglu=swiglu, squares_PM=sums)
    torch.testing.assert_close(fused, plain(between, after, norm=norm, swiglu=swiglu), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rows", [2, 16, 32, 64])
def test_the_tiles_in_half_precision(rows):
    """As they are used: no further from float32 than rounding."""
    half = torch.float16  # the interpreter has no bfloat16
    x, norm = draw(rows, 1088, dtype=half), draw(1088, seed=2, dtype=half)
    weight, down = draw(64, 1088, seed=1, dtype=half) / 32, draw(40, 1088, seed=4, dtype=half)
    for fused, exact in (
        (linear(x, weight, norm_D=norm, eps=EPS), plain(x, weight, norm=norm)),
        (linear(x, weight, norm_D=norm, eps=EPS, swiglu=True), plain(x, weight, norm=norm, swiglu=True)),
        (linear(x, down, add=x[:, :40]), plain(x, down, add=x[:, :40])),
    ):
        assert fused.dtype == half
        assert float((fused.float() - exact).norm() / exact.norm()) < 1e-3


def test_one_row_for_all():
    """Slots that are one and the same are expanded, not copied; so is what is added."""
    x, weight = draw(1, 1, 32).expand(2, 5, 32), draw(32, 32, seed=1)
    fused = linear(x, weight, add=x)
    torch.testing.assert_close(fused, plain(x, weight, add=x), atol=1e-5, rtol=1e-5)


def start_early(monkeypatch):
    """The network takes these kernels, whatever the device; they start early only where it can."""
    monkeypatch.setattr(kernels, "AHEAD", kernels.early(draw(1)))
    monkeypatch.setattr(kernels, "early", lambda x: True)


def test_who_takes_few_rows(monkeypatch):
    monkeypatch.setattr(kernels, "decoding", lambda x: not torch.is_grad_enabled())
    layer, x = nn.Linear(32, 32, bias=False), torch.zeros(2, kernels.MOST_ROWS // 2, 32)
    with torch.no_grad():
        assert not kernels.few(x, layer)  # on a CPU no kernel starts before the one in front ends
        start_early(monkeypatch)
        assert kernels.few(x, layer)
        monkeypatch.setattr(kernels, "FEW_ROWS", False)
        assert not kernels.few(x, layer)  # switched off
        monkeypatch.setattr(kernels, "FEW_ROWS", True)
        assert not kernels.few(torch.zeros(1, kernels.MOST_ROWS + 1, 32), layer)  # too many
        assert not kernels.few(x.half(), layer)
        model = to_precision(small_model(), "int8", torch.device("cpu"))
        assert not kernels.few(torch.zeros(1, 1, model.config.width), model.pass1[0].ffn.down)
    assert not kernels.few(x, layer)  # somebody may want a gradient


@pytest.mark.parametrize(("capability", "expected"), [((8, 9), False), ((9, 0), True), ((12, 0), True)])
def test_who_starts_early(capability, expected, monkeypatch):
    """Hopper and later. What torch.compile traces cannot say so."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    x = SimpleNamespace(is_cuda=True, device="cuda")
    assert kernels.early(x) == kernels.ahead(x) == expected
    monkeypatch.setattr(kernels, "AHEAD", False)
    assert kernels.early(x) == expected
    assert not kernels.ahead(x)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not kernels.early(x)


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
    monkeypatch.setattr(few_rows, "TILES", {kind: {64: Tile(128, 1, 64, 128)} for kind in few_rows.TILES})
    monkeypatch.setattr(few_rows, "linear", lambda x, *a, **k: products.append(x.shape) or linear(x, *a, **k))
    monkeypatch.setattr(kernels, "MOST_ROWS", 64)
    start_early(monkeypatch)
    for module in (kernels, layers):
        monkeypatch.setattr(module, "decoding", lambda x: not torch.is_grad_enabled())
    monkeypatch.setattr(layers, "usable", lambda x: True)
    monkeypatch.setattr(sampling, "fusible", lambda x: True)
    monkeypatch.setattr(state, "fusible", lambda x: True)
    monkeypatch.setattr(state, "decoding", lambda x: not torch.is_grad_enabled())
    *_, step = decode(model, request, plan, settings)
    assert step.ids_BN.tolist() == plain_step.ids_BN.tolist()
    # Four for a layer, one between the passes, the head. Pass 1 reads the class, what is known and the first step.
    assert len(products) == 3 * (4 + 1) + 2 * (2 * 4 + 1)
