"""`python -m arpg.cli`."""

from arpg.cli import main

main()
