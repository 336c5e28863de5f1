"""Prompts and their states: computed once, kept in memory and, where a folder is given, on disk.

The encoder is only loaded for a prompt that nobody has asked for before.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from arpg.config import TextConfig
from arpg.errors import require
from arpg.files import write_whole
from arpg.text.encoder import TextEncoder
from arpg.text.minilm import load_minilm
from arpg.text.t5 import load_t5

IN_MEMORY = 1 << 28  # bytes of states


def load_encoder(name: str, *, max_tokens: int, device: torch.device | str = "cpu") -> TextEncoder:
    """By name: minilm, flan-t5-SIZE, a hub id or a folder."""
    if name == "minilm":
        return load_minilm(max_tokens=max_tokens, device=device)
    return load_t5(name, max_tokens=max_tokens, device=device)


def open_encoder(config: TextConfig, *, device: torch.device | str = "cpu") -> TextEncoder:
    """The encoder that a model was trained with."""
    encoder = load_encoder(config.encoder, max_tokens=config.max_tokens, device=device)
    require(
        encoder.width == config.width,
        f"text encoder {config.encoder} has states of {encoder.width} numbers; the model takes {config.width}",
    )
    return encoder


class Prompts:
    """States by prompt. Any thread may ask: prompts that are kept are there at once, new ones are made one by one."""

    def __init__(
        self,
        config: TextConfig,
        *,
        folder: Path | None = None,
        device: torch.device | str = "cpu",
        load: Callable[[], TextEncoder] | None = None,
    ) -> None:
        """`load`: how the encoder comes about, if not by its name."""
        self.config, self.folder = config, folder
        self._load = load or (lambda: open_encoder(config, device=device))
        self._encoder: TextEncoder | None = None
        self._known: OrderedDict[str, Tensor] = OrderedDict()  # the one that was asked for last is last
        self._bytes = 0
        self._keeping, self._making = threading.Lock(), threading.Lock()

    @property
    def encoder(self) -> TextEncoder:
        if self._encoder is None:
            self._encoder = self._load()
        return self._encoder

    def states(self, prompt: str) -> Tensor:
        """`[T, E]`, on the CPU. One prompt at a time, so that its states depend on nothing else."""
        found = self._kept(prompt)
        if found is not None:
            return found
        with self._making:
            found = self._kept(prompt)  # somebody else may have asked for it meanwhile
            if found is None:
                found = self._from_disk(prompt)
                if found is None:
                    found = self.encoder.states([prompt])[0]
                    self._to_disk(prompt, found)
                self._keep(prompt, found)
        return found

    def _kept(self, prompt: str) -> Tensor | None:
        with self._keeping:
            found = self._known.get(prompt)
            if found is not None:
                self._known.move_to_end(prompt)
            return found

    def _keep(self, prompt: str, states: Tensor) -> None:
        """Those that nobody has asked for the longest make room."""
        with self._keeping:
            self._known[prompt] = states
            self._bytes += states.nbytes
            while self._bytes > IN_MEMORY and len(self._known) > 1:
                self._bytes -= self._known.popitem(last=False)[1].nbytes

    def _path(self, prompt: str) -> Path | None:
        if self.folder is None or Path(self.config.encoder).is_dir():  # a folder may change
            return None
        about = f"{self.config.encoder}\n{self.config.max_tokens}\n{prompt}"
        return self.folder / f"{hashlib.sha256(about.encode('utf-8', 'surrogatepass')).hexdigest()[:40]}.npy"

    def _from_disk(self, prompt: str) -> Tensor | None:
        path = self._path(prompt)
        if path is None or not path.is_file():
            return None
        try:
            states = torch.from_numpy(np.load(path, allow_pickle=False))
        except (OSError, ValueError, EOFError):  # damaged: it is computed again and replaced
            return None
        shape = tuple(states.shape)
        right = len(shape) == 2 and 1 <= shape[0] <= self.config.max_tokens and shape[1] == self.config.width
        return states if right else None

    def _to_disk(self, prompt: str, states: Tensor) -> None:
        path = self._path(prompt)
        if path is not None:

            def write(temporary: Path) -> None:
                with temporary.open("wb") as file:
                    np.save(file, states.numpy())

            write_whole(path, write)
