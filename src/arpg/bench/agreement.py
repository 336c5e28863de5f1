"""Agreement of two computations of the same network: the error of the logits and the share of equal samples.

Precisions are compared by `on_context`, engines by `draws_of` (a replayed graph does not keep its logits).

Two free runs diverge at the first token that differs, and nothing after it can be compared. So both are teacher-forced:
after each step they continue with the same given ids. Shapes: B batch, N grid tokens, S tokens of a step, V codes.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

from arpg.bench.case import Case
from arpg.bench.timing import relative_error, significant
from arpg.decode import Engine, decode
from arpg.decode.execution import filled_up
from arpg.decode.planned import Planned
from arpg.decode.sampling import guide, sample
from arpg.decode.start import read, start
from arpg.model import ARPG

Steps = Sequence[tuple[Tensor, Tensor]]  # guided logits [B, S, V] and sampled ids [B, S] of each step


@torch.no_grad()
def generate(model: ARPG, case: Case) -> Tensor:
    """Generate the ids `[B, N]` of a batch with the eager loop."""
    request, plan = case.request(model, 0)
    for step in decode(model, request, plan, case.settings):
        ids_BN = step.ids_BN
    return ids_BN


@torch.no_grad()
def on_context(model: ARPG, case: Case, ids_BN: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return the guided logits and sampled ids of each step, where the steps before have sampled `ids_BN`."""
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
    """Return the ids `[B, S]` that an engine samples in each step, where the steps before have sampled `ids_BN`."""
    if engine.mode != "graph":
        return [drawn for _, drawn in on_context(engine.model, case, ids_BN)]
    tokens_of(engine, case)  # captures the graph
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
            theirs_BN.copy_(ids_BN)  # what the next graph reads: only positions that are known by then
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
        "equal draws": equal_share([drawn for _, drawn in found], [drawn for _, drawn in exact]),
    }
