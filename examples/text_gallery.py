"""The gallery's pictures of prompts: what works, what does not, and prompts that training never saw, uncurated.

Usage: python examples/text_gallery.py [MODEL] [--out docs/images/prompts]

All seeds are 0 and counted on, nothing is chosen. With --data also what the tokenizer leaves of composed scenes.
"""

import argparse
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from arpg import Pipeline
from arpg.data.composer import Composer
from arpg.evaluation.detector_scenes import tokenized
from arpg.evaluation.text_score import held_out_questions
from arpg.image import sheet

GOOD = (
    "a strawberry to the left of a green apple",
    "two bananas above a lemon on a blue background",
    "a smiling cat emoji",
    "three purple stars on a yellow background",
    "a red car and a blue key",
    "a rocket above a house on a purple background",
    "a penguin with an umbrella on a gray background",
    "🍓 and 🍋",
)
BAD = (  # outside of what scenes and captions have
    "a photograph of a crowded street at night",
    "seven apples in a row",
    "a banana that is not yellow",
    "a cat riding a bicycle",
    "the word HELLO",
    "an apple inside a glass bottle",
    "das Haus am See",
    "",
)
NEGATIVE = (None, "a red apple", "a green apple", "a yellow apple")  # the same prompt, led away from each


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="garden-text")
    parser.add_argument("--out", type=Path, default=Path("docs/images/prompts"))
    parser.add_argument("--num", type=int, default=48, help="Pictures of the uncurated sheet.")
    parser.add_argument("--data", type=Path, help="The folder of fruits.zip and emoji.zip.")
    options = parser.parse_args()
    pipe = Pipeline.from_pretrained(options.model, device="cpu")
    write(pipe, options.out, num=options.num)
    if options.data is not None:
        scenes(pipe, options.data).save(options.out / "tokenizer.webp", quality=85, method=6)


def write(pipe: Pipeline, folder: Path, *, num: int = 48) -> list[Path]:
    """All pictures, as WebP; their paths."""
    questions = held_out_questions(max(1, num // 6))
    unseen = [q.task.prompt for q in questions[:: max(1, len(questions) // num)]][:num]
    made = {
        "good": rows(pipe, GOOD),
        "bad": rows(pipe, BAD),
        "negative": negatives(pipe),
        "uncurated": sheet(pipe.generate(prompt=unseen, seed=0), columns=8, captions=unseen),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, picture in made.items():
        picture.save(folder / f"{name}.webp", quality=85, method=6)
    return [folder / f"{name}.webp" for name in made]


def rows(pipe: Pipeline, prompts: Sequence[str], each: int = 2) -> Image.Image:
    """So many pictures of each prompt, side by side."""
    made = pipe.generate(prompt=list(prompts), num_images=each, seed=0)
    return sheet(made, columns=4 * each, captions=[shown(prompt) for prompt in prompts for _ in range(each)])


def shown(prompt: str) -> str:
    """As it can be written below a picture: emoji by their names."""
    return "".join(c if c.isascii() else f"[{unicodedata.name(c, '?').lower()}]" for c in prompt) or "(nothing)"


def negatives(pipe: Pipeline, prompt: str = "an apple", each: int = 8) -> Image.Image:
    """One prompt and the same seeds, led away from different things, a row each."""
    made = [pipe.generate(prompt=prompt, negative=text, num_images=each, seed=0) for text in NEGATIVE]
    captions = [f"{prompt}, not {text}" if text else prompt for text in NEGATIVE for _ in range(each)]
    return sheet([image for row in made for image in row], columns=each, captions=captions)


def scenes(pipe: Pipeline, data: Path, num: int = 8) -> Image.Image:
    """Composed scenes of views that nobody trained on, and below each what is left of it after the tokenizer."""
    composer = Composer(f"{data}/fruits.zip/fruits/test", f"{data}/emoji.zip/emoji")
    pixels_nHW3 = np.stack([composer.scene(10**9 + i).pixels_HW3 for i in range(num)])
    rows = np.concatenate((pixels_nHW3, tokenized(pixels_nHW3, pipe.tokenizer)))
    return sheet([Image.fromarray(pixels_HW3) for pixels_HW3 in rows], columns=num)


if __name__ == "__main__":
    main()
