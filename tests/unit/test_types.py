"""The types of the public API, as mypy sees them."""

import os
import subprocess
import sys

import pytest

from support.paths import ROOT


@pytest.mark.slow
def test_mypy_sees_every_option():
    """`make check` reads the same file together with the package."""
    ran = subprocess.run(
        [sys.executable, "-m", "mypy", "tests/typing/pipeline_types.py"],
        cwd=ROOT,
        env={**os.environ, "MYPYPATH": "src"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
