"""BERT and its WordPiece tokenizer in plain PyTorch: MiniLM where `transformers` is not installed.

The names of the parameters are those of the files. Shapes: B batch, T tokens, E width, H heads, K channels of a head.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from arpg.files import read_tensors

MOST_KNOWN = 1 << 16  # words whose pieces are kept
LONGEST = 100  # characters of a word; what is longer is unknown
CHINESE = ((0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x2CEAF), (0x2F800, 0x2FA1F))


class WordPieces:
    """Text to ids: lower case without accents, words and punctuation apart, each word in its longest known pieces."""

    def __init__(self, words: Sequence[str]) -> None:
        self.ids = {word: i for i, word in enumerate(words)}
        self.first, self.last, self.unk_token_id = (self.ids[name] for name in ("[CLS]", "[SEP]", "[UNK]"))
        self._known: dict[str, list[int]] = {}  # captions have few words, many times
        self.all_special_ids = [self.ids[f"[{name}]"] for name in ("UNK", "SEP", "PAD", "CLS", "MASK")]

    def __call__(
        self, texts: str | Sequence[str], *, truncation: bool = False, max_length: int = 512
    ) -> dict[str, Any]:
        """As a tokenizer of `transformers` is called; cut, where it is, before the last special token."""
        if isinstance(texts, str):
            pieces = [i for word in _words(texts) for i in self._known.get(word) or self._pieces(word)]
            return {"input_ids": [self.first, *(pieces[: max_length - 2] if truncation else pieces), self.last]}
        return {"input_ids": [self(t, truncation=truncation, max_length=max_length)["input_ids"] for t in texts]}

    def _pieces(self, word: str) -> list[int]:
        found, start = [], 0
        while start < len(word):
            ends = range(len(word), start, -1)
            names = ((end, ("##" if start else "") + word[start:end]) for end in ends)
            end, name = next(((end, name) for end, name in names if name in self.ids), (0, ""))
            if not name or len(word) > LONGEST:
                return [self.unk_token_id]
            found.append(self.ids[name])
            start = end
        if len(self._known) < MOST_KNOWN:
            self._known[word] = found
        return found


def _words(text: str) -> list[str]:
    if text.isascii() and text.isprintable():
        return re.findall(r"[a-z0-9]+|[^a-z0-9\s]", text.lower())
    spaced = []
    for character in unicodedata.normalize("NFD", text.lower()):
        kind = unicodedata.category(character)
        if kind == "Mn" or (kind[0] == "C" and not character.isspace()):  # accents, controls
            continue
        alone = kind[0] == "P" or (character.isascii() and character.isprintable() and not character.isalnum())
        alone = alone or any(low <= ord(character) <= high for low, high in CHINESE)
        spaced.append(f" {character} " if alone else character)
    return "".join(spaced).split()


class Bert(nn.Module):
    """The states of the last layer."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, eps = config["hidden_size"], config["layer_norm_eps"]
        self.config = SimpleNamespace(hidden_size=width)
        self.embeddings = nn.ModuleDict(
            {
                "word_embeddings": nn.Embedding(config["vocab_size"], width),
                "position_embeddings": nn.Embedding(config["max_position_embeddings"], width),
                "token_type_embeddings": nn.Embedding(config["type_vocab_size"], width),
                "LayerNorm": nn.LayerNorm(width, eps=eps),
            }
        )
        heads, inner = config["num_attention_heads"], config["intermediate_size"]
        layers = [Layer(width, heads, inner, eps) for _ in range(config["num_hidden_layers"])]
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(layers)})

    def forward(self, *, input_ids: Tensor, attention_mask: Tensor) -> SimpleNamespace:
        """As one of `transformers` is called. Nothing is ever padded, so there is nothing to mask."""
        place_T = torch.arange(input_ids.shape[1], device=input_ids.device)
        parts: Any = self.embeddings
        x: Tensor = parts["word_embeddings"](input_ids) + parts["token_type_embeddings"].weight[0]
        x = parts["LayerNorm"](x + parts["position_embeddings"](place_T))
        layers: Any = self.encoder["layer"]
        for layer in layers:
            x = layer(x)
        return SimpleNamespace(last_hidden_state=x)


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, inner: int, eps: float) -> None:
        super().__init__()
        self.heads = heads
        three = {name: nn.Linear(width, width) for name in ("query", "key", "value")}
        self.attention = nn.ModuleDict({"self": nn.ModuleDict(three), "output": _after(width, width, eps)})
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(width, inner)})
        self.output = _after(inner, width, eps)

    def forward(self, x_BTE: Tensor) -> Tensor:
        three: Any = self.attention["self"]
        q, k, v = (
            three[name](x_BTE).unflatten(2, (self.heads, -1)).transpose(1, 2) for name in ("query", "key", "value")
        )
        mixed_BTE = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x_BTE = _add(self.attention["output"], mixed_BTE, x_BTE)
        return _add(self.output, F.gelu(self.intermediate["dense"](x_BTE)), x_BTE)


def _after(inputs: int, width: int, eps: float) -> nn.ModuleDict:
    return nn.ModuleDict({"dense": nn.Linear(inputs, width), "LayerNorm": nn.LayerNorm(width, eps=eps)})


def _add(parts: Any, x: Tensor, residual: Tensor) -> Tensor:
    added: Tensor = parts["LayerNorm"](parts["dense"](x) + residual)
    return added


def load_bert(folder: Path) -> tuple[WordPieces, Bert]:
    """From a folder with config.json, vocab.txt and model.safetensors."""
    network = Bert(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    state = read_tensors(folder / "model.safetensors")
    unused = ("pooler.", "embeddings.position_ids")
    network.load_state_dict({key: t.float() for key, t in state.items() if not key.startswith(unused)})
    return WordPieces((folder / "vocab.txt").read_text(encoding="utf-8").splitlines()), network
