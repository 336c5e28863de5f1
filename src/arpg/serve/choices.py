"""The choices that a setting has, each with one line for people who do not know it."""

from __future__ import annotations

from collections.abc import Sequence

from arpg.config import EXPAND_METHODS
from arpg.settings import ATTENTIONS, DECODES, GUIDANCE_SCHEDULES, ORDERS, SCHEDULES

_ABOUT = {
    "order": {
        "random": "Anywhere, as in training.",
        "raster": "Row by row, like reading.",
        "spiral-in": "Around the border first, then inwards.",
        "spiral-out": "From the middle outwards.",
        "z-curve": "Small squares, then larger ones.",
        "alternate": "Row by row, every second one backwards.",
        "halton": "Evenly spread over the picture, at every moment.",
        "local": "Close to what is there, but the tokens of a step far from each other.",
    },
    "schedule": {
        "arccos": "A few tokens at first, many at the end; the paper's choice.",
        "cosine": "Very few at first, very many at the end.",
        "linear": "The same number in every step.",
    },
    "guidance_schedule": {
        "linear": "Grows from none to full with the share of the picture that is there.",
        "constant": "Full from the first step.",
        "none": "No guidance.",
    },
    "attention": {
        "block": "The tokens of a step see each other.",
        "causal": "A token sees only those before it, as in training.",
    },
    "decode": {
        "steps": "Several tokens at once, as the schedule says.",
        "exact": "The very picture of one token at a time, in fewer calls; needs causal attention.",
        "speculative": "As likely as one token at a time, in fewer calls; needs causal attention.",
    },
    "way": {
        "checkerboard": "Every other token of the enlarged picture is kept, the rest is drawn at once.",
        "positions": "The picture's tokens move apart, and what is between them is drawn at once.",
        "windows": "Every other token is kept, the rest is drawn window by window, at the trained size.",
    },
}
_KINDS = {
    "canny": "Thin outlines, white on black.",
    "soft": "Soft outlines, the stronger the whiter.",
    "depth": "How near things are: near is white, far is black.",
}


def kinds(names: Sequence[str]) -> list[dict[str, str]]:
    """Of condition images."""
    return [{"name": name, "about": _KINDS[name]} for name in names]


def choices() -> dict[str, list[dict[str, str]]]:
    names = {
        "order": ORDERS,
        "schedule": SCHEDULES,
        "guidance_schedule": GUIDANCE_SCHEDULES,
        "attention": ATTENTIONS,
        "decode": DECODES,
        "way": EXPAND_METHODS,
    }
    return {setting: [{"name": n, "about": _ABOUT[setting][n]} for n in known] for setting, known in names.items()}
