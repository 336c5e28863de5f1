"""The network: sizes, rotation, causality, modes."""

import dataclasses

import pytest
import torch

from arpg import ARPG, InputError, ModelConfig, VQTokenizer
from arpg.config import MODELS, TOKENIZERS
from arpg.kernels.ops import apply_rope
from arpg.model import class_condition
from arpg.model.rope import grid_positions, make_rope, no_positions, sinusoids
from support.small import SMALL, small_model


def parameters(config):
    with torch.device("meta"):
        return sum(p.numel() for p in ARPG(config).parameters()) / 1e6


@pytest.mark.parametrize(("name", "millions"), [("arpg-l", 319.85), ("arpg-xl", 719.00), ("arpg-xxl", 1302.45)])
def test_preset_sizes(name, millions):
    assert parameters(MODELS[name]) == pytest.approx(millions, abs=0.005)


@pytest.mark.parametrize(
    ("change", "millions"),
    [
        ({"shared_kv": False}, 343),
        ({"positions": "cosine"}, 320),
        ({"pass1_layers": 18, "pass2_layers": 6}, 332),
        ({"pass1_layers": 6, "pass2_layers": 18}, 307),
        ({"pass1_layers": 0, "pass2_layers": 24}, 295),
    ],
)
def test_the_papers_ablations_have_its_sizes(change, millions):
    assert round(parameters(dataclasses.replace(MODELS["arpg-l"], **change))) == millions


def test_tokenizer_sizes():
    for name, millions in (("vq-16", 71.9), ("vq-8", 70.1)):
        with torch.device("meta"):
            tokenizer = VQTokenizer(TOKENIZERS[name])
        assert sum(p.numel() for p in tokenizer.parameters()) / 1e6 == pytest.approx(millions, abs=0.05)
        assert tokenizer.config.stride == int(name[3:])


def test_rotation_is_complex_multiplication():
    place = torch.tensor([[[0.0, 0.0], [3.0, 5.0], [2.5, 7.25]]])
    x = torch.randn(1, 3, 2, 8, generator=torch.Generator().manual_seed(0))
    turned = apply_rope(x, make_rope(place, 8))
    frequency = 10000 ** -(torch.arange(2) / 2)
    for s, (row, column) in enumerate(place[0].tolist()):
        angle = torch.cat((row * frequency, column * frequency))
        z = torch.view_as_complex(x[0, s].reshape(2, 4, 2).contiguous()) * torch.polar(torch.ones(4), angle)
        assert torch.allclose(turned[0, s], torch.view_as_real(z).reshape(2, 8), atol=1e-5)


def test_rotation_depends_on_differences_only():
    """Scores of a rotated query and key do not change when both move."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 16, generator=generator).unbind(0)

    def score(a, b):
        turned = [apply_rope(x, make_rope(torch.tensor([[p]]), 16)) for x, p in ((q, a), (k, b))]
        return (turned[0] * turned[1]).sum().item()

    assert score([1.0, 2.0], [4.0, 3.0]) == pytest.approx(score([6.0, 4.5], [9.0, 5.5]), abs=1e-4)


def test_the_class_slot_vanishes():
    by = make_rope(no_positions(1, 1), 8)
    assert not by.cos_BSK.any()
    assert not by.sin_BSK.any()
    assert not sinusoids(no_positions(1, 1), 16).any()
    assert sinusoids(torch.zeros(1, 1, 2), 16).any()


def test_places_are_row_then_column():
    assert grid_positions(2, 3).tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]


@pytest.mark.parametrize("change", [{}, {"pass1_layers": 0, "pass2_layers": 2}, {"shared_kv": False}])
@pytest.mark.parametrize("train", [False, True])
def test_a_token_changes_only_what_comes_after_it(change, train):
    """Also in train mode, and also in eval mode: causality is not a mode."""
    config = dataclasses.replace(SMALL, dropout=0.0, **change)
    model = small_model(config).train(train)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(24, (2, 16), generator=generator)
    order = torch.stack([torch.randperm(16, generator=generator) for _ in range(2)])
    condition = class_condition(model, torch.tensor([0, 3]))
    with torch.no_grad():
        before = model(ids, order, condition)
        for j in (0, 6, 14):
            changed = ids.clone()
            at = order[:, j : j + 1]
            changed.scatter_(1, at, (changed.gather(1, at) + 1) % 24)
            after = model(changed, order, condition)
            assert torch.equal(before[:, : j + 1], after[:, : j + 1])
            assert (before[:, j + 1 :] - after[:, j + 1 :]).abs().amax(-1).min() > 1e-4


def test_train_mode_only_adds_dropout():
    model = small_model()
    ids, order = torch.zeros(2, 16, dtype=torch.long), torch.arange(16).expand(2, 16)
    condition = class_condition(model, torch.tensor([0, 3]))
    with torch.no_grad():
        quiet = model(ids, order, condition)
        noisy = model.train()(ids, order, condition)
        assert not torch.allclose(quiet, noisy)
        assert torch.equal(model.eval()(ids, order, condition), quiet)


def test_a_longer_prefix_is_causal_too(model):
    """Four prefix slots (as text will have): every query sees all of them and the tokens before it."""
    condition = class_condition(model, torch.tensor([0, 3]))
    wide = dataclasses.replace(
        condition,
        prefix_BPD=condition.prefix_BPD.repeat(1, 4, 1) * torch.tensor([1.0, -1.0, 0.5, 2.0])[:, None],
        pos_BP2=torch.zeros(2, 4, 2),
    )
    ids, order = torch.arange(16).expand(2, 16), torch.arange(16).expand(2, 16)
    with torch.no_grad():
        forced = model(ids, order, wide)
        cache = model.allocate_cache(2, 20)
        model.encode(wide.prefix_BPD, wide.pos_BP2, cache, causal=True)
        for r in range(16):
            place = grid_positions(4, 4)[None, r : r + 1].expand(2, -1, -1)
            assert torch.allclose(model.predict(place, None, cache)[:, 0], forced[:, r], atol=1e-4)
            model.encode(model.embedding(ids[:, r : r + 1]), place, cache, causal=False)


def test_visible_limits_each_query(model):
    """`visible` shows a query a shorter past; rolling the cache back does the same, uniform or ragged."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(2, 6, 32, generator=generator)
    place = torch.rand(2, 6, 2, generator=generator) * 4
    ask = grid_positions(4, 4)[None, :3].expand(2, -1, -1)
    with torch.no_grad():
        short = model.allocate_cache(2, 6)
        model.encode(x[:, :4], place[:, :4], short, causal=True)
        expected = model.predict(ask, None, short)
        for ragged in (False, True):
            cache = model.allocate_cache(2, 6, ragged=ragged)
            model.encode(x, place, cache, causal=True)
            assert torch.allclose(model.predict(ask, None, cache, torch.full((2, 3), 4)), expected, atol=1e-5)
            assert not torch.allclose(model.predict(ask, None, cache), expected, atol=1e-3)
            cache.roll_back(torch.tensor([4, 4]) if ragged else 4)
            assert torch.allclose(model.predict(ask, None, cache), expected, atol=1e-5)


def test_a_full_cache_says_so(model):
    cache = model.allocate_cache(1, 2)
    with pytest.raises(ValueError, match="2 slots"):
        model.encode(torch.zeros(1, 3, 32), torch.zeros(1, 3, 2), cache, causal=True)


def test_bad_configurations():
    for change in ({"width": 30}, {"pass2_layers": 0}, {"positions": "learned"}, {"dropout": 1.0}, {"grid": (0, 4)}):
        with pytest.raises(InputError):
            dataclasses.replace(SMALL, **change)
    with pytest.raises(InputError, match="class \\[9\\]"):
        class_condition(small_model(), torch.tensor([9]))


def test_initialisation_is_the_published_one():
    model = ARPG(ModelConfig(width=64, num_heads=4, pass1_layers=1, pass2_layers=1, vocab_size=64, num_classes=3))
    model.init_weights(seed=0)
    assert not model.head.weight.any()
    assert model.embedding.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert torch.equal(model.norm.weight, torch.ones(64))


def test_tokenizer_takes_any_size_that_the_stride_divides():
    from support.small import small_tokenizer

    tokenizer = small_tokenizer()
    with torch.no_grad():
        image = torch.rand(2, 3, 6, 10) * 2 - 1
        ids = tokenizer.encode(image)
        assert ids.shape == (2, 15)
        assert tokenizer.decode(ids, (3, 5)).shape == image.shape
        with pytest.raises(InputError, match="7x6 pixels; expected sides that are multiples of 2"):
            tokenizer.encode(torch.zeros(1, 3, 6, 7))
        # A preview: an unknown token's id does not matter, a known one's does.
        known = torch.zeros(2, 15, dtype=torch.bool)
        known[:, :5] = True
        first = tokenizer.decode(ids, (3, 5), known_BN=known)
        other = torch.where(known, ids, (ids + 1) % 24)
        assert torch.equal(first, tokenizer.decode(other, (3, 5), known_BN=known))
        assert not torch.equal(first, tokenizer.decode(ids, (3, 5)))
