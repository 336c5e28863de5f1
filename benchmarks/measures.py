"""Measures that several benchmarks share: the time of a captured graph, and the agreement of two computations.

Agreement is the error of the logits and the share of equal samples of the same network. Precisions are compared by
`on_context`, engines by `sampled_on_context` (a replayed graph does not keep its logits). Two free runs diverge at the
first token that differs, and nothing after it can be compared. So both are teacher-forced: after each step they
continue with the same given ids. Shapes: B batch, N grid tokens, S tokens of a step, V codes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from arpg.bench.case import Case
from arpg.decode import Engine, decode
from arpg.decode.engine import make_strategy, pad_to_bucket
from arpg.decode.state import DecodeState, PlannedSteps, StepPlan, to_device
from arpg.model import TokenDecoder
from arpg.tables import significant

Steps = Sequence[tuple[Tensor, Tensor]]  # guided logits [B, S, V] and sampled ids [B, S] of each step


@torch.no_grad()
def graph_microseconds(work: Callable[[], Any], *, repeats: int = 10) -> tuple[float, Any]:
    """Capture `work` in a CUDA graph; return the microseconds of one replay and the captured call's result."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = work()
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return 1000 * float(start.elapsed_time(end)) / repeats, made


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return |found - expected| / |expected|, both norms in float32."""
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def on_context(model: TokenDecoder, case: Case, ids_BN: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return the guided logits and sampled ids of each step, where the steps before have sampled `ids_BN`."""
    request, plan = case.request(model, 0)
    steps: list[tuple[Tensor, Tensor]] = []

    def hook(state: DecodeState, step: StepPlan, logits_BSV: Tensor, sampled_BS: Tensor) -> Tensor:
        steps.append((logits_BSV.float(), sampled_BS))
        return ids_BN.gather(1, step.predict.position_BS)

    for _ in decode(model, request, plan, case.settings, hook=hook):
        pass
    return steps


@torch.no_grad()
def sampled_on_context(engine: Engine, case: Case, ids_BN: Tensor) -> list[Tensor]:
    """Return the ids `[B, S]` that an engine samples in each step, where the steps before have sampled `ids_BN`."""
    if engine.mode != "graph":
        return [sampled for _, sampled in on_context(engine.model, case, ids_BN)]
    tokens_of(engine, case)  # captures the graphs
    graphs = next(reversed(engine.graphs.captured.values()))
    request, plan = pad_to_bucket(*case.request(engine.model, 0))
    ids_BN = torch.cat((ids_BN, ids_BN[-1:].expand(len(request.seeds) - len(ids_BN), -1)))
    strategy = make_strategy(request, plan, case.settings, engine.model.device)
    assert isinstance(strategy, PlannedSteps)
    state = to_device(engine.model, request, guided=plan.guided, ragged=strategy.ragged)
    found = []
    with graphs.busy:
        steps = graphs.replay(state, strategy.cursor)
        for (_, (own_ids_BN, _)), position_BS, (step_ids_BN, _) in zip(
            graphs.graphs, strategy.cursor.predicted(), steps, strict=True
        ):
            found.append(step_ids_BN.gather(1, position_BS)[: case.batch])
            own_ids_BN.copy_(ids_BN)  # what the next graph reads: it encodes only positions that are known by then
    return found


@torch.no_grad()
def tokens_of(engine: Engine, case: Case) -> Tensor:
    """Generate the ids `[B, N]` of a batch with `engine`."""
    request, plan = case.request(engine.model, 0)
    for step in engine.decode(request, plan, case.settings):
        ids_BN = step.ids_BN
    return ids_BN


def equal_share(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Return the share of equal ids in two runs, to four digits."""
    equal = torch.cat([(a == b).flatten() for a, b in zip(found, exact, strict=True)])
    return round(float(equal.float().mean()), 4)


def agreement(found: Steps, exact: Steps) -> dict[str, float]:
    """Return the relative error of the logits (mean and maximum over the steps) and the share of equal samples."""
    errors = [relative_error(a, b) for (a, _), (b, _) in zip(found, exact, strict=True)]
    return {
        "logit error": significant(statistics.mean(errors), 3),
        "largest logit error": significant(max(errors), 3),
        "equal samples": equal_share([ids for _, ids in found], [ids for _, ids in exact]),
    }
