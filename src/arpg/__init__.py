"""ARPG: autoregressive image generation with randomized parallel decoding."""

from importlib.metadata import PackageNotFoundError, version

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

try:
    __version__ = version("arpg")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0+source"

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
