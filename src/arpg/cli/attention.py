"""`arpg attention`: what both passes look at."""

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


@with_sampling_options
def attention(
    image: Annotated[Path | None, typer.Argument(help="A picture; none: one of the class is generated.")] = None,
    class_: Annotated[str | None, typer.Option("--class", "-c", help="Class name or id.")] = None,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="One image, or a folder for matrices.png and image.png."),
    ] = Path("attention.png"),
    layers: Annotated[str, typer.Option(help="all, last, or numbers from 1, like 2,5.")] = "all",
    heads: Annotated[str, typer.Option(help="mean, all, or numbers from 1, like 1,4.")] = "mean",
    query: Annotated[
        list[str] | None, typer.Option(metavar="ROW,COLUMN", help="A token to look from, from 1,1; as often as needed.")
    ] = None,
    *,
    sampling: SamplingOptions,
) -> None:
    """Draw the attention of both passes: as matrices in decoding order, and over the image for a few tokens."""
    folder = output.is_dir() or not output.suffix
    check_output(output, folder=folder)
    wanted_layers = layers if layers in ("all", "last") else _numbers("layers", layers, "all, last or numbers")
    wanted_heads = heads if heads in ("all", "mean") else _numbers("heads", heads, "mean, all or numbers")
    require(image is not None or class_ is not None, "there is neither a picture nor a --class; give one of them")
    picture = None if image is None else open_image(image)
    # The weights are computed a second time from queries and keys: in full precision, and not by a fused kernel.
    pipe = dataclasses.replace(sampling, dtype="float32", engine="eager").load()
    from arpg.evaluation.attention import image_attention, summarize
    from arpg.evaluation.attention_picture import (
        choose_columns,
        default_queries,
        draw_matrices,
        draw_on_image,
        stack,
    )

    positions = [_position(text, pipe.model.config.grid) for text in query or ()]
    with err.status("looking"):
        maps, seen = image_attention(pipe, picture, class_, seed=sampling.seed, **sampling.settings)
    columns = choose_columns(maps, layers=wanted_layers, heads=wanted_heads)
    pictures = {
        "matrices": draw_matrices(maps, columns),
        "image": draw_on_image(maps, seen, columns, queries=positions or default_queries(maps)),
    }
    given = {name: value for name, value in sampling.settings.items() if value is not None}
    about = json.dumps({"model": sampling.model, "class": class_, "seed": sampling.seed, **given})
    if folder:
        for name, drawn in pictures.items():
            save(drawn, output / f"{name}.png", about=about)
    else:
        save(stack(list(pictures.values())), output, about=about)
    out.print(f"{'layer':<16}{'on the class':>14}{'evenness':>12}{'reach':>10}")
    for line in summarize(maps):
        name = f"Pass {line.kind[-1]}, layer {line.layer + 1}"
        out.print(f"{name:<16}{line.on_prefix:>14.1%}{line.evenness:>12.2f}{line.reach:>10.2f}")
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
