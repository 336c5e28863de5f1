"""Two ways of computing the same network, on the same context: how far their logits are apart, how often draws agree.

Run freely, they part at the first token that differs, and nothing after that can be compared. So both are told what
was drawn, step by step. Shapes: B batch, N grid tokens, S tokens of a step, V codes.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

from arpg.bench.case import Case
from arpg.decode import decode
from arpg.decode.planned import Planned
from arpg.decode.sampling import guide, sample
from arpg.decode.start import start
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


def agreement(found: Steps, exact: Steps) -> dict[str, float]:
    """The relative error of the logits, by step on average and at most, and the share of equal draws."""
    errors = [
        float((a.float() - b.float()).norm() / b.float().norm()) for (a, _), (b, _) in zip(found, exact, strict=True)
    ]
    equal = torch.cat([(a == b).flatten() for (_, a), (_, b) in zip(found, exact, strict=True)])
    return {
        "logit error": float(f"{statistics.mean(errors):.3g}"),
        "largest logit error": float(f"{max(errors):.3g}"),
        "equal draws": round(float(equal.float().mean()), 4),
    }
