"""Random numbers that are a pure function of (seed, stream, position, code): Philox 4x32-10 in tensor operations.

Counter-based (Salmon et al., SC'11): no state, so a number does not depend on the batch it was drawn in, on
the device or on how the loop was run. The 32-bit words live in int64 tensors, because torch has no unsigned
multiplication everywhere; products wrap modulo 2^64, which is just what is needed.

Shapes: B batch, S tokens, V codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_MULTIPLY = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


class Stream(IntEnum):
    """What the numbers are for; streams never share a number."""

    TOKEN = 0
    ORDER = 1
    TRAIN_ORDER = 2
    LABEL_DROP = 3
    VIEW = 4
    ACCEPT = 5
    REPLACE = 6


def seed_keys(seeds: Sequence[int], *, device: torch.device | str = "cpu") -> Tensor:
    """`[B, 2]`: each 64-bit seed as two words."""
    return torch.tensor([(seed & _WORD, seed >> 32) for seed in seeds], dtype=torch.long, device=device)


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four random words for each counter of four words and key of two; all broadcast against each other."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLY[0], c2 * _MULTIPLY[1]
        c0, c1, c2, c3 = (
            ((product1 >> 32) & _WORD) ^ c1 ^ k0,
            product1 & _WORD,
            ((product0 >> 32) & _WORD) ^ c3 ^ k1,
            product0 & _WORD,
        )
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def random_words(key_B2: Tensor, stream: Stream, position_BS: Tensor, num_codes: int) -> Tensor:
    """`[B, S, num_codes]`: the 32-bit word of each (seed, stream, position, code)."""
    block = torch.arange(-(-num_codes // 4), device=position_BS.device)
    position = position_BS[..., None]
    zero = torch.zeros_like(block)
    words = philox((block, position, zero + int(stream), zero), (key_B2[:, 0, None, None], key_B2[:, 1, None, None]))
    return torch.stack(words, dim=-1).flatten(-2)[..., :num_codes]


def uniform(key_B2: Tensor, stream: Stream, position_BS: Tensor, num_codes: int) -> Tensor:
    """`[B, S, V]`: numbers in (0, 1) in float32, finest near 0."""
    words = random_words(key_B2, stream, position_BS, num_codes)
    return ((words.float() + 0.5) * 2.0**-32).clamp_max(1.0 - 2.0**-24)


def gumbel(key_B2: Tensor, stream: Stream, position_BS: Tensor, num_codes: int) -> Tensor:
    """`[B, S, V]` standard Gumbel noise in float32, so that argmax(logits + noise) draws from softmax(logits).

    The noise is -log(-log(1 - u)): a large value comes from a small u, where float32 is finest, so the tail
    reaches 22.9 instead of the 16.6 of -log(-log(u)).
    """
    return -torch.log(-torch.log1p(-uniform(key_B2, stream, position_BS, num_codes)))
