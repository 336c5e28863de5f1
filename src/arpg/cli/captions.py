"""`arpg embed`: text states of captioned tokens, for models that take prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from arpg.cli.options import DeviceOption, out, progress_bar


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
    from arpg.data.dataset import TEXT, open_text_states, write_text_states
    from arpg.data.tokens import open_tokens
    from arpg.pipeline import choose_device
    from arpg.text_encoder import load_encoder

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
