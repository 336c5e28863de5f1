"""Data for training: image sets, training crops, and token shards."""

from arpg.data.images import ImageSet, concatenate, open_images
from arpg.data.pixels import PixelStream, eval_pixels
from arpg.data.tokenize import tokenize
from arpg.data.tokens import TokenSet, TokenWriter, open_tokens

__all__ = [
    "ImageSet",
    "PixelStream",
    "TokenSet",
    "TokenWriter",
    "concatenate",
    "eval_pixels",
    "open_images",
    "open_tokens",
    "tokenize",
]
