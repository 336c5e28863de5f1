"""Two ways of computing the same network, on the same context: how far their logits are apart, how often draws agree.

Precisions are compared by `on_context`, engines by `draws_of` (the logits of a replayed graph are not kept).

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
from arpg.decode.execution import filled_up
from arpg.decode.planned import Planned
from arpg.decode.sampling import guide, sample
from arpg.decode.start import read, start
from arpg.model import ARPG

Steps = Sequence[tuple[Tensor, Tensor]]  # guided logits [B, S, V] and draws [B, S] of each


@torch.no_grad()
def generate(model: ARPG, case: Case) -> Tensor:
    """Ids `[B, N]`."""
    request, plan = case.request(model, 0)
    for step in decode(model, request, plan, case.settings):
        ids_BN = step.ids_BN
    return ids_BN


@torch.no_grad()
def on_context(model: ARPG, case: Case, ids_BN: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Guided logits and draws of each step, given that the steps before have drawn `ids_BN`."""
    request, plan = case.request(model, 0)
    way = Planned(request, plan, model.device)
    state = start(model, request, guided=plan.guided, causal=False, tokens=way.tokens, ragged=way.ragged)
    found = []
    while (turn := way.turn(state)) is not None:
        if turn.write is not None:
            state.encode(model, turn.write, causal=False)
        position_BS = turn.ask.position_BS
        logits = guide(state.predict(model, turn.ask), turn.ask.scale_BS)
        found.append((logits, sample(logits, case.settings, state.key_B2, position_BS)))
        state.put(position_BS, ids_BN.gather(1, position_BS), None)
    return found


@torch.no_grad()
def draws_of(engine: Engine, case: Case, ids_BN: Tensor) -> list[Tensor]:
    """The draws `[B, S]` of each step by an engine, given that the steps before have drawn `ids_BN`."""
    if engine.mode != "graph":
        return [drawn for _, drawn in on_context(engine.model, case, ids_BN)]
    tokens_of(engine, case)  # it is recorded then
    recording = next(reversed(engine.recordings.values()))
    request, plan = filled_up(*case.request(engine.model, 0))
    ids_BN = torch.cat((ids_BN, ids_BN[-1:].expand(len(request.seeds) - len(ids_BN), -1)))
    way = Planned(request, plan, engine.model.device)
    inputs = read(engine.model, request, guided=plan.guided, ragged=way.ragged)
    found = []
    with recording.busy:
        steps = recording.replay(inputs, way)
        for (_, theirs_BN, _), position_BS, step in zip(recording.steps, way.positions(), steps, strict=True):
            found.append(step.ids_BN.gather(1, position_BS)[: case.batch])
            theirs_BN.copy_(ids_BN)  # what the next graph reads: it asks only for positions that are known by then
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
