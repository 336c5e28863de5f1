"""Batches one after the other: the same pixels as one at a time, in order, planned no earlier than needed."""

import contextlib

import pytest
import torch

from arpg import SamplingSettings, make_plan, tasks
from arpg.decode import Engine, decode
from arpg.decode import engine as engine_module
from arpg.decode.engine import pipelined_decode
from support.small import small_model, small_tokenizer

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
    made = list(pipelined_decode(engine, (plan(model, first) for first in firsts), SETTINGS, tokenizer.decode))
    for (pixels, seconds), expected in zip(made, one_at_a_time(model, tokenizer, firsts), strict=True):
        assert torch.allclose(pixels.cpu(), expected, atol=1e-5)
        assert seconds > 0


class FakeStream:
    """Notes what is asked of it; the kernels themselves run at once."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for {event.name}")


class FakeEvent:
    made = 0

    def __init__(self, log):
        FakeEvent.made += 1
        self.name, self.log, self.at = f"event {FakeEvent.made}", log, FakeEvent.made

    def record(self, stream):
        self.log.append(f"{self.name} after {stream.name}")

    def synchronize(self):
        self.log.append(f"host waits for {self.name}")

    def elapsed_time(self, other):
        return 1000.0 * (other.at - self.at)


def test_who_waits_for_whom(monkeypatch):
    """Streams and events as notes: pixels wait for their tokens, the host for a batch only when the next is sent."""
    log, tokens = [], FakeStream("tokens", [])
    tokens.log = log
    FakeEvent.made = 0
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: FakeStream("pixels", log))
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: FakeEvent(log))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: tokens)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda x, s: log.append(f"memory stays for {s.name}"))
    model = small_model()
    plans = (plan(model, first) for first in (0, 2, 4))
    made = engine_module._overlapped(
        Engine(model, "eager"), plans, SETTINGS, lambda ids_BN, grid: log.append("made") or ids_BN
    )
    first = next(made)
    one, two = (
        [f"event {n} after tokens", f"event {n + 1} after tokens", f"pixels waits for event {n + 1}",
         "memory stays for pixels", "made", f"event {n + 2} after pixels"] for n in (1, 4)
    )  # fmt: skip
    assert log == [*one, *two, "host waits for event 3", "memory stays for tokens"]
    rest = list(made)
    assert [line for line in log if line.startswith("host")] == [f"host waits for event {n}" for n in (3, 6, 9)]
    assert [first.seconds, *(each.seconds for each in rest)] == [2.0, 2.0, 2.0]  # from its own start on
    for each, start in zip([first, *rest], (0, 2, 4), strict=True):
        *_, step = decode(model, *plan(model, start), SETTINGS)
        assert torch.equal(each.result, step.ids_BN)


def test_plans_are_made_when_they_are_needed():
    """Whoever stops taking batches stops the planning, too."""
    model, planned = small_model().to("cuda" if GPU else "cpu"), []

    def plans():
        for first in range(0, 20, 2):
            planned.append(first)
            yield plan(model, first)

    made = pipelined_decode(Engine(model, "eager"), plans(), SETTINGS, lambda ids_BN, grid: ids_BN)
    next(made)
    next(made)
    made.close()
    assert len(planned) == 2 + (engine_module._IN_FLIGHT if GPU else 0)


def test_nothing_comes_of_nothing():
    assert list(pipelined_decode(Engine(small_model(), "eager"), [], SETTINGS, lambda ids_BN, grid: ids_BN)) == []
