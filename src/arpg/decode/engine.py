"""The one loop: Pass 2 predicts the next positions, the sampler draws them, Pass 1 takes them into the cache.

Shapes: B batch, R rows (B, or 2B when guided: conditional, then unconditional), N grid tokens, S tokens of a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from arpg.config import SamplingSettings
from arpg.decode.noise import seed_keys
from arpg.decode.plan import Plan
from arpg.decode.request import Request
from arpg.decode.sampling import guide, sample
from arpg.errors import require
from arpg.model import ARPG


@dataclass(frozen=True)
class Step:
    """What is there after a step. The tensors are on the model's device and will not change."""

    index: int
    num_steps: int
    ids_BN: Tensor  # raster order; anything where not known
    known_BN: Tensor


@dataclass(frozen=True)
class Stage:
    """Positions that are asked for, and then enter the cache, together; rows are padded with position N."""

    position_BS: Tensor
    count_B: Tensor | None  # how many of a row's positions are real; None: all
    scale_B1: Tensor | None  # guidance
    before: int  # the greatest number of image tokens any row has before these are in
    after: int  # and after

    @property
    def slots(self) -> int:
        """Cache slots that writing these touches, padding included."""
        return self.before + self.position_BS.shape[1]


def decode(model: ARPG, request: Request, plan: Plan, settings: SamplingSettings) -> Iterator[Step]:
    """Fill the request as planned; yields after every step. Nothing in here waits for the device.

    A request in which everything is known yields one step that is the request itself.
    """
    _check(model, request, plan)
    return _loop(model, request, plan, settings)


@torch.no_grad()
def _loop(model: ARPG, request: Request, plan: Plan, settings: SamplingSettings) -> Iterator[Step]:
    device, batch, num_tokens = model.device, len(request.seeds), request.known_BN.shape[1]
    causal = settings.attention == "causal"
    copies = 2 if plan.guided else 1
    known, steps = _stages(request, plan, device)

    # Column N of ids and known, and row N of the places, belong to padding.
    ids = torch.cat((request.ids_BN.to(device), torch.zeros(batch, 1, dtype=torch.long, device=device)), 1)
    is_known = torch.cat((request.known_BN, torch.ones(batch, 1, dtype=torch.bool)), 1).to(device)
    place = torch.cat((request.places(), torch.zeros(1, 2))).to(device)
    key_B2 = seed_keys(request.seeds, device=device)
    query = _queries(model, request, copies)

    condition = request.condition
    num_prefix = condition.prefix_BPD.shape[1]
    prefix = condition.prefix_BPD if copies == 1 else torch.cat((condition.prefix_BPD, condition.null_prefix_BPD))
    to_encode = [known, *steps[:-1]]  # the last step's tokens are never looked at
    slots = num_prefix + max(stage.slots for stage in to_encode)
    cache = model.allocate_cache(copies * batch, slots, ragged=known.count_B is not None)

    def encode(stage: Stage) -> None:
        model.encode(
            _rows(model.embed(ids.gather(1, stage.position_BS)), copies),
            _rows(place[stage.position_BS], copies),
            cache,
            causal=causal,
            count_B=None if stage.count_B is None else _rows(stage.count_B, copies),
            end=num_prefix + stage.after,
        )

    model.encode(prefix, _rows(condition.place_BP2, copies), cache, causal=True)
    if known.after:
        encode(known)
    for index, step in enumerate(steps):
        if index:
            encode(steps[index - 1])
        position_RS = _rows(step.position_BS, copies)
        logits = model.predict(
            place[position_RS],
            None if query is None else query.take_along_dim(position_RS[..., None], dim=1),
            cache,
        )
        drawn = sample(guide(logits, step.scale_B1), settings, key_B2, step.position_BS)
        ids = ids.scatter(1, step.position_BS, drawn)
        is_known = is_known.scatter(1, step.position_BS, True)
        yield Step(index, len(steps), ids[:, :num_tokens], is_known[:, :num_tokens])
    if not steps:
        yield Step(0, 1, ids[:, :num_tokens], is_known[:, :num_tokens])


def _check(model: ARPG, request: Request, plan: Plan) -> None:
    require(
        len(plan.samples) == len(request.seeds),
        f"the plan is for {len(plan.samples)} samples; the request has {len(request.seeds)}",
    )
    for sample_plan, known in zip(plan.samples, request.known_BN.numpy(), strict=True):
        require(
            sorted(sample_plan.order) == np.flatnonzero(~known).tolist(),
            f"the plan fills {len(sample_plan.order)} positions; they are not the "
            f"{int((~known).sum())} positions that the request leaves open",
        )
    known_ids = request.ids_BN[request.known_BN.to(request.ids_BN.device)]
    if request.ids_BN.device.type == "cpu" and len(known_ids):
        low, high = int(known_ids.min()), int(known_ids.max())
        require(
            low >= 0 and high < model.config.vocab_size,
            f"known tokens run from {low} to {high}; expected codes from 0 to {model.config.vocab_size - 1}",
        )


def _stages(request: Request, plan: Plan, device: torch.device) -> tuple[Stage, list[Stage]]:
    """The known tokens and the tokens of each step, with every index on the device before the loop starts."""
    num_tokens = request.known_BN.shape[1]
    rows_of = [[np.flatnonzero(row).tolist() for row in request.known_BN.numpy()]]
    scales_of = [[1.0] * len(plan.samples)]
    for s in range(plan.num_steps):
        rows_of.append([_part(p.order, p.sizes, s) for p in plan.samples])
        scales_of.append([p.scales[s] if s < len(p.scales) else 1.0 for p in plan.samples])
    ragged = any(len({len(row) for row in rows}) > 1 for rows in rows_of)

    stages: list[Stage] = []
    lengths = [0] * len(plan.samples)
    for rows, scales in zip(rows_of, scales_of, strict=True):
        before, longest = max(lengths), max(len(row) for row in rows)
        lengths = [length + len(row) for length, row in zip(lengths, rows, strict=True)]
        padded = [row + [num_tokens] * (longest - len(row)) for row in rows]
        stages.append(
            Stage(
                position_BS=torch.tensor(padded, dtype=torch.long, device=device).reshape(len(rows), longest),
                count_B=torch.tensor([len(row) for row in rows], device=device) if ragged else None,
                scale_B1=torch.tensor(scales, device=device)[:, None] if plan.guided else None,
                before=before,
                after=max(lengths),
            )
        )
    return stages[0], stages[1:]


def _part(order: tuple[int, ...], sizes: tuple[int, ...], step: int) -> list[int]:
    """The positions of one step; none once the sample is done."""
    start = sum(sizes[:step])
    return list(order[start : start + sizes[step]]) if step < len(sizes) else []


def _queries(model: ARPG, request: Request, copies: int) -> Tensor | None:
    """`[R, N + 1, D]`: the condition's queries; plain [MASK] for the unconditional rows and for padding."""
    query_BND = request.condition.query_BND
    if query_BND is None:
        return None
    mask_D = model.embedding.weight[model.config.mask_id]
    if copies == 2:
        query_BND = torch.cat((query_BND, mask_D.expand_as(query_BND)))
    return torch.cat((query_BND, mask_D.expand(len(query_BND), 1, -1)), dim=1)


def _rows(x_B: Tensor, copies: int) -> Tensor:
    """The same for the conditional and the unconditional rows."""
    return x_B if copies == 1 else torch.cat((x_B,) * copies)
