"""T5: the encoder half of FLAN-T5 of any size, as the paper has it; from a folder or the hub."""

from __future__ import annotations

from pathlib import Path

import torch

from arpg.errors import InputError
from arpg.text.encoder import TextEncoder, transformers

SIZES = ("small", "base", "large", "xl", "xxl")
PUBLISHED = {f"flan-t5-{size}": f"google/flan-t5-{size}" for size in SIZES}


def load_t5(name: str, *, max_tokens: int, device: torch.device | str = "cpu") -> TextEncoder:
    """A folder, `flan-t5-SIZE`, or a hub id. In float32 on a CPU, in bfloat16 on an accelerator."""
    where = str(Path(name)) if Path(name).is_dir() else PUBLISHED.get(name, name)
    library = transformers()
    dtype = torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16
    try:
        tokenizer = library.AutoTokenizer.from_pretrained(where)
        network = library.T5EncoderModel.from_pretrained(where, dtype=dtype)
    except (OSError, ValueError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")[:160]
        raise InputError(
            f"text encoder {name!r} could not be loaded ({first}); expected minilm, {', '.join(PUBLISHED)}, "
            "a hub id or a folder with a T5"
        ) from None
    return TextEncoder(tokenizer, network, max_tokens=max_tokens, device=device)
