"""Precomputed text: the encoder's states of every caption of a token set, beside it, mapped into memory.

    text.json                 which encoder, how wide, at how many tokens captions are cut
    text-00000.npy            float16, [tokens of all captions of the shard, E]
    text-lengths-00000.npy    int32, [n]: tokens of each caption

Shapes: n images of a shard, b batch, T most tokens of a caption, E width of the states.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arpg.config import TextConfig, from_dict, to_dict
from arpg.data.tokens import TokenSet
from arpg.errors import InputError, present, require
from arpg.files import write_whole
from arpg.text_encoder import TextEncoder

TEXT = "text.json"
AT_ONCE = 4096  # captions whose states are in memory together, as a list of tensors


class TextStates:
    """States by image, over all shards."""

    def __init__(
        self, config: TextConfig, states: Sequence[NDArray[np.float16]], lengths: Sequence[NDArray[np.int32]]
    ) -> None:
        self.config = config
        self._states = list(states)
        self._lengths = np.concatenate(lengths)
        self._shard = np.repeat(np.arange(len(lengths)), [len(part) for part in lengths])
        self._first = np.concatenate([np.cumsum(part, dtype=np.int64) - part for part in lengths])

    def __len__(self) -> int:
        return len(self._lengths)

    def gather(self, index: NDArray[np.int64]) -> tuple[NDArray[np.float16], NDArray[np.int64]]:
        """`[b, T, E]`, zero after the end of a caption, and the lengths `[b]`."""
        length_b = self._lengths[index].astype(np.int64)
        out = np.zeros((len(index), self.config.max_tokens, self.config.width), np.float16)
        for shard in np.unique(self._shard[index]).tolist():
            (here,) = np.nonzero(self._shard[index] == shard)
            row = np.repeat(here, length_b[here])
            token = np.arange(len(row)) - np.repeat(np.cumsum(length_b[here]) - length_b[here], length_b[here])
            out[row, token] = self._states[shard][self._first[index[row]] + token]
        return out, length_b


def write_text_states(
    tokens: TokenSet,
    config: TextConfig,
    encoder: TextEncoder | None,
    *,
    batch_size: int = 256,
    shard_size: int = 65536,
    progress: Callable[[int, int], None] | None = None,
) -> TextStates:
    """Encode the captions of a token set; continues where it stopped. A finished set needs no encoder."""
    folder, captions = _captioned(tokens)
    if (folder / TEXT).exists():
        found = open_text_states(tokens)
        require(
            found.config == config,
            f"{folder} has text states of {_said(found.config)}, not of {_said(config)}; delete {TEXT} and text-*.npy",
        )
        return found
    for number, start in enumerate(range(0, len(captions), shard_size)):
        part = captions[start : start + shard_size]
        if not (folder / _names(number)[1]).exists():
            _write_shard(folder, number, part, present(encoder, f"{folder} is not embedded yet"), batch_size)
        if progress is not None:
            progress(min(start + shard_size, len(captions)), len(captions))
    write_whole(
        folder / TEXT, lambda path: path.write_text(json.dumps(to_dict(config), indent=1) + "\n", encoding="utf-8")
    )
    return open_text_states(tokens)


def open_text_states(tokens: TokenSet) -> TextStates:
    """The states of a set's captions."""
    folder, captions = _captioned(tokens)
    path = folder / TEXT
    require(path.is_file(), f"{folder} has captions but no text states; run `arpg embed {folder}` first")
    try:
        config = from_dict(TextConfig, json.loads(path.read_text(encoding="utf-8")), where=str(path))
    except json.JSONDecodeError as error:
        raise InputError(f"{path} is not valid JSON: {error}") from None
    states: list[NDArray[Any]] = []
    lengths: list[NDArray[Any]] = []
    while all((folder / name).exists() for name in _names(len(states))):
        names = _names(len(states))
        states.append(_load(folder / names[0]))
        lengths.append(_load(folder / names[1]))
        where = f"{folder / names[0]}: embed again"
        require(lengths[-1].ndim == 1 and lengths[-1].min(initial=1) >= 1, f"{where}, its lengths are damaged")
        require(
            states[-1].shape == (int(lengths[-1].sum()), config.width) and int(lengths[-1].max()) <= config.max_tokens,
            f"{where}, it has the shape {states[-1].shape} for {int(lengths[-1].sum())} tokens of {config.width}",
        )
    found = sum(map(len, lengths))
    require(
        found == len(captions), f"{folder} has text states of {found} captions; expected {len(captions)}; embed again"
    )
    return TextStates(config, states, lengths)


def _captioned(tokens: TokenSet) -> tuple[Path, Sequence[str]]:
    captions = present(tokens.captions, f"{tokens.folder} has no captions; tokenize images that have them")
    assert tokens.folder is not None
    return tokens.folder, captions


def _write_shard(folder: Path, number: int, captions: Sequence[str], encoder: TextEncoder, batch_size: int) -> None:
    parts, lengths = [], []
    for start in range(0, len(captions), AT_ONCE):
        states = encoder.states(captions[start : start + AT_ONCE], batch_size=batch_size)
        parts.append(np.concatenate([s.numpy().astype(np.float16) for s in states]))
        lengths += [len(s) for s in states]
    for name, array in zip(_names(number), (np.concatenate(parts), np.array(lengths, np.int32)), strict=True):
        _write(folder / name, array)


def _write(path: Path, array: NDArray[Any]) -> None:
    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:
            np.save(file, array)

    write_whole(path, write)


def _load(path: Path) -> NDArray[Any]:
    try:
        array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{path} is not a whole .npy file ({error}); delete it and embed again") from None
    return array


def _names(number: int) -> tuple[str, str]:
    return f"text-{number:05d}.npy", f"text-lengths-{number:05d}.npy"


def _said(config: TextConfig) -> str:
    return f"{config.encoder} ({config.width} wide, {config.max_tokens} tokens)"
