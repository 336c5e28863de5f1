"""`python -m experiments.garden` in this process."""

import pytest

from experiments.garden.__main__ import main


@pytest.fixture
def run(capsys):
    """A function that runs a verb: exit code, stdout, stderr."""

    def run(*arguments):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as exited:  # argparse
            code = exited.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run
