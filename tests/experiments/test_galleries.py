"""The builders of the galleries, with small models: every sheet is there, and shows what it says."""

import numpy as np
import pytest

from arpg import ControlInput, InputError, Pipeline
from arpg.data.images import open_images
from arpg.image import open_image
from arpg.tasks import control_input as picture
from arpg.text_encoder import PromptCache
from experiments import zero_shot_gallery
from experiments.garden import gallery
from support.paths import ROOT
from support.scene_sets import write_sets
from support.small import TEXT, FakeEncoder, controlled_model, noise, small_tokenizer

OUTLINE = ROOT / "examples" / "outline.png"


@pytest.fixture
def pipe():
    return Pipeline(controlled_model(), small_tokenizer())


@pytest.fixture
def tests(tmp_path, monkeypatch):
    """Images of the small model's classes; bright parts stand for edges."""
    monkeypatch.setattr(
        picture, "extract", lambda kind, image, **_: image.convert("L").point(lambda v: 255 * (v > 127))
    )
    for name in range(5):
        (tmp_path / "tests" / str(name)).mkdir(parents=True)
        for i in range(2):
            noise(9, 9, seed=10 * name + i).save(tmp_path / "tests" / str(name) / f"{i}.png")
    return open_images(tmp_path / "tests")


def test_control(pipe, tests, tmp_path):
    sets = tuple(map(str, write_sets(tmp_path)))
    sources = gallery.fruits(tests, 2, 8)
    paths = gallery.write_control(pipe, sources, sets, tmp_path / "out", num=2)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(path.name for path in paths)
    sizes = {path.stem: open_image(path).size for path in paths}
    cell = 192 + 2
    assert {name: round(width / cell) for name, (width, _) in sizes.items()} == {
        "edges": 5,
        "depth": 6,
        "drawing": 4,
        "strength": 7,
        "inpaint": 6,
    }


def test_the_outlines_are_lines_that_a_model_can_be_given(pipe):
    drawings = gallery.drawings()
    shares = [np.mean(np.asarray(ControlInput(d, "canny").fit((96, 96))) > 0) for d in drawings.values()]
    assert all(0.02 < share < 0.2 for share in shares)
    first, leaf, _ = (np.asarray(drawing) for drawing in drawings.values())
    assert np.array_equal(first[150:], leaf[150:])  # an edited drawing is the same elsewhere
    assert leaf.sum() > first.sum()
    assert np.array_equal(np.asarray(open_image(OUTLINE).convert("L")), leaf)


def test_classes_are_spread(tests):
    assert [name for _, name in gallery.fruits(tests, 3, 8)] == ["0", "2", "4"]
    shown = gallery.fruits(tests, 99, 8)
    assert [picture.size for picture, _ in shown] == [(8, 8)] * 5


def test_text(text_model, tmp_path):
    pipe = Pipeline(text_model, small_tokenizer(), prompts=PromptCache(TEXT.text, load=FakeEncoder))
    paths = gallery.write_text(pipe, tmp_path, num=12)
    assert [path.stem for path in paths] == ["good", "bad", "negative", "uncurated"]
    assert all(open_image(path).width > 192 for path in paths)


def test_zero_shot(pipe, tests, tmp_path):
    """Every task has its picture; the same seed gives the same classes and pixels, another one others."""
    paths = zero_shot_gallery.write_gallery(pipe, tmp_path / "a", rows=2, seed=3, control=pipe)
    assert [path.stem for path in paths] == ["inpaint", "edit", "outpaint", "expand", "canny", "depth"]
    again = zero_shot_gallery.write_gallery(pipe, tmp_path / "b", rows=2, seed=3)
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in paths[:4]]
    assert all(open_image(path).width > 192 for path in paths)
    gallery = zero_shot_gallery.Gallery(pipe, rows=5, seed=4)
    assert sorted(gallery.names) == [f"class {i}" for i in range(5)]
    assert gallery.others(4, 3) == gallery.names[:3]
    with pytest.raises(InputError, match="rows is 6; expected 2 to 5"):
        zero_shot_gallery.Gallery(pipe, rows=6, seed=0)
