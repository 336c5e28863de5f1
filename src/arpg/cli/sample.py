"""`arpg sample`: many images for an evaluation, in one file."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from arpg.cli.options import SamplingOptions, err, out, with_sampling_options
from arpg.errors import require
from arpg.image import check_writable

LikeOption = Annotated[
    list[str] | None,
    typer.Option("--like", help="Classes as often as in these images (class folders); else all equally often."),
]


@with_sampling_options
def sample(
    num: Annotated[int, typer.Option("--num", "-n", help="How many images in all.")],
    output: Annotated[Path, typer.Option("--out", "-o", help="The npz file to write.")] = Path("samples.npz"),
    batch_size: Annotated[int, typer.Option(help="Images decoded together; does not change them.")] = 32,
    like: LikeOption = None,
    *,
    sampling: SamplingOptions,
) -> None:
    """Generate many images into one npz file; alone or under torchrun, and again after an interruption."""
    require(num >= 1, f"the number of images is {num}; expected 1 or more")
    require(batch_size >= 1, f"batch_size is {batch_size}; expected 1 or more")
    check_writable(output)
    rank, size, device = _place(sampling.device)
    pipe = dataclasses.replace(sampling, device=device).load()
    from arpg.evaluation.sampling import Share, sample_images

    labels = choose_labels(pipe, num, like)
    with image_progress("sampling", active=rank == 0) as progress:
        sample_images(
            pipe,
            output,
            labels=labels,
            seed=sampling.seed,
            batch_size=batch_size,
            share=Share(rank, size),
            progress=progress,
            **sampling.settings,
        )
    if rank == 0:
        out.print(f"{num} images in {output}")


def choose_labels(pipe: Any, num: int, like: list[str] | None) -> Any:
    """Balanced, or in proportion to the classes of image sets."""
    from arpg.data.images import concatenate, open_images
    from arpg.evaluation.sampling import balanced_labels, count_classes, labels_like

    if not like:
        return balanced_labels(num, len(pipe.classes))
    return labels_like(count_classes(concatenate([open_images(path) for path in like]), pipe), num)


def _place(device: str) -> tuple[int, int, str]:
    """Rank, number of processes and device, as torchrun says; alone without it."""
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1 and device in ("auto", "cuda"):
        import torch

        if torch.cuda.is_available():
            device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    return rank, size, device


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:.1f} images/s" if task.speed else "")


@contextmanager
def image_progress(what: str, *, active: bool = True) -> Iterator[Any]:
    """`progress(done, total)` moves a bar with the time left and images per second."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), _Rate())
    hidden = not active or not err.is_terminal
    with Progress(*columns, console=err, transient=True, disable=hidden, speed_estimate_period=300) as bar:
        task = bar.add_task(what, total=None)
        started = False

        def progress(done: int, total: int) -> None:
            nonlocal started
            if not started:  # what an earlier run did says nothing about the speed of this one
                bar.reset(task, total=total, completed=done)
                started = True
            bar.update(task, completed=done, total=total)

        yield progress
