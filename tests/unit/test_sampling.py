"""Guidance, temperature, top-k and top-p against plain formulas."""

import pytest
import torch

from arpg import InputError, SamplingSettings
from arpg.decode.sampling import keep_top_k, keep_top_p, sample, warp
from arpg.kernels.ops import guide
from arpg.noise import seed_keys

LOGITS = torch.randn(3, 4, 50, generator=torch.Generator().manual_seed(0)) * 3


def test_guidance_formula():
    cond, uncond = torch.randn(2, 3, 4, 50, generator=torch.Generator().manual_seed(1)).unbind(0)
    scale = torch.tensor([[0.0], [1.0], [4.5]])
    guided = guide(torch.cat((cond, uncond)), scale)
    for b, s in enumerate((0.0, 1.0, 4.5)):
        assert torch.allclose(guided[b], uncond[b] + s * (cond[b] - uncond[b]), atol=1e-5)
    assert torch.allclose(guided[0], uncond[0], atol=1e-6)
    assert torch.equal(guided[1], cond[1])
    assert guide(cond.bfloat16(), scale[:1]).dtype == warp(cond.bfloat16(), SamplingSettings()).dtype == torch.float32


@pytest.mark.parametrize("k", [1, 7, 50, 1000])
def test_top_k_keeps_the_k_largest(k):
    kept = keep_top_k(LOGITS, k)
    for row, kept_row in zip(LOGITS.flatten(0, 1), kept.flatten(0, 1), strict=True):
        expected = set(row.argsort(descending=True)[:k].tolist())
        assert set(kept_row.isfinite().nonzero().flatten().tolist()) == expected


@pytest.mark.parametrize("p", [1e-6, 0.3, 0.9])
def test_top_p_keeps_the_smallest_set_that_reaches_p(p):
    kept = keep_top_p(LOGITS, p)
    for row, kept_row in zip(LOGITS.flatten(0, 1), kept.flatten(0, 1), strict=True):
        probability, total, expected = row.softmax(0), 0.0, []
        for code in row.argsort(descending=True).tolist():
            if total >= p:
                break
            expected.append(code)
            total += probability[code].item()
        assert sorted(expected) == kept_row.isfinite().nonzero().flatten().tolist()
        assert torch.equal(kept_row[expected], row[expected])


def test_top_p_of_one_keeps_everything():
    assert torch.equal(keep_top_p(LOGITS, 1.0), LOGITS)


def test_order_of_operations():
    settings = SamplingSettings(temperature=0.5, top_k=10, top_p=0.8)
    expected = keep_top_p(keep_top_k(LOGITS / 0.5, 10), 0.8)
    assert torch.equal(warp(LOGITS, settings), expected)


def test_samples_stay_inside_what_is_kept():
    settings = SamplingSettings(top_k=3, top_p=0.9)
    kept = warp(LOGITS, settings).isfinite()
    for seed in range(50):
        ids = sample(LOGITS, settings, seed_keys([seed] * 3), torch.arange(4).expand(3, 4))
        assert kept.gather(-1, ids[..., None]).all()


def test_temperature_zero_is_greedy():
    settings = SamplingSettings(temperature=0.0)
    ids = sample(LOGITS, settings, seed_keys([1, 2, 3]), torch.arange(4).expand(3, 4))
    assert torch.equal(ids, LOGITS.argmax(-1))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("steps", 0),
        ("steps", -3),
        ("guidance", float("nan")),
        ("guidance", float("inf")),
        ("guidance", -1.0),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", float("nan")),
        ("top_k", 0),
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("order", "hilbert"),
        ("schedule", "square"),
        ("schedule", (3, 0, 2)),
        ("guidance_schedule", "cosine"),
        ("attention", "full"),
    ],
)
def test_bad_settings_name_the_value(field, value):
    with pytest.raises(InputError, match=f"{field} is .*expected|must") as caught:
        SamplingSettings(**{field: value})
    shown = str(list(value)) if isinstance(value, tuple) else str(value)
    assert shown in str(caught.value)
