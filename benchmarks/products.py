"""Matrix products at the sizes of decoding on a GPU: bf16, float8 with a scale for each row, float8 with one scale; and
what float8 makes of whole generations.

    python benchmarks/products.py
    python benchmarks/products.py --parts products residual --batch 16

check: float8 layers and kernels against bf16. speed: generations in bf16 and fp8, kernels by kind. products: us of each
product, and the ms of all that one generation has. residual: a product that adds to the stream itself, then a norm,
against a product and a kernel that adds and norms. agreement: `garden` in fp8 on the context of float32.
Weights are random, and each product takes another one, so that they come from memory as they do in a generation.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from precision import open_in
from torch import Tensor, nn
from torch.nn import functional as F

from arpg.bench.agreement import agreement, generate, on_context
from arpg.bench.case import Case, open_pipeline
from arpg.bench.throughput import Effort, measure
from arpg.decode import decode
from arpg.kernels.dispatch import FLOAT8, can_fuse
from arpg.pipeline import Pipeline
from arpg.quantization.packed import become
from arpg.quantization.precision import Fp8Linear, to_float8, to_precision
from arpg.settings import SamplingSettings

PARTS = ("check", "speed", "products", "residual", "agreement")
ROWS = (128, 512, 1024, 2048)  # that are told
BYTES = 128 * 2**20  # of weights in turn: more than a cache holds

Product = tuple[int, int]  # outputs, inputs
Calls = Sequence[Callable[[], Any]]


def say(*words: Any) -> None:
    print(*words, flush=True)  # noqa: T201


def attempt(label: str, call: Callable[[], Any]) -> Any:
    """None where it fails: the others still count."""
    try:
        return call()
    except Exception as error:
        say(f"  {label}: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}")
        return None


@torch.no_grad()
def microseconds(calls: Calls, device: torch.device, repeats: int = 3) -> float:
    """Of one call, on average; on a GPU all of them are one graph."""
    if device.type != "cuda":
        began = time.perf_counter()
        for call in calls:
            call()
        return 1e6 * (time.perf_counter() - began) / len(calls)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        calls[0]()
        stream.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for call in calls:
                call()
        finally:
            graph.capture_end()
        graph.replay()
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record(stream)
        for _ in range(repeats):
            graph.replay()
        ended.record(stream)
        ended.synchronize()
    return 1e3 * began.elapsed_time(ended) / (repeats * len(calls))


def weights(product: Product, device: torch.device, size: int) -> list[Tensor]:
    """In bf16: so many that they fill `BYTES`, with `size` bytes for a number, but 64 at most."""
    count = max(2, min(64, BYTES // (size * product[0] * product[1])))
    return [0.02 * torch.randn(product, device=device, dtype=torch.bfloat16) for _ in range(count)]


def ways(product: Product, device: torch.device) -> dict[str, Callable[[Tensor], Calls]]:
    """Calls for the rows `[M, I]`, by name."""
    plain, small = (weights(product, device, size) for size in (2, 1))
    float8 = [to_float8(weight / weight.abs().max() * 448) for weight in small]
    one = torch.ones((), device=device)
    per_output = torch.ones(1, product[0], device=device)

    def scaled(x: Tensor, a: Tensor, b: Tensor) -> Calls:
        x8 = to_float8(x)
        options: dict[str, Any] = {"out_dtype": torch.bfloat16, "use_fast_accum": device.type == "cuda"}
        return [lambda w=w: torch._scaled_mm(x8, w.t(), scale_a=a, scale_b=b, **options) for w in float8]

    return {
        "bf16": lambda x: [lambda w=w: F.linear(x, w) for w in plain],
        "fp8, rows": lambda x: scaled(x, torch.ones(len(x), 1, device=device), per_output),
        "fp8": lambda x: scaled(x, one, one),
    }


@torch.no_grad()
def products_of(pipe: Pipeline, case: Case) -> Counter[tuple[Product, int]]:
    """How often a generation has each product, with how many rows."""
    found: Counter[tuple[Product, int]] = Counter()

    def count(layer: nn.Module, args: tuple[Any, ...]) -> None:
        assert isinstance(layer, nn.Linear)
        found[(layer.out_features, layer.in_features), args[0].numel() // layer.in_features] += 1

    layers = [layer for layer in pipe.model.modules() if isinstance(layer, nn.Linear)]
    handles = [layer.register_forward_pre_hook(count) for layer in layers]
    for _ in decode(pipe.model, *case.request(pipe.model, 0), case.settings):
        pass
    for handle in handles:
        handle.remove()
    return found


def tell_products(counts: Counter[tuple[Product, int]], device: torch.device) -> None:
    whole: Counter[str] = Counter()
    say("products: us by rows", *ROWS)
    for product in sorted({product for product, _ in counts}):
        wanted = sorted({*ROWS, *(rows for each, rows in counts if each == product)})
        for name, calls in ways(product, device).items():
            times: dict[int, float] = {}
            for rows in wanted:
                x = torch.randn(rows, product[1], device=device, dtype=torch.bfloat16)
                times[rows] = attempt(f"{name}, {rows} rows", lambda c=calls, x=x: microseconds(c(x), device)) or 0.0
            spent = sum(counts[product, rows] * took for rows, took in times.items()) / 1000
            whole[name] += spent
            shape = f"{product[0]} x {product[1]}"
            say(f"  {shape:>13} {name:10}", *(f"{times[rows]:8.2f}" for rows in ROWS), f"  all {spent:7.2f} ms")
    for name, spent in whole.items():
        say(f"  {sum(counts.values())} products of a generation, {name}: {spent:.2f} ms")


def forms(x: Tensor, stream: Tensor, all_weights: Sequence[Tensor]) -> dict[str, Calls]:
    """Products of the rows `[M, I]` that end in the stream `[1, M, D]`, alone and with the norm that follows."""
    from arpg.kernels.residual import residual_norm

    norm, key = torch.ones_like(stream[0, 0]), torch.empty(0, dtype=torch.int32, device=x.device)

    def add(w: Tensor) -> Tensor:
        return stream[0].addmm_(x, w.t())

    def then(w: Tensor) -> Any:
        return residual_norm(stream, F.linear(x, w)[None], norm, key, 0.0, 1e-5)

    made: dict[str, Callable[[Tensor], Any]] = {
        "product": lambda w: F.linear(x, w),
        "product that adds": add,
        "product; add and norm": then,
        "product that adds; norm": lambda w: F.rms_norm(add(w), norm.shape, norm, 1e-5),
    }
    return {name: [partial(form, w) for w in all_weights] for name, form in made.items()}


def tell_residual(width: int, hidden: int, device: torch.device) -> None:
    """The products after attention and SwiGLU, in bf16."""
    say("residual: us by rows", *ROWS)
    for inputs in (width, hidden):
        found: dict[str, list[str]] = {}
        all_weights = weights((width, inputs), device, 2)
        for rows in ROWS:
            x = torch.randn(rows, inputs, device=device, dtype=torch.bfloat16)
            stream = torch.randn(1, rows, width, device=device, dtype=torch.bfloat16)
            for name, calls in forms(x, stream, all_weights).items():
                took = attempt(name, partial(microseconds, calls, device))
                found.setdefault(name, []).append("       -" if took is None else f"{took:8.2f}")
        for name, times in found.items():
            say(f"  {width} x {inputs:4} {name:24}", *times)


@torch.no_grad()
def check(device: torch.device) -> None:
    def off(found: Tensor, expected: Tensor) -> str:
        return f"{float((found.float() - expected.float()).norm() / expected.float().norm()):.4f}"

    layer = nn.Linear(1024, 3072, bias=False, device=device)
    weight = layer.weight.detach().clone()
    made = become(layer, Fp8Linear)
    made.keep(weight, torch.bfloat16)
    for rows in (1, 16, 100, 1000):
        x = torch.randn(2, rows, 1024, device=device, dtype=torch.bfloat16)
        told = attempt("layer", lambda x=x: off(made(x), F.linear(to_float8(x).float(), made.weight.float())))
        say(f"check: {2 * rows} rows, a layer off by {told} from its twin, {off(made(x), F.linear(x.float(), weight))}")
    if not can_fuse(x):
        return
    from arpg.kernels.residual import residual_norm, residual_norm_float8

    from arpg.kernels.attention import attend
    from arpg.kernels.swiglu import swiglu, swiglu_float8

    norm, key = torch.ones(1024, device=device, dtype=x.dtype), torch.empty(0, dtype=torch.int32, device=device)
    q, k, v = torch.randn(3, 128, 8, 16, 64, device=device, dtype=x.dtype)
    pairs: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
        "norm": lambda: (residual_norm_float8(x, x, norm, 1e-5)[1], residual_norm(x, x, norm, key, 0.0, 1e-5)[1]),
        "SwiGLU": lambda: (swiglu_float8(x), swiglu(x)),
        "SwiGLU, too large": lambda: (swiglu_float8(300 * x), swiglu(300 * x).clamp(-448, 448)),
        "attention": lambda: (attend(q, k, v, None, dtype=FLOAT8), attend(q, k, v, None)),
    }
    for name, pair in pairs.items():
        say(f"check: {name} off by", attempt(name, lambda pair=pair: off(*pair())), "(float8 alone: about 0.026)")


def tell_speed(pipe: Pipeline, case: Case, repeats: int) -> None:
    row = measure(pipe, case, Effort(repeats, 2, pixels=False, top=True), limits=lambda dtype: None)
    say(f"speed, {row['settings']['dtype']}: {row['token images/s']} images/s, latency {row['latency ms']} ms")
    say("  ", row.get("kernels"), "kernels, ms:", row.get("kernels ms"))
    for kernel in row.get("top kernels", [])[:10]:
        say(f"   {kernel['ms']:8.3f} ms {kernel['launches']:6} {kernel['kernel'][:100]}")


def tell_agreement(name: str, device: torch.device, batch: int) -> None:
    exact = open_in(name, "float32", device)
    case = Case(name, batch, exact.sampling.settings(), exact.model.config.grid)
    ids = generate(exact.model, case)
    expected = on_context(exact.model, case, ids)
    for kind in ("bfloat16", "fp8"):
        say(
            f"agreement, {name}, {kind}:", agreement(on_context(open_in(name, kind, device).model, case, ids), expected)
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--model", default="arpg-l", help="A preset, or a folder for its sizes; weights are random.")
    parser.add_argument("--trained", default="garden", help="Of the agreement.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=8)
    options = parser.parse_args()
    device, began, parts = torch.device(options.device), time.perf_counter(), options.parts
    torch.manual_seed(0)

    def done(part: str) -> None:
        say(f"-- {part}: {time.perf_counter() - began:.1f} s since the start")

    if "check" in parts:
        attempt("check", lambda: check(device))
        done("check")
    dtype, engine = ("bfloat16", "graph") if device.type == "cuda" else ("float32", "eager")
    pipe = open_pipeline(options.model, random=True, device=options.device, dtype=dtype, engine=engine)
    case = Case(
        options.model, options.batch, SamplingSettings(steps=options.steps, guidance=4.0), pipe.model.config.grid
    )
    counts = products_of(pipe, case)
    done("a generation")
    if "speed" in parts:
        attempt("speed", lambda: tell_speed(pipe, case, options.repeats))
        pipe.engine.graphs.clear()
        if attempt("fp8", lambda: to_precision(pipe.model, "fp8", device)) is not None:
            attempt("speed", lambda: tell_speed(pipe, case, options.repeats))
        done("speed")
    if "products" in parts:
        tell_products(counts, device)
        done("products")
    if "residual" in parts:
        attempt("residual", lambda: tell_residual(pipe.model.config.width, pipe.model.config.ffn_width, device))
        done("residual")
    if "agreement" in parts:
        attempt("agreement", lambda: tell_agreement(options.trained, device, batch=16))
        done("agreement")


if __name__ == "__main__":
    main()
