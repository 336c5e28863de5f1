"""What each order costs the model: bits per token of real test images, given the tokens before, one at a time.

    python benchmarks/ablation_bits.py --num 136

By the chain rule the bits of an image are the same in every order, for a model whose conditionals fit together. What
an order costs above the random one is what the model does not know about the contexts that this order leaves.
The result goes into --out; `ablation_report.py` makes a table of it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ablation_lines import BITS

from arpg import Pipeline
from arpg.data.images import concatenate, open_images
from arpg.decode.likelihood import make_orders, token_bits
from arpg.files import write_whole
from arpg.image import adm_crop, to_images
from arpg.settings import ORDERS
from arpg.tasks import label_condition

DOMAINS = ("fruits", "flowers")
BATCH = 8
Z = 1.96


def read_images(data: Path, num: int, size: int) -> tuple[Any, list[int]]:
    """Centre crops of the test split and their classes, evenly from all."""
    images = concatenate([open_images(f"{data}/{domain}.zip/{domain}/test") for domain in DOMAINS])
    chosen = np.linspace(0, len(images) - 1, min(num, len(images))).astype(int).tolist()
    return np.stack([np.asarray(adm_crop(images.read(i), size)) for i in chosen]), [images.labels[i] for i in chosen]


@torch.no_grad()
def bits_in(pipe: Pipeline, ids_BN: torch.Tensor, labels: Sequence[int], order: str) -> Any:
    """`[B, 3]`: mean bits of the tokens in the first, middle and last third of the order; image i has seed i."""
    model = pipe.model
    order_BN = make_orders(order, model.config.grid, range(len(labels)))
    parts = []
    for i in range(0, len(labels), BATCH):
        rows = slice(i, i + BATCH)
        bits_BN = token_bits(model, ids_BN[rows], label_condition(model, list(labels[rows])), order_BN[rows]).cpu()
        parts.append(bits_BN.gather(1, order_BN[rows]))
    return np.stack([part.mean(1).numpy() for part in torch.cat(parts).tensor_split(3, dim=1)], axis=1)


def summary(bits: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Of each order: bits per token, by thirds, and above the random order, image by image, with 95 %."""
    found = {}
    for order, bits_B3 in bits.items():
        above = (bits_B3 - bits["random"]).mean(1)
        noise = Z * float(above.std(ddof=1)) / len(above) ** 0.5
        found[order] = {
            "bits": round(float(bits_B3.mean()), 4),
            "thirds": [round(float(third), 4) for third in bits_B3.mean(0)],
            "above random": [round(float(above.mean()), 4), round(noise, 4)],
        }
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="garden")
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--num", type=int, default=136, help="Test images.")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/ablations"))
    options = parser.parse_args(arguments)
    pipe = Pipeline.from_pretrained(options.model)
    size = pipe.model.config.grid[0] * pipe.tokenizer.config.stride
    pixels, labels = read_images(options.data, options.num, size)
    with torch.no_grad():
        ids_BN = torch.cat(
            [
                pipe.tokenizer.encode(to_images(pixels[i : i + BATCH], pipe.tokenizer.device))
                for i in range(0, len(pixels), BATCH)
            ]
        )
    bits = {}
    for order in ORDERS:
        bits[order] = bits_in(pipe, ids_BN, labels, order)
        sys.stdout.write(f"{order:<12}{bits[order].mean():8.3f} bits per token\n")
        sys.stdout.flush()
    device = torch.cuda.get_device_name() if pipe.model.device.type == "cuda" else "CPU"
    found = {"model": options.model, "images": len(labels), "device": device, "orders": summary(bits)}
    text = json.dumps(found, indent=1) + "\n"
    write_whole(options.out / BITS, lambda path: path.write_text(text, encoding="utf-8"))


if __name__ == "__main__":
    main()
