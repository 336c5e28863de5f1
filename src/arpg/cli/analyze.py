"""`arpg score` and `arpg classify`: the likelihood of an image."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from arpg.cli.options import DeviceOption, ModelOption, err, load_pipeline, out, setting_help
from arpg.config import DEFAULT_MODEL, DEFAULT_TEXT_MODEL
from arpg.errors import require
from arpg.image import check_output, open_image, save

ImageArgument = Annotated[Path, typer.Argument(help="The image, which is centre-cropped.")]
OrdersOption = Annotated[int, typer.Option(help="How many random orders to average over.")]
SeedOption = Annotated[int, typer.Option(help="Order k has seed SEED + k.")]


def score(
    image: ImageArgument,
    class_: Annotated[str | None, typer.Option("--class", "-c", help="Class name or id; none: unconditional.")] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Prompt, for models that take prompts.")] = None,
    orders: OrdersOption = 4,
    order: Annotated[str, typer.Option(help=setting_help("order"))] = "random",
    bits_map: Annotated[Path | None, typer.Option("--map", help="Write a map of the bits of each token.")] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", help="A folder, a published name, a hub id; none: garden, or garden-text for a prompt."
        ),
    ] = None,
    seed: SeedOption = 0,
    device: DeviceOption = "auto",
) -> None:
    """Print the exact negative log-likelihood of an image's tokens, in bits per token."""
    from arpg.figures import draw_bits

    if bits_map is not None:
        check_output(bits_map, folder=False)
    source = open_image(image)
    pipe = load_pipeline(model or (DEFAULT_MODEL if prompt is None else DEFAULT_TEXT_MODEL), device=device)
    bits = pipe.score(source, class_, prompt=prompt, orders=orders, order=order, seed=seed)
    means = bits.mean((1, 2))
    spread = f" +- {means.std(ddof=1):.3f} between orders" if orders > 1 else ""
    out.print(f"{means.mean():.3f} bits per token ({bits[0].size} tokens, {orders} x {order}{spread})")
    if bits_map is not None:
        save(draw_bits(bits.mean(0), source), bits_map)
        out.print(f"wrote {bits_map}")


def classify(
    image: ImageArgument,
    top: Annotated[int, typer.Option(help="How many classes to show.")] = 5,
    orders: OrdersOption = 1,
    model: ModelOption = DEFAULT_MODEL,
    seed: SeedOption = 0,
    device: DeviceOption = "auto",
) -> None:
    """Print the classes under which an image is most likely."""
    require(top >= 1, f"top is {top}; expected 1 or more classes")
    source = open_image(image)
    pipe = load_pipeline(model, device=device)
    with err.status(f"comparing {len(pipe.classes)} classes"):
        bits = pipe.classify(source, orders=orders, seed=seed)
    for class_id in bits.argsort()[:top].tolist():
        out.print(f"{bits[class_id]:8.3f} bits per token  {class_id:5d}  {pipe.classes.name(class_id)}", markup=False)
