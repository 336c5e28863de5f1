"""Image tasks: what all of them guarantee, expansion, the best of several candidates, and animations."""

import dataclasses
import json
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from arpg import InputError, Request, cli, make_plan
from arpg.decode.likelihood import fill_bits, make_orders, token_bits
from arpg.figures import FRAME_MS, LAST_FRAME_MS, frame_sheets, save_gif
from arpg.image import to_images, to_pil
from arpg.model import Condition, class_condition
from arpg.model.rope import grid_positions
from arpg.settings import EXPAND_METHODS, ORDERS, SCHEDULES
from arpg.tasks.stages import MAX_TOKENS, expand_stage
from support.decoding import decode_request
from support.small import noise


def same(a, b):
    return len(a) == len(b) and all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in zip(a, b, strict=True))


def close(a, b):
    """The same tokens: convolutions may round a pixel differently in another batch."""
    pairs = [(np.asarray(x).astype(int), np.asarray(y)) for x, y in zip(a, b, strict=True)]
    return all(x.shape == y.shape and abs(x - y).max() <= 1 for x, y in pairs)


def random_mask(seed, size=(8, 8)):
    mask = np.random.default_rng(seed).random((size[1] // 2, size[0] // 2)) < 0.5
    return Image.fromarray(mask.repeat(2, 0).repeat(2, 1).astype(np.uint8) * 255)


def begin(pipeline, name, **options):
    """A small task of each name."""
    image = noise(8, 8, seed=3)
    options = {"steps": 3, "num_images": 2, **options}
    if name == "generate":
        return pipeline.generate_task([1, 4], **{**options, "num_images": 1})
    if name == "inpaint":
        return pipeline.inpaint_task(image, random_mask(1), 2, **options)
    if name == "edit":
        return pipeline.edit_task(image, (1, 1, 7, 7), 2, **options)
    if name == "outpaint":
        return pipeline.outpaint_task(image, 2, left=5, bottom=3, **options)
    if name == "expand":
        return pipeline.expand_task(image, 2, size=(16, 16), **options)
    return pipeline.expand_task(None, 2, size=(16, 16), method=name, **options)


TASKS = ["generate", "inpaint", "edit", "outpaint", "expand", "positions", "windows"]


@pytest.mark.parametrize("name", TASKS)
def test_every_task_previews_each_step_and_ends_in_its_images(pipeline, name):
    task = begin(pipeline, name)
    previews = list(task.stream())
    assert task.index == len(task)
    assert task.next_request() is None
    assert same(previews[-1], task.images())
    assert not same(previews[0], previews[-1])
    assert same(task.images(), begin(pipeline, name).run()), "and so does a task without previews"
    assert close(task.images(), begin(pipeline, name, batch_size=1).run()), "whatever the batch"


@pytest.mark.parametrize("name", TASKS)
def test_an_image_depends_on_its_seed_alone(pipeline, name):
    second = begin(pipeline, name, seed=5)
    images = second.run()
    assert second.seeds == [5, 6]
    if name != "generate":
        assert close(images[1:], begin(pipeline, name, seed=6, num_images=1).run())
    assert not same(images[:1], images[1:])


@pytest.mark.parametrize("attention", ["block", "causal"])
@pytest.mark.parametrize("guidance", [1.0, 4.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_known_tokens_never_change(pipeline, attention, guidance, seed):
    image, mask = noise(8, 8), random_mask(seed)
    with torch.no_grad():
        ids = pipeline.tokenizer.encode(to_images(np.asarray(image)[None]))
    known = ~torch.from_numpy(np.asarray(mask)[::2, ::2] > 0).flatten()
    task = pipeline.inpaint_task(image, mask, 2, num_images=2, steps=5, attention=attention, guidance=guidance)
    for step in task.steps():
        assert torch.equal(step.ids_BN[:, known], ids[:, known].expand(2, -1))
        assert step.known_BN[:, known].all()
    outside = np.asarray(mask) == 0
    for result in task.images():
        assert np.array_equal(np.asarray(result)[outside], np.asarray(image)[outside])


@pytest.mark.parametrize("attention", ["block", "causal"])
def test_different_masks_and_classes_in_one_batch_are_what_they_are_alone(pipeline, attention):
    settings = {"steps": 4, "guidance": 3.0, "attention": attention}
    image_tasks = [
        pipeline.inpaint_task(noise(8, 8, seed=i), random_mask(i), i, seed=10 + i, **settings) for i in range(4)
    ]
    requests = [task.next_request() for task in image_tasks]
    assert len({int(request.known_BN.sum()) for request in requests}) > 1
    conditions = [request.condition for request in requests]
    together = Request(
        Condition(*(torch.cat([getattr(c, f.name) for c in conditions]) for f in dataclasses.fields(Condition)[:3])),
        requests[0].grid,
        torch.cat([request.ids_BN for request in requests]),
        torch.cat([request.known_BN for request in requests]),
        tuple(seed for request in requests for seed in request.seeds),
    )
    resolved = image_tasks[0].spec.settings
    *_, last = decode_request(pipeline, together, resolved)
    for i, request in enumerate(requests):
        *_, alone = decode_request(pipeline, request, resolved)
        assert torch.equal(alone.ids_BN[0], last.ids_BN[i])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("schedule", [*SCHEDULES, "explicit"])
def test_orders_and_schedules_apply_to_the_masked_part(pipeline, order, schedule):
    mask = random_mask(2)
    masked = np.flatnonzero(np.asarray(mask)[::2, ::2] > 0).tolist()
    sizes = (1, len(masked) - 3, 2)
    task = pipeline.inpaint_task(
        noise(8, 8), mask, 2, steps=3, order=order, schedule=sizes if schedule == "explicit" else schedule
    )
    request = task.next_request()
    (plan,) = make_plan(request.grid, request.known_BN, request.seeds, task.spec.settings).samples
    assert sorted(plan.order) == masked
    assert sum(plan.sizes) == len(masked)
    assert len(plan.sizes) == 3
    if schedule == "explicit":
        assert plan.sizes == sizes
    if order == "raster":
        assert list(plan.order) == masked


def test_the_best_is_the_most_likely(pipeline):
    """Against every candidate alone, scored from the definition."""
    image, mask = noise(8, 8), random_mask(1)
    task = pipeline.inpaint_task(image, mask, 2, num_images=2, best_of=3, seed=7, steps=4)
    images = task.run()
    order = make_orders("random", (4, 4), range(1))[0].tolist()
    bits = []
    for seed in range(7, 13):
        alone = pipeline.inpaint_task(image, mask, 2, seed=seed, steps=4)
        *_, step = alone.steps()
        known = (np.asarray(mask)[::2, ::2] == 0).ravel()
        row = [i for i in order if known[i]] + [i for i in order if not known[i]]
        condition = class_condition(pipeline.model, torch.tensor([2]))
        each = token_bits(pipeline.model, step.ids_BN, condition, torch.tensor([row]))
        bits.append(each[0, ~torch.from_numpy(known)].sum().item())
    best = [7 + int(np.argmin(bits[:3])), 10 + int(np.argmin(bits[3:]))]
    assert task.seeds == best
    for seed, image_ in zip(best, images, strict=True):
        assert close(pipeline.inpaint(image, mask, 2, seed=seed, steps=4), [image_]), "its seed draws it again"


@pytest.mark.parametrize("name", ["generate", "outpaint", "expand", "positions", "windows"])
def test_the_best_of_every_task_is_one_of_its_candidates(pipeline, name):
    task = begin(pipeline, name, best_of=3, seed=2, batch_size=4)
    images = task.run()
    assert len(images) == 2
    first, second = task.seeds
    assert 2 <= first < 5 <= second < 8
    if name != "generate":
        assert close(begin(pipeline, name, seed=second, num_images=1).run(), images[1:])


def test_bits_of_a_fill_follow_its_places(pipeline):
    """With everything open on the trained grid they are the score; fractional places change them."""
    model = pipeline.model
    ids = torch.arange(16)[None] % 24
    request = Request.from_nothing(class_condition(model, torch.tensor([1])), (4, 4), (0,))
    whole = token_bits(model, ids, request.condition, make_orders("random", (4, 4), range(1))).sum()
    assert fill_bits(model, request, ids).item() == pytest.approx(whole.item(), rel=1e-5)
    same_places = dataclasses.replace(request, pos_N2=grid_positions(4, 4))
    assert fill_bits(model, same_places, ids).item() == pytest.approx(whole.item(), rel=1e-5)
    squeezed = dataclasses.replace(request, pos_N2=grid_positions(4, 4) / 2)
    assert abs(fill_bits(model, squeezed, ids).item() - whole.item()) > 1e-2
    closed = dataclasses.replace(request, known_BN=torch.ones(1, 16, dtype=torch.bool))
    assert fill_bits(model, closed, ids).item() == 0


def test_expansion_keeps_tokens_at_their_places(pipeline):
    image = noise(8, 8)
    with torch.no_grad():
        small = pipeline.tokenizer.encode(to_images(np.asarray(image)[None])).reshape(4, 4)
        large = image.resize((16, 16), Image.Resampling.BICUBIC)
        large_ids = pipeline.tokenizer.encode(to_images(np.asarray(large)[None])).reshape(8, 8)
    request = pipeline.expand_task(image, 1, size=(16, 16), method="positions").next_request()
    assert request.grid == (8, 8)
    assert torch.equal(request.ids_BN.reshape(8, 8)[::2, ::2], small)
    assert request.known_BN.sum() == 16
    assert request.known_BN.reshape(8, 8)[::2, ::2].all()
    assert torch.equal(request.positions().reshape(8, 8, 2)[::2, ::2], grid_positions(4, 4).reshape(4, 4, 2))
    assert request.positions().max() <= 3.5

    request = pipeline.expand_task(image, 1, size=(16, 16), method="checkerboard").next_request()
    board = torch.arange(8)[:, None].add(torch.arange(8)) % 2 == 0
    assert torch.equal(request.known_BN.reshape(8, 8), board)
    assert torch.equal(request.ids_BN.reshape(8, 8)[board], large_ids[board])
    assert torch.equal(request.positions(), grid_positions(8, 8) / 2)

    task = pipeline.expand_task(image, 1, size=(16, 16), steps=3)  # windows are the default
    seen = torch.zeros(8, 8, dtype=torch.int64)
    for part in task._requests:
        seen[part.corner[0] : part.corner[0] + 4, part.corner[1] : part.corner[1] + 4] += 1
    assert (seen[~board] >= 1).all()
    request = task.next_request()
    assert request.grid == (4, 4)
    assert request.pos_N2 is None
    assert request.known_BN.sum() == 8
    task.run()
    assert torch.equal(task._ids_Chw[0][board], large_ids[board])


@pytest.mark.parametrize("method", EXPAND_METHODS)
@pytest.mark.parametrize(
    ("own", "size"), [((8, 8), (11, 11)), ((8, 8), (17, 17)), ((12, 6), (30, 15)), ((3, 3), (5, 5))]
)
def test_any_size_of_the_same_shape(pipeline, method, own, size):
    task = pipeline.expand_task(noise(*own), 1, size=size, method=method, steps=2)
    (result,) = task.run()
    assert result.size == size
    for stage in task.stages:
        if stage.pos_N2 is not None:
            assert stage.pos_N2.min() >= 0, "a negative place is no place at all"
            assert stage.pos_N2.max() < 4


def test_a_generated_image_is_expanded_like_a_given_one(pipeline):
    (small,) = pipeline.generate(2, seed=9, steps=3)
    task = pipeline.expand_task(None, 2, size=(16, 16), method="positions", seed=9, steps=3)
    *_, last = task.steps()
    given = pipeline.expand_task(small, 2, size=(16, 16), method="positions").next_request()
    assert torch.equal(last.ids_BN[given.known_BN], given.ids_BN[given.known_BN])


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ((4, 4), "size is 4x4, the image is 8x8 pixels; expected a larger size"),
        ((8, 8), "expected a larger size"),
        ((16, 4), "expected a larger size"),
        ((0, 16), "expected 1 or more pixels"),
        ((-16, -16), "expected 1 or more pixels"),
        ((16, 24), "keeps its shape; expected 24x24"),
        ((32, 16), "expected 32x32, or outpaint"),
        ((10**6, 10**6), "at most 64 million pixels"),
        ((4000, 4000), f"2000x2000 tokens; at most {MAX_TOKENS}"),
    ],
)
@pytest.mark.parametrize("method", EXPAND_METHODS)
def test_bad_sizes(method, size, message):
    with pytest.raises(InputError, match=message):
        expand_stage((8, 8), size, window=(4, 4), stride=2, method=method)


def test_bad_calls(pipeline):
    with pytest.raises(InputError, match="neither an image nor a class"):
        pipeline.expand(size=(16, 16))
    with pytest.raises(InputError, match="method is 'zoom'; expected one of"):
        pipeline.expand(noise(8, 8), size=(16, 16), method="zoom")
    with pytest.raises(InputError, match="best_of is 0"):
        pipeline.generate(1, best_of=0)
    with pytest.raises(InputError, match="seed is -1"):
        pipeline.outpaint(noise(8, 8), 1, left=2, seed=-1)
    with pytest.raises(InputError, match="tokens; at most"):
        pipeline.outpaint(noise(8, 8), 1, right=70000)


def test_a_gif_loops_and_holds_its_last_frame(pipeline, tmp_path):
    task = begin(pipeline, "generate", steps=4)
    sheets = frame_sheets(list(zip(*(task.preview(step) for step in task.steps()), strict=True)))
    assert len(sheets) == 4
    assert np.array_equal(np.asarray(sheets[-1])[:8, :8], np.asarray(task.images()[0]))
    save_gif(sheets, tmp_path / "a.gif")
    with Image.open(tmp_path / "a.gif") as gif:
        durations = []
        for k in range(gif.n_frames):
            gif.seek(k)
            durations.append(gif.info["duration"])
        assert gif.info["loop"] == 0
        assert durations[-1] == LAST_FRAME_MS
        assert sum(durations) == LAST_FRAME_MS + 3 * FRAME_MS
        last = np.asarray(gif.convert("RGB")).astype(int)
    assert abs(last - np.asarray(sheets[-1])).mean() < 8, "a palette of 256 colours"


def test_a_gif_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    def full(self, path, **_):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", full)
    with pytest.raises(InputError, match="No space left"):
        save_gif([Image.new("RGB", (4, 4))], tmp_path / "a.gif")
    assert not list(tmp_path.iterdir())


def test_command_line(folder, tmp_path, monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["arpg", *map(str, arguments), "--model", str(folder), "--steps", "3"])
        with pytest.raises(SystemExit) as exited:
            cli.main()
        return exited.value.code or 0, capsys.readouterr()

    source, out, gif = tmp_path / "in.png", tmp_path / "out.png", tmp_path / "steps.gif"
    noise(8, 8).save(source)
    for verb in (
        ("generate", "--class", 1, "-n", 2),
        ("inpaint", source, "--mask", source),
        ("edit", source, "--box", "1,1,7,7", "--class", 2),
        ("outpaint", source, "--right", 5, "--bottom", 2),
        ("expand", "--class", 2, "--size", "16x16"),
        ("expand", source, "--size", "16x16", "--way", "windows"),  # the former name
    ):
        code, printed = run(*verb, "--gif", gif, "--best-of", 2, "--seed", 4, "-o", out)
        assert code == 0, printed.err
        assert "the steps are in" in printed.out
        with Image.open(out) as image, Image.open(gif) as steps:
            about = json.loads(image.text["arpg"])
            assert steps.size == image.size
            assert steps.n_frames >= 3
        assert about["task"] == verb[0]
        assert about["best_of"] == 2
        kept = about.get("images", [about])[0]["seed"]
        assert kept in (4, 5)
        gif.unlink()
    assert (
        run("expand", source, "--size", "16x16", "--method", "windows", "--seed", kept, "-o", tmp_path / "again.png")[0]
        == 0
    )
    assert np.array_equal(np.asarray(Image.open(tmp_path / "again.png")), np.asarray(Image.open(out)))
    for arguments, part in (
        (("expand", source, "--size", "16"), "size is '16'; expected WIDTHxHEIGHT"),
        (("expand", source, "--size", "-16x16"), "size is '-16x16'"),
        (("expand", source, "--size", "4x4"), "expected a larger size"),
        (("expand", "--size", "16x16"), "neither an image nor a class"),
        (("expand", source, "--size", "16x16", "--method", "zoom"), "method is 'zoom'"),
        (("expand", tmp_path / "no.png", "--size", "16x16"), "no.png does not exist"),
        (("generate", "--class", 1, "--best-of", 0), "best_of is 0"),
        (("generate", "--class", 1, "--gif", tmp_path / "a.mp4"), "does not end in .gif"),
    ):
        code, printed = run(*arguments, "-o", tmp_path / "bad.png")
        assert code == 2, arguments
        assert part in printed.err
        assert printed.err.count("\n") == 1
    assert not (tmp_path / "bad.png").exists()


def test_previews_show_what_is_not_there_yet_in_grey(pipeline):
    """In the second window of an outpainting the first one is sampled, the next is not."""
    task = pipeline.outpaint_task(Image.new("RGB", (8, 8), "black"), 2, right=16, steps=2)
    assert len(task) > 1
    grey = np.asarray(to_pil(torch.full((1, 3, 1, 1), 0.75))[0])[0, 0]
    counts = [int((np.asarray(images[0]) == grey).all(-1).sum()) for images in task.stream()]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > 8 * 8
    assert counts[-1] == 0
