"""`python -m arpg`: the command line where no script is installed."""

from arpg.cli import main

if __name__ == "__main__":
    main()
