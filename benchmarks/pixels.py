"""Time the tokenizer's decoder on a GPU, from the plain one to the fused one, with the PSNR of each against float32.

    python benchmarks/pixels.py --batch 64 --tokenizer vq-16 --model arpg-l --out pixels-vq-16.json
    python benchmarks/pixels.py --batch 64 --tokenizer garden --profile

A preset has random weights (speed does not depend on them), garden or a folder its own. PSNR is that of the 8-bit
pixels. The variants that matter most come first, and each is written as soon as it is measured. Of a variant that fails
or takes longer than --limit (compiling may), the first line of the error is reported, and the others go on.

--model times a model with random weights to pixels, with and without CUDA graphs of the decoder.
"""

from __future__ import annotations

import argparse
import copy
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from arpg.bench.case import Case, open_pipeline
from arpg.bench.profile import profile_kernels
from arpg.bench.record import environment, error_line
from arpg.bench.roofline import device_limits, pixel_work
from arpg.bench.throughput import time_pipelined
from arpg.checkpoint import load_tokenizer
from arpg.config import TOKENIZERS
from arpg.decode.graphs import Capture
from arpg.device import choose_device, synchronize
from arpg.files import write_json
from arpg.hub import resolve
from arpg.image import to_uint8
from arpg.kernels.dispatch import KernelPolicy, has_kernels, kernel_policy
from arpg.settings import SamplingSettings
from arpg.tokenizer import VQTokenizer

Decode = Callable[[Tensor], Tensor]  # images [B, 3, H, W] from z


def open_tokenizer(name: str, device: torch.device) -> VQTokenizer:
    torch.manual_seed(0)
    if name in TOKENIZERS:
        return VQTokenizer(TOKENIZERS[name]).eval().to(device)
    return load_tokenizer(resolve(name), device=device, dtype=torch.float32)


def plain(decoder: nn.Module, *, last: bool = False, **compile: Any) -> Decode:
    """Return the plain decoder in bfloat16."""
    made = copy.deepcopy(decoder).bfloat16()
    form = torch.channels_last if last else torch.contiguous_format
    made = made.to(memory_format=form)  # type: ignore[call-overload]
    run = torch.compile(made, **compile) if compile else made
    return lambda z: run(z.bfloat16().contiguous(memory_format=form))


def fused(decoder: nn.Module, **compile: Any) -> Decode:
    from arpg.tokenizer.fused import FusedDecoder

    made = FusedDecoder(decoder, torch.bfloat16)  # type: ignore[arg-type]
    return torch.compile(made, **compile) if compile else made


def graphed(decode: Decode, z: Tensor) -> Decode:
    """Capture `decode` for this batch; the image stays in the graph's memory until the next replay."""
    inside = z.clone()
    for _ in range(2):
        decode(inside)
    capture = Capture([lambda: decode(inside)], z.device)

    def replay(z: Tensor) -> Tensor:
        (image,) = capture.run([inside], [z])
        return image

    return replay


def untuned(decode: Decode) -> Decode:
    """Return `decode` with cuDNN's default choice of algorithms, as outside of this benchmark."""

    def run(z: Tensor) -> Tensor:
        with torch.backends.cudnn.flags(enabled=True, benchmark=False):
            return decode(z)

    return run


def variants(tokenizer: VQTokenizer, z: Tensor) -> dict[str, Callable[[], Decode]]:
    decoder, own = tokenizer.decoder, {"dynamic": False}
    found: dict[str, Callable[[], Decode]] = {}
    if has_kernels(z):
        found["fused"] = lambda: fused(decoder)
        found["fused, convolutions not tuned"] = lambda: untuned(fused(decoder))
        found["fused, CUDA graph"] = lambda: graphed(fused(decoder), z)
    found["float32"] = lambda: decoder
    found["bfloat16"] = lambda: plain(decoder)
    found["bfloat16, channels last"] = lambda: plain(decoder, last=True)
    if z.is_cuda:
        found["bfloat16, channels last, compiled"] = lambda: plain(decoder, last=True, **own)
    if has_kernels(z):
        found["fused, compiled"] = lambda: fused(decoder, **own)
    return found


def to_pixels(model: str, batch: int, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield the images per second of a model from labels to pixels, by policy."""
    pipe = open_pipeline(model, random=True, device=str(device), dtype="bfloat16")
    case = Case(model, batch, SamplingSettings(steps=32, guidance=4.0), pipe.model.config.grid)
    for name, policy in {
        "launched": KernelPolicy(pixel_graphs=False),
        "CUDA graphs": KernelPolicy(),
    }.items():
        with kernel_policy(policy):
            for _ in range(2):  # captures tokens, and pixels where they are
                time_pipelined(pipe, case, 2, pixels=True)
            row = {"variant": name, "images/s": round(8 * batch / time_pipelined(pipe, case, 8, pixels=True), 1)}
        print(f"| {model} to pixels, {name} | | {row['images/s']} | |", flush=True)
        yield row


@contextmanager
def at_most(limit: float) -> Iterator[None]:
    """Raise TimeoutError after `limit` seconds, as soon as Python runs again."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"took more than {limit:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def seconds(decode: Decode, z: Tensor, rounds: int) -> float:
    """Return the median seconds of a batch."""
    times = []
    for _ in range(rounds + 3):
        synchronize(z.device)
        began = time.perf_counter()
        decode(z)
        synchronize(z.device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[3:])


def psnr(found: Tensor, exact: Tensor) -> float:
    error = (to_uint8(found).float() - to_uint8(exact).float()).square().mean()
    return round(float(10 * torch.log10(255**2 / error.clamp_min(1e-6))), 1)


@torch.no_grad()
def measure(tokenizer: VQTokenizer, z: Tensor, rounds: int, *, limit: float = 120.0) -> Iterator[dict[str, Any]]:
    exact = torch.cat([tokenizer.decoder(part) for part in z.split(16)])
    for name, make in variants(tokenizer, z).items():
        row: dict[str, Any] = {"variant": name}
        try:
            with at_most(limit):
                decode = make()
                row["PSNR dB"] = psnr(decode(z), exact)
                took = seconds(decode, z, rounds)
            row |= {"ms": round(1000 * took, 3), "images/s": round(len(z) / took, 1)}
        except Exception as error:  # the others are still measured
            row["error"] = error_line(error)
        print(line(row), flush=True)
        yield row
        decode = None  # type: ignore[assignment]
        if z.is_cuda:
            torch.cuda.empty_cache()


def line(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"| {row['variant']} | {row['error']} | | |"
    return f"| {row['variant']} | {row['ms']} | {row['images/s']} | {row['PSNR dB']} |"


def keep(path: Path | None, result: dict[str, Any]) -> None:
    if path is not None:
        write_json(path, result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tokenizer", default="vq-16", help="vq-16, vq-8 (random weights), an installed name or a folder."
    )
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--grid", type=int, default=16, help="Tokens per side.")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--limit", type=float, default=120.0, help="Seconds of a variant, compiling included.")
    parser.add_argument("--profile", action="store_true", help="Also the most expensive kernels of the fused one.")
    parser.add_argument("--model", help="Also a model with random weights, from labels to pixels: arpg-l.")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = choose_device(options.device)
    torch.backends.cudnn.benchmark = True
    tokenizer = open_tokenizer(options.tokenizer, device)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(tokenizer.config.codebook_size, (options.batch, options.grid**2), generator=generator)
    with torch.no_grad():
        codes = tokenizer.quantize.look_up(ids.to(device)).transpose(1, 2)
        z = tokenizer.post_quant_conv(codes.reshape(options.batch, -1, options.grid, options.grid))
    result: dict[str, Any] = {
        "benchmark": "pixels",
        **{name: getattr(options, name) for name in ("tokenizer", "batch", "grid")},
        "rows": [],
        "where": environment(device),
    }
    if (limits := device_limits(device, torch.bfloat16)) is not None:
        work = pixel_work(tokenizer.config, (options.grid, options.grid), options.batch, 2)
        result["roofline images/s"] = round(options.batch / limits.seconds(work), 1)
    print("| | ms | images/s | PSNR dB |\n|---|---:|---:|---:|")
    for row in measure(tokenizer, z, options.rounds, limit=options.limit):
        result["rows"].append(row)
        keep(options.out, result)
    if options.model is not None:
        result["to pixels"] = list(to_pixels(options.model, options.batch, device))
        keep(options.out, result)
    if options.profile and device.type == "cuda":
        with torch.no_grad():
            decode = fused(tokenizer.decoder)
            decode(z)
            result["kernels"] = profile_kernels(lambda: decode(z))["top kernels"]
        for row in result["kernels"]:
            print(f"{row['ms']:8.3f} ms {row['launches']:4d} x {row['kernel']}")
        keep(options.out, result)


if __name__ == "__main__":
    main()
