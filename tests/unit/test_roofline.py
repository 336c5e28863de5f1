"""The floor under the time of a generation: work and limits against numbers worked out by hand."""

import math

import pytest
import torch

from arpg import ModelConfig, SamplingSettings, TokenizerConfig
from arpg.bench.case import Case
from arpg.bench.roofline import Limits, Work, cpu_limits, gpu_limits, passes, pixel_work, token_floor
from arpg.decode.plan import plan_sample
from support.small import SMALL, small_model

ONE_STEP = SamplingSettings(steps=1, guidance=1.0)


def case(guidance=3.0):
    return Case("small", 2, SamplingSettings(steps=4, guidance=guidance), (4, 4))


def test_the_work_of_one_step_by_hand():
    """Width 8, hidden 256, 1 + 1 layers, 10 codes; one image, one step, not guided: 2 x 1 tokens from the class."""
    config = ModelConfig(
        width=8, num_heads=2, pass1_layers=1, pass2_layers=1, vocab_size=10, num_classes=3, grid=(1, 2)
    )
    [(first, second)] = passes(config, Case("tiny", 1, ONE_STEP, (1, 2)), torch.bfloat16)
    weights1 = 3 * 8 * 8 + 8 * 8 + 2 * 8 * 256 + 256 * 8 + 2 * 8 * 8  # qkv, out, gate and up, down, memory
    weights2 = 8 * 8 + 8 * 8 + 2 * 8 * 256 + 256 * 8 + 8 * 10  # q, out, gate and up, down, head
    attention = 2 * 2 * 1 * 8  # scores and mix, one slot visible
    cache = 2 * 1 * 8  # one key and one value
    assert first == Work(1 * (2 * weights1 + attention), 2 * (weights1 + cache))
    assert second == Work(2 * (2 * weights2 + attention), 2 * (weights2 + cache))


def test_guidance_doubles_the_rows_and_later_steps_see_more():
    alone, guided = (passes(SMALL, case(guidance=g), torch.float32) for g in (1.0, 3.0))
    assert len(alone) == len(guided) == 4
    for (a1, a2), (g1, g2) in zip(alone, guided, strict=True):
        assert g1.flops == 2 * a1.flops
        assert g2.flops < 2 * a2.flops  # the head takes guided rows
        assert a1.bytes < g1.bytes < 2 * a1.bytes  # weights are read once
    head = 2 * 2 * SMALL.width * SMALL.vocab_size  # of a batch of two, one token each
    slots = plan_sample((4, 4), [False] * 16, 0, case().settings).sizes
    assert [2 * a.flops - g.flops for (_, a), (_, g) in zip(alone, guided, strict=True)] == [head * s for s in slots]
    reads = [second.bytes for _, second in guided]
    assert reads == sorted(reads)
    assert reads[0] < reads[-1]


def test_the_weights_of_the_roofline_are_those_of_the_model():
    """Matrix products of a batch of one at one slot: two operations for each weight, and what attention adds."""
    model = small_model()
    tables = model.embedding.weight.numel()
    weights = sum(p.numel() for p in model.parameters() if p.dim() == 2) - tables
    one = Case("small", 1, SamplingSettings(steps=16, guidance=1.0), (4, 4))
    first, second = passes(SMALL, one, torch.float32)[0]
    attention = 4 * 1 * SMALL.width * (SMALL.pass1_layers + SMALL.pass2_layers)
    assert first.flops + second.flops == 2 * weights + attention


def test_the_floor_is_the_slower_of_computing_and_reading():
    limits = Limits(flops=100.0, bandwidth=10.0)
    assert limits.seconds(Work(1000, 10)) == 10
    assert limits.seconds(Work(10, 1000)) == 100
    per_pass = [limits.seconds(work) for step in passes(SMALL, case(), torch.float32) for work in step]
    assert token_floor(SMALL, case(), torch.float32, limits) == pytest.approx(sum(per_pass))
    assert token_floor(SMALL, case(), torch.bfloat16, Limits(math.inf, 1.0)) == pytest.approx(
        token_floor(SMALL, case(), torch.float32, Limits(math.inf, 2.0))
    )


def test_gpus_are_known_by_their_names():
    h200 = gpu_limits("NVIDIA H200", torch.bfloat16)
    assert (h200.flops, h200.bandwidth) == (989e12, 4.8e12)
    assert gpu_limits("NVIDIA H200", torch.float32).flops == 67e12
    assert gpu_limits("NVIDIA H100 80GB HBM3", torch.float16).bandwidth == 3.35e12
    assert gpu_limits("NVIDIA A100-SXM4-80GB", torch.bfloat16) == Limits(312e12, 2.039e12)
    assert gpu_limits("NVIDIA A100-SXM4-40GB", torch.bfloat16).bandwidth == 1.555e12
    assert gpu_limits("Imaginary 9000", torch.bfloat16) is None


def test_the_work_of_pixels_by_hand():
    """A decoder of one level without residual blocks beyond its one: its convolutions, and two small attentions."""
    config = TokenizerConfig(channels=32, multipliers=(1,), res_blocks=1, z_channels=4, codebook_size=5, codebook_dim=3)
    area, c = 2 * 3, 32
    convolutions = 3 * 4 + 9 * 4 * c + 2 * (2 * 9 * c * c) + 2 * (2 * 9 * c * c) + 9 * c * 3
    attentions = 3 * 4 * c * c  # one in the middle, one after each of two residual blocks
    mixing = 3 * 2 * area * c
    work = pixel_work(config, (2, 3), 5, 4)
    assert work.flops == 5 * 2 * area * (convolutions + attentions + mixing)
    tokenizer_weights = 3 * 4 + 4
    assert work.bytes > 4 * tokenizer_weights
    assert pixel_work(config, (2, 3), 1, 2).bytes == work.bytes / 2  # not per image


def test_the_limits_of_this_cpu_are_numbers():
    limits = cpu_limits(torch.float32, torch.get_num_threads())
    assert limits.flops > 1e8
    assert limits.bandwidth > 1e7
