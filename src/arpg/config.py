"""Configurations: frozen dataclasses that check themselves, the presets, and strict JSON reading."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from arpg.errors import InputError, one_of, require, require_positive
from arpg.settings import CONTROL_KINDS, SamplingDefaults

PRECISIONS = ("auto", "float32", "bfloat16", "float16", "fp8", "int8")
KV_CACHE_DTYPES = ("auto", "fp8")  # of the key-value cache; auto: the type that the model computes in
ENGINES = ("auto", "eager", "compiled", "graph")
STORAGE_FORMATS = ("int8", "int6", "int4", "float16", "bfloat16", "float32")  # of weights in files
POSITIONS = ("rope", "cosine")

T = TypeVar("T")


def _check_heads(width: int, num_heads: int) -> None:
    require(
        width % (4 * num_heads) == 0,
        f"width {width} does not give {num_heads} heads of a multiple of 4 channels, which 2-D rotation needs; change "
        "width or num_heads",
    )


@dataclass(frozen=True)
class TextConfig:
    """Text conditioning: the encoder, the width of its states, and the maximum number of tokens of a prompt."""

    encoder: str  # minilm, or a T5: a published name, a hub id or a folder
    width: int
    max_tokens: int

    def __post_init__(self) -> None:
        require(bool(self.encoder), "encoder is empty; expected minilm, flan-t5-xl, a hub id or a folder")
        require_positive(self, "width", "max_tokens")


@dataclass(frozen=True)
class ControlConfig:
    """Condition images: their kinds, and the encoder that makes a query of each patch.

    `encoder` is "patches", a small ViT of our own with `width`, `num_heads` and `layers`; or the hub id or folder of a
    ViT or DINOv2 of `transformers`, which has its own sizes and is fine-tuned with the rest.
    """

    kinds: tuple[str, ...] = ("canny", "depth")
    patch: int = 16  # pixels of a condition image for each token, along each side: the tokenizer's stride
    encoder: str = "patches"
    width: int = 192
    num_heads: int = 3
    layers: int = 5

    def __post_init__(self) -> None:
        require(
            len(self.kinds) >= 1 and len(set(self.kinds)) == len(self.kinds),
            f"kinds are {list(self.kinds)}; expected different ones of {', '.join(CONTROL_KINDS)}",
        )
        for kind in self.kinds:
            one_of("kinds", kind, CONTROL_KINDS)
        require(bool(self.encoder), "encoder is empty; expected patches, a hub id or a folder")
        require_positive(self, "patch", "width", "num_heads", "layers")
        _check_heads(self.width, self.num_heads)

    def kind_id(self, kind: str) -> int:
        """Return the index of a kind; raise an `InputError` if the model does not take it."""
        require(kind in self.kinds, f"kind is {kind!r}; the model takes {', '.join(self.kinds)}")
        return self.kinds.index(kind)


@dataclass(frozen=True)
class ModelConfig:
    """The two-pass decoder. The defaults are those of all published models."""

    width: int
    num_heads: int
    pass1_layers: int
    pass2_layers: int
    vocab_size: int = 16384
    num_classes: int = 1000
    grid: tuple[int, int] = (16, 16)
    shared_kv: bool = True  # one key-value projection for all Pass-2 layers, or one for each
    positions: str = "rope"  # or "cosine": 2-D sinusoids added to tokens and queries
    dropout: float = 0.1
    text: TextConfig | None = None  # prompts instead of classes
    control: ControlConfig | None = None  # condition images beside them
    guidance_input: bool = False  # the guidance scale is an input of Pass 2: no unconditional rows (distilled)

    def __post_init__(self) -> None:
        require_positive(self, "width", "num_heads", "pass2_layers", "vocab_size")
        if self.text is None:
            require(self.num_classes >= 1, f"num_classes is {self.num_classes}; expected 1 or more")
        else:
            require(self.num_classes == 0, f"num_classes is {self.num_classes}; a model that takes prompts has 0")
        require(self.pass1_layers >= 0, f"pass1_layers is {self.pass1_layers}; expected 0 or more")
        _check_heads(self.width, self.num_heads)
        require(min(self.grid) >= 1, f"grid is {self.grid}; expected two numbers of 1 or more")
        one_of("positions", self.positions, POSITIONS)
        require(0 <= self.dropout < 1, f"dropout is {self.dropout}; expected 0 <= dropout < 1")

    @property
    def head_dim(self) -> int:
        """Channels of an attention head."""
        return self.width // self.num_heads

    @property
    def ffn_width(self) -> int:
        """8/3 of the width, rounded up to a multiple of 256."""
        return -(-(8 * self.width // 3) // 256) * 256

    # One embedding table holds everything: codes, [MASK], classes, the null class and a spare row.

    @property
    def mask_id(self) -> int:
        """Row of the [MASK] embedding."""
        return self.vocab_size

    @property
    def first_class_id(self) -> int:
        """Row of the embedding of class 0."""
        return self.vocab_size + 1

    @property
    def null_class_id(self) -> int:
        """Row of the embedding of the null class."""
        return self.vocab_size + 1 + self.num_classes

    @property
    def num_embeddings(self) -> int:
        """Rows of the embedding table."""
        return self.vocab_size + self.num_classes + 3


@dataclass(frozen=True)
class TokenizerConfig:
    """The convolutional VQ autoencoder. The defaults are VQ-16's."""

    channels: int = 128
    multipliers: tuple[int, ...] = (1, 1, 2, 2, 4)
    res_blocks: int = 2
    z_channels: int = 256
    codebook_size: int = 16384
    codebook_dim: int = 8

    def __post_init__(self) -> None:
        require_positive(self, "channels", "res_blocks", "z_channels", "codebook_size", "codebook_dim")
        require(
            len(self.multipliers) >= 1 and min(self.multipliers) >= 1,
            f"multipliers are {self.multipliers}; expected one number of 1 or more per level",
        )
        require(
            self.channels % 32 == 0,
            f"channels is {self.channels}; GroupNorm has 32 groups, so it must be a multiple of 32",
        )

    @property
    def stride(self) -> int:
        """Pixels per token along each side."""
        return int(2 ** (len(self.multipliers) - 1))


DEFAULT_MODEL = "meadow"
DEFAULT_TEXT_MODEL = "garden-text"  # where a prompt is given
DEFAULT_CONTROL_MODEL = "garden-control"  # where a condition image is given

# Presets; guidance for each number of steps from the paper's table of parallel decoding.

MODELS: dict[str, ModelConfig] = {
    "arpg-l": ModelConfig(width=1024, num_heads=16, pass1_layers=12, pass2_layers=12),
    "arpg-xl": ModelConfig(width=1280, num_heads=20, pass1_layers=18, pass2_layers=18),
    "arpg-xxl": ModelConfig(width=1536, num_heads=24, pass1_layers=24, pass2_layers=24),
}

TOKENIZERS: dict[str, TokenizerConfig] = {
    "vq-16": TokenizerConfig(),
    "vq-8": TokenizerConfig(multipliers=(1, 2, 2, 4)),
}

SAMPLING: dict[str, SamplingDefaults] = {
    "arpg-l": SamplingDefaults(guidance_by_steps=((16, 7.8), (24, 6.1), (32, 5.4), (64, 5.1), (128, 4.6), (256, 4.3))),
    "arpg-xl": SamplingDefaults(guidance_by_steps=((16, 8.4), (24, 7.0), (32, 6.6), (64, 5.3), (128, 5.1), (256, 5.0))),
    "arpg-xxl": SamplingDefaults(
        guidance_by_steps=((16, 9.3), (24, 8.1), (32, 6.5), (64, 6.3), (128, 6.1), (256, 6.0))
    ),
}


def to_dict(config: Any) -> dict[str, Any]:
    """Convert a configuration to plain JSON values."""
    return dataclasses.asdict(config)


def from_dict(cls: type[T], data: Any, *, where: str) -> T:
    """Build `cls` from JSON values: unknown or missing keys and wrong types are errors that name `where`."""
    require(isinstance(data, Mapping), f"{where}: expected an object with the fields of {cls.__name__}, got {data!r}")
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(set(data) - set(fields))
    require(not unknown, f"{where}: unknown key {', '.join(unknown)}; known: {', '.join(fields)}")
    required = {n for n, f in fields.items() if f.default is f.default_factory is dataclasses.MISSING}
    missing = sorted(required - set(data))
    require(not missing, f"{where}: missing key {', '.join(missing)}")
    values = {name: _value(value, hints[name], f"{where}.{name}") for name, value in data.items()}
    try:
        return cls(**values)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _value(value: Any, hint: Any, where: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return from_dict(hint, value, where=where)
    if origin is types.UnionType:
        sections = [o for o in args if isinstance(o, type) and dataclasses.is_dataclass(o)]
        if sections and isinstance(value, Mapping):  # so that errors name the field
            return from_dict(sections[0], value, where=where)
        if value == "none" and type(None) in args:  # TOML and `--set` have no null
            return None
        for option in args:
            try:
                return _value(value, option, where)
            except InputError:
                continue
    elif origin is tuple:
        if isinstance(value, list | tuple):
            if args[-1] is Ellipsis:
                return tuple(_value(item, args[0], where) for item in value)
            if len(value) == len(args):
                return tuple(_value(item, arg, where) for item, arg in zip(value, args, strict=True))
    elif hint is type(None):
        if value is None:
            return None
    elif hint is float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    elif isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    raise InputError(f"{where} is {value!r}; expected {getattr(hint, '__name__', hint)}")
