"""The verbs of `arpg` in the groups of its help, and how one is run. Errors are one line and exit code 2."""

from __future__ import annotations

import itertools
import logging
import os
import sys
from collections.abc import Callable
from typing import Annotated

import typer
import typer.exceptions

from arpg.cli import analyze, bench, check, evaluate, generate, models, serve, train
from arpg.cli.options import Command, Verb, VerbGroup, err, out
from arpg.errors import InputError

PANELS: dict[str, tuple[Command, ...]] = {
    "Create": (
        generate.generate,
        generate.inpaint,
        generate.edit,
        generate.outpaint,
        generate.expand,
        generate.control,
        check.demo,
    ),
    "Inspect": (
        models.info,
        models.classes,
        models.pull,
        generate.plan,
        analyze.score,
        analyze.classify,
        analyze.attention,
        check.selftest,
    ),
    "Train": (train.finetune, train.train, train.train_tokenizer, train.tokenize, train.embed, train.train_cost),
    "Evaluate": (evaluate.sample, evaluate.evaluate, evaluate.evaluate_tokenizer, evaluate.sweep),
    "Serve": (serve.serve,),
}
GROUPS = {"convert": ("Train", models.convert), "bench": ("Evaluate", bench.app)}
MOVED = ("compose", "train-detector", "evaluate-text", "train-depth", "evaluate-control")

app = typer.Typer(
    name="arpg", cls=VerbGroup, no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False
)


def _print_version(wanted: bool) -> None:
    if wanted:
        import arpg

        out.print(f"arpg {arpg.__version__}")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Generate, edit and study images with ARPG, and train, evaluate and serve its models."""


for _panel, _verbs in PANELS.items():
    for _verb in _verbs:
        app.command(_verb.__name__.replace("_", "-"), cls=Verb, rich_help_panel=_panel)(_verb)
    for _name, (_home, _group) in GROUPS.items():
        if _home == _panel:
            app.add_typer(_group, name=_name, rich_help_panel=_panel)


def _moved(verb: str) -> Callable[[], None]:
    def run() -> None:
        raise InputError(f"arpg {verb} moved to `python -m experiments.garden {verb}` in the repository")

    return run


for _name in MOVED:
    app.command(
        _name,
        hidden=True,
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )(_moved(_name))


def run() -> int:
    """Run the verb on the command line and return the exit code; print errors as one line."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its retries; the outcome is reported
    try:
        code: int = app(standalone_mode=False) or 0
    except InputError as error:
        return _fail(str(error), 2)
    except typer.exceptions.TyperException as error:
        return _fail(error.format_message() + _given(error), 2)
    except typer.Abort:
        raise KeyboardInterrupt from None
    except Exception as error:
        if os.environ.get("ARPG_DEBUG"):
            raise
        return _fail(f"{type(error).__name__}: {error}; this is a bug, set ARPG_DEBUG=1 to see where", 1)
    if code == 130:  # what typer makes of an interruption
        raise KeyboardInterrupt
    return code


def _fail(message: str, code: int) -> int:
    if message:  # none where help was printed instead
        err.print("arpg: " + " ".join(message.split()))
    return code


def _given(error: Exception) -> str:
    """Return the value on the command line of the option that an error is about; the parser does not name it."""
    options = getattr(getattr(error, "param", None), "opts", [])
    pairs = itertools.pairwise(sys.argv)
    return next((f" (got {value!r})" for option, value in pairs if option in options), "")
