"""Small networks, a small tokenizer, a text encoder that needs no weights, and noise images."""

import dataclasses
import zipfile
import zlib

import numpy as np
import torch
from PIL import Image

from arpg import ARPG, ModelConfig, TokenizerConfig, VQTokenizer
from arpg.config import ControlConfig, TextConfig

SMALL = ModelConfig(width=32, num_heads=2, pass1_layers=2, pass2_layers=2, vocab_size=24, num_classes=5, grid=(4, 4))

TEXT = dataclasses.replace(SMALL, num_classes=0, text=TextConfig("minilm", width=12, max_tokens=7))

CONTROL = ControlConfig(patch=2, width=16, num_heads=2, layers=2)


def text_states(*lengths, seed=0, width=12):
    """Random encoder states of prompts of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length, width, generator=generator) for length in lengths]


class FakeEncoder:
    """States that follow from the words: one token for each, and one for the end."""

    def __init__(self, width=12, max_tokens=7):
        self.width, self.max_tokens, self.asked = width, max_tokens, 0

    def states(self, prompts, *, batch_size=1):
        self.asked += len(prompts)
        return [torch.stack([self._word(w) for w in (*p.split(), ".")][: self.max_tokens]) for p in prompts]

    def _word(self, word):
        return torch.randn(self.width, generator=torch.Generator().manual_seed(zlib.crc32(word.encode())))


def small_model(config=SMALL, seed=0):
    """Random weights, large enough for attention to matter, and a head that is not zero."""
    model = ARPG(config).init_weights(seed=seed, std=0.15)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        model.head.weight.copy_(torch.randn(model.head.weight.shape, generator=generator) * 0.5)
    return model.eval()


def controlled_model(config=None, seed=0):
    """A small network that takes condition images, with an MLP that does not end in zeros."""
    model = small_model(config or dataclasses.replace(SMALL, control=CONTROL), seed)
    generator = torch.Generator().manual_seed(seed + 2)
    with torch.no_grad():
        weight = model.control.down.weight
        weight.copy_(torch.randn(weight.shape, generator=generator) * 0.5)
    return model


def small_tokenizer(codebook_size=24):
    torch.manual_seed(0)
    config = TokenizerConfig(
        channels=32, multipliers=(1, 1), res_blocks=1, z_channels=8, codebook_size=codebook_size, codebook_dim=4
    )
    return VQTokenizer(config).eval()


def noise(width, height, seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def write_zip(folder, path, prefix=""):
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(folder.rglob("*"), reverse=True):  # a zip file is in no particular order
            if file.is_file():
                archive.write(file, prefix + file.relative_to(folder).as_posix())
    return path
