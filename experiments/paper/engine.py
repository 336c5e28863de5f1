"""The engine of a table's row: any network and order, with the loop, kernels and CUDA graphs of ARPG's engine.

Shapes: B batch, R rows (2B when guided), N grid tokens, S tokens of a step, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import lru_cache, partial

import numpy as np
import torch
from torch import Tensor

from arpg import make_plan, tasks
from arpg.decode import Engine, Plan, Request
from arpg.decode.plan import guidance_scales
from arpg.decode.sampling import warp
from arpg.decode.state import DecodeState, DecodeStrategy, EncodeArgs, PlanCursor, PlannedSteps, StepPlan
from arpg.errors import require
from arpg.model import TokenDecoder
from arpg.noise import Stream, gumbel
from arpg.settings import SamplingSettings
from experiments.paper.peers import Masked, Peer

GRAPH_SHARE = 1 / 8  # of the GPU's memory that the graphs of one engine may hold: a search has several engines


class RemainingSteps(PlannedSteps):
    """Each step predicts all positions that are left and accepts as many as planned.

    `confidence`: None accepts those that come first in the plan. A number accepts those whose token has the greatest
    log-probability plus that much Gumbel noise, annealed to none at the last step, as MaskGIT does.
    """

    def __init__(self, cursor: PlanCursor, settings: SamplingSettings, *, confidence: float | None) -> None:
        require(not cursor.ragged, "the samples have different numbers of tokens to fill; expected the same")
        super().__init__(cursor)
        self.settings, self.confidence = settings, confidence
        self.accepted: list[Tensor] = []  # positions [B, S] of each step so far
        self._step: StepPlan | None = None

    def next_step(self, state: DecodeState) -> StepPlan | None:
        """Encode what was accepted last, predict what is left."""
        planned = self.cursor.next_step()
        if planned is None:
            return None
        done = len(self.accepted)
        left = sum(self.cursor.widths[done + 1 :])
        position_BS = state.image()[1].byte().argsort(dim=1, stable=True)[:, :left]
        encode = None
        if planned.encode is not None:
            encode = EncodeArgs(self.accepted[-1], None, planned.encode.longest)
        predict = dataclasses.replace(planned.predict, position_BS=position_BS, static=False)
        self._step = StepPlan(encode, predict)
        return self._step

    def accept(self, state: DecodeState, logits_BSV: Tensor, sampled_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Accept the surest tokens, or those that come first in the plan."""
        assert self._step is not None
        args, done = self._step.predict, len(self.accepted)
        if self.confidence is None:
            rank_T = torch.arange(self.cursor.position_BT.shape[1], device=sampled_BS.device)
            rank_BN = torch.zeros_like(state.ids_BN)
            rank_BN = rank_BN.scatter(1, self.cursor.position_BT, rank_T.expand_as(self.cursor.position_BT))
            sure_BS = -rank_BN.gather(1, args.position_BS).float()
        else:
            log_BSV = warp(logits_BSV, self.settings).log_softmax(-1)
            sure_BS = log_BSV.gather(-1, sampled_BS[..., None])[..., 0]
            noise = self.confidence * (1 - (done + 1) / self.cursor.num_steps)
            if noise > 0:
                sure_BS = sure_BS + noise * gumbel(state.key_B2, Stream.ORDER, args.position_BS, 1)[..., 0]
        index_BS = sure_BS.topk(self.cursor.widths[done + 1]).indices
        self.accepted.append(args.position_BS.gather(1, index_BS))
        return sampled_BS, torch.zeros_like(sampled_BS, dtype=torch.bool).scatter(1, index_BS, True)


@lru_cache(maxsize=64)
def plan_from_nothing(grid: tuple[int, int], seeds: tuple[int, ...], settings: SamplingSettings) -> Plan:
    """Plan samples that start from nothing."""
    return make_plan(grid, torch.zeros(len(seeds), math.prod(grid), dtype=torch.bool), seeds, settings)


class RowEngine(Engine):
    """Decodes a network of a row. `confidence`: as in `RemainingSteps`; a masked model always predicts what is left."""

    def __init__(self, model: TokenDecoder, mode: str = "auto", *, confidence: float | None = None) -> None:
        total = torch.cuda.get_device_properties(model.device).total_memory if model.device.type == "cuda" else 0
        super().__init__(model, mode, graph_memory=int(GRAPH_SHARE * total))
        self.confidence = confidence

    def make_strategy(self, request: Request, plan: Plan, settings: SamplingSettings) -> DecodeStrategy:
        """Return planned steps, or those that predict everything left."""
        if self.confidence is None and not isinstance(self.model, Masked):
            return super().make_strategy(request, plan, settings)
        cursor = PlanCursor(request, plan, self.model.device)
        return RemainingSteps(cursor, settings, confidence=self.confidence)

    def plan(self, request: Request, settings: SamplingSettings) -> Plan:
        """Plan a request; the orders of one that starts from nothing are kept: a search changes the guidance alone."""
        if request.known_BN.any():
            return make_plan(request.grid, request.known_BN, request.seeds, settings)
        orders = SamplingSettings(steps=settings.steps, order=settings.order, schedule=settings.schedule)
        plan = plan_from_nothing(request.grid, tuple(request.seeds), orders)
        sizes = tuple(plan.count_BK[0].tolist())
        scales = guidance_scales(settings.guidance_schedule, settings.guidance, sizes)
        return Plan.from_arrays(plan.order_T, plan.count_BK, np.tile(scales, (len(plan.count_BK), 1)))

    def generate(self, labels: Sequence[int], seeds: Sequence[int], settings: SamplingSettings) -> Tensor:
        """Sample ids `[B, N]`; image i has label i and seed i, with the orders and step sizes of `settings`."""
        make = self.model.request if isinstance(self.model, Peer) else partial(tasks.generate, self.model)
        return self.fill(make(labels, seeds), settings)[:, -math.prod(self.model.config.grid) :]

    @torch.no_grad()
    def fill(self, request: Request, settings: SamplingSettings) -> Tensor:
        """Sample what a request leaves open; return ids `[B, N]`. Some peers have an order and steps of their own."""
        if isinstance(self.model, Peer) and (sizes := self.model.fixed_sizes()) is not None:
            order = self.model.fixed_order(torch.device("cpu"))
            assert order is not None
            settings = dataclasses.replace(settings, order=order, schedule=sizes)
        plan = self.plan(request, settings)
        *_, last = self.decode(request, plan, settings, every_step=False)
        return last.ids_BN
