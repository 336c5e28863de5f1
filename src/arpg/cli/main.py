"""The command line: its verbs and its entry point. Errors are one line and exit code 2, never a traceback."""

from __future__ import annotations

import itertools
import logging
import os
import sys
from collections.abc import Callable

import typer
import typer.exceptions

from arpg.cli import (
    analyze,
    bench,
    evaluate,
    generate,
    models,
    serve,
    train,
)
from arpg.cli.options import err
from arpg.errors import InputError

app = typer.Typer(name="arpg", no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)
app.command()(generate.generate)
app.command()(generate.inpaint)
app.command()(generate.edit)
app.command()(generate.outpaint)
app.command()(generate.expand)
app.command()(generate.control)
app.command()(models.info)
app.command()(models.classes)
app.command()(models.pull)
app.command()(generate.plan)
app.command()(analyze.score)
app.command()(analyze.classify)
app.command()(analyze.attention)
app.command()(evaluate.sample)
app.command()(evaluate.sweep)
app.command()(evaluate.evaluate)
app.command("evaluate-tokenizer")(evaluate.evaluate_tokenizer)
app.command()(train.tokenize)
app.command()(train.embed)
app.command("train-tokenizer")(train.train_tokenizer)
app.command()(train.train)
app.command("train-cost")(train.train_cost)
app.command()(serve.serve)
app.add_typer(models.convert, name="convert")
app.add_typer(bench.app, name="bench")


def _moved(verb: str) -> Callable[[], None]:
    def run() -> None:
        raise InputError(f"arpg {verb} moved to `python -m experiments.garden {verb}` in the repository")

    return run


for _verb in ("compose", "train-detector", "evaluate-text", "train-depth", "evaluate-control"):
    app.command(
        _verb,
        hidden=True,
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )(_moved(_verb))


def main() -> None:
    """Run a verb; print errors as one line."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its retries; the outcome is reported
    try:
        code = app(standalone_mode=False)
    except InputError as error:
        code = _fail(str(error), 2)
    except typer.exceptions.TyperException as error:
        code = _fail(error.format_message() + _given(error), 2)
    except (KeyboardInterrupt, typer.Abort):
        code = _fail("interrupted", 130)
    except Exception as error:
        if os.environ.get("ARPG_DEBUG"):
            raise
        code = _fail(f"{type(error).__name__}: {error}; this is a bug, set ARPG_DEBUG=1 to see where", 1)
    sys.exit(code)


def _fail(message: str, code: int) -> int:
    if message:  # none where help was printed instead
        err.print("arpg: " + " ".join(message.split()), markup=False)
    return code


def _given(error: Exception) -> str:
    """Return the value on the command line of the option that an error is about; the parser does not name it."""
    options = getattr(getattr(error, "param", None), "opts", [])
    pairs = itertools.pairwise(sys.argv)
    return next((f" (got {value!r})" for option, value in pairs if option in options), "")
