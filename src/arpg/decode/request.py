"""Request: known tokens, positions to fill and a condition. Every task is one of these.

Shapes: B batch, N grid tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from arpg.errors import require
from arpg.model import Condition
from arpg.model.rope import grid_positions


@dataclass(frozen=True)
class Request:
    """What the loop fills. `known_BN` is on the CPU: the plan is made from it."""

    condition: Condition
    grid: tuple[int, int]
    ids_BN: Tensor  # anything where not known
    known_BN: Tensor
    seeds: tuple[int, ...]  # one for each sample
    pos_N2: Tensor | None = None  # position of each token in the trained grid; None: its own row and column

    def __post_init__(self) -> None:
        shape = (len(self.seeds), self.grid[0] * self.grid[1])
        require(len(self.seeds) >= 1, "the request is empty; expected at least one image")
        for seed in self.seeds:
            require(0 <= seed < 2**64, f"seed is {seed}; expected 0 to 2^64 - 1")
        for name in ("ids_BN", "known_BN"):
            require(
                tuple(getattr(self, name).shape) == shape,
                f"{name} has shape {tuple(getattr(self, name).shape)}; {len(self.seeds)} seeds and a grid of "
                f"{self.grid[0]}x{self.grid[1]} need {shape}",
            )
        require(
            len(self.condition) == len(self.seeds),
            f"the condition is for {len(self.condition)} samples; there are {len(self.seeds)} seeds",
        )
        query_BND = self.condition.query_BND
        require(
            query_BND is None or query_BND.shape[1] == shape[1],
            f"the condition image has {0 if query_BND is None else query_BND.shape[1]} patches; a grid of "
            f"{self.grid[0]}x{self.grid[1]} needs {shape[1]}",
        )

    @classmethod
    def from_nothing(cls, condition: Condition, grid: tuple[int, int], seeds: tuple[int, ...]) -> Request:
        """Return a request in which nothing is known: plain generation."""
        shape = (len(seeds), grid[0] * grid[1])
        return cls(condition, grid, torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.bool), seeds)

    @classmethod
    def gather(cls, parts: Sequence[tuple[Request, int]]) -> Request:
        """Return samples of several requests (of the same grid and positions) as one."""
        first = parts[0][0]
        return cls(
            Condition.gather([(request.condition, row) for request, row in parts]),
            first.grid,
            torch.stack([request.ids_BN[row].cpu() for request, row in parts]),
            torch.stack([request.known_BN[row] for request, row in parts]),
            tuple(request.seeds[row] for request, row in parts),
            first.pos_N2,
        )

    def rows(self, rows: Sequence[int]) -> Request:
        """Return some of the samples, also repeated."""
        index = torch.tensor(list(rows))
        return Request(
            self.condition.rows(index),
            self.grid,
            self.ids_BN[index.to(self.ids_BN.device)],
            self.known_BN[index],
            tuple(self.seeds[row] for row in rows),
            self.pos_N2,
        )

    @property
    def num_tokens(self) -> int:
        """N: tokens of the grid."""
        return self.known_BN.shape[1]

    def positions(self) -> Tensor:
        """`[N, 2]`: the grid position of each token."""
        return grid_positions(*self.grid) if self.pos_N2 is None else self.pos_N2
