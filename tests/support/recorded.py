"""Golden files: networks recorded from the authors' code."""

import json

from safetensors.torch import load_file

from arpg.convert import read_published
from support.paths import GOLDEN


class Golden:
    """One recorded network: our model with its weights, the settings and the tensors."""

    def __init__(self, name):
        self.info = json.loads((GOLDEN / f"{name}.json").read_text())
        self.tensors = load_file(GOLDEN / f"{name}.safetensors")
        self.published = read_published(GOLDEN / f"{name}.pt")
        self.path = GOLDEN / f"{name}.pt"
