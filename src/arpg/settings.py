"""Settings of sampling and of image tasks: name, type, default, limits, choices and help of each, written once.

`SETTINGS` describes how tokens are sampled, `TASK_SETTINGS` what else an image task takes. The checks of
`SamplingSettings`, the CLI options, the HTTP schema, `/v1/arpg/info`, the axes of a sweep and the controls of the page
are made from them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from arpg.errors import InputError, one_of, require, suggest

# The name of an order, the raster position of every token in the order of decoding, or a function that returns these
# positions for a grid (height, width).
Order = str | Iterable[int] | Callable[[tuple[int, int]], Iterable[int]]


@dataclass(frozen=True)
class Setting:
    """One setting as every surface presents it."""

    name: str
    kind: type[int] | type[float] | type[str]
    default: Any
    help: str
    choices: Mapping[str, str] = field(default_factory=dict)  # name of a choice: one line about it
    minimum: float | None = None
    maximum: float | None = None  # the most that a server accepts; the library itself has no upper limit but top_p's
    above_minimum: bool = False  # the minimum itself is not allowed
    hint: str = ""  # what an error adds
    aliases: tuple[str, ...] = ()  # other accepted names: those of diffusers, and former ones
    slider: tuple[float, float, float] | None = None  # lowest, highest and step of a control on a page
    advanced: bool = False  # a page shows it on demand only

    @property
    def names(self) -> tuple[str, ...]:
        """The choices, the default first."""
        return tuple(self.choices)

    def check(self, value: Any) -> None:
        """Raise an `InputError` unless `value` is allowed."""
        if self.choices:
            one_of(self.name, value, self.names, self.hint)
            return
        low = self.minimum
        if low is None:
            return
        shown = repr(value) if isinstance(value, str) else value
        fits = hasattr(value, "__index__" if self.kind is int else "__float__")
        good = fits and math.isfinite(value) and (value > low if self.above_minimum else value >= low)
        if self.name == "top_p":
            require(good and value <= 1, f"top_p is {shown}; expected 0 < top_p <= 1 (1 turns it off)")
        number = "a finite number of " if self.kind is float else "" if fits else "a whole number of "
        require(good, f"{self.name} is {shown}; expected {number}{low:g} or more{self.hint}")


def _table(*settings: Setting) -> Mapping[str, Setting]:
    return MappingProxyType({setting.name: setting for setting in settings})


def _choice(name: str, help: str, choices: Mapping[str, str], **more: Any) -> Setting:
    """Return a setting with named choices, the first of which is the default."""
    return Setting(name, str, next(iter(choices)), help, choices, **more)


SETTINGS: Mapping[str, Setting] = _table(
    Setting(
        "steps",
        int,
        32,
        "Decoding steps.",
        minimum=1,
        maximum=1024,
        slider=(1, 256, 1),
        hint=" (32 is a good start)",
        aliases=("num_inference_steps",),
    ),
    Setting(
        "guidance",
        float,
        1.0,
        "Guidance scale; 1 turns guidance off.",
        minimum=0,
        maximum=100,
        hint=" (1 turns guidance off)",
        slider=(0, 12, 0.1),
        aliases=("guidance_scale",),
    ),
    _choice(
        "guidance_schedule",
        "How the guidance scale changes from step to step.",
        {
            "linear": "Grows from 1 to the full scale with the share of tokens that are known.",
            "constant": "The full scale from the first step.",
            "cutoff": "The full scale, but none in the last quarter of the steps.",
            "none": "No guidance.",
        },
    ),
    _choice(
        "order",
        "The order in which tokens are decoded.",
        {
            "random": "A uniformly random permutation, as in training.",
            "raster": "Row by row.",
            "spiral-in": "Along the border first, then inwards.",
            "spiral-out": "From the middle outwards.",
            "z-curve": "Small squares, then larger ones (Morton order).",
            "alternate": "Row by row, every second row from right to left.",
            "halton": "Evenly spread over the image at every step.",
            "local": "Close to what is known, but the tokens of a step far from each other.",
        },
        hint=", or the raster position of every token of the grid",
    ),
    _choice(
        "schedule",
        "How many tokens each step decodes.",
        {
            "arccos": "Two thirds of the average at first; the last step is by far the largest. The paper's choice.",
            "cosine": "Very few tokens at first, growing to one and a half times the average.",
            "linear": "The same number in every step.",
        },
        hint=" or the tokens of each step, like 16,48,80",
    ),
    _choice(
        "attention",
        "Whether the tokens of a step see each other in Pass 1.",
        {
            "block": "The tokens of a step see each other.",
            "causal": "A token sees only those before it, as in training.",
        },
    ),
    _choice(
        "decode",
        "The decoding strategy; exact and speculative need causal attention.",
        {
            "steps": "Several tokens at once, as the schedule says.",
            "exact": "The tokens of one-at-a-time decoding, in fewer calls of the network.",
            "speculative": "The distribution of one-at-a-time decoding, in fewer calls of the network.",
        },
    ),
    Setting(
        "draft",
        int,
        16,
        "Tokens that exact and speculative decoding draft per call.",
        minimum=1,
        maximum=1024,
        hint=" tokens to draft (16 is good)",
        slider=(2, 64, 1),
    ),
    Setting(
        "temperature",
        float,
        1.0,
        "Sampling temperature; 0 is greedy.",
        minimum=0,
        maximum=100,
        hint=" (0 is greedy)",
        slider=(0, 2, 0.05),
    ),
    Setting(
        "top_k",
        int,
        None,
        "Sample from the k most likely codes only.",
        minimum=1,
        maximum=2**31,
        hint=", or nothing for all codes",
        slider=(0, 2000, 1),
        advanced=True,
    ),
    Setting(
        "top_p",
        float,
        1.0,
        "Sample from the most likely codes that together reach this probability.",
        minimum=0,
        maximum=1,
        above_minimum=True,
        slider=(0.05, 1, 0.05),
        advanced=True,
    ),
)

TASK_SETTINGS: Mapping[str, Setting] = _table(
    Setting("num_images", int, 1, "Number of images.", minimum=1, aliases=("num_images_per_prompt",)),
    Setting(
        "seed", int, 0, "Random seed; image i has seed SEED + i.", minimum=0, maximum=2**64 - 1, aliases=("generator",)
    ),
    Setting(
        "best_of",
        int,
        1,
        "Candidates sampled for each image, of which the most likely is kept.",
        minimum=1,
        hint=" candidates for each image",
        slider=(1, 8, 1),
        advanced=True,
    ),
    Setting(
        "batch_size",
        int,
        32,
        "Images decoded together; tokens do not depend on it, pixels may differ by one grey level.",
        minimum=1,
    ),
    Setting(
        "feather",
        int,
        4,
        "Blend this many pixels inside the mask with the original image; 0 leaves a visible seam.",
        minimum=0,
        maximum=256,
        hint=" pixels",
        slider=(0, 16, 1),
    ),
    _choice(
        "method",
        "How an image is enlarged.",
        {
            "windows": "Keep every other token of the resized image, sample the rest window by window.",
            "checkerboard": "Keep every other token of the resized image, sample the rest in one grid.",
            "positions": "Spread the image's own tokens over the larger grid, sample those between them.",
        },
        aliases=("way",),
    ),
    _choice(
        "kind",
        "Kind of the condition image.",
        {
            "canny": "Thin edges, white on black.",
            "soft": "Soft edges, brighter where they are stronger.",
            "depth": "Depth: near is white, far is black.",
        },
    ),
    Setting(
        "strength",
        float,
        1.0,
        "Weight of the condition image: 0 ignores it, 1 is as trained.",
        minimum=0,
        hint=" (0 ignores the condition image, 1 is as trained)",
        slider=(0, 2, 0.05),
    ),
)

ORDERS = SETTINGS["order"].names
SCHEDULES = SETTINGS["schedule"].names
EXPAND_METHODS = TASK_SETTINGS["method"].names
CONTROL_KINDS = TASK_SETTINGS["kind"].names
ALIASES = {
    alias: setting.name
    for table in (SETTINGS, TASK_SETTINGS)
    for setting in table.values()
    for alias in setting.aliases
}


def read_order(order: Order) -> str | tuple[int, ...] | Callable[[tuple[int, int]], Iterable[int]]:
    """Return a name or a function as it is, and positions (a list, an array or a tensor) as a tuple.

    Positions must be a permutation of 0 to n - 1; `arpg.decode.order.resolve_order` checks that n is the grid's size.
    """
    if isinstance(order, str):
        SETTINGS["order"].check(order)
    if isinstance(order, str) or callable(order):
        return order
    values: Any = order.tolist() if hasattr(order, "tolist") else order
    expected = "expected the positions 0 to n - 1 of n tokens, each once, in the order of decoding"
    try:
        positions = tuple(operator.index(position) for position in values)
    except TypeError:
        raise InputError(f"order is {str(values)[:60]}, not a list of whole numbers; {expected}") from None
    missing = min(set(range(len(positions))).difference(positions), default=None)
    require(bool(positions), f"order has no positions; {expected}")
    require(missing is None, f"order has {len(positions)} positions, but {missing} is not among them; {expected}")
    return positions


def canonical_names(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return `options` with aliases replaced by the names of the settings; naming one setting twice is an error."""
    named: dict[str, Any] = {}
    for given, value in options.items():
        name = ALIASES.get(given, given)
        require(name not in named, f"{given} is another name of {name}, which is given too; leave one of them out")
        named[name] = value
    return named


@dataclass(frozen=True)
class SamplingSettings:
    """How a request is sampled, fully resolved and checked. `SETTINGS` describes each field."""

    steps: int = 32
    guidance: float = 1.0
    order: Order = "random"
    schedule: str | tuple[int, ...] = "arccos"
    guidance_schedule: str = "linear"
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    attention: str = "block"
    decode: str = "steps"
    draft: int = 16

    def __post_init__(self) -> None:
        for name, setting in SETTINGS.items():
            value = getattr(self, name)
            if name == "schedule" and not isinstance(value, str):
                good = len(value) >= 1 and min(value) >= 1
                require(good, f"schedule is {list(value)}; every step must fill at least one token")
            elif name == "order":
                object.__setattr__(self, name, read_order(value))
            elif value is not None or setting.default is not None:
                setting.check(value)
        require(
            self.decode == "steps" or self.attention == "causal",
            f"attention is {self.attention!r}, but {self.decode} decoding is causal; set attention to causal",
        )


@dataclass(frozen=True)
class SamplingDefaults:
    """What a model folder recommends: its settings, and the guidance scale for each number of steps."""

    steps: int = 32
    guidance_by_steps: tuple[tuple[int, float], ...] = ((32, 4.0),)
    order: str = "random"
    schedule: str = "arccos"
    guidance_schedule: str = "linear"
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        require(len(self.guidance_by_steps) >= 1, "guidance_by_steps is empty; expected [[steps, guidance], ...]")
        steps = [entry[0] for entry in self.guidance_by_steps]
        require(steps == sorted(set(steps)), f"guidance_by_steps lists the steps {steps}; expected rising numbers")
        self.settings()

    def guidance_for(self, steps: int) -> float:
        """Return the listed guidance; between two entries interpolate over log(steps), outside take the nearest."""
        table = self.guidance_by_steps
        if steps <= table[0][0]:
            return table[0][1]
        for (low, low_guidance), (high, high_guidance) in itertools.pairwise(table):
            if steps <= high:
                t = math.log(steps / low) / math.log(high / low)
                return round(low_guidance + t * (high_guidance - low_guidance), 3)
        return table[-1][1]

    def settings(self, **overrides: Any) -> SamplingSettings:
        """Resolve `overrides` (None: not given; aliases as in diffusers) over what the model recommends.

        Guidance follows the number of steps. Exact and speculative decoding are causal, and guided like the largest
        number of steps.
        """
        given = canonical_names({name: value for name, value in overrides.items() if value is not None})
        for name in given:
            if name not in SETTINGS:  # a suggestion takes longer than the rest of the call
                raise InputError(f"unknown sampling setting {name}; {suggest(name, SETTINGS)}")
        for name in ("decode", "steps"):  # others follow from them
            if name in given:
                SETTINGS[name].check(given[name])
        schedule = given.get("schedule", self.schedule)
        if not isinstance(schedule, str):
            given["schedule"] = schedule = tuple(schedule)
            given.setdefault("steps", len(schedule))
        steps = given.get("steps", self.steps)
        if (decode := given.get("decode", "steps")) != "steps":
            for name in ("steps", "schedule"):
                require(name not in given, f"{decode} decoding finds its own steps; leave {name} out")
            given.setdefault("attention", "causal")
            steps = self.guidance_by_steps[-1][0]  # guided as for the most steps listed
        recommended = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name in SETTINGS}
        guidance = self.guidance_for(steps)
        return SamplingSettings(**{**recommended, "guidance": guidance, **given})
