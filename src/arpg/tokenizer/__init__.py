"""The VQ tokenizer: images to code ids and back."""

from arpg.tokenizer.vq import VQTokenizer

__all__ = ["VQTokenizer"]
