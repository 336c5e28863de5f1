"""Text: prompts become the states of an encoder that was trained on language."""

from arpg.text.encoder import TextEncoder
from arpg.text.prompts import Prompts, load_encoder, open_encoder

__all__ = ["Prompts", "TextEncoder", "load_encoder", "open_encoder"]
