"""The one interface to text encoders: prompts in, the states of their tokens out. What is behind it is an argument.

Shapes: B batch, T tokens of a prompt, E width of the states.
"""

from __future__ import annotations

import logging
import unicodedata
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from arpg.errors import InputError

_log = logging.getLogger(__name__)


class TextEncoder:
    """A network and its tokenizer, both as `transformers` has them. Prompts longer than `max_tokens` are cut."""

    def __init__(self, tokenizer: Any, network: Any, *, max_tokens: int, device: torch.device | str = "cpu") -> None:
        self.tokenizer, self.max_tokens, self.device = tokenizer, max_tokens, torch.device(device)
        self.network = network.to(self.device).eval()
        self.width: int = network.config.hidden_size
        self._special, self._unknown = set(tokenizer.all_special_ids), tokenizer.unk_token_id

    @torch.inference_mode()
    def states(self, prompts: Sequence[str], *, batch_size: int = 1) -> list[Tensor]:
        """`[T, E]` for each prompt, on the CPU, in float32.

        Only prompts of the same length share a batch, so nothing is ever padded.
        """
        texts = [readable(prompt) for prompt in prompts]
        whole: list[list[int]] = self.tokenizer(texts, truncation=False)["input_ids"] if texts else []
        ids = [self._cut(*both) for both in zip(prompts, texts, whole, strict=True)]
        by_length = sorted(range(len(ids)), key=lambda i: len(ids[i]))
        found: dict[int, Tensor] = {}
        while by_length:
            length = len(ids[by_length[0]])
            chosen = [i for i in by_length[:batch_size] if len(ids[i]) == length]
            by_length = by_length[len(chosen) :]
            ids_BT = torch.tensor([ids[i] for i in chosen], device=self.device)
            states_BTE = self.network(input_ids=ids_BT, attention_mask=torch.ones_like(ids_BT)).last_hidden_state
            found |= dict(zip(chosen, states_BTE.float().cpu().clone(), strict=True))
        return [found[i] for i in range(len(ids))]

    def _cut(self, prompt: str, text: str, ids: list[int]) -> list[int]:
        """Token ids, cut with the special tokens in their places; says so where something is lost."""
        if len(ids) > self.max_tokens:
            _log.warning(
                "prompt %s has %d tokens; only the first %d count, so make it shorter",
                _short(prompt),
                len(ids),
                self.max_tokens,
            )
            ids = self.tokenizer(text, truncation=True, max_length=self.max_tokens)["input_ids"]
        unknown = ids.count(self._unknown)
        if unknown and 2 * unknown >= unknown + sum(i not in self._special for i in ids):
            _log.warning("prompt %s is mostly unknown to the encoder; English works best", _short(prompt))
        return ids


def readable(prompt: str) -> str:
    """The prompt in characters that encoders know: emoji by their Unicode names, no invisible marks, single spaces."""
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


def transformers() -> Any:
    """The library, where it is installed."""
    try:
        import transformers as library
    except ImportError:
        raise InputError("prompts need the extra: pip install 'arpg[text]'") from None
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    return library


def _short(prompt: str) -> str:
    return repr(prompt if len(prompt) <= 60 else prompt[:57] + "...")
