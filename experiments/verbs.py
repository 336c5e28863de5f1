"""`python -m experiments.NAME VERB ...`: run a verb of one of the experiments, from the root of the repository."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Mapping, Sequence

from arpg.errors import InputError

LOGGERS = ("garden", "experiments", "arpg")


def run_verb(name: str, verbs: Mapping[str, tuple[str, str]], arguments: Sequence[str] | None = None) -> int:
    """Run the verb that `arguments` begin with; an error of the user is one line and exit code 2.

    `verbs`: each verb with "module:function" of experiments.NAME (or "/module:function" of experiments), and what it
    does. Words behind the function are its first arguments. Only the module of the chosen verb is imported.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        lines = [f"  {verb:<17}{about}" for verb, (_, about) in verbs.items()]
        sys.stdout.write(f"usage: python -m experiments.{name} VERB ...\n\n" + "\n".join(lines) + "\n")
        return 0
    if arguments[0] not in verbs:
        sys.stderr.write(f"{name}: unknown verb {arguments[0]!r}; expected one of {', '.join(verbs)}\n")
        return 2
    handler = logging.StreamHandler(sys.stdout)
    logging.getLogger().addHandler(handler)
    for logger in LOGGERS:
        logging.getLogger(logger).setLevel(logging.INFO)
    try:
        module, call = module_of(name, verbs[arguments[0]][0])
        function, *first = call.split()
        getattr(importlib.import_module(module), function)(*first, arguments[1:])
    except InputError as error:
        sys.stderr.write(f"{name}: " + " ".join(str(error).split()) + "\n")
        return 2
    except KeyboardInterrupt:
        if os.environ.get("ARPG_DEBUG"):
            raise
        sys.stderr.write(f"{name}: interrupted\n")
        return 130
    finally:
        logging.getLogger().removeHandler(handler)
    return 0


def module_of(name: str, where: str) -> tuple[str, str]:
    """Return the full name of the module and the function of a verb."""
    module, function = where.split(":")
    return (f"experiments.{module[1:]}" if module.startswith("/") else f"experiments.{name}.{module}"), function
