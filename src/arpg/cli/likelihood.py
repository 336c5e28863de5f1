"""`arpg score` and `arpg classify`: what the model thinks of a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from arpg import config as configs
from arpg import settings as settings_table
from arpg.cli.console import DeviceOption, err, out
from arpg.errors import require
from arpg.image import check_output, open_image, save

ModelOption = Annotated[str, typer.Option("--model", "-m", help="garden, a folder, a published name or a hub id.")]
ImageArgument = Annotated[Path, typer.Argument(help="The picture; its centre is looked at.")]
OrdersOption = Annotated[int, typer.Option(help="How many random orders to average over.")]
SeedOption = Annotated[int, typer.Option(help="Order k has seed SEED + k.")]


def score(
    image: ImageArgument,
    class_: Annotated[str | None, typer.Option("--class", "-c", help="Class name or id; none: unconditional.")] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Instead of a class.")] = None,
    orders: OrdersOption = 4,
    order: Annotated[str, typer.Option(help=f"{', '.join(settings_table.ORDERS)}.")] = "random",
    surprise: Annotated[Path | None, typer.Option("--map", help="Write the bits of each token as a picture.")] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", help="A folder, a published name, a hub id; none: garden, or garden-text for a prompt."
        ),
    ] = None,
    seed: SeedOption = 0,
    device: DeviceOption = "auto",
) -> None:
    """The exact log-likelihood of a picture's tokens, in bits per token."""
    from arpg.figures import draw_bits

    if surprise is not None:
        check_output(surprise, folder=False)
    picture = open_image(image)
    in_the_box = configs.DEFAULT_MODEL if prompt is None else configs.DEFAULT_TEXT_MODEL
    pipe = _load(model or in_the_box, device)
    bits = pipe.score(picture, class_, prompt=prompt, orders=orders, order=order, seed=seed)
    means = bits.mean((1, 2))
    spread = f" +- {means.std(ddof=1):.3f} between orders" if orders > 1 else ""
    out.print(f"{means.mean():.3f} bits per token ({bits[0].size} tokens, {orders} x {order}{spread})")
    if surprise is not None:
        save(draw_bits(bits.mean(0), picture), surprise)
        out.print(f"wrote {surprise}")


def classify(
    image: ImageArgument,
    top: Annotated[int, typer.Option(help="How many classes to show.")] = 5,
    orders: OrdersOption = 1,
    model: ModelOption = configs.DEFAULT_MODEL,
    seed: SeedOption = 0,
    device: DeviceOption = "auto",
) -> None:
    """The classes under which a picture is most likely."""
    require(top >= 1, f"top is {top}; expected 1 or more classes")
    picture = open_image(image)
    pipe = _load(model, device)
    with err.status(f"comparing {len(pipe.classes)} classes"):
        bits = pipe.classify(picture, orders=orders, seed=seed)
    for class_id in bits.argsort()[:top].tolist():
        out.print(f"{bits[class_id]:8.3f} bits per token  {class_id:5d}  {pipe.classes.name(class_id)}", markup=False)


def _load(model: str, device: str) -> Any:
    with err.status("loading"):
        from arpg.device import set_threads
        from arpg.pipeline import Pipeline

        set_threads()
        return Pipeline.from_pretrained(model, device=device)
