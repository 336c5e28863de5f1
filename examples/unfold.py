"""Show the decoding: a strip of previews after chosen steps, one row per class.

Usage: python examples/unfold.py OUT.webp CLASS [CLASS ...] [--model MODEL]
"""

import argparse
from pathlib import Path

from arpg import Pipeline
from arpg.config import DEFAULT_MODEL
from arpg.image import save, sheet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("classes", nargs="+")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    options = parser.parse_args()
    pipe = Pipeline.from_pretrained(options.model, device="cpu")
    previews = list(pipe.stream(options.classes, order="random", seed=7))
    shown = [previews[len(previews) * part // 24 - 1] for part in (2, 6, 12, 16, 19, 21, 23, 24)]
    rows = range(len(options.classes))
    save(sheet([images[row] for row in rows for images in shown], columns=len(shown)), options.target)


if __name__ == "__main__":
    main()
