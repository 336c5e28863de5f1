"""The counter-based generator: published known answers, and samples that follow the right distribution."""

import importlib

import numpy as np
import pytest
import torch

from arpg import SamplingSettings
from arpg.decode.sampling import sample
from arpg.noise import Stream, gumbel, philox, random_words, seed_keys


def words(*values):
    return tuple(torch.tensor([value]) for value in values)


def test_philox_known_answers():
    """The three vectors that its authors publish with the generator (Random123)."""
    full = 0xFFFFFFFF
    cases = [
        ((0,) * 4, (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((full,) * 4, (full, full), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ]
    for counter, key, expected in cases:
        assert tuple(word.item() for word in philox(words(*counter), words(*key))) == expected


def test_a_number_depends_on_its_own_coordinates_alone():
    seeds, positions = [3, 2**40 + 5, 2**64 - 1], torch.tensor([[0, 9, 255]] * 3)
    together = random_words(seed_keys(seeds), Stream.TOKEN, positions, 10)
    for b, seed in enumerate(seeds):
        for s in range(3):
            alone = random_words(seed_keys([seed]), Stream.TOKEN, positions[b : b + 1, s : s + 1], 7)
            assert torch.equal(alone[0, 0], together[b, s, :7])
    assert together.unique().numel() == together.numel()
    assert not torch.equal(together, random_words(seed_keys(seeds), Stream.ORDER, positions, 10))


def plain_philox(c, k):
    """As the paper writes it, in Python's own numbers."""
    c, k = list(c), list(k)
    for _ in range(10):
        p0, p1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [p1 >> 32 ^ c[1] ^ k[0], p1 % 2**32, p0 >> 32 ^ c[3] ^ k[1], p0 % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


@pytest.mark.parametrize("few", [1, 7, 2**15])
def test_the_words_do_not_depend_on_how_many_rows_are_made_at_once(monkeypatch, few):
    """7 codes are two counters; so many that a row is a part, some rows are one, or all are."""
    monkeypatch.setattr(importlib.import_module("arpg.noise"), "_AT_ONCE", few)
    seeds, position_BS = [5, 2**63 + 11], torch.tensor([[0, 3, 255], [8, 7, 1024]])
    words = random_words(seed_keys(seeds), Stream.ACCEPT, position_BS, 7)
    for b, seed in enumerate(seeds):
        for s in range(3):
            counters = [(block, position_BS[b, s].item(), int(Stream.ACCEPT), 0) for block in (0, 1)]
            expected = [word for counter in counters for word in plain_philox(counter, (seed % 2**32, seed >> 32))]
            assert words[b, s].tolist() == expected[:7]
    assert random_words(seed_keys(seeds), Stream.TOKEN, position_BS[:, :0], 7).shape == (2, 0, 7)


def test_gumbel_has_its_moments():
    noise = gumbel(seed_keys(range(64)), Stream.TOKEN, torch.arange(32).expand(64, 32), 256)
    assert torch.isfinite(noise).all()
    assert abs(noise.mean().item() - 0.57722) < 0.01
    assert abs(noise.var().item() - np.pi**2 / 6) < 0.02


def test_samples_follow_the_softmax():
    """Chi-square against the exact law, over positions, seeds and both; 7 degrees of freedom, p about 1e-5."""
    logits = torch.tensor([2.0, 0.0, -1.0, 1.5, -3.0, 0.5, 0.5, -0.25])
    law = logits.softmax(0)
    draws = 20000
    for seeds, positions in (
        ([0], torch.arange(draws)[None]),
        (range(draws), torch.zeros(draws, 1, dtype=torch.long)),
        (range(100), torch.arange(draws // 100).expand(100, -1)),
    ):
        shape = (*positions.shape, len(logits))
        ids = sample(logits.expand(shape), SamplingSettings(), seed_keys(list(seeds)), positions)
        count = torch.bincount(ids.flatten(), minlength=len(logits))
        assert ((count - draws * law) ** 2 / (draws * law)).sum() < 35
