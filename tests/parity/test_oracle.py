"""The cached loop against the naive oracle: block-wise and causal, every order, known tokens, ragged batches."""

import dataclasses

import pytest
import torch

from arpg import Request, SamplingSettings, decode, make_plan
from arpg.convert import model_to_published
from arpg.model import class_condition
from arpg.settings import ORDERS
from support import oracle
from support.small import SMALL, small_model


def decode_and_record(model, request, settings):
    """The plan, the final ids, and the guided logits of every step."""
    raw = []
    plan = make_plan(request.grid, request.known_BN, request.seeds, settings)
    steps = decode(model, request, plan, settings, hook=lambda state, step, logits, sampled: raw.append(logits))
    last = list(steps)[-1]
    return plan, last.ids_BN, raw


def check_against_oracle(model, request, labels, settings):
    plan, ids, raw = decode_and_record(model, request, settings)
    published = model_to_published(model.config, model.state_dict())
    for b, sample in enumerate(plan.samples):
        cond, uncond = (
            oracle.decoding_logits(
                published,
                model.config.num_heads,
                label=label,
                ids=ids[b].tolist(),
                known=request.known_BN[b].nonzero().flatten().tolist(),
                order=list(sample.order),
                sizes=sample.sizes,
                width=request.grid[1],
                causal=settings.attention == "causal",
            )
            for label in (labels[b], None)
        )
        ours = torch.cat([raw[s][b, :size] for s, size in enumerate(sample.sizes)])
        assert (ours - oracle.guided(cond, uncond, sample)).abs().max() < 1e-4


@pytest.mark.parametrize("attention", ["block", "causal"])
@pytest.mark.parametrize("order", [*ORDERS, (14, 0, 7, 1, 13, 2, 12, 3, 11, 4, 10, 5, 9, 6, 8)])
def test_every_order_on_a_non_square_grid(model, order, attention):
    request = Request.from_nothing(class_condition(model, torch.tensor([1, 4])), (3, 5), (7, 8))
    settings = SamplingSettings(steps=4, guidance=3.0, order=order, attention=attention)
    check_against_oracle(model, request, [1, 4], settings)


@pytest.mark.parametrize("attention", ["block", "causal"])
def test_known_tokens_and_ragged_rows(model, attention):
    """Three samples with 0, 5 and 12 known tokens of 12 share one decode."""
    known = torch.zeros(3, 12, dtype=torch.bool)
    known[1, [0, 3, 4, 9, 11]] = True
    known[2] = True
    known[2, 6] = False
    ids = torch.randint(24, (3, 12), generator=torch.Generator().manual_seed(3))
    condition = class_condition(model, torch.tensor([0, 2, 3]))
    request = Request(condition, (4, 3), ids, known, (5, 6, 7))
    settings = SamplingSettings(steps=5, guidance=2.0, guidance_schedule="constant", attention=attention)
    check_against_oracle(model, request, [0, 2, 3], settings)


def test_without_guidance_the_batch_is_not_doubled(model):
    request = Request.from_nothing(class_condition(model, torch.tensor([1, 4])), (4, 4), (7, 8))
    for settings in (SamplingSettings(steps=3), SamplingSettings(steps=3, guidance=9.0, guidance_schedule="none")):
        check_against_oracle(model, request, [1, 4], settings)
        _, _, raw = decode_and_record(model, request, settings)
        assert all(len(logits) == 2 for logits in raw)


def test_teacher_forcing_is_sequential_causal_decoding(model):
    """For every ablation: the logits of a one-token-at-a-time decode are those of one teacher-forced pass."""
    for change in (
        {},
        {"pass1_layers": 3, "pass2_layers": 1},
        {"pass1_layers": 0, "pass2_layers": 3},
        {"shared_kv": False},
        {"positions": "cosine"},
    ):
        model = small_model(dataclasses.replace(SMALL, **change))
        condition = class_condition(model, torch.tensor([1, 4]))
        request = Request.from_nothing(condition, (4, 4), (7, 8))
        settings = SamplingSettings(steps=16)
        plan, ids, raw = decode_and_record(model, request, settings)
        order = torch.tensor([sample.order for sample in plan.samples])
        with torch.no_grad():
            forced = model(ids, order, condition)
        assert (torch.cat(raw, dim=1) - forced).abs().max() < 1e-4, change


def test_condition_queries_replace_the_mask(model):
    """Queries equal to [MASK] change nothing; other ones do, but only for the conditional rows."""
    plain = class_condition(model, torch.tensor([1, 4]))
    mask = model.embedding.weight[model.config.mask_id].detach()

    def first_logits(condition, scale=2.0):
        request = Request.from_nothing(condition, (4, 4), (7, 8))
        settings = SamplingSettings(steps=4, guidance=scale, guidance_schedule="constant")
        logits = decode_and_record(model, request, settings)[2][0]
        return logits

    same = dataclasses.replace(plain, query_BND=mask.expand(2, 16, -1))
    other = dataclasses.replace(plain, query_BND=mask.flip(0).expand(2, 16, -1))
    base = first_logits(plain)
    assert torch.allclose(first_logits(same), base, atol=1e-6)
    changed = first_logits(other)
    assert (changed - base).abs().max() > 0.1
    assert torch.allclose(first_logits(other, scale=0.0), first_logits(plain, scale=0.0), atol=1e-5)
    # Teacher forcing takes them position by position as well.
    ids, order = torch.zeros(2, 16, dtype=torch.long), torch.arange(16).flip(0).expand(2, 16)
    only_5 = mask.expand(2, 16, -1).clone()
    only_5[:, 5] = mask.flip(0)
    with torch.no_grad():
        difference = model(ids, order, dataclasses.replace(plain, query_BND=only_5)) - model(ids, order, plain)
    assert difference.abs().amax((0, 2)).nonzero().flatten().tolist() == [10]
