"""Data for training: image sets, crops, token sets, and the datasets of tokens, text states and condition maps."""

from arpg.data.crops import CropStream, center_crops
from arpg.data.images import ImageSet, concatenate, open_images
from arpg.data.tokenize import tokenize
from arpg.data.tokens import TokenSet, TokenWriter, open_tokens

__all__ = [
    "CropStream",
    "ImageSet",
    "TokenSet",
    "TokenWriter",
    "center_crops",
    "concatenate",
    "open_images",
    "open_tokens",
    "tokenize",
]
