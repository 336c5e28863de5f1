"""State: a running batch, and the two things that are done with it: Pass 1 writes tokens, Pass 2 asks for positions.

Shapes: B batch, R rows (B, or 2B when guided: conditional, then unconditional), N grid tokens, S tokens of a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from arpg.kernels import decoding, fusible
from arpg.model import ARPG, Cache
from arpg.model.rope import BASE, Rotation


@dataclass(frozen=True)
class Write:
    """Tokens that enter the cache, named by position; rows are padded with position N."""

    position_BS: Tensor
    count_B: Tensor | None = None  # how many of a row's are real; None: all
    longest: int | None = None  # image tokens of the longest row when these are in; None: all that are written


@dataclass(frozen=True)
class Ask:
    """Positions that are asked for, padded with N."""

    position_BS: Tensor
    scale_BS: Tensor | None  # guidance, one for each position or for each row; None: not guided
    visible_BS: Tensor | None = None  # image tokens of the cache that each may see; None: all that its row has


@dataclass
class State:
    """All that belongs to the samples of a running batch, one row each.

    The cache and the queries have the unconditional rows, too. Column N of ids, known and places is for padding.
    """

    ids_BN: Tensor  # raster order; anything where not known
    known_BN: Tensor
    place_BN2: Tensor
    key_B2: Tensor  # the seeds
    query_RND: Tensor | None  # what Pass 2 asks with, where it is not [MASK]
    cache: Cache
    num_prefix: int  # slots that stand before the tokens, in the row that has the most
    prefix_R1: Tensor | None = None  # and in each row, where they differ

    @property
    def copies(self) -> int:
        """Rows of the network for each sample: 2 when guided."""
        return self.cache.rows // len(self.ids_BN)

    def encode(self, model: ARPG, write: Write, *, causal: bool) -> None:
        """Pass 1: tokens of these positions enter the cache."""
        x_RSD, at = self._look_up(model, write.position_BS)
        model.encode(
            x_RSD,
            at,
            self.cache,
            causal=causal,
            count_B=None if write.count_B is None else self._rows(write.count_B),
            end=None if write.longest is None else self.num_prefix + write.longest,
        )

    def predict(self, model: ARPG, ask: Ask) -> Tensor:
        """Pass 2: logits `[R, S, V]`."""
        position_BS, num_asked = ask.position_BS, ask.position_BS.shape[1]
        if self._alike(model, ask):
            position_BS = position_BS[:, :1]
        query_RSD = None
        if self.query_RND is not None:
            query_RSD = self.query_RND.take_along_dim(self._rows(position_BS)[..., None], dim=1)
        visible_RS = None if ask.visible_BS is None else self._prefix() + self._rows(ask.visible_BS)
        logits_RSV = model.predict(self._at(model, position_BS), query_RSD, self.cache, visible_RS)
        return logits_RSV.expand(-1, num_asked, -1)

    def _alike(self, model: ARPG, ask: Ask) -> bool:
        """Whether all positions have the same logits: who sees a single slot gets its value, wherever it stands."""
        alone = self.cache.end == 1 and self.cache.length_B is None and ask.visible_BS is None
        return alone and self.query_RND is None and model.config.positions == "rope"

    def put(self, position_BS: Tensor, ids_BS: Tensor, kept_BS: Tensor | None) -> None:
        """These tokens now stand there; they are known where they are kept (None: all)."""
        if kept_BS is None and fusible(self.place_BN2):
            from arpg.kernels.lookup import put

            self.ids_BN, self.known_BN = put(self.ids_BN, self.known_BN, position_BS, ids_BS)
        else:
            known: Tensor | bool = True if kept_BS is None else kept_BS | self.known_BN.gather(1, position_BS)
            self.ids_BN = self.ids_BN.scatter(1, position_BS, ids_BS)
            self.known_BN = self.known_BN.scatter(1, position_BS, known)
        self.cache.settle()  # neither starts before all that has written into the cache has ended

    def roll_back(self, length_B: Tensor, longest: int) -> None:
        """Forget all but the first image tokens of each row; `longest` is the greatest of the numbers."""
        self.cache.roll_back((self._prefix() + self._rows(length_B[:, None]))[:, 0])
        self.cache.roll_back(self.num_prefix + longest)

    def set_lengths(self, lengths: Sequence[int], *, uniform: bool) -> None:
        """Image tokens in the cache of each row. `uniform`: and all will get as many more, so no mask is needed."""
        self.cache.end = self.num_prefix + max(lengths)
        self.cache.length_B = None
        if not uniform or len(set(lengths)) > 1 or self.prefix_R1 is not None:
            length_B1 = torch.tensor(lengths, dtype=torch.long, device=self.ids_BN.device)[:, None]
            self.cache.length_B = (self._prefix() + self._rows(length_B1))[:, 0]

    def image(self) -> tuple[Tensor, Tensor]:
        """Ids and known `[B, N]`, without the padding."""
        return self.ids_BN[:, :-1], self.known_BN[:, :-1]

    def prefixes(self) -> Tensor:
        """`[R, 1]`: the slots before the tokens of each row."""
        if self.prefix_R1 is not None:
            return self.prefix_R1
        return torch.full((self.cache.rows, 1), self.num_prefix, device=self.ids_BN.device)

    def _prefix(self) -> Tensor | int:
        return self.num_prefix if self.prefix_R1 is None else self.prefix_R1

    def _look_up(self, model: ARPG, position_BS: Tensor) -> tuple[Tensor, Tensor | Rotation]:
        """The tokens at the positions of all rows, embedded, and where they are."""
        if self._in_one(model):
            from arpg.kernels.lookup import embedded_at

            x_RSD, *by = embedded_at(
                model.embedding.weight,
                self.ids_BN,
                self.place_BN2,
                position_BS,
                copies=self.copies,
                head_dim=model.config.head_dim,
                base=BASE,
            )
            return x_RSD, Rotation(*by)
        return self._rows(model.embed(self.ids_BN.gather(1, position_BS))), self._at(model, position_BS)

    def _at(self, model: ARPG, position_BS: Tensor) -> Tensor | Rotation:
        """Where the positions of all rows are: their places, or how they turn where one kernel makes that at once."""
        if self._in_one(model):
            from arpg.kernels.lookup import turned_at

            head_dim = model.config.head_dim
            return Rotation(*turned_at(self.place_BN2, position_BS, copies=self.copies, head_dim=head_dim, base=BASE))
        return self._rows(self.place_BN2.gather(1, position_BS[..., None].expand(-1, -1, 2)))

    def _in_one(self, model: ARPG) -> bool:
        return model.config.positions == "rope" and decoding(model.embedding.weight)

    def _rows(self, x_B: Tensor) -> Tensor:
        """The same for the conditional and the unconditional rows."""
        return x_B if self.copies == 1 else torch.cat((x_B,) * self.copies)


def gather(parts: Sequence[tuple[State, Sequence[int]]], *, tokens: int) -> State:
    """Some rows of some states as one, with room for so many image tokens: this is how rows join and leave.

    The states must be of the same grid and model, all guided or none.
    """
    first = parts[0][0]
    assert len({(state.copies, state.ids_BN.shape[1]) for state, _ in parts}) == 1
    index = [torch.tensor(list(rows), dtype=torch.long, device=first.ids_BN.device) for _, rows in parts]

    def rows_of(name: str, copy: int = 0) -> list[Tensor]:
        found = ((getattr(state, name), len(state.ids_BN)) for state, _ in parts)
        return [x[copy * batch + rows] for (x, batch), rows in zip(found, index, strict=True)]

    copies = range(first.copies)
    indexed = [(state, rows) for (state, _), rows in zip(parts, index, strict=True)]
    caches = [(state.cache, c * len(state.ids_BN) + rows) for c in copies for state, rows in indexed]
    num_prefix = max(state.num_prefix for state, _ in parts)
    prefix_R1 = None
    if any(state.prefix_R1 is not None or state.num_prefix != num_prefix for state, _ in parts):
        prefix_R1 = torch.cat([state.prefixes()[c * len(state.ids_BN) + r] for c in copies for state, r in indexed])
    return State(
        ids_BN=torch.cat(rows_of("ids_BN")),
        known_BN=torch.cat(rows_of("known_BN")),
        place_BN2=torch.cat(rows_of("place_BN2")),
        key_B2=torch.cat(rows_of("key_B2")),
        query_RND=None if first.query_RND is None else torch.cat([x for c in copies for x in rows_of("query_RND", c)]),
        cache=Cache.gather(caches, num_prefix + tokens),
        num_prefix=num_prefix,
        prefix_R1=prefix_R1,
    )
