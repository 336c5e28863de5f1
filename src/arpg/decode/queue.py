"""Queue: the positions that each sample still has to fill, one after the other; samples move on by different numbers.

Shapes: B batch, N grid tokens, M places of an order, S tokens of a call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from arpg.decode.plan import Plan
from arpg.decode.request import Request
from arpg.decode.state import Ask, State, Write
from arpg.errors import require


class Queue:
    """`done` places of each order are decided. Offsets count from there: -1 is the last decided place, 0 the next.

    The cache holds what is decided but for that last one, which nothing has asked about yet: it is written first.
    Guidance belongs to a place of the order, whichever call decides it.
    """

    def __init__(self, request: Request, plan: Plan, device: torch.device, *, ahead: int) -> None:
        require(
            all(set(sample.sizes) <= {1} for sample in plan.samples),
            "the plan fills several tokens at once; exact and speculative decoding need a plan of single tokens",
        )
        totals = [len(sample.order) for sample in plan.samples]
        known = request.known_BN.sum(1)
        width = max(totals) + ahead  # offsets beyond the end of an order are padding
        orders = [[*sample.order, *[request.num_tokens] * (width - len(sample.order))] for sample in plan.samples]
        scales = [[*sample.scales, *[1.0] * (width - len(sample.scales))] for sample in plan.samples]
        self.position_BM = torch.tensor(orders, device=device)
        self.scale_BM = torch.tensor(scales, device=device) if plan.guided else None
        self.total_B = torch.tensor(totals, device=device)
        self.known_B = known.to(device)
        self.done_B = torch.zeros_like(self.total_B)
        self.left = max(totals)  # places that the sample with the most of them still has
        self.started = False
        # Rows that are done still write their padding.
        self.tokens = int((known + torch.tensor(totals)).max()) + ahead

    def write(self, first: int, stop: int) -> Write | None:
        """The tokens at these offsets, if there are any: nothing stands at -1 before the first answer."""
        first = first if self.started else max(first, 0)
        return Write(self.position_BM.gather(1, self._places(first, stop))) if first < stop else None

    def ask(self, first: int, stop: int, *, guesses: int, prefix: int) -> Ask:
        """Ask for these offsets; each sees what is decided, and the guesses at the offsets before its own."""
        place_BS = self._places(first, stop)
        offset_S = torch.arange(first, stop, device=place_BS.device).clamp_max(guesses)
        return Ask(
            self.position_BM.gather(1, place_BS),
            None if self.scale_BM is None else self.scale_BM.gather(1, place_BS),
            prefix + (self.known_B + self.done_B)[:, None] + offset_S,
        )

    def advance(self, state: State, count_B: Tensor) -> None:
        """So many more places are decided; whatever else is in the cache is forgotten. Waits for the device."""
        self.started = True
        self.done_B = torch.minimum(self.done_B + count_B, self.total_B)
        length_B = self.known_B + (self.done_B - 1).clamp_min(0)
        self.left, longest = torch.stack(((self.total_B - self.done_B).max(), length_B.max())).tolist()
        state.roll_back(length_B, longest)

    def keep(self, rows_B: Tensor) -> None:
        """Only these samples stay."""
        self.position_BM, self.total_B = self.position_BM[rows_B], self.total_B[rows_B]
        self.known_B, self.done_B = self.known_B[rows_B], self.done_B[rows_B]
        self.scale_BM = None if self.scale_BM is None else self.scale_BM[rows_B]
        self.left = int((self.total_B - self.done_B).max())

    def _places(self, first: int, stop: int) -> Tensor:
        offset_S = torch.arange(first, stop, device=self.done_B.device)
        return (self.done_B[:, None] + offset_S).clamp(0, self.position_BM.shape[1] - 1)
