"""`arpg score`, `classify` and `attention`: the likelihood of an image, and what both passes attend to."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Annotated

import typer

from arpg.cli.options import (
    AdaptedModelOption,
    DeviceOption,
    LoraOption,
    SamplingOptions,
    err,
    load_pipeline,
    out,
    output_option,
    parse_order,
    setting_help,
    with_sampling_options,
)
from arpg.config import DEFAULT_MODEL, DEFAULT_TEXT_MODEL
from arpg.errors import present, require
from arpg.tables import text_table

ImageArgument = Annotated[Path, typer.Argument(help="The image, which is centre-cropped.")]
OrdersOption = Annotated[int, typer.Option(help="How many random orders to average over.")]
SeedOption = Annotated[int, typer.Option(help="Order k has seed SEED + k.")]


def score(
    image: ImageArgument,
    class_: Annotated[str | None, typer.Option("--class", "-c", help="Class name or id; none: unconditional.")] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Prompt, for models that take prompts.")] = None,
    orders: OrdersOption = 4,
    order: Annotated[str, typer.Option(help=setting_help("order"))] = "random",
    output: Annotated[Path | None, output_option("Also write an image with the bits of each token.")] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help=f"A folder, a published name, a hub id; none: {DEFAULT_MODEL}, or {DEFAULT_TEXT_MODEL} for a prompt.",
        ),
    ] = None,
    lora: LoraOption = None,
    seed: SeedOption = 0,
    device: DeviceOption = "auto",
) -> None:
    """Print the exact negative log-likelihood of an image's tokens, in bits per token."""
    from arpg.figures import draw_bits
    from arpg.image import check_output, open_image, save

    if output is not None:
        check_output(output, folder=False)
    source = open_image(image)
    default = DEFAULT_MODEL if prompt is None else DEFAULT_TEXT_MODEL
    pipe = load_pipeline(model, default=default, lora=lora, device=device)
    bits = pipe.score(source, class_, prompt=prompt, orders=orders, order=parse_order(order), seed=seed)
    means = bits.mean((1, 2))
    spread = f" +- {means.std(ddof=1):.3f} between orders" if orders > 1 else ""
    out.print(f"{means.mean():.3f} bits per token ({bits[0].size} tokens, {orders} x {order}{spread})")
    if output is not None:
        save(draw_bits(bits.mean(0), source), output)
        out.print(f"wrote {output}")


def classify(
    image: ImageArgument,
    top: Annotated[int, typer.Option(help="How many classes to show.")] = 5,
    orders: OrdersOption = 1,
    model: AdaptedModelOption = None,
    lora: LoraOption = None,
    seed: SeedOption = 0,
    device: DeviceOption = "auto",
) -> None:
    """Print the classes under which an image is most likely."""
    from arpg.image import open_image

    require(top >= 1, f"top is {top}; expected 1 or more classes")
    source = open_image(image)
    pipe = load_pipeline(model, lora=lora, device=device)
    with err.status(f"comparing {len(pipe.classes)} classes"):
        bits = pipe.classify(source, orders=orders, seed=seed)
    for class_id in bits.argsort()[:top].tolist():
        out.print(f"{bits[class_id]:8.3f} bits per token  {class_id:5d}  {pipe.classes.name(class_id)}")


@with_sampling_options
def attention(
    image: Annotated[Path | None, typer.Argument(help="An image; default: one of the class is generated.")] = None,
    class_: Annotated[str | None, typer.Option("--class", "-c", help="Class name or id.")] = None,
    output: Annotated[Path, output_option("One image, or a folder for matrices.png and image.png.")] = Path(
        "attention.png"
    ),
    layers: Annotated[str, typer.Option(help="all, last, or numbers from 1, like 2,5.")] = "all",
    heads: Annotated[str, typer.Option(help="mean, all, or numbers from 1, like 1,4.")] = "mean",
    query: Annotated[
        list[str] | None, typer.Option(metavar="ROW,COLUMN", help="A query token, from 1,1 (repeatable).")
    ] = None,
    *,
    sampling: SamplingOptions,
) -> None:
    """Write the attention of both passes: as matrices in decoding order, and over the image for a few tokens."""
    from arpg.image import check_output, open_image, save

    folder = output.is_dir() or not output.suffix
    check_output(output, folder=folder)
    chosen_layers = layers if layers in ("all", "last") else _numbers("layers", layers, "all, last or numbers")
    chosen_heads = heads if heads in ("all", "mean") else _numbers("heads", heads, "mean, all or numbers")
    require(image is not None or class_ is not None, "there is neither an image nor a --class; give one of them")
    opened = None if image is None else open_image(image)
    # The weights are computed a second time from queries and keys: in full precision, and not by a fused kernel.
    sampling = dataclasses.replace(sampling.with_default_model(), dtype="float32", engine="eager")
    pipe = sampling.load()
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
    out.print(text_table(["layer", "on the class", "evenness", "reach"], rows))
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
