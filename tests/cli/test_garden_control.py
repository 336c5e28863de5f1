"""Images of garden-control follow condition images, and no condition image breaks it."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from arpg import ARPG, ControlInput, Pipeline
from arpg.checkpoint import load_model, read_folder
from arpg.hub import resolve
from arpg.model import class_condition
from experiments.control_images import agreement, edge_maps
from support.command import check_error
from support.distribution import require_model
from support.small import noise

NAMES = ["Apple Red 1", "Lemon", "Tomato 1", "Kiwi"]
BOXES = [[(20, 24, 76, 80)], [(8, 30, 88, 66)], [(34, 6, 66, 90)], [(4, 20, 48, 64), (52, 36, 92, 76)]]
STEPS = {"steps": 8, "seed": 0}


@pytest.fixture(scope="module")
def pipe():
    require_model("garden-control")
    return Pipeline.from_pretrained("garden-control", device="cpu")


def ellipses(boxes, **look):
    """White lines on black, or with `fill` a shape that is so near."""
    image = Image.new("L", (96, 96))
    for box in boxes:
        ImageDraw.Draw(image).ellipse(box, **look or {"outline": 255})
    return image


OUTLINES = [ellipses(boxes) for boxes in BOXES]


def against_outlines(images):
    wanted = np.stack([np.asarray(outline) > 0 for outline in OUTLINES])
    return agreement(wanted, edge_maps(np.stack([np.asarray(image) for image in images])))


def pixels(images):
    return [image.tobytes() for image in images]


@pytest.fixture(scope="module")
def plain(pipe):
    return pipe.generate(NAMES, **STEPS)


def test_what_is_sampled_has_the_edges_of_the_drawing(pipe, plain):
    led = pipe.generate(NAMES, control=[ControlInput(outline) for outline in OUTLINES], **STEPS)
    assert against_outlines(led).f1_n.min() > 0.6
    assert against_outlines(plain).f1_n.max() < 0.4


def test_strength_zero_is_the_model_without_control(pipe, plain):
    off = pipe.generate(NAMES, control=[ControlInput(outline, strength=0) for outline in OUTLINES], **STEPS)
    assert pixels(off) == pixels(plain)


def test_what_is_near_stands_before_the_rest(pipe):
    """Depth, without a class: where the shape ends, what is sampled has an edge."""
    shapes = [ellipses(boxes, fill=200) for boxes in BOXES]
    led = [pipe.control(shape, kind="depth", **STEPS)[0] for shape in shapes]
    assert against_outlines(led).recall_n.min() > 0.8


def test_without_a_condition_it_is_the_base_architecture():
    """The very logits of a network that has no encoder, with the other weights."""
    require_model("garden-control")
    folder = resolve("garden-control")
    model = load_model(folder, device="cpu", dtype=torch.float32).eval()
    base = ARPG(dataclasses.replace(model.config, control=None)).eval()
    own = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("control.")}
    base.load_state_dict(own)
    assert base.config == read_folder(resolve("garden")).model
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 8192, (2, 144), generator=generator)
    order = torch.randperm(144, generator=generator).expand(2, 144)
    labels = torch.tensor([3, 136])
    with torch.no_grad():
        ours, theirs = (network(ids, order, class_condition(network, labels)) for network in (model, base))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", ["canny", "depth"])
def test_odd_conditions(pipe, kind):
    """Conditions unlike the training data give finite queries, no larger than those of a drawing, and whole images."""
    dot = np.zeros((96, 96), np.uint8)
    dot[40, 50] = 255
    odd = [
        Image.new("L", (96, 96)),
        Image.new("1", (96, 96), 1),
        Image.fromarray(255 - np.asarray(OUTLINES[0])),
        noise(96, 96).convert("L"),
        Image.fromarray(dot),
        Image.new("RGBA", (96, 96), (0, 0, 0, 0)),
        OUTLINES[1].resize((640, 64)),
        Image.new("L", (1, 1), 255),
    ]
    task = pipe.generate_task(
        ["Banana"] * len(odd), control=[ControlInput(image, kind) for image in odd], steps=2, seed=0
    )
    queries = task.next_request().condition.query_BND
    usual = pipe.generate_task("Banana", control=ControlInput(OUTLINES[0], kind)).next_request().condition.query_BND
    assert queries.isfinite().all()
    assert queries.norm(dim=-1).mean(1).max() < 3 * usual.norm(dim=-1).mean()
    images = task.run()
    assert [image.size for image in images] == [(96, 96)] * len(odd)


def test_no_edges_ask_for_an_empty_image(pipe):
    (image,) = pipe.control(Image.new("L", (96, 96)), "Banana", **STEPS)
    assert not edge_maps(np.asarray(image)[None]).any()


def test_a_condition_of_another_size_is_fitted(pipe):
    large = ellipses([(1, 1, 95, 95)]).resize((400, 200), Image.Resampling.NEAREST)
    fitted = ControlInput(large).fit((96, 96))
    assert pixels(pipe.control(large, "Lemon", steps=3)) == pixels(pipe.control(fitted, "Lemon", steps=3))


def test_the_page_shows_the_thumbnails_of_garden():
    from arpg.serve.served_model import find_thumbnails

    require_model("garden-control")
    ours, theirs = (find_thumbnails(resolve(name)) for name in ("garden-control", "garden"))
    assert ours == theirs == resolve("garden") / "thumbnails.webp"
    assert find_thumbnails(resolve("garden-text")) is None
    assert read_folder(resolve("garden-control")).classes.lines == read_folder(resolve("garden")).classes.lines


def test_a_condition_goes_to_the_model_that_takes_it(run, tmp_path):
    require_model("garden-control")
    edges, out = tmp_path / "edges.png", tmp_path / "out.png"
    OUTLINES[0].save(edges)
    shared = ["--steps", 1, "--device", "cpu", "-o", out]
    box = ["--box", "10,10,80,80"]
    for command in (
        ["control", edges],
        ["generate", "--class", "Lemon", "-n", 1, "--condition", edges],
        ["edit", edges, *box, "--class", "Lemon", "--condition", edges],
    ):
        code, _, err = run(*command, *shared)
        assert code == 0, err
        with Image.open(out) as image:
            assert json.loads(image.text["arpg"])["model"] == "garden-control"
    assert "differences from garden" in run("info", "garden-control")[1]
    check_error(run("control", edges, "--model", "garden", *shared), "takes no condition images", "garden-control")
    check_error(run("control", edges, "--prompt", "a lemon", *shared), "no installed model takes a prompt and")
