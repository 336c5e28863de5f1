"""The product in Gluon against its plain twin: its numbers in Triton's interpreter, all of it on a GPU."""

import os

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from arpg.kernels import few_rows, few_rows_gluon
from arpg.kernels.few_rows import Placed, linear
from test_few_rows import DEVICE, EPS, draw, plain

GPU = torch.cuda.is_available()
HALF, CLOSE = (torch.bfloat16, 6e-3) if GPU else (torch.float32, 1e-5)


@pytest.fixture(autouse=True)
def placed(monkeypatch, tmp_path_factory):
    if not GPU:
        if os.environ.get("TRITON_INTERPRET") != "1":
            pytest.skip("neither a GPU nor the interpreter")
        from interpreted_gluon import interpreted

        module = interpreted(few_rows_gluon.__file__, tmp_path_factory.mktemp("kernel"))
        monkeypatch.setattr(few_rows, "product", module.product)
    monkeypatch.setattr(few_rows, "placed", lambda x: True)


def off(made, exact):
    assert made.dtype == HALF
    return float((made.float() - exact).norm() / exact.norm())


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 10, 15, 16, 17, 24, 32, 40])
@pytest.mark.parametrize(("inputs", "outputs"), [(1024, 48), (2816, 17), (1280, 24), (48, 40)])
@pytest.mark.parametrize("kind", ["norm", "norm and swiglu", "sum"])
@pytest.mark.parametrize("staged", [False, True])
def test_a_product(rows, inputs, outputs, kind, staged, monkeypatch):
    """Whole parts of the inputs and not, whole groups of outputs and not."""
    if not GPU and rows not in (3, 16, 17):
        pytest.skip("the interpreter is slow")
    place = Placed(8, 3, 8, staged, 2, 255)
    monkeypatch.setattr(few_rows, "PLACED", {name: {16: place, 32: place} for name in few_rows.PLACED})
    monkeypatch.setattr(few_rows, "_processors", lambda device: 2)
    swiglu = kind == "norm and swiglu"
    x = 3 * draw(1, rows, inputs, dtype=HALF)
    weight = (draw(outputs * (2 if swiglu else 1), inputs, seed=1) / inputs**0.5).to(HALF)
    norm = None if kind == "sum" else draw(inputs, seed=2, dtype=HALF)
    add = draw(1, rows, outputs, seed=3, dtype=HALF) if kind == "sum" else None
    made = linear(x, weight, norm_D=norm, eps=EPS, add=add, swiglu=swiglu)
    assert off(made, plain(x, weight, norm=norm, add=add, swiglu=swiglu)) < CLOSE


@pytest.mark.parametrize("rows", [1, 10, 16, 19, 32])
@pytest.mark.parametrize("swiglu", [False, True])
def test_squares_that_are_summed_on_the_way(rows, swiglu):
    """A product leaves the sums of its squares, and a norm of its outputs takes them; as the table has it."""
    x, weight, add = draw(1, rows, 128, dtype=HALF), draw(144, 128, seed=1, dtype=HALF), draw(1, rows, 144, dtype=HALF)
    norm, after = draw(144, seed=3, dtype=HALF), (draw(32, 144, seed=4) / 12).to(HALF)
    sums = few_rows.empty_sums(x, weight)
    between = linear(x, weight, add=add, sums_PM=sums)
    torch.testing.assert_close(sums.sum(0)[:rows], between[0].float().square().sum(-1), atol=1e-2, rtol=1e-4)
    made = linear(between, after, norm_D=norm, eps=EPS, swiglu=swiglu, squares_PM=sums)
    assert off(made, plain(between, after, norm=norm, swiglu=swiglu)) < CLOSE


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("rows", [2, 10, 16, 24, 32])
def test_a_layer_as_it_is_used(rows):
    """The sizes of ARPG-L, with the tiles of the table."""
    x, norm = draw(rows, 1024, dtype=HALF), draw(1024, seed=2, dtype=HALF)
    for lines, inputs, swiglu in ((3072, 1024, False), (1024, 1024, False), (16384, 1024, False), (5632, 1024, True)):
        weight = (draw(lines, inputs, seed=1) / 32).to(HALF)
        made = linear(x, weight, norm_D=norm, eps=EPS, swiglu=swiglu)
        assert off(made, plain(x, weight, norm=norm, swiglu=swiglu)) < CLOSE
    hidden, down = draw(rows, 2816, seed=5, dtype=HALF), (draw(1024, 2816, seed=6) / 50).to(HALF)
    assert off(linear(hidden, down, add=x), plain(hidden, down, add=x)) < CLOSE
    assert str(x.device.type) == DEVICE
