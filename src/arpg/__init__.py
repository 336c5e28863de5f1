"""ARPG: autoregressive image generation with randomized parallel decoding.

Names are imported when they are first used, so that the command line can answer `--help` without torch.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from arpg.checkpoint import load_model, load_tokenizer
    from arpg.config import ModelConfig, TokenizerConfig
    from arpg.decode import Plan, Request, Step, decode, make_plan
    from arpg.errors import InputError
    from arpg.model import ARPG
    from arpg.pipeline import Pipeline
    from arpg.settings import SamplingDefaults, SamplingSettings
    from arpg.tasks.control_input import ControlInput
    from arpg.tasks.task import ImageTask
    from arpg.tokenizer import VQTokenizer

    __version__: str

_MODULES = {
    "ARPG": "model",
    "ControlInput": "tasks.control_input",
    "ImageTask": "tasks.task",
    "InputError": "errors",
    "ModelConfig": "config",
    "Pipeline": "pipeline",
    "Plan": "decode",
    "Request": "decode",
    "SamplingDefaults": "settings",
    "SamplingSettings": "settings",
    "Step": "decode",
    "TokenizerConfig": "config",
    "VQTokenizer": "tokenizer",
    "decode": "decode",
    "load_model": "checkpoint",
    "load_tokenizer": "checkpoint",
    "make_plan": "decode",
}

__all__ = [
    "ARPG",
    "ControlInput",
    "ImageTask",
    "InputError",
    "ModelConfig",
    "Pipeline",
    "Plan",
    "Request",
    "SamplingDefaults",
    "SamplingSettings",
    "Step",
    "TokenizerConfig",
    "VQTokenizer",
    "decode",
    "load_model",
    "load_tokenizer",
    "make_plan",
]


def __getattr__(name: str) -> Any:
    value: Any
    if name == "__version__":
        value = _version()
    elif name in _MODULES:
        value = getattr(importlib.import_module(f"arpg.{_MODULES[name]}"), name)
    else:
        raise AttributeError(f"module 'arpg' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("arpg")
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "0+source"


class _Package(ModuleType):
    """`arpg.decode` is the function; importing the package of that name must not replace it."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name == "decode" and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
