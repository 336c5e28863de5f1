"""Two ways of computing the same network, on the same context: how far their logits are apart, how often draws agree.

Precisions are compared by `on_context`, engines by `sampled_on_context` (the logits of a replayed graph are not kept).

Run freely, they part at the first token that differs, and nothing after that can be compared. So both are told what
was drawn, step by step. Shapes: B batch, N grid tokens, S tokens of a step, V codes.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

from arpg.bench.case import Case
from arpg.decode import Engine, decode
from arpg.decode.engine import make_strategy, pad_to_bucket
from arpg.decode.sampling import guide
from arpg.decode.state import DecodeState, to_device
from arpg.decode.steps import PlannedSteps, StepPlan
from arpg.model import ARPG

Steps = Sequence[tuple[Tensor, Tensor]]  # guided logits [B, S, V] and draws [B, S] of each


@torch.no_grad()
def generate(model: ARPG, case: Case) -> Tensor:
    """Ids `[B, N]`."""
    request, plan = case.request(model, 0)
    for step in decode(model, request, plan, case.settings):
        ids_BN = step.ids_BN
    return ids_BN


def on_context(model: ARPG, case: Case, ids_BN: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Guided logits and sampled ids of each step, given that the steps before have sampled `ids_BN`."""
    request, plan = case.request(model, 0)
    steps: list[tuple[Tensor, Tensor]] = []

    def hook(state: DecodeState, step: StepPlan, logits_RSV: Tensor, sampled_BS: Tensor) -> Tensor:
        steps.append((guide(logits_RSV, step.predict.scale_BS), sampled_BS))
        return ids_BN.gather(1, step.predict.position_BS)

    for _ in decode(model, request, plan, case.settings, hook=hook):
        pass
    return steps


@torch.no_grad()
def sampled_on_context(engine: Engine, case: Case, ids_BN: Tensor) -> list[Tensor]:
    """The sampled ids `[B, S]` of each step by an engine, given that the steps before have sampled `ids_BN`."""
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
        for (_, own_ids_BN, _), position_BS, (_, (step_ids_BN, _)) in zip(
            graphs.graphs, strategy.cursor.predicted(), steps, strict=True
        ):
            found.append(step_ids_BN.gather(1, position_BS)[: case.batch])
            own_ids_BN.copy_(ids_BN)  # what the next graph reads: it encodes only positions that are known by then
    return found


@torch.no_grad()
def tokens_of(engine: Engine, case: Case) -> Tensor:
    """Ids `[B, N]`, drawn freely."""
    request, plan = case.request(engine.model, 0)
    for step in engine.decode(request, plan, case.settings):
        ids_BN = step.ids_BN
    return ids_BN


def equal_share(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    equal = torch.cat([(a == b).flatten() for a, b in zip(found, exact, strict=True)])
    return round(float(equal.float().mean()), 4)


def agreement(found: Steps, exact: Steps) -> dict[str, float]:
    """The relative error of the logits, by step on average and at most, and the share of equal draws."""
    errors = [
        float((a.float() - b.float()).norm() / b.float().norm()) for (a, _), (b, _) in zip(found, exact, strict=True)
    ]
    return {
        "logit error": float(f"{statistics.mean(errors):.3g}"),
        "largest logit error": float(f"{max(errors):.3g}"),
        "equal draws": equal_share([drawn for _, drawn in found], [drawn for _, drawn in exact]),
    }
