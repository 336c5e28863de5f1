"""`arpg attention`: the attention of both passes as figures."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Annotated

import typer

from arpg.cli.options import SamplingOptions, err, out, with_sampling_options
from arpg.errors import present, require
from arpg.image import check_output, open_image, save
from arpg.tables import text_table


@with_sampling_options
def attention(
    image: Annotated[Path | None, typer.Argument(help="An image; default: one of the class is generated.")] = None,
    class_: Annotated[str | None, typer.Option("--class", "-c", help="Class name or id.")] = None,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="One image, or a folder for matrices.png and image.png."),
    ] = Path("attention.png"),
    layers: Annotated[str, typer.Option(help="all, last, or numbers from 1, like 2,5.")] = "all",
    heads: Annotated[str, typer.Option(help="mean, all, or numbers from 1, like 1,4.")] = "mean",
    query: Annotated[
        list[str] | None, typer.Option(metavar="ROW,COLUMN", help="A query token, from 1,1 (repeatable).")
    ] = None,
    *,
    sampling: SamplingOptions,
) -> None:
    """Write the attention of both passes: as matrices in decoding order, and over the image for a few tokens."""
    folder = output.is_dir() or not output.suffix
    check_output(output, folder=folder)
    chosen_layers = layers if layers in ("all", "last") else _numbers("layers", layers, "all, last or numbers")
    chosen_heads = heads if heads in ("all", "mean") else _numbers("heads", heads, "mean, all or numbers")
    require(image is not None or class_ is not None, "there is neither an image nor a --class; give one of them")
    opened = None if image is None else open_image(image)
    # The weights are computed a second time from queries and keys: in full precision, and not by a fused kernel.
    pipe = dataclasses.replace(sampling, dtype="float32", engine="eager").load()
    from arpg.evaluation.attention_maps import (
        choose_columns,
        default_queries,
        draw_matrices,
        draw_on_image,
        image_attention,
        stack,
        summarize,
    )

    positions = [_position(text, pipe.model.config.grid) for text in query or ()]
    with err.status("decoding"):
        maps, decoded = image_attention(pipe, opened, class_, seed=sampling.seed, **sampling.settings)
    columns = choose_columns(maps, layers=chosen_layers, heads=chosen_heads)
    figures = {
        "matrices": draw_matrices(maps, columns),
        "image": draw_on_image(maps, decoded, columns, queries=positions or default_queries(maps)),
    }
    given = {name: value for name, value in sampling.settings.items() if value is not None}
    about = json.dumps({"model": sampling.model, "class": class_, "seed": sampling.seed, **given})
    if folder:
        for name, figure in figures.items():
            save(figure, output / f"{name}.png", about=about)
    else:
        save(stack(list(figures.values())), output, about=about)
    rows = [
        (f"Pass {s.kind[-1]}, layer {s.layer + 1}", f"{s.on_prefix:.1%}", f"{s.evenness:.2f}", f"{s.reach:.2f}")
        for s in summarize(maps)
    ]
    out.print(text_table(["layer", "on the class", "evenness", "reach"], rows), markup=False)
    out.print("evenness: 1 is uniform attention; reach: mean distance over that of uniform attention")
    out.print(f"wrote {output}{'/' if folder else ''}")


def _numbers(name: str, text: str, expected: str) -> list[int]:
    require(bool(re.fullmatch(r"\d+(,\d+)*", text)), f"{name} is {text!r}; expected {expected}, like 1,3")
    return [int(part) for part in text.split(",")]


def _position(text: str, grid: tuple[int, int]) -> int:
    match = present(re.fullmatch(r"(\d+),(\d+)", text), f"query is {text!r}; expected ROW,COLUMN, like 6,6")
    row, column = int(match[1]), int(match[2])
    require(
        1 <= row <= grid[0] and 1 <= column <= grid[1],
        f"query is {text!r}; expected a row from 1 to {grid[0]} and a column from 1 to {grid[1]}",
    )
    return (row - 1) * grid[1] + column - 1
