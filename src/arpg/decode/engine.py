"""The one loop: Pass 1 takes tokens into the cache, Pass 2 predicts positions, the sampler draws them.

What a turn of it writes, asks and keeps is said by a way of decoding.
Shapes: B batch, N grid tokens, S tokens of a turn, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from arpg.decode.exact import Exact
from arpg.decode.plan import Plan
from arpg.decode.planned import Planned
from arpg.decode.request import Request
from arpg.decode.sampling import sample
from arpg.decode.speculative import Speculative
from arpg.decode.start import Inputs, begin, read
from arpg.decode.state import State
from arpg.decode.way import Way
from arpg.errors import require
from arpg.model import ARPG
from arpg.settings import SamplingSettings


@dataclass(frozen=True)
class Step:
    """What is there after a step: one call of the network. The tensors are on its device and will not change."""

    index: int
    num_steps: int | None  # None: that is not known before the last one
    ids_BN: Tensor  # raster order; anything where not known
    known_BN: Tensor

    @property
    def calls(self) -> int:
        """Calls of the network so far: one Pass 1 and one Pass 2 each."""
        return self.index + 1

    @property
    def last(self) -> bool:
        return self.num_steps == self.index + 1


def decode(model: ARPG, request: Request, plan: Plan, settings: SamplingSettings) -> Iterator[Step]:
    """Fill the request as planned; yields after every step.

    A request in which everything is known yields one step that is the request itself.
    """
    check(model, request, plan)
    way = choose_way(request, plan, settings, model.device)
    return run(model, read(model, request, guided=plan.guided, ragged=way.ragged), way, settings)


@torch.no_grad()
def run(model: ARPG, inputs: Inputs, way: Way, settings: SamplingSettings) -> Generator[Step]:
    """The loop itself."""
    causal = settings.attention == "causal"
    state = begin(model, inputs, causal=causal, tokens=way.tokens, ragged=way.ragged)
    index = 0
    while advance(model, state, way, settings):
        yield Step(index, way.num_steps, *state.image())
        index += 1
    if index == 0:
        yield Step(0, 1, *state.image())


@torch.no_grad()
def advance(model: ARPG, state: State, way: Way, settings: SamplingSettings) -> bool:
    """One turn of the loop; False if there is none left."""
    turn = way.turn(state)
    if turn is None:
        return False
    if turn.write is not None:
        state.encode(model, turn.write, causal=settings.attention == "causal")
    ask = turn.ask
    logits_RSV = state.predict(model, ask)
    drawn_BS = sample(logits_RSV, settings, state.key_B2, ask.position_BS, scale_BS=ask.scale_BS)
    state.put(ask.position_BS, *way.keep(state, logits_RSV, drawn_BS))
    return True


def choose_way(request: Request, plan: Plan, settings: SamplingSettings, device: torch.device) -> Way:
    if settings.decode == "exact":
        return Exact(request, plan, device, draft=settings.draft)
    if settings.decode == "speculative":
        return Speculative(request, plan, device, settings=settings)
    return Planned(request, plan, device)


def check(model: ARPG, request: Request, plan: Plan) -> None:
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
