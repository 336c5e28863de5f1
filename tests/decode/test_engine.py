"""The loop eagerly, compiled and from CUDA graphs: the same tokens, also from threads, after errors and many times."""

import threading
from typing import ClassVar

import pytest
import torch

from arpg import SamplingSettings, make_plan, tasks
from arpg.decode import Engine, decode
from arpg.decode import engine as engine_module
from arpg.decode.engine import loop
from arpg.decode.state import PlannedSteps
from arpg.errors import InputError
from support.small import small_model

GPU = torch.cuda.is_available()
gpu = [pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="needs an NVIDIA GPU")]
graphs = [pytest.param("graph", marks=gpu), pytest.param("auto", marks=gpu)]

SETTINGS = SamplingSettings(steps=4, guidance=3.0)


def make(model, batch, *, known=0, first=0, settings=SETTINGS):
    """Requests that differ in seeds, classes and known tokens, but not in shape."""
    mask = torch.zeros(batch, 16, dtype=torch.bool)
    for row in range(batch):
        mask[row, torch.randperm(16, generator=torch.Generator().manual_seed(first + row))[:known]] = True
    labels = [(first + row) % 5 for row in range(batch)]
    request = tasks.fill(model, labels, range(first, first + batch), ids_N=torch.arange(16) % 24, known_N=mask)
    return request, make_plan((4, 4), mask, request.seeds, settings), settings


def tokens(steps):
    return [(step.ids_BN.masked_fill(~step.known_BN, -1).tolist(), step.index, step.num_steps) for step in steps]


@pytest.fixture
def model():
    return small_model().to("cuda" if GPU else "cpu")


@pytest.mark.parametrize("mode", ["eager", *graphs])
@pytest.mark.parametrize(
    "options",
    [{"batch": 1}, {"batch": 3}, {"batch": 5, "known": 6}, {"batch": 2, "settings": SamplingSettings(steps=16)}],
)
def test_every_mode_draws_the_same_tokens(model, mode, options):
    engine = Engine(model, mode)
    for first in (0, 10, 20):  # `auto` captures the second time and replays the third
        case = make(model, first=first, **options)
        assert tokens(engine.decode(*case)) == tokens(decode(model, *case))
        assert tokens(engine.decode(*case, every_step=False))[-1] == tokens(decode(model, *case))[-1]


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs an NVIDIA GPU: for a CPU, compiling takes minutes")
@pytest.mark.filterwarnings("ignore")
def test_compiled_parts_draw_the_same_tokens(model):
    case = make(model, 2)
    plain = tokens(decode(model, *case))
    assert tokens(Engine(model, "compiled").decode(*case)) == plain


def test_what_an_engine_may_be(model):
    with pytest.raises(InputError, match=r"engine is 'fast'; expected"):
        Engine(model, "fast")
    if not GPU:
        assert Engine(model).mode == "eager"
        with pytest.raises(InputError, match="CUDA graphs need a GPU"):
            Engine(model, "graph")


def test_a_part_of_a_request(model):
    request, *_ = make(model, 3, known=4)
    twice = request.rows([1, 1])
    assert twice.seeds == (1, 1)
    assert twice.known_BN.tolist() == [request.known_BN[1].tolist()] * 2
    assert torch.equal(twice.condition.prefix_BPD[1], request.condition.prefix_BPD[1])


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs an NVIDIA GPU")
class TestGraphs:
    def test_rows_of_different_lengths(self, model):
        """A ragged shape is recorded like any other."""
        mask = torch.zeros(2, 16, dtype=torch.bool)
        mask[0, :5] = True
        request = tasks.fill(model, 2, [5, 6], ids_N=torch.arange(16) % 24, known_N=mask)
        case = (request, make_plan((4, 4), mask, request.seeds, SETTINGS), SETTINGS)
        engine = Engine(model, "graph")
        assert [tokens(engine.decode(*case)) for _ in range(2)] == [tokens(decode(model, *case))] * 2

    def test_a_generation_that_is_left_halfway(self, model):
        engine = Engine(model, "graph")
        list(engine.decode(*make(model, 2)))
        case = make(model, 2, first=7)
        steps = engine.decode(*case)
        next(steps)
        assert tokens(engine.decode(*make(model, 2, first=9))) == tokens(decode(model, *make(model, 2, first=9)))
        steps.close()
        with pytest.raises(ZeroDivisionError):
            any(1 // 0 for _ in engine.decode(*case))
        assert tokens(engine.decode(*case)) == tokens(decode(model, *case))

    def test_an_error_while_capturing(self, model, monkeypatch):
        engine = Engine(model, "graph")
        plain, calls = loop, []

        def fail(*args):
            """The first run, which compiles the kernels, goes well; the second is captured."""
            calls.append(args)
            steps = plain(*args)
            if len(calls) == 2:
                next(steps)
                raise RuntimeError("out of something")
            yield from steps

        with monkeypatch.context() as patched:
            patched.setattr(engine_module, "loop", fail)
            with pytest.raises(RuntimeError, match="out of something"):
                list(engine.decode(*make(model, 2)))
        case = make(model, 2, first=3)
        assert tokens(engine.decode(*case)) == tokens(decode(model, *case))

    def test_threads_do_not_mix(self, model):
        engine, wrong = Engine(model, "auto"), []
        cases = [make(model, 1 + i % 2, first=10 * i) for i in range(8)]
        right = [tokens(decode(model, *case)) for case in cases]

        def draw(start):
            for turn in range(12):
                i = (start + turn) % len(cases)
                if tokens(engine.decode(*cases[i])) != right[i]:
                    wrong.append(i)

        threads = [threading.Thread(target=draw, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong

    def test_memory_does_not_grow(self, model):
        engine = Engine(model, "graph")
        sizes = []
        for i in range(200):
            list(engine.decode(*make(model, 2, first=i)))
            if i in (5, 199):
                torch.cuda.synchronize()
                sizes.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
        assert sizes[0] == sizes[1]
        assert len(engine.graphs.captured) == 1

    def test_graphs_go_when_there_is_no_room(self, model):
        engine = Engine(model, "graph", graph_memory=1)
        for batch in (1, 2, 3):
            list(engine.decode(*make(model, batch)))
            assert len(engine.graphs.captured) == 1
        case = make(model, 2, first=4)
        assert tokens(engine.decode(*case)) == tokens(decode(model, *case))

    def test_one_graph_in_one_piece_of_memory(self, model):
        """The tokens of one graph per step, in no more memory than without reserving it first."""
        case, sizes = make(model, 6), {}
        for every_step in (True, False):
            for reserve in (True, False):
                engine = Engine(model, "graph")
                with pytest.MonkeyPatch.context() as patched:
                    if not reserve:
                        patched.setattr(engine_module, "run_and_measure", lambda steps, device: len(list(steps)) * 0)
                    for _ in range(2):
                        found = tokens(engine.decode(*case, every_step=every_step))
                        assert found == tokens(decode(model, *case))[-len(found) :]
                (graphs,) = engine.graphs.captured.values()
                assert len(graphs.graphs) == (case[1].num_steps if every_step else 1)
                sizes[every_step, reserve] = graphs.bytes
        for every_step in (True, False):
            assert sizes[every_step, True] <= sizes[every_step, False] + 2**21  # a segment is 2 MiB or more


class Fake:
    """Captured graphs that a CPU can make: they run the loop."""

    made: ClassVar = []
    model = None

    def __init__(self, state, cursor, steps, *, every_step, run_bytes):
        self.busy, self.bytes = threading.Lock(), 10
        self.graphs = [None] * (cursor.num_steps if every_step else 1)
        self.made.append(len(state.ids_BN))

    def replay(self, state, cursor):
        for step in loop(self.model, state, PlannedSteps(cursor), SETTINGS):
            if len(self.graphs) > 1 or step.num_steps == step.index + 1:
                yield step.ids_BN, step.known_BN


@pytest.fixture
def engine(model, monkeypatch):
    """An engine that captures fakes."""
    monkeypatch.setattr(engine_module, "CapturedGraphs", Fake)
    monkeypatch.setattr(Fake, "model", model, raising=False)
    monkeypatch.setattr(Fake, "made", [])
    made = Engine(model, graph_memory=25)
    made.mode = "graph"
    return made


def test_a_shape_is_captured_when_it_comes_again(engine, model):
    for first in (0, 10, 20):
        case = make(model, 5, first=first)
        assert tokens(engine.decode(*case)) == tokens(decode(model, *case))
    assert Fake.made == [6]  # padded
    for batch in (1, 2, 1, 2, 5, 6):  # room for two of them; the oldest goes
        list(engine.decode(*make(model, batch)))
    assert Fake.made == [6, 1, 2, 6]
    engine.graphs.clear()
    assert not engine.graphs.captured


def test_what_runs_eagerly_is_not_padded(engine, model, monkeypatch):
    sizes = []
    monkeypatch.setattr(
        engine_module, "loop", lambda model, state, *a: sizes.append(len(state.ids_BN)) or loop(model, state, *a)
    )
    for first in (0, 10, 20):
        list(engine.decode(*make(model, 5, first=first)))
    assert sizes == [5, 6, 6]  # eagerly; then padded, to compile and to capture; the fake runs by itself


def test_who_looks_at_the_last_step_alone(engine, model):
    """Eagerly and recorded; a recording is then one graph, of its own."""
    case = make(model, 2)
    *_, last = decode(model, *case)
    for _ in range(3):
        *before, step = engine.decode(*case, every_step=False)
        assert tokens([step]) == tokens([last])
    assert Fake.made == [2]
    assert not before
    assert [len(graphs.graphs) for graphs in engine.graphs.captured.values()] == [1]
    for _ in range(2):
        assert tokens(engine.decode(*case)) == tokens(decode(model, *case))
    assert [len(graphs.graphs) for graphs in engine.graphs.captured.values()] == [1, last.num_steps]


def test_what_is_too_large_runs_eagerly(engine, model, monkeypatch, caplog):
    tries = []

    def fail(*_, **__):
        tries.append(1)
        raise torch.OutOfMemoryError

    monkeypatch.setattr(engine_module, "CapturedGraphs", fail)
    for first in (0, 10, 20):
        case = make(model, 2, first=first)
        assert tokens(engine.decode(*case)) == tokens(decode(model, *case))
    assert tries == [1]  # not again and again
    assert "too large to be captured" in caplog.text
