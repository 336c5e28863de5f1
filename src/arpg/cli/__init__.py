"""The command line: thin verbs over the library."""

from arpg.cli.main import app, main

__all__ = ["app", "main"]
