"""Text: prompts become the states of an encoder that was trained on language."""

from arpg.text.encoder import TextEncoder
from arpg.text.prompts import Prompts, open_encoder

__all__ = ["Prompts", "TextEncoder", "open_encoder"]
