"""On one thread of a CPU: what each thing that was done for it brings, alone; CPU time, least of several, in turns.

python benchmarks/cpu_parts.py --out benchmarks/results/cpu-parts.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from arpg.bench.case import Case, open_pipeline
from arpg.bench.record import environment
from arpg.config import MODELS, TOKENIZERS
from arpg.decode import decode
from arpg.device import has_bfloat16
from arpg.files import write_whole
from arpg.image import to_uint8
from arpg.noise import Stream, gumbel, seed_keys
from arpg.pipeline import Pipeline
from arpg.quantization.packed import pack_linears
from arpg.tokenizer import VQTokenizer

WORD = 0xFFFFFFFF


def fastest(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Milliseconds of CPU time."""
    times: dict[str, list[int]] = {name: [] for name in runs}
    for _ in range(rounds + 1):
        for name, run in runs.items():
            began = time.process_time_ns()
            run()
            times[name].append(time.process_time_ns() - began)
    return {name: float(f"{min(values[1:]) / 1e6:.4g}") for name, values in times.items()}


def plain_gumbel(key_B2: Tensor, position_BS: Tensor, num_codes: int) -> Tensor:
    """Philox as one would write it: a new tensor for every operation, over all rows at once."""
    c0 = torch.arange(-(-num_codes // 4)).expand(*position_BS.shape, -1)
    c1, c2, c3 = position_BS[..., None].expand_as(c0), torch.zeros_like(c0), torch.zeros_like(c0)
    k0, k1 = key_B2[:, 0, None, None], key_B2[:, 1, None, None]
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = ((p1 >> 32) & WORD) ^ c1 ^ k0, p1 & WORD, ((p0 >> 32) & WORD) ^ c3 ^ k1, p0 & WORD
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    words = torch.stack((c0, c1, c2, c3), dim=-1).flatten(-2)[..., :num_codes]
    return -torch.log(-torch.log1p(-((words.float() + 0.5) * 2.0**-32).clamp_max(1.0 - 2.0**-24)))


@torch.no_grad()
def products(rows: int, rounds: int) -> dict[str, float]:
    """The SwiGLU of ARPG-L's twelve Pass-2 layers: too large for the caches, as in a step."""
    width, hidden = MODELS["arpg-l"].width, MODELS["arpg-l"].ffn_width
    runs: dict[str, Callable[[], object]] = {}
    for name in ("float32", *(["bfloat16"] if has_bfloat16() else [])):
        x = torch.randn(rows, width).to(getattr(torch, name))
        plain, packed = ([nn.Linear(width, 2 * hidden, bias=False).to(x.dtype) for _ in range(12)] for _ in range(2))
        for layer in packed:
            pack_linears(layer)
        runs[name] = lambda x=x, layers=plain: [layer(x) for layer in layers]
        runs[f"{name}, packed"] = lambda x=x, layers=packed: [layer(x) for layer in layers]
    return fastest(runs, rounds)


@torch.no_grad()
def noise(batch: int, tokens: int, codes: int, *, rounds: int) -> dict[str, float]:
    key, position = seed_keys(range(batch)), torch.arange(tokens).expand(batch, tokens)
    assert torch.equal(plain_gumbel(key, position, codes), gumbel(key, Stream.TOKEN, position, codes))
    runs = {
        "as written": lambda: plain_gumbel(key, position, codes),
        "in place": lambda: gumbel(key, Stream.TOKEN, position, codes),
    }
    return fastest(runs, rounds)


@torch.no_grad()
def pixels(tokenizer: VQTokenizer, grid: tuple[int, int], rounds: int) -> dict[str, float]:
    ids = torch.randint(
        tokenizer.config.codebook_size, (1, grid[0] * grid[1]), generator=torch.Generator().manual_seed(0)
    )
    runs: dict[str, Callable[[], object]] = {}
    for name, dtype, form in (
        ("float32", torch.float32, torch.contiguous_format),
        ("float32, channels last", torch.float32, torch.channels_last),
        ("bfloat16", torch.bfloat16, torch.contiguous_format),
        ("bfloat16, channels last", torch.bfloat16, torch.channels_last),
    ):
        if dtype == torch.float32 or has_bfloat16():
            other = VQTokenizer(tokenizer.config).eval()
            other.load_state_dict(tokenizer.state_dict())
            other.decode_in(dtype).decoder.to(memory_format=form)
            runs[name] = lambda other=other: other.decode(ids, grid)
    return fastest(runs, rounds)


@torch.no_grad()
def likeness(pipe: Pipeline) -> dict[str, float]:
    """Pixels in bfloat16 against those in float32, of the same tokens: an image of each of 16 classes."""
    case = Case("garden", 16, pipe.sampling.settings(), pipe.model.config.grid)
    request, plan = case.request(pipe.model, 0)
    for step in decode(pipe.model, request, plan, case.settings):
        ids_BN = step.ids_BN
    in_float32 = to_uint8(pipe.tokenizer.decode(ids_BN, case.grid)).int()
    other = to_uint8(pipe.tokenizer.decode_in(torch.bfloat16).decode(ids_BN, case.grid)).int()
    pipe.tokenizer.decode_in(torch.float32)
    difference = (in_float32 - other).float()
    psnr = 10 * torch.log10(255**2 / difference.square().mean())
    return {"PSNR dB": round(float(psnr), 1), "grey levels at most": int(difference.abs().max())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    garden = open_pipeline("garden", random=False, device="cpu")
    result = {
        "benchmark": "cpu_parts",
        "ms, gate and up of 12 layers of ARPG-L": {f"{m} rows": products(m, options.rounds) for m in (2, 16, 64)},
        "ms, noise of a step": {
            f"batch {b}, {s} tokens, {v} codes": noise(b, s, v, rounds=options.rounds)
            for b, s, v in ((1, 10, 8192), (1, 8, 16384), (32, 10, 8192), (32, 8, 16384))
        },
        "ms, pixels of an image": {
            "garden": pixels(garden.tokenizer, (12, 12), options.rounds),
            "vq-16": pixels(VQTokenizer(TOKENIZERS["vq-16"]), (16, 16), min(options.rounds, 3)),
        },
        "garden's pixels, bfloat16 against float32": likeness(garden),
        "where": environment(torch.device("cpu")),
    }
    text = json.dumps(result, indent=1)
    print(text)  # noqa: T201
    if options.out:
        write_whole(options.out, lambda path: path.write_text(text + "\n"))


if __name__ == "__main__":
    main()
