"""Time the tokenizer's decoder on a GPU, from the plain one to the fused one, with the PSNR of each against float32.

    python benchmarks/pixels.py --batch 64 --tokenizer vq-16 --tiles --model arpg-l --out pixels-vq-16.json
    python benchmarks/pixels.py --batch 64 --tokenizer garden --profile

A preset has random weights (speed does not depend on them), garden or a folder its own. PSNR is that of the 8-bit
pixels. The variants that matter most come first, and each is written as soon as it is measured. Of a variant that fails
or takes longer than --limit (compiling may), the first line of the error is reported, and the others go on.

--tiles times each convolution of the decoder with its neighbours, by the library and by the fused kernel with several
tiles, prints the entries of `arpg.kernels.conv.TILES`, and uses them for what follows. --model times a model with
random weights to pixels, with and without the fused convolutions and CUDA graphs of the decoder.
"""

from __future__ import annotations

import argparse
import copy
import multiprocessing
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from arpg.bench.case import Case, open_pipeline
from arpg.bench.record import environment, error_line
from arpg.bench.roofline import device_limits, pixel_work
from arpg.bench.throughput import time_pipelined
from arpg.checkpoint import load_tokenizer
from arpg.config import TOKENIZERS, TokenizerConfig
from arpg.decode.graphs import Capture
from arpg.device import choose_device, synchronize
from arpg.files import write_json
from arpg.hub import resolve
from arpg.image import to_uint8
from arpg.kernels.dispatch import KernelPolicy, has_kernels, kernel_policy
from arpg.settings import SamplingSettings
from arpg.tokenizer import VQTokenizer

if TYPE_CHECKING:
    from arpg.kernels.conv import ConvShape, Tile

Decode = Callable[[Tensor], Any]  # images [B, 3, H, W] from z
_CALLS = 4  # of a convolution in a graph
_WORTH = 0.98  # of the library's time that a tile must stay below


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


def under(policy: KernelPolicy, decode: Decode) -> Decode:
    def run(z: Tensor) -> Tensor:
        with kernel_policy(policy):
            return decode(z)

    return run


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
        library = KernelPolicy(fused_conv="none")
        found["fused"] = lambda: fused(decoder)
        found["fused, library's convolutions"] = lambda: under(library, fused(decoder))
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


class ConvCall(NamedTuple):
    """A convolution of the decoder with its neighbours."""

    shape: ConvShape
    residual: bool = False
    image: bool = False  # the last one

    def runner(self, batch: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Callable[[], Any]:
        """Return the call on random numbers, as `pixel_ops` chooses to run it."""
        from arpg.kernels import group_norm, pixel_ops

        inputs, outputs, height, width, upsample = self.shape

        def draw(*size: int) -> Tensor:
            return group_norm.last(torch.randn(size, device=device, dtype=dtype))

        x, bias = draw(batch, inputs, height, width), torch.zeros(outputs, device=device)
        if upsample:
            weight = draw(4 * outputs, inputs, 2, 2)
            return lambda: pixel_ops.upsample_conv(x, weight, bias)
        weight, norm = draw(outputs, inputs, 3, 3), nn.GroupNorm(32, inputs).to(device).requires_grad_(False)
        features = pixel_ops.Features(x, group_norm.moments(x))
        if self.image:
            return lambda: pixel_ops.norm_conv_to_image(features, norm, weight, bias)
        residual = draw(batch, outputs, height, width) if self.residual else None
        return lambda: pixel_ops.norm_conv(features, norm, weight, bias, residual_BOHW=residual)


def conv_calls(config: TokenizerConfig, grid: tuple[int, int]) -> Counter[ConvCall]:
    """Return the convolutions of a decoder that have a fused form, with how often each occurs."""
    from arpg.kernels.conv import ConvShape
    from arpg.tokenizer.autoencoder import Decoder, ResBlock, Upsample
    from arpg.tokenizer.fused import OUTPUTS

    with torch.device("meta"):
        decoder = Decoder(config)
    calls: Counter[ConvCall] = Counter()
    height, width = grid
    for layer in decoder.modules():  # in the order of the forward pass
        if isinstance(layer, ResBlock):
            for conv in (layer.conv1, layer.conv2):
                shape = ConvShape(conv.in_channels, conv.out_channels, height, width)
                calls[ConvCall(shape, residual=conv is layer.conv2)] += 1
        elif isinstance(layer, Upsample):
            channels = layer.conv.in_channels
            calls[ConvCall(ConvShape(channels, channels, height, width, upsample=True))] += 1
            height, width = 2 * height, 2 * width
    shape = ConvShape(decoder.conv_out.in_channels, OUTPUTS, height, width)
    calls[ConvCall(shape, image=True)] += 1
    return calls


def candidates(shape: ConvShape, *, image: bool) -> list[Tile]:
    """Return the tiles that are tried for a shape."""
    from arpg.kernels.conv import Tile

    # Pixels, outputs, inputs, warps, stages, registers: few enough registers let a program normalise while another one
    # multiplies.
    sizes = [
        *((128, 128, 64, 8, stages, 128) for stages in (2, 3)),
        *((128, 128, 64, 8, stages, None) for stages in (3, 4)),
        *((128, 256, 64, 8, stages, None) for stages in (2, 3)),
        *((256, 128, 64, 8, stages, None) for stages in (2, 3)),
        *((128, 64, 64, 8, stages, None) for stages in (2, 3)),
        *((64, 128, 64, 4, stages, None) for stages in (2, 3)),
        (128, 64, 64, 4, 3, None),
        (128, 128, 64, 4, 3, None),
        (128, 128, 32, 8, 4, 128),
    ]
    if image:
        sizes = [(pixels, 16, 64, 4, stages, None) for pixels in (64, 128, 256) for stages in (1, 2, 3)]
    norms = [True] if image or shape.upsample else [True, False]
    tiles = [Tile(*size, norm=norm).fit(shape) for norm in norms for size in sizes]
    return list(dict.fromkeys(tiles))


def run_tile(call: ConvCall, tile: Tile | None, batch: int, device: torch.device, rounds: int) -> float:
    """Return the median milliseconds of a call, by a tile of the fused kernel or (None) by the library.

    From a CUDA graph, since launching takes longer than the kernels of small grids.
    """
    from arpg.kernels import conv

    policy = KernelPolicy(fused_conv="none" if tile is None else "all")
    kept = dict(conv.TILES)
    if tile is not None:
        conv.TILES[call.shape] = tile
    try:
        with torch.no_grad(), kernel_policy(policy):
            run, nothing = call.runner(batch, device), torch.empty(0, device=device)
            run()
            if rounds == 0:
                return 0.0
            decode = graphed(lambda _: [run() for _ in range(_CALLS)][-1], nothing)
            return 1000 * seconds(decode, nothing, rounds) / _CALLS
    finally:
        conv.TILES.clear()
        conv.TILES.update(kept)


def compile_tile(call: ConvCall, tile: Tile, device: str) -> str | None:
    """Compile the kernels of a call into Triton's cache, in a process of its own; return the error, if any."""
    try:
        run_tile(call, tile, 1, torch.device(device), 0)
    except Exception as error:
        return error_line(error)
    return None


def best_tiles(
    config: TokenizerConfig, grid: tuple[int, int], batch: int, device: torch.device, *, rounds: int, jobs: int
) -> Iterator[dict[str, Any]]:
    """Yield the milliseconds of each shape in a whole decode, by the library and by the best tile, and the tile."""
    calls = conv_calls(config, grid)
    pairs = [(call, tile) for call in calls for tile in candidates(call.shape, image=call.image)]
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        errors = dict(zip(pairs, pool.map(compile_tile, *zip(*pairs, strict=True), repeat(str(device))), strict=True))
    for shape in dict.fromkeys(call.shape for call in calls):
        same = {call: count for call, count in calls.items() if call.shape == shape}

        def total(tile: Tile | None, same: dict[ConvCall, int] = same) -> float:
            return sum(count * run_tile(call, tile, batch, device, rounds) for call, count in same.items())

        tiles = candidates(shape, image=any(call.image for call in same))
        failed = {tile: error for tile in tiles for call in same if (error := errors[call, tile])}
        library, times = total(None), {tile: total(tile) for tile in tiles if tile not in failed}
        ranked = sorted(times, key=times.__getitem__)
        yield {
            "shape": shape._asdict(),
            "calls": sum(same.values()),
            "library ms": round(library, 3),
            "tiles": [{"tile": str(tile), "ms": round(times[tile], 3)} for tile in ranked],
            "errors": {str(tile): error for tile, error in failed.items()},
            "best": ranked[0] if ranked and times[ranked[0]] < _WORTH * library else None,
        }


def tune(config: TokenizerConfig, grid: tuple[int, int], batch: int, device: torch.device, **options: Any) -> list[Any]:
    """Print the library and the best tile at each shape, and the table of the shapes that win, which is then used."""
    from arpg.kernels import conv

    rows, found = [], {}
    print("| inputs, outputs, grid | calls | library, ms | best tile, ms | tile |\n|---|---:|---:|---:|---|")
    for row in best_tiles(config, grid, batch, device, **options):
        shape = conv.ConvShape(**row["shape"])
        best = row.pop("best")
        first = row["tiles"][0] if row["tiles"] else {"tile": "none", "ms": None}
        print(
            f"| {tuple(shape)} | {row['calls']} | {row['library ms']} | {first['ms']} | {first['tile']} |", flush=True
        )
        if best is not None:
            found[shape] = best
        rows.append(row | {"used": best is not None})
    for shape, tile in found.items():
        print(f"    {shape}: {tile},")
    conv.TILES.clear()
    conv.TILES.update(found)
    return rows


def to_pixels(model: str, batch: int, device: torch.device, *, batches: int = 8) -> Iterator[dict[str, Any]]:
    """Yield the images per second of a model from labels to pixels, by policy."""
    pipe = open_pipeline(model, random=True, device=str(device), dtype="bfloat16")
    case = Case(model, batch, SamplingSettings(steps=32, guidance=4.0), pipe.model.config.grid)
    for name, policy in {
        "library's convolutions": KernelPolicy(fused_conv="none"),
        "library's convolutions, pixel graphs": KernelPolicy(fused_conv="none", pixel_graphs=True),
        "fused convolutions": KernelPolicy(),
        "fused convolutions, pixel graphs": KernelPolicy(pixel_graphs=True),
    }.items():
        with kernel_policy(policy):
            for _ in range(2):  # captures tokens and pixels
                time_pipelined(pipe, case, 2, pixels=True)
            row = {
                "variant": name,
                "images/s": round(batches * batch / time_pipelined(pipe, case, batches, pixels=True), 1),
            }
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


def profile(decode: Decode, z: Tensor, rounds: int = 3) -> list[dict[str, Any]]:
    """Return the ten most expensive kernels: milliseconds and launches of a batch."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    with record(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
        for _ in range(rounds):
            decode(z)
        torch.cuda.synchronize()
    events = [event for event in recorded.key_averages() if "cuda" in str(event.device_type).lower()]
    events.sort(key=lambda event: -event.self_device_time_total)
    return [
        {
            "ms": round(event.self_device_time_total / 1000 / rounds, 3),
            "launches": event.count // rounds,
            "kernel": event.key[:90],
        }
        for event in events[:10]
    ]


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
    parser.add_argument("--profile", action="store_true", help="Also the ten most expensive kernels of the fused one.")
    parser.add_argument("--tiles", action="store_true", help="Find the shapes and tiles of the fused convolution.")
    parser.add_argument("--jobs", type=int, default=8, help="Processes that compile the tiles.")
    parser.add_argument("--model", help="Also a model with random weights, from labels to pixels: arpg-l.")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = choose_device(options.device)
    if options.tiles and device.type != "cuda":
        parser.error("--tiles needs an NVIDIA GPU; leave it out to time the decoder on this device")
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
    if options.tiles:
        grid, tuning = (options.grid, options.grid), {"rounds": options.rounds, "jobs": options.jobs}
        result["tiles"] = tune(tokenizer.config, grid, options.batch, device, **tuning)
        keep(options.out, result)
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
            result["kernels"] = profile(decode, z)
        for row in result["kernels"]:
            print(f"{row['ms']:8.3f} ms {row['launches']:4d} x {row['kernel']}")
        keep(options.out, result)


if __name__ == "__main__":
    main()
