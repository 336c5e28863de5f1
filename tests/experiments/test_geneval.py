"""GenEval: prompts that training never saw, its rules and layout, and the detector."""

import itertools
import json

import numpy as np
import pytest
import torch
from PIL import Image

from arpg import InputError, Pipeline
from arpg.text_encoder import PromptCache
from experiments.garden.composer import Composer
from experiments.garden.detector import (
    STRIDE,
    Detection,
    Detector,
    DetectorConfig,
    Maps,
    compose_detector_scenes,
    detection_loss,
    heat_target,
    to_arrays,
    train_detector,
)
from experiments.garden.geneval import (
    TASKS,
    GenEvalPrompt,
    ceiling,
    generate,
    held_out_prompts,
    is_correct,
    read_pixels,
    read_prompts,
    relations,
    score,
    to_prompt,
)
from experiments.garden.objects import KINDS, TINTS, held_out
from experiments.garden.scene_sets import reconstruct_half
from experiments.garden.scene_spec import Group, SceneSpec
from support.command import check_error
from support.scene_sets import write_sets
from support.small import TEXT, FakeEncoder, small_tokenizer


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    return tuple(str(path) for path in write_sets(tmp_path_factory.mktemp("sets")))


@pytest.fixture(scope="module")
def composer(sets):
    return Composer(*sets)


# Prompts


def test_prompts_are_held_out_and_never_change():
    prompts = held_out_prompts(60)
    assert [q.prompt.tag for q in prompts] == [tag for tag in TASKS for _ in range(60)]
    assert len({q.prompt.text for q in prompts}) == 360
    assert all(q.spec.visible() for q in prompts)
    for q in prompts:  # in what the task is about, not by chance in something else
        first, background, kinds = q.spec.groups[0], q.spec.background, [g.kind for g in q.spec.groups]
        about = {
            "single_object": ("ground", first.kind, background),
            "counting": ("count", first.kind, str(first.count)),
            "colors": ("colour", first.kind, first.colour),
        }
        assert held_out(*about.get(q.prompt.tag, ("pair", *kinds)))
    again = held_out_prompts(60)
    assert [q.prompt for q in again] == [q.prompt for q in prompts]
    assert prompts[0].prompt.text == "a photo of a mushroom on a gray background"
    with pytest.raises(InputError, match="per_task is 5000"):
        held_out_prompts(5000)


def test_specs_as_geneval_prompts():
    there = to_prompt("position", SceneSpec((Group("cat"), Group("key")), "above"))
    assert json.loads(there.to_json()) == {
        "tag": "position",
        "include": [{"class": "key", "count": 1}, {"class": "cat", "count": 1, "position": ["above", 0]}],
        "prompt": "a photo of a cat above a key",
    }
    three = to_prompt("counting", SceneSpec((Group("star", 3),)))
    assert three.exclude == ({"class": "star", "count": 4},)


# Rules


def found(kind, x=50, y=50, colour="red", side=20, score=0.9):
    return Detection(kind, colour, (x - side / 2, y - side / 2, x + side / 2, y + side / 2), score)


CAT, KEY = {"class": "cat", "count": 1}, {"class": "key", "count": 1}


@pytest.mark.parametrize(
    ("include", "exclude", "objects", "right"),
    [
        ([CAT], [], [found("cat"), found("key")], True),
        ([CAT], [], [found("key")], False),
        ([CAT, KEY], [], [found("key"), found("cat")], True),
        ([CAT, KEY], [], [found("cat"), found("cat")], False),
        ([{"class": "cat", "count": 2}], [{"class": "cat", "count": 3}], [found("cat")] * 2, True),
        ([{"class": "cat", "count": 2}], [{"class": "cat", "count": 3}], [found("cat")] * 3, False),
        ([{"class": "cat", "count": 2}], [{"class": "cat", "count": 3}], [found("cat")], False),
        ([{**CAT, "color": "blue"}], [], [found("cat", colour="blue")], True),
        ([{**CAT, "color": "blue"}], [], [found("cat"), found("key", colour="blue")], False),
        ([{**CAT, "color": "red"}, {**KEY, "color": "blue"}], [], [found("cat"), found("key", colour="blue")], True),
        ([{**CAT, "color": "blue"}, {**KEY, "color": "red"}], [], [found("cat"), found("key", colour="blue")], False),
        ([KEY, {**CAT, "position": ["left of", 0]}], [], [found("cat", x=20), found("key", x=70)], True),
        ([KEY, {**CAT, "position": ["left of", 0]}], [], [found("cat", x=70), found("key", x=20)], False),
        ([KEY, {**CAT, "position": ["left of", 0]}], [], [found("cat", x=20)], False),
        ([KEY, {**CAT, "position": ["below", 0]}], [], [found("cat", y=80), found("key", y=20)], True),
    ],
)
def test_rules(include, exclude, objects, right):
    assert is_correct(GenEvalPrompt("x", "y", tuple(include), tuple(exclude)), objects) is right


def test_relations_need_a_distance():
    assert relations(found("a", x=50), found("b", x=53)) == set()
    assert relations(found("a", x=20, y=20), found("b", x=70, y=70)) == {"left of", "above"}
    assert relations(found("a", x=80, y=52), found("b", x=20, y=50)) == {"right of"}


def test_offsets_are_divided_by_the_distance_of_the_centres():
    """As in the official scorer: by the norm of the offset itself, not of what is left after the threshold."""
    # The offset is (10, 7), the threshold 0.1 * (20 + 20): (6, 3) is left, and 6 / hypot(10, 7) is below one half.
    assert relations(found("a", x=60, y=57), found("b", x=50, y=50)) == set()
    # Of an offset of (14, 7), (10, 3) is left: 10 / hypot(14, 7) is above it.
    assert relations(found("a", x=64, y=57), found("b", x=50, y=50)) == {"right of"}


def test_counting_needs_sure_detections():
    """0.9 in the counting task and 0.3 in the others; the threshold itself is not enough."""
    two = ({"class": "cat", "count": 2},)
    counting = GenEvalPrompt("counting", "two cats", two, ({"class": "cat", "count": 3},))
    sure, unsure = found("cat", score=0.95), found("cat", score=0.9)
    assert is_correct(counting, [sure, sure])
    assert is_correct(counting, [sure, sure, unsure])
    assert not is_correct(counting, [sure, unsure])
    other = GenEvalPrompt("two_object", "two cats", two)
    assert is_correct(other, [found("cat", score=0.4)] * 2)
    assert not is_correct(other, [found("cat", score=0.3)] * 2)


def test_at_most_sixteen_objects_of_a_class_count():
    many = [found("cat", score=0.99)] * 20
    assert is_correct(GenEvalPrompt("counting", "sixteen cats", ({"class": "cat", "count": 16},)), many)
    assert not is_correct(GenEvalPrompt("counting", "seventeen cats", ({"class": "cat", "count": 17},)), many)


def perfect(scene):
    """What a detector that never errs would find."""
    placed = sorted(scene.objects, key=lambda o: o.order)
    return [Detection(o.kind, o.colour, tuple(map(float, o.box)), 1.0) for o in placed]


def test_real_scenes_of_the_prompts_are_right(composer):
    """The composer and the rules agree about every task: with a perfect detector the ceiling is 1."""
    rng = np.random.default_rng(0)
    for q in held_out_prompts(12):
        assert is_correct(q.prompt, perfect(composer.compose(q.spec, rng))), q.prompt.text
    # And the rules are not blind: scenes of one prompt are wrong for another.
    prompts = held_out_prompts(12)[24:]
    wrong = [is_correct(a.prompt, perfect(composer.compose(b.spec, rng))) for a, b in itertools.pairwise(prompts)]
    assert np.mean(wrong) < 0.1


# Layout


def test_geneval_files_round_trip(tmp_path):
    tasks = [q.prompt for q in held_out_prompts(2)]
    file = tmp_path / "evaluation_metadata.jsonl"
    file.write_text("\n".join(task.to_json() for task in tasks) + "\n")
    assert read_prompts(file) == tasks
    for text, message in (("", "no prompts"), ("{}", "line 1 is not GenEval metadata"), ("[", "line 1 is not")):
        file.write_text(text)
        with pytest.raises(InputError, match=message):
            read_prompts(file)


@pytest.fixture(scope="module")
def pipe(text_model):
    return Pipeline(text_model, small_tokenizer(), prompts=PromptCache(TEXT.text, load=FakeEncoder))


def test_images_are_generated_into_the_layout(pipe, tmp_path):
    tasks = [q.prompt for q in held_out_prompts(1)]
    paths = generate(pipe, tasks, tmp_path, images=2, seed=30, batch_size=5, steps=2)
    assert len(paths) == 12
    assert json.loads((tmp_path / "00003" / "metadata.jsonl").read_text())["prompt"] == tasks[3].text
    alone = pipe.generate(prompt=tasks[3].text, seed=30 + 7, steps=2)[0]
    assert np.array_equal(read_pixels([tmp_path / "00003" / "samples" / "0001.png"], 8)[0], np.asarray(alone))
    before = paths[0].stat().st_mtime_ns
    paths[5].unlink()
    again = generate(pipe, tasks, tmp_path, images=2, seed=30, batch_size=5, steps=2)
    assert again == paths
    assert paths[0].stat().st_mtime_ns == before
    assert paths[5].exists()
    for change in ({"steps": 3}, {"seed": 31}, {"images": 3}):
        with pytest.raises(InputError, match="holds results of something else"):
            generate(pipe, tasks, tmp_path, **{"images": 2, "seed": 30, "batch_size": 5, "steps": 2} | change)
    with pytest.raises(InputError, match=r"holds results of something else \(prompts"):
        generate(pipe, tasks[::-1], tmp_path, images=2, seed=30, steps=2)


# The detector


SMALL = DetectorConfig(("apple", "cat", "key"), ("red", "blue"), width=8)


def test_targets_have_a_peak_at_each_centre():
    kind = torch.tensor([[2, 0, -1, -1]])
    box = torch.tensor([[[8.0, 16.0, 24.0, 40.0], [60, 60, 92, 92], [0, 0, 0, 0], [0, 0, 0, 0]]])
    heat = heat_target(kind, box, (3, 24, 24))
    assert (heat == 1).nonzero().tolist() == [[0, 0, 19, 19], [0, 2, 7, 4]]
    assert 0 < heat[0, 0, 19, 20] < 1
    assert not heat[0, 1].any()


def test_maps_are_read_as_they_are_written():
    """Maps that say exactly what stands there are read back as these objects, and have hardly any loss."""
    config = SMALL
    boxes = [(8.0, 16.0, 24.0, 40.0), (61.0, 59.0, 92.0, 93.0)]
    heat, size = torch.full((1, 3, 24, 24), -9.0), torch.zeros(1, 2, 24, 24)
    offset, colour = torch.zeros(1, 2, 24, 24), torch.zeros(1, 2, 24, 24)
    for kind, (left, top, right, bottom) in zip((2, 0), boxes, strict=True):
        x, y = (left + right) / 2 / STRIDE, (top + bottom) / 2 / STRIDE
        column, row = int(x), int(y)
        heat[0, kind, row, column] = 9.0
        size[0, :, row, column] = torch.tensor([(right - left) / STRIDE, (bottom - top) / STRIDE]).log()
        offset[0, :, row, column] = torch.tensor([x - column, y - row])
        colour[0, kind // 2, row, column] = 9.0
    maps = Maps(heat, size, offset, colour)
    first, second = sorted(Detector(config)._read(maps, 0.5)[0], key=lambda f: f.box)
    assert (first.kind, first.colour, second.kind, second.colour) == ("key", "blue", "apple", "red")
    assert first.box == pytest.approx(boxes[0], abs=1e-4)
    assert second.box == pytest.approx(boxes[1], abs=1e-4)
    kind, said = torch.tensor([[2, 0]]), torch.tensor([[1, 0]])
    loss = detection_loss(maps, kind, said, torch.tensor([boxes]))
    assert loss < 0.05
    assert detection_loss(maps, kind.flip(1), said, torch.tensor([boxes])) > 5


@pytest.mark.slow
def test_a_detector_learns_scenes(sets, tmp_path):
    """Two kinds in two colours: after a little training it finds most of them, and a saved one finds the same."""
    composer, rng = Composer(*sets, size=64), np.random.default_rng(0)
    specs = [
        SceneSpec((Group(kind, colour=colour),), background="white")
        for kind in ("cat", "key")
        for colour in ("red", "blue")
    ]
    scenes = [composer.compose(specs[i % 4], rng) for i in range(96)]
    arrays = to_arrays(scenes[:64], SMALL.kinds, SMALL.colours)
    detector = train_detector(arrays, SMALL, steps=100, batch_size=16, device="cpu", lr=5e-3)
    tests = scenes[64:]
    tasks = [to_prompt("colors", scene.spec) for scene in tests]
    pixels = np.stack([scene.pixels_HW3 for scene in tests])
    report = score(tasks, pixels, detector, images=1)
    assert report["overall"] > 0.7
    assert score(tasks[1:] + tasks[:1], pixels, detector, images=1)["overall"] < 0.3
    detector.save(tmp_path)
    assert score(tasks, pixels, Detector.load(tmp_path), images=1) == report
    with pytest.raises(InputError, match="holds no detector"):
        Detector.load(tmp_path / "none")
    with pytest.raises(InputError, match="multiples of 16"):
        detector(torch.zeros(1, 3, 90, 96))


@pytest.mark.slow
def test_the_detector_learns_from_every_combination(sets):
    config = DetectorConfig(tuple(KINDS), tuple(TINTS), width=8)
    scenes = compose_detector_scenes(sets, config, num=260, seed=4)
    again = compose_detector_scenes(sets, config, num=260, seed=4, processes=1)
    assert np.array_equal(scenes.pixels_nHW3, again.pixels_nHW3)
    assert np.array_equal(scenes.kind_nO, again.kind_nO)
    names = [[config.kinds[k] for k in row if k >= 0] for row in scenes.kind_nO]
    pairs = {pair for row in names for pair in itertools.combinations(sorted(set(row)), 2)}
    assert any(held_out("pair", *pair) for pair in pairs)
    assert (scenes.box_nO4[scenes.kind_nO >= 0][:, 2:] > scenes.box_nO4[scenes.kind_nO >= 0][:, :2]).all()


def test_half_of_the_scenes_go_through_the_tokenizer(sets, tmp_path, folder):
    scenes = compose_detector_scenes(sets, DetectorConfig(tuple(KINDS), tuple(TINTS), width=8), num=6)
    changed = reconstruct_half(scenes, str(folder), device=torch.device("cpu")).pixels_nHW3
    same = [np.array_equal(a, b) for a, b in zip(scenes.pixels_nHW3, changed, strict=True)]
    assert same == [False, True] * 3


# The command line


def test_evaluate_text(run, pipe, sets, tmp_path, monkeypatch):
    """Generated, scored, and compared with real scenes; the numbers are those of the functions."""
    monkeypatch.setenv("ARPG_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("arpg.text_encoder.open_encoder", lambda config, device: FakeEncoder())
    pipe.save_pretrained(tmp_path / "model")
    model = ["--model", tmp_path / "model", "--steps", 2, "--device", "cpu"]
    both = ["--fruits", sets[0], "--emoji", sets[1]]
    train = ["train-detector", *both, "-n", 8, "--steps", 2, "--batch-size", 4, "--width", 8, "--processes", 0]
    code, _, err = run(*train, "-o", tmp_path / "detector")
    assert code == 0, err
    more = ["-o", tmp_path / "out", "--per-task", 1, "--images", 2, "--json", tmp_path / "r.json"]
    code, text, err = run("evaluate-text", *model, *both, *more, "--detector", tmp_path / "detector")
    assert code == 0, err
    assert all(tag in text for tag in (*TASKS, "overall", "ceiling"))
    report = json.loads((tmp_path / "r.json").read_text())
    detector, prompts = Detector.load(tmp_path / "detector"), held_out_prompts(1)
    expected = ceiling(prompts, Composer(*sets), detector, images=2)
    assert report["ceiling"]["overall"] == expected["overall"]
    with Image.open(tmp_path / "out" / "00005" / "samples" / "0001.png") as image:
        assert image.size == (8, 8)
    file = tmp_path / "geneval.jsonl"
    file.write_text('{"tag": "two_object", "include": [], "prompt": "a photo of a bench and a sheep"}\n')
    code, text, _ = run("evaluate-text", *model, "-o", tmp_path / "official", "--prompts", file)
    assert code == 0
    assert len(list((tmp_path / "official" / "00000" / "samples").iterdir())) == 4


def test_bad_evaluations(run, folder, tmp_path, sets):
    out = ["-o", tmp_path / "out"]
    for arguments, message in (
        (["--model", folder], "takes classes; expected a model that takes prompts"),
        (["--fruits", sets[0]], "both or neither"),
        (["--fruits", sets[0], "--emoji", sets[1]], "needs a detector"),
        (["--prompts", tmp_path / "none.jsonl"], "does not exist"),
    ):
        check_error(run("evaluate-text", *out, *arguments), message, program="garden")
