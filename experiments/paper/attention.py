"""Attention of ARPG and of the interleaved peer (Figures 3 and 11): how evenly it is spread, how much [MASK]s receive.

Teacher forcing over real tokens in random orders, one token per step, as in training. Shapes: B batch, H heads, S rows,
T slots, N grid tokens.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from arpg.evaluation.attention_maps import AttentionRecorder
from arpg.figures import new_plot, save_plot
from arpg.model import TokenDecoder, class_condition
from experiments.paper.peers import InterleavedPositions


@dataclass(frozen=True)
class LayerAttention:
    """The weights of one layer's rows of one kind, `[B, H, S, T]`, which slots they see, and which slots are [MASK]."""

    rows: str  # "pass1", "pass2"; of the interleaved peer "tokens", "masks"
    layer: int
    weights_BHST: Tensor
    seen_ST: Tensor
    is_mask_T: Tensor

    @property
    def choice(self) -> Tensor:
        """Which rows have a choice: they see two slots or more besides the class."""
        return self.seen_ST[:, 1:].sum(1) >= 2

    def evenness(self) -> Tensor:
        """Return exp(entropy) over the number of slots seen, `[B]`: 1 is uniform."""
        choice_S = self.choice
        weights = self.weights_BHST[:, :, choice_S]
        entropy = -(weights * weights.clamp_min(1e-30).log()).sum(-1)
        return (entropy.exp() / self.seen_ST[choice_S].sum(1)).mean((1, 2))

    def on_masks(self) -> Tensor:
        """Return the attention on [MASK] slots over what an even share would be, `[B]`."""
        share_S = (self.seen_ST & self.is_mask_T).sum(1) / self.seen_ST.sum(1)
        some_S = share_S > 0
        given = (self.weights_BHST * self.is_mask_T).sum(-1)[:, :, some_S]
        return (given / share_S[some_S]).mean((1, 2))

    def low(self) -> Tensor:
        """Return the share of slots seen that receive less than a tenth of an even share, `[B]`."""
        choice_S = self.choice
        seen = self.seen_ST[choice_S]
        even_S1 = 0.1 / seen.sum(1, keepdim=True)
        few = ((self.weights_BHST[:, :, choice_S] < even_S1) & seen).sum(-1)
        return (few / seen.sum(1)).mean((1, 2))


@torch.no_grad()
def layer_attention(
    network: TokenDecoder, ids_BN: Tensor, order_BN: Tensor, labels_B: Tensor
) -> Iterator[LayerAttention]:
    """Yield the attention of every layer, a layer at a time; the network is in float32."""
    device = network.device
    with AttentionRecorder(network) as recorder:  # type: ignore[arg-type]
        key_B = torch.zeros(len(ids_BN), dtype=torch.int32, device=device)
        condition = class_condition(network, labels_B)
        network(ids_BN.to(device), order_BN.to(device), condition, dropout_key_B=key_B)
    num_layers = len(network.pass1) + len(network.pass2)
    assert len(recorder.calls) == num_layers, "the attention of a layer was not recorded"
    interleaved = isinstance(network, InterleavedPositions)
    for call in recorder.calls:
        weights = call.weights()
        _, _, num_rows, num_slots = weights.shape
        slot_T = torch.arange(num_slots, device=device)
        assert call.mask is not None
        seen = call.mask.reshape(-1, num_slots)[-num_rows:].expand(num_rows, -1)
        is_mask_T = (slot_T % 2 == 1) if interleaved else torch.zeros_like(slot_T, dtype=torch.bool)
        if not interleaved:
            yield LayerAttention(call.kind, call.layer, weights, seen, is_mask_T)
            continue
        for rows, chosen in (("masks", slot_T % 2 == 1), ("tokens", slot_T % 2 == 0)):
            yield LayerAttention(rows, call.layer, weights[:, :, chosen], seen[chosen], is_mask_T)


MEASURES = ("evenness", "on masks", "low")


def attention_line(batches: Iterator[tuple[Tensor, Tensor, Tensor]], network: TokenDecoder) -> dict[str, Any]:
    """Return means over images for each layer and kind of row, and those of the last layers with 95 % intervals."""
    found: dict[tuple[str, int, str], list[Tensor]] = defaultdict(list)
    for ids_BN, order_BN, labels_B in batches:
        for part in layer_attention(network, ids_BN, order_BN, labels_B):
            values = {"evenness": part.evenness(), "low": part.low()}
            if part.is_mask_T.any():
                values["on masks"] = part.on_masks()
            for name, value_B in values.items():
                found[part.rows, part.layer, name].append(value_B.cpu())
    line: dict[str, Any] = {"layers": []}
    last: dict[str, int] = {}
    for rows, layer, _ in found:
        last[rows] = max(layer, last.get(rows, 0))
    for (rows, layer, name), parts in found.items():
        value_M = torch.cat(parts).double()
        line["images"] = len(value_M)
        mean = float(value_M.mean())
        line["layers"].append([rows, layer, name, round(mean, 5)])
        if layer == last[rows]:
            half = 1.96 * float(value_M.std()) / math.sqrt(len(value_M)) if len(value_M) > 1 else math.nan
            line[f"{rows}: {name}"] = round(mean, 5)
            line[f"{rows}: {name} interval"] = [round(mean - half, 5), round(mean + half, 5)]
    return line


def draw_last_layer(network: TokenDecoder, batch: tuple[Tensor, Tensor, Tensor], path: Path) -> bool:
    """Draw the last layer's maps of some heads for the first image: a row of plots per kind of row.

    Each weight is divided by an even share. The slots of the interleaved peer are parted into [MASK]s and tokens.
    """
    last: dict[str, LayerAttention] = {}
    for part in layer_attention(network, *(x[:1] for x in batch)):
        last[part.rows] = part
    heads = min(4, network.config.num_heads)
    figure = new_plot((3 * heads + 1, 3 * len(last)), file=path.name)
    if figure is None:
        return False
    grid = figure.subplots(len(last), heads, squeeze=False)
    for row, (name, part) in zip(grid, last.items(), strict=True):
        slots = torch.argsort(part.is_mask_T.int(), descending=True, stable=True).cpu()
        even = part.weights_BHST[0] * part.seen_ST.sum(1, keepdim=True)
        shown = torch.where(part.seen_ST, even.clamp(1 / 16, 16).log2(), torch.nan).cpu()[..., slots]
        for head, axes in enumerate(row):
            image = axes.imshow(np.asarray(shown[head]), cmap="coolwarm", vmin=-4, vmax=4, interpolation="nearest")
            axes.set_title(f"{name}, head {head + 1}", fontsize=8)
            axes.set_xticks([])
            axes.set_yticks([])
            axes.set_xlabel("[MASK]s, then tokens" if part.is_mask_T.any() else "slots in decoding order", fontsize=7)
    figure.colorbar(image, ax=grid, label="log2 of attention over an even share", shrink=0.6)
    save_plot(figure, path)
    return True
