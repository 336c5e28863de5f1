"""`python -m arpg.cli`, the former name of `python -m arpg`."""

from arpg.cli import main

if __name__ == "__main__":
    main()
