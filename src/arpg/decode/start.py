"""The start of a generation: everything that a request brings is put on the device, then Pass 1 reads it.

The two are apart so that a recorded generation (`recording.py`) can be given the inputs of another request.
Shapes: B batch, R rows (B, or 2B when guided), N grid tokens, S tokens of a call, P prefix slots, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from arpg.decode.noise import seed_keys
from arpg.decode.request import Request
from arpg.decode.state import State, Write
from arpg.device import send
from arpg.model import ARPG, Condition


@dataclass(frozen=True)
class Inputs:
    """A request on the device. As in `State`, ids, known and places have a column for padding."""

    ids_BN: Tensor
    known_BN: Tensor
    place_BN2: Tensor
    key_B2: Tensor
    prefix_RPD: Tensor
    place_RP2: Tensor
    query_RND: Tensor | None
    prefix_R: Tensor | None  # how many prefix slots each row has, where they differ
    known: Write | None  # the tokens that are known from the start


def read(model: ARPG, request: Request, *, guided: bool, ragged: bool) -> Inputs:
    """`ragged`: rows may differ in length."""
    device, batch = model.device, len(request.seeds)
    condition = request.condition
    lengths = condition.lengths(guided=guided)
    uniform = len(set(lengths)) == 1
    prefix_RPD = torch.cat((condition.prefix_BPD, condition.null_prefix_BPD)) if guided else condition.prefix_BPD
    place_RP2 = torch.cat((condition.place_BP2, condition.place_BP2)) if guided else condition.place_BP2
    known, write = known_positions(request), None
    counts = [len(row) for row in known]
    if any(counts):
        count_B = send(torch.tensor(counts), device) if ragged or not uniform else None
        write = Write(pad(known, request.num_tokens, device=device), count_B, max(counts))
    return Inputs(
        ids_BN=send(torch.cat((request.ids_BN, request.ids_BN.new_zeros(batch, 1)), 1), device),
        known_BN=send(torch.cat((request.known_BN, request.known_BN.new_ones(batch, 1)), 1), device),
        place_BN2=send(torch.cat((request.places(), torch.zeros(1, 2))), device).repeat(batch, 1, 1),
        key_B2=seed_keys(request.seeds, device=device),
        prefix_RPD=prefix_RPD[:, : max(lengths)],
        place_RP2=place_RP2[:, : max(lengths)],
        query_RND=_queries(model, condition, guided=guided),
        prefix_R=None if uniform else send(torch.tensor(lengths), device),
        known=write,
    )


def begin(model: ARPG, inputs: Inputs, *, causal: bool, tokens: int, ragged: bool) -> State:
    """The state before the first step: the condition and the known tokens are in the cache.

    `tokens`: how many image tokens the cache must hold, padding included.
    """
    rows, num_prefix = inputs.prefix_RPD.shape[:2]
    prefix_R = inputs.prefix_R
    state = State(
        ids_BN=inputs.ids_BN,
        known_BN=inputs.known_BN,
        place_BN2=inputs.place_BN2,
        key_B2=inputs.key_B2,
        query_RND=inputs.query_RND,
        cache=model.allocate_cache(rows, num_prefix + tokens, ragged=ragged or prefix_R is not None),
        num_prefix=num_prefix,
        prefix_R1=None if prefix_R is None else prefix_R[:, None],
    )
    model.encode(inputs.prefix_RPD, inputs.place_RP2, state.cache, causal=True, count_B=prefix_R)
    if inputs.known is not None:
        state.encode(model, inputs.known, causal=causal)
    return state


def start(model: ARPG, request: Request, *, guided: bool, causal: bool, tokens: int, ragged: bool) -> State:
    """Both at once."""
    inputs = read(model, request, guided=guided, ragged=ragged)
    return begin(model, inputs, causal=causal, tokens=tokens, ragged=ragged)


def pad(rows: Sequence[Sequence[int]], padding: int, *, device: torch.device) -> Tensor:
    """`[B, S]`: rows of positions, filled up to the longest of them."""
    longest = max(len(row) for row in rows)
    padded = [[*row, *[padding] * (longest - len(row))] for row in rows]
    return send(torch.tensor(padded, dtype=torch.long).reshape(len(rows), longest), device)


def known_positions(request: Request) -> list[list[int]]:
    """Of each sample, in raster order."""
    return [np.flatnonzero(row).tolist() for row in request.known_BN.numpy()]


def _queries(model: ARPG, condition: Condition, *, guided: bool) -> Tensor | None:
    """`[R, N + 1, D]`: the condition's queries; plain [MASK] for the unconditional rows and for padding."""
    query_BND = condition.query_BND
    if query_BND is None:
        return None
    mask_D = model.embedding.weight[model.config.mask_id]
    if guided:
        query_BND = torch.cat((query_BND, mask_D.expand_as(query_BND)))
    return torch.cat((query_BND, mask_D.expand(len(query_BND), 1, -1)), dim=1)
