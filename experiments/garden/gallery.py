"""The images of the documentation: prompts that work, do not work and are held out; edges and depth followed."""

from __future__ import annotations

import argparse
import math
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from arpg import ControlInput, Pipeline
from arpg.data.images import ImageSet, open_images
from arpg.image import adm_crop, sheet
from experiments.control_images import choose_evenly
from experiments.garden.composer import Composer
from experiments.garden.control_score import SCENE_SEED
from experiments.garden.depth_net import compose_depth_scenes
from experiments.garden.geneval import held_out_prompts
from experiments.photo_measures import image_side
from experiments.photos import reconstruct
from experiments.zero_shot_gallery import Captioned, captioned, save_all

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
NEGATIVE = (None, "a red apple", "a green apple", "a yellow apple")  # negative prompts of the same prompt


def text(arguments: Sequence[str] | None = None) -> None:
    """Write the images of prompts of the documentation. All seeds start at 0, nothing is selected."""
    parser = argparse.ArgumentParser(prog="experiments.garden text-gallery", description=text.__doc__)
    parser.add_argument("model", nargs="?", default="garden-text")
    parser.add_argument("--out", type=Path, default=Path("docs/images/prompts"))
    parser.add_argument("--num", type=int, default=48, help="Images of the uncurated sheet.")
    parser.add_argument("--data", type=Path, help="The folder of fruits.zip and emoji.zip: adds tokenizer.webp.")
    options = parser.parse_args(arguments)
    pipe = Pipeline.from_pretrained(options.model, device="cpu")
    write_text(pipe, options.out, num=options.num)
    if options.data is not None:
        save_all([("tokenizer", reconstructed_scenes(pipe, options.data))], options.out)


def write_text(pipe: Pipeline, folder: Path, *, num: int = 48) -> list[Path]:
    """Write all images as WebP, and return their paths."""
    held = held_out_prompts(max(1, num // 6))
    unseen = [each.prompt.text for each in held[:: max(1, len(held) // num)]][:num]
    made = {
        "good": rows(pipe, GOOD),
        "bad": rows(pipe, BAD),
        "negative": negatives(pipe),
        "uncurated": sheet(pipe.generate(prompt=unseen, seed=0), columns=8, captions=unseen),
    }
    return save_all(made.items(), folder)


def rows(pipe: Pipeline, prompts: Sequence[str], each: int = 2) -> Image.Image:
    """Return `each` images of each prompt, side by side."""
    made = pipe.generate(prompt=list(prompts), num_images=each, seed=0)
    return sheet(made, columns=4 * each, captions=[shown(prompt) for prompt in prompts for _ in range(each)])


def shown(prompt: str) -> str:
    """Return a prompt as a caption: emoji by their names."""
    return "".join(c if c.isascii() else f"[{unicodedata.name(c, '?').lower()}]" for c in prompt) or "(nothing)"


def negatives(pipe: Pipeline, prompt: str = "an apple", each: int = 8) -> Image.Image:
    """Return one row per negative prompt, with the same prompt and seeds."""
    made = [pipe.generate(prompt=prompt, negative=text, num_images=each, seed=0) for text in NEGATIVE]
    captions = [f"{prompt}, not {text}" if text else prompt for text in NEGATIVE for _ in range(each)]
    return sheet([image for row in made for image in row], columns=each, captions=captions)


def reconstructed_scenes(pipe: Pipeline, data: Path, num: int = 8) -> Image.Image:
    """Return composed scenes of the test views, and below each its reconstruction by the tokenizer."""
    composer = Composer(f"{data}/fruits.zip/fruits/test", f"{data}/emoji.zip/emoji")
    pixels_nHW3 = np.stack([composer.scene(10**9 + i).pixels_HW3 for i in range(num)])
    rows = np.concatenate((pixels_nHW3, reconstruct(pixels_nHW3, pipe.tokenizer)))
    return sheet([Image.fromarray(pixels_HW3) for pixels_HW3 in rows], columns=num)


LINE = 256  # pixels of a drawing's side, before the model's size
NAMES = ("Apple Red 1", "Lemon", "Tomato 1")  # what an outline of a round fruit can be
FLOWERS = ("daisy", "roses", "sunflowers")
STRENGTHS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5)


def control(arguments: Sequence[str] | None = None) -> None:
    """Write the images of control of the documentation. All seeds start at 0, nothing is selected.

    Fruits are test images; flowers are generated by `garden`: the photographers of its training images would have to be
    named.
    """
    parser = argparse.ArgumentParser(prog="experiments.garden control-gallery", description=control.__doc__)
    parser.add_argument("model", nargs="?", default="garden-control")
    parser.add_argument("--data", type=Path, default=Path("data"), help="The folder of fruits.zip and emoji.zip.")
    parser.add_argument("--out", type=Path, default=Path("docs/images/control"))
    parser.add_argument("--num", type=int, default=5, help="Test images; one more scenes.")
    options = parser.parse_args(arguments)
    pipe, garden = (Pipeline.from_pretrained(name, device="cpu") for name in (options.model, "garden"))
    sets = (f"{options.data}/fruits.zip/fruits/test", f"{options.data}/emoji.zip/emoji")
    sources = [*fruits(open_images(sets[0]), options.num, image_side(pipe)), *flowers(garden)]
    write_control(pipe, sources, sets, options.out, num=options.num + 1)


def write_control(pipe: Pipeline, sources: Captioned, sets: tuple[str, str], folder: Path, *, num: int) -> list[Path]:
    """Write all images as WebP, and return their paths. `sources`: images to take edges of, with their classes."""
    made = {
        "edges": edges(pipe, sources),
        "depth": depth(pipe, sets, num),
        "drawing": by_hand(pipe),
        "strength": strengths(pipe, [sources[0], sources[-1]]),
        "inpaint": inpainted(pipe),
    }
    return save_all(made.items(), folder, quality=80)


def fruits(tests: ImageSet, num: int, size: int) -> Captioned:
    """Return the middle image of each of `num` classes at even distances."""
    classes = np.linspace(0, len(tests.classes) - 1, min(num, len(tests.classes))).round().astype(int)
    one_each = choose_evenly(tests.labels, len(tests.classes))
    return [(adm_crop(tests.read(int(one_each[i])), size), tests.classes[i]) for i in classes]


def flowers(garden: Pipeline) -> Captioned:
    """Return the most likely of eight generated images of each class."""
    return list(zip(garden.generate(list(FLOWERS), seed=0, best_of=8), FLOWERS, strict=True))


def edges(pipe: Pipeline, sources: Captioned) -> Image.Image:
    """Return rows of an image, its edges, two results of its class, and one of the class of the next row."""
    shown: Captioned = []
    for row, (image, name) in enumerate(sources):
        other = sources[(row + 1) % len(sources)][1]
        condition = pipe.extract_control(image, "canny")
        shown += [(image, "image"), (condition.image, "edges")]
        shown += [(image, name) for image in pipe.generate(name, control=condition, num_images=2, seed=0)]
        shown += [(pipe.generate(other, control=condition, seed=0)[0], other)]
    return captioned(shown, columns=5)


def depth(pipe: Pipeline, sets: tuple[str, str], num: int) -> Image.Image:
    """Return rows of a composed scene, its depth, two results without a class, and one with each of two classes."""
    scenes = compose_depth_scenes(sets, num=num, seed=SCENE_SEED, size=max(32, image_side(pipe)))
    shown: Captioned = []
    for pixels, near in zip(scenes.pixels_nHW3, scenes.near_nHW, strict=True):
        control = ControlInput(Image.fromarray(near), "depth")
        size = (image_side(pipe), image_side(pipe))
        shown += [(Image.fromarray(pixels).resize(size), "composed scene"), (control.fit(size), "its depth")]
        shown += [(image, "no class") for image in pipe.generate(control=control, num_images=2, seed=0)]
        shown += [(pipe.generate(name, control=control, seed=0)[0], str(name)) for name in known(pipe)[:2]]
    return captioned(shown, columns=6)


def by_hand(pipe: Pipeline) -> Image.Image:
    """Return rows of a drawing (plain, with a leaf, of two fruits) and three classes that follow it."""
    shown: Captioned = []
    for title, drawing in drawings().items():
        control = ControlInput(drawing, "canny")
        shown += [(control.fit((image_side(pipe), image_side(pipe))), title)]
        shown += [(pipe.generate(name, control=control, seed=0)[0], str(name)) for name in known(pipe)]
    return captioned(shown, columns=1 + len(known(pipe)))


def strengths(pipe: Pipeline, sources: Captioned) -> Image.Image:
    """Return rows of one seed at growing strengths."""
    shown: Captioned = []
    for image, name in sources:
        condition = pipe.extract_control(image, "canny")
        shown += [(condition.image, f"{name}: edges")]
        for strength in STRENGTHS:
            control = ControlInput(condition.image, "canny", strength)
            shown += [(pipe.generate(name, control=control, seed=0)[0], f"strength {strength:g}")]
    return captioned(shown, columns=1 + len(STRENGTHS))


def inpainted(pipe: Pipeline) -> Image.Image:
    """Return a fruit along a drawing, and its right half inpainted: freely, along another drawing, as another class."""
    (name, other), half = known(pipe)[:2], image_side(pipe) // 2
    outlines = [ControlInput(drawing, "canny") for drawing in drawings().values()][:2]
    (fruit,) = pipe.generate(name, control=outlines[0], seed=0)
    mask, hole = Image.new("L", fruit.size), fruit.copy()
    for image, colour in ((mask, "white"), (hole, "grey")):
        image.paste(colour, (half, 0, 2 * half, 2 * half))
    requests = ((name, None), (name, outlines[1]), (other, outlines[1]))
    free, guided, changed = (pipe.inpaint(fruit, mask, what, control=c, seed=0)[0] for what, c in requests)
    shown = [(fruit, str(name)), (hole, "half is to be filled"), (free, "filled")]
    shown += [(outlines[1].fit(fruit.size), "a leaf is added"), (guided, "filled along it"), (changed, str(other))]
    return captioned(shown, columns=6)


def drawings() -> dict[str, Image.Image]:
    """Return line drawings, white on black: a round fruit, the same with a leaf, two fruits."""
    plain, leaf, two = (Image.new("L", (LINE, LINE)) for _ in range(3))
    for image in (plain, leaf):
        pen(image, circle(124, 150, 100), seed=1)  # a fruit fills its image, as in training
        pen(image, lambda t: (126 + 12 * t, 66 - 48 * t), seed=2)
    pen(leaf, lambda t: (134 + 72 * t, 40 - 30 * math.sin(math.pi * t)), seed=3)
    pen(leaf, lambda t: (134 + 72 * t, 40 + 16 * math.sin(math.pi * t)), seed=4)
    pen(two, circle(76, 140, 70), seed=5)
    pen(two, circle(194, 156, 54), seed=6)
    return {"a drawing": plain, "a leaf is added": leaf, "two instead": two}


def circle(x: float, y: float, radius: float) -> Callable[[float], tuple[float, float]]:
    return lambda t: (x + radius * math.cos(2 * math.pi * t), y + 0.94 * radius * math.sin(2 * math.pi * t))


def pen(image: Image.Image, path: Callable[[float], tuple[float, float]], *, seed: int, points: int = 48) -> None:
    """Draw a line along a path from 0 to 1, with the slow wobble of a hand."""
    rng = np.random.default_rng(seed)
    wobble = np.cumsum(rng.normal(0, 0.5, (points + 1, 2)), axis=0)
    wobble -= np.linspace(0, 1, points + 1)[:, None] * wobble[-1]  # a closed path stays closed
    line = [(x + dx, y + dy) for (x, y), (dx, dy) in zip(map(path, np.linspace(0, 1, points + 1)), wobble, strict=True)]
    ImageDraw.Draw(image).line(line, fill=255, width=2, joint="curve")


def known(pipe: Pipeline) -> list[str | int]:
    """Return the classes of round fruits, or the first three of another model."""
    names = [pipe.classes.name(i) for i in range(len(pipe.classes))]
    return list(NAMES) if set(NAMES) <= set(names) else list(range(min(3, len(names))))
