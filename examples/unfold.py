"""Show the decoding: a strip of previews after chosen steps, one row per class.

Usage: python examples/unfold.py OUT.png CLASS [CLASS ...]
"""

import sys

from arpg import Pipeline
from arpg.config import DEFAULT_MODEL
from arpg.image import sheet


def main() -> None:
    target, *names = sys.argv[1:]
    pipe = Pipeline.from_pretrained(DEFAULT_MODEL, device="cpu")
    previews = list(pipe.stream(names, steps=24, order="random", seed=7))
    shown = [previews[i] for i in (0, 5, 11, 15, 18, 20, 22, 23)]
    sheet([images[row] for row in range(len(names)) for images in shown], columns=len(shown)).save(target)


if __name__ == "__main__":
    main()
