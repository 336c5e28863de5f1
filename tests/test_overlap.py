"""Batches one after the other: the same pixels as one at a time, in order, planned no earlier than needed."""

import pytest
import torch

from arpg import SamplingSettings, make_plan, tasks
from arpg.decode import Engine, decode
from arpg.overlap import AHEAD, flow
from conftest import small_model, small_tokenizer

GPU = torch.cuda.is_available()
SETTINGS = SamplingSettings(steps=4, guidance=3.0)


def plan(model, first, batch=2):
    request = tasks.generate(model, [row % 5 for row in range(batch)], range(first, first + batch))
    return request, make_plan(request.grid, request.known_BN, request.seeds, SETTINGS)


def one_at_a_time(model, tokenizer, firsts):
    for first in firsts:
        *_, step = decode(model, *plan(model, first), SETTINGS)
        with torch.no_grad():
            yield tokenizer.decode(step.ids_BN, (4, 4)).cpu()


@pytest.mark.parametrize(
    "mode",
    ["eager", pytest.param("graph", marks=[pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="needs a GPU")])],
)
def test_the_same_pixels_in_the_same_order(mode):
    on = "cuda" if GPU else "cpu"
    model, tokenizer = small_model().to(on), small_tokenizer().to(on)
    engine, firsts = Engine(model, mode), range(0, 20, 2)
    made = list(flow(engine, (plan(model, first) for first in firsts), SETTINGS, tokenizer.decode))
    for (pixels, seconds), expected in zip(made, one_at_a_time(model, tokenizer, firsts), strict=True):
        assert torch.allclose(pixels.cpu(), expected, atol=1e-5)
        assert seconds > 0


def test_plans_are_made_when_they_are_needed():
    """Whoever stops taking batches stops the planning, too."""
    model, planned = small_model().to("cuda" if GPU else "cpu"), []

    def plans():
        for first in range(0, 20, 2):
            planned.append(first)
            yield plan(model, first)

    made = flow(Engine(model, "eager"), plans(), SETTINGS, lambda ids_BN, grid: ids_BN)
    next(made)
    next(made)
    made.close()
    assert len(planned) == 2 + (AHEAD if GPU else 0)


def test_nothing_comes_of_nothing():
    assert list(flow(Engine(small_model(), "eager"), [], SETTINGS, lambda ids_BN, grid: ids_BN)) == []
