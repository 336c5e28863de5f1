"""Attention maps: the weights of both passes for the tokens of an image, decoded again as planned, and figures of them.

The network keeps no weights and is not changed: its attention calls are recorded while it runs, and the softmax is
computed a second time. In figures the colour is the weight over that of an even share of the row, on a log scale: rows
that see three slots and rows that see a hundred can be compared, and uniform attention is one colour.
Shapes: L layers, H heads, N grid tokens, T slots (prefix, then tokens in decoding order), S slots of a call, K channels
of a head, D width.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from arpg.decode import Plan, Request, SamplePlan, decode, make_plan
from arpg.decode.state import DecodeState, StepPlan
from arpg.errors import require
from arpg.figures import SIDE, ramp
from arpg.image import adm_crop, resize, to_images, to_pil, to_rgb
from arpg.kernels.dispatch import can_fuse_half
from arpg.model import ARPG, Condition, class_condition
from arpg.pipeline import Pipeline
from arpg.settings import SamplingSettings

Weights = NDArray[np.float32]


@dataclass(frozen=True)
class AttentionMaps:
    """The weights of one image under one plan; what is not seen is 0, and every row sums to 1."""

    pass1_LHTT: Weights  # a slot of Pass 1 (prefix, then tokens in decoding order) to those that it sees
    pass2_LHNT: Weights  # the query for a token (in decoding order) to the slots it is predicted from
    seen1_TT: NDArray[np.bool_]
    seen2_NT: NDArray[np.bool_]
    order: tuple[int, ...]  # the raster position of each token, in decoding order
    num_prefix: int
    grid: tuple[int, int]

    def on_grid(self, weights_T: Weights) -> Weights:
        """Return `[h, w]`: the weights of slots at the positions of their tokens; NaN where there is no token yet."""
        image_N = np.full(self.grid[0] * self.grid[1], np.nan, np.float32)
        tokens = len(weights_T) - self.num_prefix
        image_N[list(self.order[:tokens])] = weights_T[self.num_prefix :]
        return image_N.reshape(self.grid)


class AttentionRecorder(TorchFunctionMode):
    """While active, record queries, keys, values, mask and output of every attention call, with its layer."""

    def __init__(self, model: ARPG) -> None:
        super().__init__()
        self.model = model
        self.calls: list[AttentionCall] = []
        self._name = ("", 0)
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> AttentionRecorder:
        for kind, blocks in (("pass1", self.model.pass1), ("pass2", self.model.pass2)):
            for i, block in enumerate(blocks):
                self._hooks.append(block.register_forward_pre_hook(partial(self._enter_layer, (kind, i))))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _enter_layer(self, name: tuple[str, int], *_: Any) -> None:
        self._name = name

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is F.scaled_dot_product_attention:
            query, key, value = args
            mask = kwargs.get("attn_mask")
            if kwargs.get("is_causal"):
                mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
            # Copies: keys and values are views of a cache, whose padding is written over later.
            self.calls.append(AttentionCall(*self._name, query, key.clone(), value.clone(), mask, out))
        return out


@dataclass(frozen=True)
class AttentionCall:
    """One call of the attention: `[B, H, S or T, K]` each, the mask as a tensor (None: everything is seen)."""

    kind: str
    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    out: Tensor

    def weights(self) -> Tensor:
        """Return the weights `[B, H, S, T]` in float32."""
        score = self.query.float() @ self.key.float().transpose(-1, -2) / math.sqrt(self.query.shape[-1])
        if self.mask is not None:
            score = score.masked_fill(~self.mask, float("-inf"))
        return score.softmax(-1)


@torch.no_grad()
def attention_maps(
    model: ARPG, ids_N: Tensor, condition: Condition, *, plan: SamplePlan, attention: str = "block"
) -> AttentionMaps:
    """Decode the tokens of an image again, with the decode loop and its hook, and keep the weights of both passes.

    `plan` fills the whole grid; one token per step is what training sees. The tokens of the last step are never
    encoded, so Pass 1 has no rows for them. These are the conditional rows: those of the null condition are left out.
    """
    config, device = model.config, model.device
    num_tokens = config.grid[0] * config.grid[1]
    require(
        len(condition) == 1 and ids_N.shape == (num_tokens,) == (len(plan.order),),
        f"{len(condition)} conditions, {list(ids_N.shape)} tokens and a plan of {len(plan.order)}; "
        f"expected one image of {num_tokens} tokens and a plan that fills all of it",
    )
    require(
        not can_fuse_half(model.embedding.weight),
        f"the model is in {model.dtype} on a GPU, whose fused attention keeps no weights; load it with dtype float32",
    )
    num_prefix = max(condition.lengths(guided=False))
    num_slots = num_prefix + num_tokens - plan.sizes[-1]
    pass1 = np.zeros((config.pass1_layers, config.num_heads, num_slots, num_slots), np.float32)
    pass2 = np.zeros((config.pass2_layers, config.num_heads, num_tokens, num_slots), np.float32)
    seen1, seen2 = np.zeros((num_slots, num_slots), bool), np.zeros((num_tokens, num_slots), bool)
    ids_N = ids_N.to(device)
    first1 = first2 = 0  # rows of Pass 1 and Pass 2 that are filled

    def keep_weights(state: DecodeState, step: StepPlan, logits_BSV: Tensor, sampled_BS: Tensor) -> Tensor:
        """Fill the rows of this step, and return the tokens of the image instead of the sampled ones."""
        nonlocal first1, first2
        assert len(recorder.calls) == len(pass1) + len(pass2), "the attention of a layer was not recorded"
        num_predicted = step.predict.position_BS.shape[1]
        for call in recorder.calls:
            weights = call.weights()[0].cpu().numpy()
            _, num_rows, columns = weights.shape
            visible = np.ones((num_rows, columns), bool) if call.mask is None else call.mask.cpu().numpy()
            visible = np.broadcast_to(visible, (1, 1, num_rows, columns))[0, 0]
            target, seen, first = (pass1, seen1, first1) if call.kind == "pass1" else (pass2, seen2, first2)
            # Where all positions of a step have the same logits, Pass 2 predicts one of them: one row stands for all.
            rows = slice(first, first + (num_rows if call.kind == "pass1" else num_predicted))
            target[call.layer, :, rows, :columns] = weights
            seen[rows, :columns] = visible
        first1 = state.filled_cache.end
        first2 += num_predicted
        recorder.calls.clear()
        return ids_N[step.predict.position_BS]

    request = Request.from_nothing(condition, config.grid, (0,))
    unguided = Plan((dataclasses.replace(plan, scales=(1.0,) * len(plan.sizes)),))
    with AttentionRecorder(model) as recorder:
        for _ in decode(model, request, unguided, SamplingSettings(attention=attention), hook=keep_weights):
            pass
    return AttentionMaps(pass1, pass2, seen1, seen2, plan.order, num_prefix, config.grid)


@torch.no_grad()
def image_attention(
    pipe: Pipeline, image: Image.Image | None, class_: str | int | None, *, seed: int = 0, **settings: Any
) -> tuple[AttentionMaps, Image.Image]:
    """Return the maps of `image` (its centre, as tokens) or of an image that is generated first, and that image.

    Settings as in `Pipeline.generate`; order, schedule, steps and attention decide in which steps the tokens come.
    """
    resolved = pipe.sampling.settings(**settings)
    config, stride = pipe.model.config, pipe.tokenizer.config.stride
    label = config.num_classes if class_ is None else pipe.classes.find(class_)
    if image is None:
        require(class_ is not None, "there is neither an image nor a class; give one of them")
        for step in pipe.generate_task(label, seed=seed, **settings).steps():
            ids_N = step.ids_BN[0]
    else:
        require(config.grid[0] == config.grid[1], f"the model's grid is {config.grid}; images need a square one")
        pixels = np.asarray(adm_crop(to_rgb(image), config.grid[0] * stride))
        ids_N = pipe.tokenizer.encode(to_images(pixels[None], pipe.tokenizer.device))[0]
    plan = make_plan(config.grid, torch.zeros(1, len(ids_N), dtype=torch.bool), [seed], resolved).samples[0]
    condition = class_condition(pipe.model, torch.tensor([label]))
    maps = attention_maps(pipe.model, ids_N, condition, plan=plan, attention=resolved.attention)
    return maps, to_pil(pipe.tokenizer.decode(ids_N[None], config.grid))[0]


@dataclass(frozen=True)
class LayerSummary:
    """How one layer's attention is spread, as means over heads and rows that have a choice of tokens."""

    kind: str
    layer: int
    on_prefix: float  # the share of attention that goes to the condition
    evenness: float  # exp(entropy) over the number of slots seen: 1 is uniform
    reach: float  # mean distance on the grid to the tokens attended to, over that of uniform attention


def summarize(maps: AttentionMaps) -> list[LayerSummary]:
    """Return for each layer the share of attention on the condition, its evenness and its reach."""
    row, column = np.divmod(np.array(maps.order), maps.grid[1])
    distance_NN = np.hypot(row[:, None] - row, column[:, None] - column)
    p = maps.num_prefix
    tokens = maps.pass1_LHTT.shape[-1] - p
    lines = []
    for kind, weights_LHST, seen, distance in (
        ("pass1", maps.pass1_LHTT[:, :, p:], maps.seen1_TT[p:], distance_NN[:tokens, :tokens]),
        ("pass2", maps.pass2_LHNT, maps.seen2_NT, distance_NN[:, :tokens]),
    ):
        rows = seen[:, p:].sum(1) >= 2
        seen_tokens = seen[rows, p:]
        uniform = (distance[rows] * seen_tokens).sum(1) / seen_tokens.sum(1)
        for layer, weights_HST in enumerate(weights_LHST[:, :, rows]):
            entropy = -(weights_HST * np.log(np.maximum(weights_HST, 1e-30))).sum(-1)
            on_tokens = weights_HST[..., p:]
            mean = (on_tokens * distance[rows]).sum(-1) / np.maximum(on_tokens.sum(-1), 1e-30)
            lines.append(
                LayerSummary(
                    kind,
                    layer,
                    on_prefix=float(weights_HST[..., :p].sum(-1).mean()),
                    evenness=float((np.exp(entropy) / seen[rows].sum(1)).mean()),
                    reach=float((mean / uniform).mean()),
                )
            )
    return lines


MARGIN, CAPTION = 14, 26  # pixels around a tile, and of a line of text
OCTAVES = 4  # colours run from 1/16 to 16 times an even share
NOT_SEEN = (232, 232, 232)
NAMES = {"pass1": "Pass 1", "pass2": "Pass 2"}


@dataclass(frozen=True)
class Column:
    """One column of a figure: a layer of a pass, and one of its heads or their mean (None)."""

    kind: str
    layer: int
    head: int | None

    @property
    def caption(self) -> str:
        """Return the caption of the column: layer, and head where one is chosen."""
        return f"layer {self.layer + 1}" + ("" if self.head is None else f", head {self.head + 1}")


def choose_columns(
    maps: AttentionMaps, *, layers: str | Sequence[int] = "all", heads: str | Sequence[int] = "mean"
) -> list[Column]:
    """Return the columns for `layers` ("all", "last" or numbers) and `heads` ("mean", "all" or numbers), from 1.

    A pass with fewer layers than requested has columns for those it has.
    """
    num_layers = {"pass1": len(maps.pass1_LHTT), "pass2": len(maps.pass2_LHNT)}
    num_heads = maps.pass1_LHTT.shape[1]
    _check("layer", layers, max(num_layers.values()))
    _check("head", heads, num_heads)
    columns = []
    for kind, count in num_layers.items():
        every = range(1, count + 1)
        chosen = every if layers == "all" else every[-1:] if layers == "last" else [n for n in layers if n in every]
        of_layer: Sequence[int | None] = [None]
        if heads != "mean":
            of_layer = range(num_heads) if heads == "all" else [int(n) - 1 for n in heads]
        columns += [Column(kind, int(layer) - 1, head) for layer in chosen for head in of_layer]
    return columns


def _check(name: str, numbers: str | Sequence[int], most: int) -> None:
    bad = [] if isinstance(numbers, str) else [n for n in numbers if not 1 <= n <= most]
    require(not bad, f"{name} {', '.join(map(str, bad))} does not exist; expected 1 to {most}")


def default_queries(maps: AttentionMaps) -> list[int]:
    """Return the raster positions of three tokens: at a quarter and half of the order, and the last one of Pass 1."""
    last = maps.pass1_LHTT.shape[-1] - maps.num_prefix - 1
    return [maps.order[max(0, index)] for index in (last // 4, last // 2, last)]


def draw_matrices(maps: AttentionMaps, columns: Sequence[Column]) -> Image.Image:
    """Return one row of matrices per pass: queries down, keys across, both in decoding order."""
    cell = max(1, round(1.25 * SIDE / max(maps.pass2_LHNT.shape[-2:])))
    rows = []
    for kind, what in (
        ("pass1", "each slot (down) looks at the slots before it and those of its step (across)"),
        ("pass2", "the query for each token (down) looks at the slots that are known (across)"),
    ):
        tiles = []
        for column in columns:
            if column.kind == kind:
                weights, seen = _weights(maps, column)
                colours = _colours(weights, seen).repeat(cell, 0).repeat(cell, 1)
                tiles.append((column.caption, Image.fromarray(colours)))
        if tiles:
            rows.append((f"{NAMES[kind]}: {what}", tiles))
    return _sheet(rows)


def draw_on_image(
    maps: AttentionMaps, image: Image.Image, columns: Sequence[Column], *, queries: Sequence[int]
) -> Image.Image:
    """Return a row per query position (raster) and pass: the image with the token marked, then its attention."""
    bad = [q for q in queries if not 0 <= q < len(maps.order)]
    require(not bad, f"query position {bad[:1]} is outside the grid of {maps.grid[0]}x{maps.grid[1]} tokens")
    cell = max(4, SIDE // max(maps.grid))
    size = (maps.grid[1] * cell, maps.grid[0] * cell)
    base = resize(image.convert("RGB"), size)
    grey = np.asarray(base.convert("L"), np.float32)[..., None]
    rows = []
    for query in queries:
        index = maps.order.index(query)
        where = f"token {index + 1} of {len(maps.order)}, row {query // maps.grid[1] + 1}, column "
        where += f"{query % maps.grid[1] + 1}"
        for kind in NAMES:
            tiles = [("the image", _mark(base, query, maps.grid, cell))]
            for column in columns:
                weights, seen = _weights(maps, column)
                row = index if kind == "pass2" else index + maps.num_prefix
                if column.kind != kind or row >= len(weights):
                    continue
                prefix = float(weights[row, : maps.num_prefix].sum())
                lift = _lift(weights, seen)[row]
                lift_hw = maps.on_grid(np.where(seen[row], lift, np.nan).astype(np.float32))
                known = ~np.isnan(lift_hw)
                colours = np.where(known[..., None], ramp(np.nan_to_num(lift_hw).ravel()).reshape(*maps.grid, 3), 255)
                heat = colours.repeat(cell, 0).repeat(cell, 1)
                shown = known.repeat(cell, 0).repeat(cell, 1)[..., None]
                pixels = np.where(shown, 0.72 * heat + 0.28 * grey, 0.75 * np.array(NOT_SEEN) + 0.25 * grey)
                tile = Image.fromarray(pixels.round().astype(np.uint8))
                tiles.append((f"{column.caption} (class {prefix:.0%})", _mark(tile, query, maps.grid, cell)))
            if len(tiles) > 1:
                rows.append((f"{NAMES[kind]}, {where}", tiles))
    return _sheet(rows)


def stack(images: Sequence[Image.Image]) -> Image.Image:
    """Return the images in one column."""
    whole = Image.new("RGB", (max(image.width for image in images), sum(image.height for image in images)), "white")
    top = 0
    for image in images:
        whole.paste(image, (0, top))
        top += image.height
    return whole


def _weights(maps: AttentionMaps, column: Column) -> tuple[Weights, NDArray[np.bool_]]:
    first = column.kind == "pass1"
    heads_HST = (maps.pass1_LHTT if first else maps.pass2_LHNT)[column.layer]
    weights: Weights = heads_HST.mean(0) if column.head is None else heads_HST[column.head]
    return weights, maps.seen1_TT if first else maps.seen2_NT


def _lift(weights_ST: Weights, seen_ST: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Scale weights to 0 (a 16th of an even share, or less), 0.5 (an even share) and 1 (16 times as much, or more)."""
    even = np.log2(np.maximum(weights_ST * seen_ST.sum(1, keepdims=True), 1e-9))
    lift: NDArray[np.float32] = (0.5 + 0.5 * even / OCTAVES).clip(0, 1).astype(np.float32)
    return lift


def _colours(weights_ST: Weights, seen_ST: NDArray[np.bool_]) -> NDArray[np.uint8]:
    colours = ramp(_lift(weights_ST, seen_ST).ravel()).reshape(*weights_ST.shape, 3)
    colours[~seen_ST] = NOT_SEEN
    return colours


def _mark(image: Image.Image, query: int, grid: tuple[int, int], cell: int) -> Image.Image:
    """Draw a frame around the token at a position."""
    marked = image.copy()
    x, y = query % grid[1] * cell, query // grid[1] * cell
    draw = ImageDraw.Draw(marked)
    draw.rectangle((x - 2, y - 2, x + cell + 1, y + cell + 1), outline="black", width=2)
    draw.rectangle((x, y, x + cell - 1, y + cell - 1), outline="white", width=2)
    return marked


def _sheet(rows: Sequence[tuple[str, Sequence[tuple[str, Image.Image]]]]) -> Image.Image:
    """Return rows with a title, of tiles with a caption each, below the scale of the colours."""
    font, title_font = ImageFont.load_default(size=13), ImageFont.load_default(size=15)
    width = max(max(sum(t.width + MARGIN for _, t in tiles) for _, tiles in rows) + MARGIN, 640)
    heights = [2 * CAPTION + max(tile.height for _, tile in tiles) + MARGIN for _, tiles in rows]
    canvas = Image.new("RGB", (width, CAPTION + MARGIN + sum(heights)), "white")
    draw = ImageDraw.Draw(canvas)
    _scale(canvas, draw, font)
    top = CAPTION + MARGIN
    for (title, tiles), height in zip(rows, heights, strict=True):
        draw.text((MARGIN, top), title, fill="black", font=title_font)
        left = MARGIN
        for caption, tile in tiles:
            draw.text((left, top + CAPTION), caption, fill=(80, 80, 80), font=font)
            canvas.paste(tile, (left, top + 2 * CAPTION - 4))
            left += tile.width + MARGIN
        top += height
    return canvas


def _scale(canvas: Image.Image, draw: ImageDraw.ImageDraw, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> None:
    bar = ramp(np.linspace(0, 1, 120))[None].repeat(12, 0)
    text = f"attention, as a multiple of an even share:  1/{2**OCTAVES}"
    draw.text((MARGIN, MARGIN - 4), text, fill="black", font=font)
    left = MARGIN + int(draw.textlength(text, font=font)) + 8
    canvas.paste(Image.fromarray(bar), (left, MARGIN - 2))
    draw.text((left + 128, MARGIN - 4), f"{2**OCTAVES}   grey: not seen", fill="black", font=font)
