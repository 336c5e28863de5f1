"""The memory of each model and precision, and the images/s that each card allows: from the roofline, and as measured.

    python -m benchmarks.device_table
    python -m benchmarks.device_table --write

Nothing is run. Memory (`decode_bytes`) and rooflines (`arpg.bench.roofline`) are computed from the data sheets in
`arpg.device.GPU_SPECS`; measured values come from `benchmarks/results/engine-h200.json`. --write puts the tables into
docs/performance/devices.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from arpg.bench.case import Case
from arpg.bench.roofline import gpu_limits, token_floor
from arpg.config import MODELS, SAMPLING, TOKENIZERS, ModelConfig
from arpg.decode.plan import plan_sample
from arpg.device import GPU_SPECS, GpuSpec, meta_device
from arpg.files import write_text
from arpg.model import ARPG
from arpg.tables import fill_page, markdown_table
from arpg.tokenizer import VQTokenizer

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "performance" / "devices.md"
RESULTS = ROOT / "benchmarks" / "results" / "engine-h200.json"
CARDS = ("Tesla T4", "NVIDIA L4", "4090", "5090", "A100", "H100", "H200", "B200", "MI300X")
WEIGHT_SIZE = {"16 bits": 2, "fp8": 1, "int8": 1}
BATCHES = (1, 64)
STEPS = 32
GIB = 2**30


def decode_bytes(config: ModelConfig, case: Case, dtype: torch.dtype, *, weight_size: int | None = None) -> int:
    """Return about the bytes that the tokens of a batch take: weights, cache and the scratch of the largest step.

    Scratch: the residual stream, what is added to it, the normed rows and the three parts of SwiGLU; or the logits.
    """
    plan = plan_sample(case.grid, [False] * case.tokens, 0, case.settings)
    rows = case.batch * (2 if any(scale != 1.0 for scale in plan.scales) else 1)
    size, width, slots = dtype.itemsize, config.width, max(plan.sizes)
    with meta_device():
        model = ARPG(config)
    linears = sum(layer.weight.numel() for layer in model.modules() if isinstance(layer, torch.nn.Linear))
    others = sum(parameter.numel() for parameter in model.parameters()) - linears
    weights = (weight_size or size) * linears + size * others
    held = 1 + case.tokens - plan.sizes[-1]  # the class and all tokens but those of the last step
    cache_bytes = model.num_cached_layers * rows * held * 2 * width * size
    scratch = max(rows * slots * (3 * width + 3 * config.ffn_width), case.batch * slots * config.vocab_size) * size
    return weights + cache_bytes + scratch


def has_fp8(spec: GpuSpec) -> bool:
    """Return whether a GPU multiplies float8 (e4m3) in hardware, as `Fp8Linear` needs."""
    return (spec.capability or (0, 0)) >= (8, 9)


def case_of(model: str, batch: int) -> Case:
    """Return the case that all tables are about."""
    return Case(model, batch, SAMPLING[model].settings(steps=STEPS), MODELS[model].grid)


def measured(record: dict[str, Any], model: str, precision: str) -> dict[str, Any]:
    """Return the row of the H200 for a model and a precision at batch 64 and 32 steps; empty: not measured."""
    dtype = {"16 bits": "bfloat16"}.get(precision, precision)
    for row in record["rows"].values():
        settings = row.get("settings", {})
        wanted = {"model": f"{model} (random)", "batch": 64, "steps": STEPS, "tokens": 256, "dtype": dtype}
        wanted["kv_cache_dtype"] = None  # 16 bits
        if all(settings.get(name) == value for name, value in wanted.items()) and not row["pixels"]:
            return dict(row)
    return {}


def memory_table(record: dict[str, Any]) -> str:
    """Return the GiB of each model and precision: computed, and measured on an H200."""
    with meta_device():
        tokenizer = 4 * sum(parameter.numel() for parameter in VQTokenizer(TOKENIZERS["vq-16"]).parameters())
    rows, shares = [], []
    for model in MODELS:
        for precision, size in WEIGHT_SIZE.items():
            needed = [
                tokenizer + decode_bytes(MODELS[model], case_of(model, batch), torch.bfloat16, weight_size=size)
                for batch in BATCHES
            ]
            peak = measured(record, model, precision).get("peak GiB")
            rows.append([model, precision, *(f"{each / GIB:.2f}" for each in needed), peak and f"{peak:.2f}"])
            shares += [] if peak is None else [needed[-1] / GIB / peak]
    header = ["model", "precision", *(f"batch {batch}, computed" for batch in BATCHES), "batch 64, measured"]
    return f"{markdown_table(header, rows)}\nComputed is {_range(shares)} of measured.\n"


def speed_table(record: dict[str, Any]) -> str:
    """Return the images/s that each card allows at batch 64; measured ones in bold with the limit behind them."""
    rows, shares = [], []
    for model in MODELS:
        for precision, size in WEIGHT_SIZE.items():
            cells = []
            for card in CARDS:
                found = measured(record, model, precision) if card == "H200" else {}
                most = images_per_second(model, precision, size, card)
                cells.append(None if most is None else f"{float(f'{most:.3g}'):,.0f}")
                if most is not None and found:
                    cells[-1] = f"**{found['value']:,.0f}** of {cells[-1]}"
                    shares.append(found["value"] / most)
            rows.append([model, precision, *cells])
    names = [f"{card.split()[-1]}, {GPU_SPECS[card].memory:g} GB" for card in CARDS]
    return f"{markdown_table(['model', 'precision', *names], rows)}\nMeasured is {_range(shares)} of the roofline.\n"


def _range(shares: Sequence[float]) -> str:
    return f"{100 * min(shares):.0f} to {100 * max(shares):.0f}%"


def images_per_second(model: str, precision: str, weight_size: int, card: str) -> float | None:
    """Return the roofline of a card; None: it has no such products, or not enough memory."""
    case, spec = case_of(model, 64), GPU_SPECS[card]
    if precision == "fp8" and not has_fp8(spec):
        return None
    if decode_bytes(MODELS[model], case, torch.bfloat16, weight_size=weight_size) > 0.9e9 * spec.memory:
        return None
    limits = gpu_limits(card, torch.float8_e4m3fn if precision == "fp8" else torch.bfloat16)
    assert limits is not None
    floor = token_floor(MODELS[model], case, torch.bfloat16, limits, weight_size=weight_size)
    return case.batch / floor


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="Put the tables into docs/performance/devices.md.")
    parser.add_argument("--page", type=Path, default=PAGE, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    record = json.loads(RESULTS.read_text(encoding="utf-8"))
    parts = {"memory": memory_table(record), "cards": speed_table(record)}
    print(*parts.values(), sep="\n")
    if options.write:
        write_text(options.page, fill_page(options.page.read_text(encoding="utf-8"), parts))


if __name__ == "__main__":
    main()
