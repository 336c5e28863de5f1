"""Attention as pictures: matrices in decoding order, and heat over the image for a few of its tokens.

Everywhere the colour is the weight over that of an even share of the row, on a log scale: rows that see three slots and
rows that see a hundred can be compared, and uniform attention is one colour. Shapes as in `attention.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from arpg.errors import require
from arpg.evaluation.attention import AttentionMaps, Weights
from arpg.figures import CAPTION, MARGIN, SIDE, ramp

OCTAVES = 4  # colours run from 1/16 to 16 times an even share
NOT_SEEN = (232, 232, 232)
NAMES = {"pass1": "Pass 1", "pass2": "Pass 2"}


@dataclass(frozen=True)
class Column:
    """What one column of a sheet shows: a layer of a pass, and one of its heads or their mean (None)."""

    kind: str
    layer: int
    head: int | None

    @property
    def caption(self) -> str:
        return f"layer {self.layer + 1}" + ("" if self.head is None else f", head {self.head + 1}")


def choose_columns(
    maps: AttentionMaps, *, layers: str | Sequence[int] = "all", heads: str | Sequence[int] = "mean"
) -> list[Column]:
    """`layers`: "all", "last" or numbers; `heads`: "mean", "all" or numbers. Numbers count from 1, in each pass.

    A pass that has fewer layers than asked for shows those it has.
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
    """Raster positions of three tokens: a quarter and half of the way, and the last one that Pass 1 takes in."""
    last = maps.pass1_LHTT.shape[-1] - maps.num_prefix - 1
    return [maps.order[max(0, place)] for place in (last // 4, last // 2, last)]


def draw_matrices(maps: AttentionMaps, columns: Sequence[Column]) -> Image.Image:
    """One row of matrices per pass: a row is who looks, a column who is looked at, both in decoding order."""
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
    """For each query position (raster) and pass: the image with the token marked, then what it looks at."""
    bad = [q for q in queries if not 0 <= q < len(maps.order)]
    require(not bad, f"query position {bad[:1]} is outside the grid of {maps.grid[0]}x{maps.grid[1]} tokens")
    cell = max(4, SIDE // max(maps.grid))
    size = (maps.grid[1] * cell, maps.grid[0] * cell)
    picture = image.convert("RGB").resize(size, Image.Resampling.BICUBIC)
    grey = np.asarray(picture.convert("L"), np.float32)[..., None]
    rows = []
    for query in queries:
        turn = maps.order.index(query)
        where = f"token {turn + 1} of {len(maps.order)}, row {query // maps.grid[1] + 1}, column "
        where += f"{query % maps.grid[1] + 1}"
        for kind in NAMES:
            tiles = [("the image", _mark(picture, query, maps.grid, cell))]
            for column in columns:
                weights, seen = _weights(maps, column)
                row = turn if kind == "pass2" else turn + maps.num_prefix
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


def stack(pictures: Sequence[Image.Image]) -> Image.Image:
    """One above the other."""
    whole = Image.new("RGB", (max(p.width for p in pictures), sum(p.height for p in pictures)), "white")
    top = 0
    for picture in pictures:
        whole.paste(picture, (0, top))
        top += picture.height
    return whole


def _weights(maps: AttentionMaps, column: Column) -> tuple[Weights, NDArray[np.bool_]]:
    first = column.kind == "pass1"
    heads_HST = (maps.pass1_LHTT if first else maps.pass2_LHNT)[column.layer]
    weights: Weights = heads_HST.mean(0) if column.head is None else heads_HST[column.head]
    return weights, maps.seen1_TT if first else maps.seen2_NT


def _lift(weights_ST: Weights, seen_ST: NDArray[np.bool_]) -> NDArray[np.float32]:
    """From 0 (a 16th of an even share, or less) over 0.5 (an even share) to 1 (16 times as much, or more)."""
    even = np.log2(np.maximum(weights_ST * seen_ST.sum(1, keepdims=True), 1e-9))
    lift: NDArray[np.float32] = (0.5 + 0.5 * even / OCTAVES).clip(0, 1).astype(np.float32)
    return lift


def _colours(weights_ST: Weights, seen_ST: NDArray[np.bool_]) -> NDArray[np.uint8]:
    colours = ramp(_lift(weights_ST, seen_ST).ravel()).reshape(*weights_ST.shape, 3)
    colours[~seen_ST] = NOT_SEEN
    return colours


def _mark(picture: Image.Image, query: int, grid: tuple[int, int], cell: int) -> Image.Image:
    """A frame around the token at a position."""
    marked = picture.copy()
    x, y = query % grid[1] * cell, query // grid[1] * cell
    draw = ImageDraw.Draw(marked)
    draw.rectangle((x - 2, y - 2, x + cell + 1, y + cell + 1), outline="black", width=2)
    draw.rectangle((x, y, x + cell - 1, y + cell - 1), outline="white", width=2)
    return marked


def _sheet(rows: Sequence[tuple[str, Sequence[tuple[str, Image.Image]]]]) -> Image.Image:
    """Rows with a title, of tiles with a caption each; the scale of the colours at the top."""
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
