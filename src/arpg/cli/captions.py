"""`arpg compose` and `arpg embed`: captioned tokens for models that take prompts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from arpg.cli.options import DeviceOption, out, progress_bar
from arpg.errors import require
from arpg.image import check_output, save


def compose(
    fruits: Annotated[str, typer.Option(help="The fruit set: class folders on white.")],
    emoji: Annotated[str, typer.Option(help="The emoji set, with its captions.json.")],
    folder: Annotated[Path | None, typer.Option("--out", "-o", help="The token folder to write.")] = None,
    num: Annotated[int, typer.Option("--num", "-n", help="How many scenes.")] = 16,
    tokenizer: Annotated[str, typer.Option("--tokenizer", "-t", help="A model folder with a tokenizer.")] = "garden",
    sheet: Annotated[
        Path | None, typer.Option(help="Also draw up to 64 scenes with their captions, as a picture.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Scene i has seed SEED + i.")] = 0,
    size: Annotated[int, typer.Option(help="Side of a scene in pixels.")] = 96,
    processes: Annotated[int | None, typer.Option(help="That draw; 0: this one. Not given: one for each core.")] = None,
    depth: Annotated[bool, typer.Option("--depth", help="Also keep their exact depth as condition images.")] = False,
    device: DeviceOption = "auto",
) -> None:
    """Compose captioned scenes from cut-outs, as tokens for `arpg train`; continues where it stopped."""
    require(folder is not None or sheet is not None, "neither --out nor --sheet is given; there is nothing to write")
    if sheet is not None:
        from arpg.data.composer import Composer
        from arpg.image import sheet as make_sheet

        check_output(sheet, folder=False)
        composer = Composer(fruits, emoji, size=size)
        scenes = [composer.scene(seed + i) for i in range(min(num, 64))]
        save(make_sheet([s.image for s in scenes], captions=[s.caption for s in scenes]), sheet)
        out.print(f"wrote {sheet}")
    if folder is None:
        return
    import torch

    from arpg.checkpoint import load_tokenizer
    from arpg.data.compose import compose_tokens
    from arpg.hub import resolve
    from arpg.pipeline import choose_device

    loaded = load_tokenizer(resolve(tokenizer), device=choose_device(device), dtype=torch.float32)
    with progress_bar() as progress:
        task = progress.add_task("composing", total=num)
        tokens = compose_tokens(
            loaded,
            (fruits, emoji),
            folder,
            num=num,
            seed=seed,
            size=size,
            depth=depth,
            processes=len(os.sched_getaffinity(0)) if processes is None else processes,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    out.print(f"{tokens.num_images} scenes of {tokens.grid[0]}x{tokens.grid[1]} tokens in {folder}")


def embed(
    folder: Annotated[Path, typer.Argument(help="A token folder with captions.")],
    encoder: Annotated[
        str, typer.Option(help="minilm, flan-t5-xl (or another size), a hub id or a folder.")
    ] = "minilm",
    max_tokens: Annotated[int, typer.Option(help="Captions are cut there.")] = 32,
    batch_size: Annotated[int, typer.Option(help="Captions encoded together.")] = 512,
    device: DeviceOption = "auto",
) -> None:
    """Compute the text states of a token set's captions, once, for `arpg train`; continues where it stopped."""
    from arpg.config import TextConfig
    from arpg.data.text_states import TEXT, open_text_states, write_text_states
    from arpg.data.tokens import open_tokens
    from arpg.pipeline import choose_device
    from arpg.text import load_encoder

    tokens = open_tokens(folder)
    if (folder / TEXT).exists():  # how wide the states are is known without the encoder
        width = open_text_states(tokens).config.width
        load = None
    else:
        load = load_encoder(encoder, max_tokens=max_tokens, device=choose_device(device))
        width = load.width
    with progress_bar() as progress:
        task = progress.add_task("embedding", total=None)
        states = write_text_states(
            tokens,
            TextConfig(encoder, width, max_tokens),
            load,
            batch_size=batch_size,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    out.print(f"{len(states)} captions in {folder}, {width} numbers for each token")
