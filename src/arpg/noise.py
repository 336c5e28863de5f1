"""Random numbers that are a pure function of (seed, stream, position, code): Philox 4x32-10 in tensor operations.

Counter-based (Salmon et al., SC'11): no state, so a number does not depend on the batch, the device or on how the loop
is executed. The 32-bit words live in int64 tensors, because torch has no unsigned multiplication everywhere; products
wrap modulo 2^64, which is just what is needed.

Shapes: B batch, S tokens, V codes, R = B S rows, of which r are made at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_WORD = 0xFFFFFFFF
_MULTIPLY = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_AT_ONCE = 32768  # counters that a thread of a CPU works on


class Stream(IntEnum):
    """What the numbers are used for; streams never share a number."""

    TOKEN = 0
    ORDER = 1
    TRAIN_ORDER = 2
    LABEL_DROP = 3
    VIEW = 4
    ACCEPT = 5
    REPLACE = 6


def seed_keys(seeds: Sequence[int]) -> Tensor:
    """`[B, 2]`: each 64-bit seed as two words, on the CPU."""
    return torch.from_numpy(_words(seeds))


def position_words(seeds: Sequence[int], stream: Stream, num_positions: int) -> NDArray[np.int64]:
    """`[B, N]`: `random_words` of one code at each of the positions 0 to N - 1, in numpy."""
    zero, kind, keys = np.zeros((), np.int64), np.full((), int(stream)), _words(seeds)
    words: NDArray[np.int64] = philox((zero, np.arange(num_positions), kind, zero), (keys[:, :1], keys[:, 1:]))[0]
    return words


def seed_words(seed: int) -> tuple[int, int]:
    """Return a 64-bit seed as two words."""
    return seed & _WORD, seed >> 32


def _words(seeds: Sequence[int]) -> NDArray[np.int64]:
    return np.array([seed_words(seed) for seed in seeds], dtype=np.int64)


def philox(counter: tuple[Any, Any, Any, Any], key: tuple[Any, Any]) -> tuple[Any, ...]:
    """Four random words for each counter of four words and key of two; all broadcast against each other.

    Tensors, or arrays of numpy, which for a few hundred words take a fifth of the time. Everything happens in six
    buffers: passes over memory are what this costs.
    """
    shape = np.broadcast_shapes(*(word.shape for word in (*counter, *key)))
    shift: Any
    buffers: Any
    if isinstance(counter[0], Tensor):
        shift, buffers = torch.bitwise_right_shift, torch.empty((6, *shape), dtype=torch.long, device=counter[0].device)
    else:
        shift, buffers = np.right_shift, np.empty((6, *shape), dtype=np.int64)
    for buffer, word in zip(buffers, counter, strict=False):
        buffer[...] = word
    c0, c1, c2, c3, new0, new2 = buffers
    k0, k1 = key
    for _ in range(_ROUNDS):
        c0 *= _MULTIPLY[0]
        c2 *= _MULTIPLY[1]
        # c1 and c3 are whole products here, of which the low word counts: one mask for all three that are combined.
        for new, product, word, k in ((new0, c2, c1, k0), (new2, c0, c3, k1)):
            shift(product, 32, out=new)
            new ^= word
            new ^= k
            new &= _WORD
        c0, c1, c2, c3, new0, new2 = new0, c2, new2, c0, c1, c3
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    c1 &= _WORD
    c3 &= _WORD
    return c0, c1, c2, c3


def random_words(
    key_B2: Tensor, stream: Stream, position_BS: Tensor, num_codes: int, *, dtype: torch.dtype = torch.long
) -> Tensor:
    """`[B, S, num_codes]`: the 32-bit word of each (seed, stream, position, code), in int64 or rounded to `dtype`.

    On a CPU a few rows at a time, so that what is in between stays in its caches.
    """
    device, (batch, tokens), blocks = position_BS.device, position_BS.shape, -(-num_codes // 4)
    out_RV4 = torch.empty((batch * tokens, blocks, 4), dtype=dtype, device=device)
    row_R3 = torch.cat((position_BS[..., None], key_B2[:, None].expand(-1, tokens, -1)), dim=-1).reshape(-1, 3, 1)
    few = max(1, _AT_ONCE * torch.get_num_threads() // max(1, blocks)) if device.type == "cpu" else max(1, len(row_R3))
    block, kind = torch.arange(blocks, device=device), torch.full((), int(stream), device=device)
    for out_rV4, row_r3 in zip(torch.split(out_RV4, few), torch.split(row_R3, few), strict=True):
        position, *key = row_r3.unbind(1)
        for i, word in enumerate(philox((block, position, kind, torch.zeros_like(kind)), (key[0], key[1]))):
            out_rV4[..., i] = word
    return out_RV4.reshape(batch, tokens, 4 * blocks)[..., :num_codes]


def uniform(key_B2: Tensor, stream: Stream, position_BS: Tensor, num_codes: int) -> Tensor:
    """`[B, S, V]`: numbers in (0, 1) in float32, finest near 0."""
    words = random_words(key_B2, stream, position_BS, num_codes, dtype=torch.float32)
    return words.add_(0.5).mul_(2.0**-32).clamp_max_(1.0 - 2.0**-24)


def gumbel(key_B2: Tensor, stream: Stream, position_BS: Tensor, num_codes: int) -> Tensor:
    """`[B, S, V]` standard Gumbel noise in float32, so that argmax(logits + noise) draws from softmax(logits).

    The noise is -log(-log(1 - u)): a large value comes from a small u, where float32 is finest, so the tail
    reaches 22.9 instead of the 16.6 of -log(-log(u)).
    """
    return uniform(key_B2, stream, position_BS, num_codes).neg_().log1p_().neg_().log_().neg_()
