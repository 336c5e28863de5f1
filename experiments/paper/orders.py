r"""The orders that a model is surest of for images it is given, as training orders (arXiv 2504.17069).

    python -m experiments.paper surest-orders --model meadow --tokens runs/tokens/meadow-train \
        --out runs/orders.npy
    arpg train recipes/meadow-orders.toml -o runs/meadow-orders

Shapes: B batch, N grid tokens, M images.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from arpg import make_plan, tasks
from arpg.checkpoint import load_model
from arpg.data.tokens import TokenSet, open_tokens
from arpg.decode import decode
from arpg.device import choose_device
from arpg.files import write_array
from arpg.hub import resolve
from arpg.settings import SamplingSettings
from experiments.paper.engine import RemainingSteps, RowEngine

STEPS = 16  # in which an order is found: the surest tokens of each step, the surest first


def surest_order(engine: RowEngine, ids_BN: Tensor, labels: list[int], *, steps: int = STEPS) -> Tensor:
    """Return the order `[B, N]` in which the tokens of images are most probable, each step given those before it."""
    ids_BN = ids_BN.to(engine.model.device)
    settings = SamplingSettings(steps=steps)
    request = tasks.generate(engine.model, labels, range(len(labels)))
    plan = make_plan(request.grid, request.known_BN, request.seeds, settings)
    strategy = RowEngine(engine.model, "eager", confidence=0.0).make_strategy(request, plan, settings)
    assert isinstance(strategy, RemainingSteps)

    def give(_state: Any, step: Any, _logits: Tensor, _sampled: Tensor) -> Tensor:
        return ids_BN.gather(1, step.predict.position_BS)

    for _ in decode(engine.model, request, plan, settings, hook=give, strategy=strategy):
        pass
    return torch.cat(strategy.accepted, dim=1)


def write_orders(engine: RowEngine, tokens: TokenSet, path: Path, *, batch_size: int) -> None:
    """Write the surest order of every image and view, `[images, views, N]`, for `data.orders` of a recipe."""
    shape = (tokens.num_images, tokens.views, tokens.grid[0] * tokens.grid[1])
    orders = np.empty(shape, np.uint8 if shape[2] <= 256 else np.uint16)
    for view in range(tokens.views):
        for start in range(0, len(tokens), batch_size):
            index = np.arange(start, min(start + batch_size, len(tokens)))
            ids_BN = torch.from_numpy(tokens.gather(index, np.full_like(index, view)))
            orders[index, view] = surest_order(engine, ids_BN, tokens.labels[index].tolist()).cpu().numpy()
    write_array(path, orders)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the order that a model is surest of for every image and view of a token set."""
    parser = argparse.ArgumentParser(prog="experiments.paper surest-orders", description=main.__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", type=Path, required=True)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, required=True, help="An npy file, for data.orders of a recipe.")
    options = parser.parse_args(arguments)
    device = choose_device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    engine = RowEngine(load_model(resolve(options.model), device=device, dtype=dtype))
    write_orders(engine, open_tokens(options.tokens), options.out, batch_size=options.batch_size)
