"""The command line: thin verbs over the library. Errors are one line and exit code 2, never a traceback.

This module imports next to nothing, so that Ctrl-C is answered while the others are imported.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import typer

    app: typer.Typer

__all__ = ["app", "main"]


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module 'arpg.cli' has no attribute {name!r}")
    from arpg.cli.verbs import app

    return app


def main() -> None:
    """Run a verb and exit; an interruption is one line, also during imports."""
    report_unraisable = sys.unraisablehook

    def exit_when_interrupted(problem: Any) -> None:
        """Exit for an interruption that came in a callback: Python would print it with a traceback and go on."""
        if problem.exc_type is not KeyboardInterrupt:
            report_unraisable(problem)
            return
        sys.stderr.write("arpg: interrupted\n")
        sys.stderr.flush()
        os._exit(130)

    sys.unraisablehook = exit_when_interrupted
    try:
        from arpg.cli.verbs import run

        code = run()
    except KeyboardInterrupt:
        if os.environ.get("ARPG_DEBUG"):
            raise
        with contextlib.suppress(ValueError):  # only the main thread may do this
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # once more would be a traceback of the shutdown
        sys.stderr.write("arpg: interrupted\n")
        code = 130
    finally:
        sys.unraisablehook = report_unraisable
    sys.exit(code)
