"""Ours against what the published implementation computed with the same weights."""

import json

import pytest
import torch
from torch.nn import functional as F

from arpg import Plan, Request, SamplingSettings, VQTokenizer, decode
from arpg.convert import tokenizer_from_published
from arpg.decode import SamplePlan
from arpg.decode.plan import guidance_scales, step_sizes
from arpg.image import to_uint8
from arpg.model import class_condition
from support import oracle
from support.paths import GOLDEN
from support.recorded import Golden

TOLERANCE = 1e-4
ORDERS = json.loads((GOLDEN / "orders.json").read_text())  # see golden/README.md


def test_teacher_forced_logits_and_loss(golden):
    t = golden.tensors
    condition = class_condition(golden.model, t["train.labels"])
    with torch.no_grad():
        logits = golden.model(t["train.input_ids"], t["train.orders"], condition)
    assert (logits - t["train.logits"]).abs().max() < TOLERANCE
    targets = t["train.input_ids"].gather(1, t["train.orders"])
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    assert abs(loss - t["train.loss"].item()) < TOLERANCE


@pytest.mark.parametrize("run", range(4))
def test_every_step_of_every_recorded_run(golden, run):
    """Through the one loop: each sampled token is replaced by the recorded one, and the logits are compared."""
    info, t = golden.info["generate"][run], golden.tensors
    order, ids = ORDERS[f"{golden.path.stem}.gen{run}"], t[f"gen{run}.ids"]
    sizes = step_sizes(info["schedule"], len(order), info["steps"])
    scales = guidance_scales(info["cfg_schedule"], info["guidance"], sizes)
    assert list(sizes) == info["sizes"]
    assert scales == pytest.approx(info["scales"], abs=1e-12)

    condition = class_condition(golden.model, t["train.labels"])
    request = Request.from_nothing(condition, golden.model.config.grid, tuple(range(len(ids))))
    cond, uncond = t[f"gen{run}.cond_logits"], t[f"gen{run}.uncond_logits"]

    def check(scales, expected):
        seen, plan = [], SamplePlan(tuple(order), sizes, scales)

        def hook(state, step, logits, sampled):
            seen.append(logits)
            return ids.gather(1, step.predict.position_BS)

        last = list(decode(golden.model, request, Plan((plan,) * len(ids)), SamplingSettings(), hook=hook))[-1]
        assert torch.equal(last.ids_BN, ids)
        assert (torch.cat(seen, dim=1) - expected(plan)).abs().max() < max(1.0, *scales) * TOLERANCE

    check((1.0,) * len(sizes), lambda plan: cond)
    check((0.0,) * len(sizes), lambda plan: uncond)
    check(scales, lambda plan: oracle.guided(cond, uncond, plan))


@pytest.mark.parametrize("name", ["vq_a", "vq_b"])
def test_tokenizer(name):
    recorded = Golden(name)
    config, state = tokenizer_from_published(recorded.published, where=name)
    assert config.multipliers == tuple(recorded.info["ch_mult"])
    tokenizer = VQTokenizer(config).eval()
    tokenizer.load_state_dict(state)
    t, grid = recorded.tensors, tuple(recorded.info["grid"])
    with torch.no_grad():
        ids = tokenizer.encode(t["image"])
        quantized = tokenizer.quantize.look_up(ids).transpose(1, 2).reshape(t["quantized"].shape)
        image = tokenizer.decode(ids, grid)
    assert torch.equal(ids, t["ids"])
    assert (quantized - t["quantized"]).abs().max() < TOLERANCE
    assert (image - t["reconstruction"]).abs().max() < TOLERANCE


def test_step_tables():
    table = json.loads((GOLDEN / "step_sizes.json").read_text())
    assert len(table) > 50
    for key, sizes in table.items():
        schedule, tokens, steps = key.split(":")
        assert list(step_sizes(schedule, int(tokens), int(steps))) == sizes, key


def test_pixels_are_truncated():
    x = torch.tensor([-2.0, -1.0, -0.999, 0.0, 0.5, 0.9999, 1.0, 3.0])
    expected = [0, 0, 0, 128, 191, 255, 255, 255]
    assert to_uint8(x.reshape(1, 1, 1, -1).expand(1, 3, 1, -1))[0, 0, :, 0].tolist() == expected
