"""Command-line options of sampling, from the table of settings, for verbs that generate images."""

from __future__ import annotations

import argparse
from typing import Any

from arpg.config import ENGINES, PRECISIONS
from arpg.device import set_threads
from arpg.pipeline import Pipeline
from arpg.settings import SETTINGS, SamplingDefaults


def add_sampling_options(parser: argparse.ArgumentParser, *, model: str) -> None:
    """Add --model, --seed, --device, --precision, --engine and one option per sampling setting."""
    group = parser.add_argument_group("sampling")
    group.add_argument("--model", "-m", default=model, help="A folder, a bundled or published name, or a hub id.")
    group.add_argument("--seed", type=int, default=0, help="Image i has seed SEED + i.")
    group.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:0.")
    group.add_argument("--precision", "--dtype", default="auto", choices=PRECISIONS)
    group.add_argument("--engine", default="auto", choices=ENGINES)
    for setting in SETTINGS.values():
        flag = f"--{setting.name.replace('_', '-')}"
        if setting.name == "schedule":
            group.add_argument(flag, type=_schedule, help=setting.help)
        else:
            group.add_argument(flag, type=setting.kind, choices=setting.names or None, help=setting.help)


def _schedule(text: str) -> str | tuple[int, ...]:
    return tuple(map(int, text.split(","))) if text[:1].isdigit() else text


def sampling_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that were given."""
    settings = {name: getattr(options, name) for name in SETTINGS if getattr(options, name) is not None}
    SamplingDefaults().settings(**settings)  # bad settings fail before the model is loaded
    return settings


def load_pipeline(options: argparse.Namespace, model: str | None = None) -> Pipeline:
    """Load `model`, or that of --model."""
    sampling_settings(options)
    set_threads()
    return Pipeline.from_pretrained(
        model or options.model, device=options.device, dtype=options.precision, engine=options.engine
    )
