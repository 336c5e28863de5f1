"""The roofline: the least time that a generation can take on given hardware, computed from its plan alone.

The model: Pass 1 and Pass 2 of a step run one after the other, and each takes at least

    max(floating-point operations of its matrix products / peak, bytes of its weights and keys and values / bandwidth).

Weights are read once per pass. The keys and values that a row has are read once by every layer. Norms, rotations,
sampling, activations and launches are free. Pixels: the same for the tokenizer's decoder, once per batch.
Shapes: D width, F hidden width of SwiGLU, V vocabulary, R rows (2 per image when guided), S slots of a call, T visible.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch.utils.flop_counter import FlopCounterMode

from arpg.bench.case import Case
from arpg.config import ModelConfig, TokenizerConfig
from arpg.decode.plan import plan_sample
from arpg.device import gpu_spec, meta_device
from arpg.quantization.packed import pack_linears
from arpg.tokenizer import VQTokenizer


@dataclass(frozen=True)
class Limits:
    """The limits of a device for one number type."""

    flops: float  # per second
    bandwidth: float  # bytes per second

    def seconds(self, work: Work) -> float:
        """Return the least seconds that `work` takes."""
        return max(work.flops / self.flops, work.bytes / self.bandwidth)


@dataclass(frozen=True)
class Work:
    """Floating-point operations, and bytes read from memory."""

    flops: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes + other.bytes)


def gpu_limits(name: str, dtype: torch.dtype) -> Limits | None:
    """Return the limits by the data sheet; None for a GPU that is not in `arpg.device.GPU_SPECS`."""
    spec = gpu_spec(name)
    if spec is None:
        return None
    if dtype == torch.float8_e4m3fn:  # twice that of 16 bits, where the GPU has float8 at all
        return Limits(2 * spec.bf16_flops, spec.bandwidth)
    return Limits(spec.float32_flops if dtype == torch.float32 else spec.bf16_flops, spec.bandwidth)


def device_limits(device: torch.device, dtype: torch.dtype) -> Limits | None:
    """Return the limits of a GPU by its data sheet, or of a CPU as measured; None where they are not known."""
    if device.type == "cuda":
        return gpu_limits(torch.cuda.get_device_name(device), dtype)
    return cpu_limits(dtype, torch.get_num_threads()) if device.type == "cpu" else None


@cache
def cpu_limits(dtype: torch.dtype, threads: int) -> Limits:
    """Measure the limits: the best of several large products, and of several reads of 256 MB, with these threads.

    Both are what the CPU reached, not what it could reach, so a share of them may come out slightly above 1.
    """
    with torch.no_grad():
        layer = pack_linears(torch.nn.Linear(2048, 2048, bias=False).to(dtype))
        x = torch.randn(1024, 2048).to(dtype)
        product = _least(lambda: layer(x))
        weights = [pack_linears(torch.nn.Linear(4096, 4096, bias=False).to(dtype)) for _ in range(4)]
        row = torch.randn(1, 4096).to(dtype)
        reading = _least(lambda: [weight(row) for weight in weights])
    size = 4 * 4096**2 * dtype.itemsize
    return Limits(2 * 1024 * 2048**2 / product, size / reading)


def passes(
    config: ModelConfig,
    case: Case,
    dtype: torch.dtype,
    *,
    weight_size: int | None = None,
    cache_size: int | None = None,
) -> list[tuple[Work, Work]]:
    """Return the work of Pass 1 and of Pass 2 in each step of a batch.

    `weight_size` and `cache_size`: bytes of a number, by default `dtype`'s.
    """
    plan = plan_sample(case.grid, [False] * case.tokens, 0, case.settings)
    rows = case.batch * (2 if any(scale != 1.0 for scale in plan.scales) else 1)
    size, width, hidden = dtype.itemsize, config.width, config.ffn_width
    memories = 1 if config.shared_kv else config.pass2_layers
    weights1 = config.pass1_layers * (4 * width**2 + 3 * width * hidden) + memories * 2 * width**2
    weights2 = config.pass2_layers * (2 * width**2 + 3 * width * hidden)

    def work(weights: int, layers: int, slots: int, visible: int) -> Work:
        flops = rows * slots * (2 * weights + layers * 4 * visible * width)
        return Work(flops, (weight_size or size) * weights + (cache_size or size) * layers * rows * visible * 2 * width)

    def head(slots: int) -> Work:  # of the guided rows
        weights = width * config.vocab_size
        return Work(case.batch * slots * 2 * weights, (weight_size or size) * weights)

    steps, visible, new = [], 0, 1  # the class enters first; the last step's tokens never do
    for slots in plan.sizes:
        visible += new
        pass2 = work(weights2, config.pass2_layers, slots, visible) + head(slots)
        steps.append((work(weights1, config.pass1_layers, new, visible), pass2))
        new = slots
    return steps


def token_floor(
    config: ModelConfig,
    case: Case,
    dtype: torch.dtype,
    limits: Limits,
    *,
    weight_size: int | None = None,
    cache_size: int | None = None,
) -> float:
    """Return the least seconds that the tokens of a batch take; sizes as in `passes`."""
    steps = passes(config, case, dtype, weight_size=weight_size, cache_size=cache_size)
    return sum(limits.seconds(work) for step in steps for work in step)


@cache
def pixel_work(config: TokenizerConfig, grid: tuple[int, int], batch: int, size: int) -> Work:
    """Return the work of decoding a batch to pixels, with `size` bytes per number; counted on a meta device."""
    with meta_device():
        tokenizer = VQTokenizer(config).eval()
        codes = torch.empty(1, config.codebook_dim, *grid)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        tokenizer.decode_codes(codes)
    parts = (tokenizer.decoder, tokenizer.post_quant_conv)
    weights = sum(parameter.numel() for part in parts for parameter in part.parameters())
    return Work(float(batch * counter.get_total_flops()), float(size * weights))


def _least(run: Callable[[], object]) -> float:
    """Return the seconds of the fastest of five runs, after a first one."""
    found = []
    for _ in range(6):
        began = time.perf_counter()
        run()
        found.append(time.perf_counter() - began)
    return min(found[1:])
