"""Condition images with every task: fitted, cut into windows, through the one loop, also as commands."""

import json
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from arpg import ControlInput, InputError, Pipeline, cli
from arpg.tasks import control_input as picture
from arpg.tasks.control_input import WHOLE
from arpg.tasks.task import ImageTask
from support.decoding import decode_request
from support.small import controlled_model, noise, small_tokenizer

STEPS = {"steps": 3, "guidance": 2.0}


@pytest.fixture(scope="module")
def pipe():
    return Pipeline(controlled_model(), small_tokenizer())


@pytest.fixture
def extractor(monkeypatch):
    """Instead of the real one: what is brighter than the middle."""
    monkeypatch.setattr(
        picture, "extract", lambda kind, image, **_: image.convert("L").point(lambda v: 255 * (v > 127))
    )


def grey(width=8, height=8, seed=0):
    return noise(width, height, seed).convert("L")


def same(one, other):
    return all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in zip(one, other, strict=True))


def queries(pipe, task):
    """The queries of each request."""
    found = []
    while (request := task.next_request()) is not None:
        found.append(request.condition.query_BND)
        *_, step = decode_request(pipe, request, task.spec.settings)
        task.accept(step)
    return found


def test_it_steers_and_strength_zero_does_not(pipe):
    plain = pipe.generate(2, num_images=3, **STEPS)
    steered = pipe.control(grey(), 2, kind="depth", num_images=3, **STEPS)
    assert not same(plain, steered)
    assert same(plain, pipe.control(grey(), 2, kind="depth", strength=0, num_images=3, **STEPS))
    assert not same(steered, pipe.control(grey(), 2, kind="canny", num_images=3, **STEPS))
    assert same(steered, pipe.generate(2, control=ControlInput(grey(), "depth"), num_images=3, batch_size=2, **STEPS))
    assert pipe.control(grey(), kind="depth", **STEPS)[0].size == (8, 8)  # no class


def test_strength_zero_is_exact_for_every_task(pipe):
    picture, mask = noise(20, 14), Image.new("L", (20, 14))
    mask.paste(255, (3, 3, 12, 9))
    off = {"control": ControlInput(grey(), "depth", 0.0), "seed": 4, **STEPS}
    without = {"seed": 4, **STEPS}
    assert same(pipe.inpaint(picture, mask, 1, **off), pipe.inpaint(picture, mask, 1, **without))
    assert same(pipe.outpaint(picture, 1, left=9, **off), pipe.outpaint(picture, 1, left=9, **without))
    larger = {"size": (40, 28), "method": "windows"}
    assert same(pipe.expand(picture, 1, **larger, **off), pipe.expand(picture, 1, **larger, **without))


@pytest.mark.parametrize("order", ["random", "raster", "spiral-out", "halton", "local"])
def test_inpainting_in_any_order(pipe, order):
    picture, mask = noise(8, 8, seed=3), Image.new("L", (8, 8))
    mask.paste(255, (2, 2, 8, 6))
    control = ControlInput(grey(), "depth")
    plain, steered = (pipe.inpaint(picture, mask, 1, order=order, control=c, **STEPS)[0] for c in (None, control))
    before, after, open_ = (np.asarray(x) for x in (picture, steered, mask))
    assert np.array_equal(before[open_ == 0], after[open_ == 0])
    assert not same([plain], [steered])


@pytest.mark.parametrize("decode", ["exact", "speculative"])
def test_other_ways_to_decode(pipe, decode):
    exact = pipe.control(grey(), 1, kind="depth", decode=decode, guidance=2.0)
    if decode == "exact":
        one_by_one = {"steps": 16, "schedule": (1,) * 16, "attention": "causal", "guidance_schedule": "linear"}
        assert same(exact, pipe.control(grey(), 1, kind="depth", guidance=2.0, **one_by_one))


def test_an_image_that_is_inpainted_sees_its_part(pipe):
    """The view of a long image is a part of it, and so is that of its condition image, whatever its size."""
    picture, mask = noise(24, 8), Image.new("L", (24, 8))
    mask.paste(255, (17, 2, 22, 6))
    control = grey(24, 8, seed=1)
    view = control.crop((15, 0, 23, 8))
    (found,) = queries(pipe, pipe.inpaint_task(picture, mask, 1, control=ControlInput(control, "depth"), **STEPS))
    (alone,) = queries(pipe, pipe.generate_task(1, control=ControlInput(view, "depth"), **STEPS))
    assert torch.equal(found, alone)
    twice = control.resize((48, 16), Image.Resampling.NEAREST)
    (fitted,) = queries(pipe, pipe.inpaint_task(picture, mask, 1, control=ControlInput(twice, "depth"), **STEPS))
    assert (fitted - alone).abs().mean() < 0.5 * (alone - alone.roll(1, 1)).abs().mean()


def test_each_window_gets_its_part(pipe):
    picture, control = noise(8, 8), grey(24, 8, seed=2)
    task = pipe.outpaint_task(picture, 1, left=8, right=8, control=ControlInput(control, "depth"), **STEPS)
    corners = task.stages[0].corners
    assert len(corners) >= 2
    for found, (_, left) in zip(queries(pipe, task), corners, strict=True):
        part = control.crop((2 * left, 0, 2 * left + 8, 8))
        (alone,) = queries(pipe, pipe.generate_task(1, control=ControlInput(part, "depth"), **STEPS))
        assert torch.equal(found, alone)


def test_one_for_each_image(pipe):
    controls = [ControlInput(grey(seed=s), "depth") for s in range(3)]
    together = pipe.generate([1, 2, 3], control=controls, seed=7, **STEPS)
    alone = [pipe.generate(1 + i, control=c, seed=7 + i, **STEPS)[0] for i, c in enumerate(controls)]
    assert same(together, alone)
    with pytest.raises(InputError, match="2 condition images for 3 images"):
        pipe.generate_task([1, 2, 3], control=controls[:2])


def test_best_of_scores_with_the_condition(pipe):
    best = pipe.generate_task(1, control=ControlInput(grey(), "depth"), best_of=3, **STEPS)
    best.run()
    single = [pipe.control(grey(), 1, kind="depth", seed=s, **STEPS)[0] for s in range(3)]
    assert same(best.images(), [single[best.kept[0]]])


@pytest.mark.parametrize("size", [(8, 8), (1, 1), (3, 50), (640, 480), (7, 9)])
@pytest.mark.parametrize("kind", ["canny", "depth"])
def test_a_condition_of_another_size_is_fitted(pipe, size, kind):
    assert pipe.control(grey(*size), 1, kind=kind, **STEPS)[0].size == (8, 8)
    fitted = ControlInput(grey(*size), kind).fit((12, 6))
    assert (fitted.size, fitted.mode) == ((12, 6), "L")


def test_fitting():
    lines = np.zeros((96, 96), np.uint8)
    lines[40], lines[:, 17] = 255, 255  # a pixel wide: both are still lines at a quarter of the size, and at twice it
    small, large = (np.asarray(ControlInput(Image.fromarray(lines)).fit(size)) for size in ((24, 24), (192, 192)))
    assert set(np.unique(small)) == {0, 255}
    assert (small[10] == 255).all()
    assert (small[:, 4] == 255).all()
    assert (small == 255).sum() == 24 + 24 - 1
    assert (large == 255).sum() == 2 * 192 * 2 - 4
    wide = Image.fromarray(np.repeat(np.arange(200, dtype=np.uint8)[None], 100, 0))
    middle = np.asarray(ControlInput(wide, "depth").fit((100, 100)))
    assert (middle == np.arange(50, 150)).all()  # the middle, not squeezed
    squeezed = np.asarray(ControlInput(wide, "depth").fit((100, 100), WHOLE))
    assert squeezed[0, 0] <= 1
    assert squeezed[0, -1] >= 197
    assert np.asarray(ControlInput(wide, "depth").fit(wide.size)).tolist() == np.asarray(wide).tolist()


@pytest.mark.parametrize("name", ["blank", "white", "inverted", "noisy", "one pixel", "coloured", "transparent"])
def test_odd_conditions_do_not_break_it(pipe, name):
    dot = np.zeros((8, 8), np.uint8)
    dot[3, 4] = 255
    odd = {
        "blank": Image.new("L", (8, 8)),
        "white": Image.new("1", (8, 8), 1),
        "inverted": Image.fromarray(255 - dot),
        "noisy": grey(seed=5),
        "one pixel": Image.fromarray(dot),
        "coloured": noise(8, 8),
        "transparent": Image.new("RGBA", (8, 8), (0, 0, 0, 0)),
    }[name]
    for kind in ("canny", "depth"):
        task = pipe.generate_task(1, control=ControlInput(odd, kind), num_images=2, **STEPS)
        request = task.next_request()
        assert torch.isfinite(request.condition.query_BND).all()
        assert all(image.size == (8, 8) for image in pipe.control(odd, 1, kind=kind, num_images=2, **STEPS))


def test_from_an_image(pipe, extractor):
    """The image is cut to the model's size first, then its condition is taken."""
    picture = noise(30, 20)
    seen = pipe.extract_control(picture, "depth")
    assert seen.image.size == (8, 8)
    taken = pipe.control(picture, 1, kind="depth", from_image=True, **STEPS)
    assert same(taken, pipe.control(seen.image, 1, kind="depth", **STEPS))
    assert not same(taken, pipe.control(picture, 1, kind="depth", **STEPS))


def test_bad_input(pipe, pipeline):
    with pytest.raises(InputError, match="takes no condition images"):
        pipeline.control(grey(), 1)
    with pytest.raises(InputError, match="kind is 'sketch'"):
        pipe.control(grey(), 1, kind="sketch")
    with pytest.raises(InputError, match="'soft'; the model takes canny, depth"):
        pipe.control(grey(), 1, kind="soft")
    with pytest.raises(InputError, match="strength is nan"):
        pipe.control(grey(), 1, strength=float("nan"))
    with pytest.raises(InputError, match="no class is given"):
        pipe.generate([])
    task = pipe.generate_task(1)
    with pytest.raises(InputError, match="no condition image to show"):
        ImageTask.beside_conditions(task, [0], [grey()])


@pytest.fixture
def run(monkeypatch, capsys, pipe, tmp_path):
    """Run `arpg VERB` with a saved model; returns (exit code, stdout, stderr)."""
    pipe.save_pretrained(tmp_path / "model")

    def run(verb, *arguments):
        shared = ["--model", tmp_path / "model", "--steps", 3, "--device", "cpu"]
        monkeypatch.setattr(sys, "argv", ["arpg", verb, *map(str, (*arguments, *shared))])
        with pytest.raises(SystemExit) as exited:
            cli.main()
        captured = capsys.readouterr()
        return exited.value.code or 0, captured.out, captured.err

    return run


def test_the_command(run, pipe, tmp_path, extractor):
    edges, made = tmp_path / "edges.png", tmp_path / "made.png"
    grey().save(edges)
    assert run("control", edges, "--kind", "depth", "--class", 2, "--strength", 0.5, "-o", made)[0] == 0
    with Image.open(made) as image:
        about = json.loads(image.text["arpg"])
        assert same([image], pipe.control(grey(), 2, kind="depth", strength=0.5, steps=3))
    assert (about["task"], about["kind"], about["strength"], about["class"]) == ("control", "depth", 0.5, 2)
    assert (
        run("control", "--condition", edges, "--kind", "depth", "--class", 2, "-n", 2, "-o", tmp_path / "two")[0] == 0
    )
    assert len(list((tmp_path / "two").iterdir())) == 2
    picture = tmp_path / "picture.png"
    noise(30, 20).save(picture)
    beside = ["--beside", "--gif", tmp_path / "steps.gif", "-o", made]
    assert run("control", picture, "--from-image", "--kind", "depth", "--class", 2, *beside)[0] == 0
    with Image.open(made) as image:
        assert image.size == (18, 8)  # both, and the gap
        left = image.crop((0, 0, 8, 8)).convert("L")
        assert same([left], [pipe.extract_control(noise(30, 20), "depth").image])
    with Image.open(tmp_path / "steps.gif") as steps:
        assert steps.n_frames >= 3


def test_transparent_parts_of_a_file_are_black(run, tmp_path):
    lines = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    lines.paste((255, 255, 255, 255), (3, 0, 4, 8))
    path, made = tmp_path / "lines.png", tmp_path / "made.png"
    lines.save(path)
    expected = lines.getchannel("A")
    assert same([ControlInput(path).fit((8, 8))], [expected])
    for given in (("control", path), ("control", "--condition", path), ("generate", "--condition", path)):
        assert run(*given, "--class", 2, "-n", 1, "--beside", "-o", made)[0] == 0
        with Image.open(made) as image:
            assert same([image.crop((0, 0, 8, 8)).convert("L")], [expected]), given


def test_other_verbs_take_a_condition(run, pipe, tmp_path):
    edges, picture, made = (tmp_path / name for name in ("edges.png", "picture.png", "made.png"))
    grey().save(edges)
    noise(8, 8).save(picture)
    steer = ["--condition", edges, "--kind", "depth", "--class", 2, "-o", made]
    assert run("outpaint", picture, "--right", 4, *steer, "--beside")[0] == 0
    with Image.open(made) as image:
        assert image.size == (26, 8)
    assert run("edit", picture, "--box", "2,2,8,8", *steer)[0] == 0
    with Image.open(made) as image:
        control = ControlInput(grey(), "depth")
        assert same([image], pipe.edit(noise(8, 8), (2, 2, 8, 8), 2, control=control, steps=3))


def test_bad_commands(run, tmp_path):
    edges = tmp_path / "edges.png"
    grey().save(edges)
    for arguments, message in (
        (["control"], "give an image or --condition"),
        (["control", edges, "--condition", edges], "give an image or --condition"),
        (["control", "--condition", edges, "--from-image"], "--from-image needs an image"),
        (["control", tmp_path / "none.png"], "does not exist"),
        (["control", edges, "--kind", "sketch"], "'sketch'"),
        (["control", edges, "--strength", "-1"], "strength is -1"),
        (["generate", "--class", "1", "--beside"], "--beside needs a condition image"),
    ):
        code, _, err = run(*arguments, "-o", tmp_path / "out.png")
        assert (code, message in err, err.count("\n")) == (2, True, 1), (arguments, err)
