"""What all verbs that draw share: where the pictures go, the best of several, the animation, progress."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from PIL import Image

from arpg.cli.console import out, progress_bar
from arpg.cli.sampling import Sampling, add_options, samples
from arpg.config import CONTROLS, to_dict
from arpg.errors import require
from arpg.figures import Frames, save_gif
from arpg.image import check_output, open_image, save, sheet
from arpg.tasks.control_input import ControlInput


@dataclass(frozen=True)
class Output:
    """What the options say about the result."""

    path: Path
    folder: bool
    gif: Path | None
    beside: bool
    kind: str  # of condition images
    strength: float
    options: dict[str, Any]  # for the pipeline

    def draw(
        self,
        drawing: Any,
        *,
        pipe: Any,
        sampling: Sampling,
        about: dict[str, Any],
        names: Sequence[str],
        columns: int = 0,
    ) -> None:
        """Draw, with a progress bar, and write everything."""
        frames, wanted = Frames(), drawing.spec
        require(bool(wanted.controls) or not self.beside, "--beside needs a condition image; give --condition")

        def shown(rows: Sequence[int], images: list[Image.Image]) -> list[Image.Image]:
            return drawing.beside_conditions(rows, images) if self.beside else images

        with _progress(len(drawing)) as tick:

            def on_step(step: Any) -> None:
                tick(step)
                if self.gif is not None:
                    frames.add(drawing.rows, shown(drawing.rows, drawing.preview(step)))

            images = drawing.run(on_step)
        images = shown(drawing.kept, images)
        about = {"model": sampling.model, **about, **to_dict(wanted.settings)}
        if wanted.best_of > 1:
            about["best_of"] = wanted.best_of
        if wanted.controls:
            about |= {"kind": wanted.controls[0].kind, "strength": wanted.controls[0].strength}
        labels = [_shown(label, len(pipe.classes)) for label in wanted.labels]
        abouts = [{**about, **what, "seed": seed} for what, seed in zip(labels, drawing.seeds, strict=True)]
        self._write(images, names=names, abouts=abouts, columns=columns)
        if self.gif is not None:
            save_gif(frames.sheets(drawing.kept, columns=columns or None), self.gif)
            out.print(f"the steps are in {self.gif}")

    def _write(
        self, images: Sequence[Image.Image], *, names: Sequence[str], abouts: Sequence[dict[str, Any]], columns: int
    ) -> None:
        if self.folder:
            for i, (image, name, about) in enumerate(zip(images, names, abouts, strict=True)):
                save(image, self.path / f"{i:05d}-{slug(name)}-seed{about['seed']}.png", about=json.dumps(about))
        else:
            whole = images[0] if len(images) == 1 else sheet(images, columns=columns or None)
            seeds = {"seeds": [about["seed"] for about in abouts]} if len(images) > 1 else {}
            save(whole, self.path, about=json.dumps({**abouts[0], "images": len(images), **seeds}))
        out.print(f"{len(images)} image{'s' if len(images) > 1 else ''} in {self.path}{'/' if self.folder else ''}")


def _outputs(
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="An image (a sheet if there are several), or a folder (one file each)."),
    ] = Path("out.png"),
    gif: Annotated[Path | None, typer.Option(help="Also write the decoding, step by step, as a GIF.")] = None,
    condition: Annotated[
        Path | None, typer.Option(help="A condition image that steers the result, where a model takes it.")
    ] = None,
    kind: Annotated[str, typer.Option(help=f"What the condition image is: {', '.join(CONTROLS)}.")] = CONTROLS[0],
    strength: Annotated[float, typer.Option(help="How much it steers: 0 not at all, 1 as trained.")] = 1.0,
    beside: Annotated[bool, typer.Option("--beside", help="Show the condition image beside each result.")] = False,
    best_of: Annotated[int, typer.Option(help="Draw so many for each image and keep the most likely.")] = 1,
    batch_size: Annotated[int, typer.Option(help="Images decoded together; does not change them.")] = 32,
) -> Output:
    folder = output.is_dir() or not output.suffix
    check_output(output, folder=folder)
    if gif is not None:
        require(gif.suffix.lower() == ".gif", f"{gif} does not end in .gif; expected the name of a GIF file")
        check_output(gif, folder=False)
    options: dict[str, Any] = {"best_of": best_of, "batch_size": batch_size}
    if condition is not None:
        options["control"] = ControlInput(open_image(condition, what="condition image"), kind, strength)
    return Output(output, folder, gif, beside, kind, strength, options)


def draws(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of sampling and output; its parameters `sampling` and `output` receive them."""
    return samples(add_options(command, _outputs, "output"))


def _shown(label: Any, num_classes: int) -> dict[str, Any]:
    """What a picture was asked to be, for its metadata."""
    if isinstance(label, int):
        return {"class": None if label == num_classes else label}
    negative = {"negative": label.negative} if label.negative_TE is not None else {}
    return {"prompt": label.text if label.states_TE is not None else None, **negative}


def slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:80].strip("-") or "image"


@contextmanager
def _progress(num_requests: int) -> Iterator[Callable[[Any], None]]:
    """A progress bar over the steps of all requests."""
    with progress_bar() as progress:
        task = progress.add_task("drawing", total=None)

        def on_step(step: Any) -> None:
            total = None if step.num_steps is None else num_requests * step.num_steps  # None: that will be seen
            progress.update(task, advance=1, total=total)

        yield on_step
