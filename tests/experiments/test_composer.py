"""The composer: cut-outs, scenes that show what they say, held-out combinations, captions that are true."""

import itertools
import re

import numpy as np
import pytest
from PIL import Image, ImageDraw

from arpg import InputError
from experiments.garden.composer import FAR, Composer, cut_out, tint
from experiments.garden.objects import BACKGROUNDS, KINDS, RARITY, TINTS, held_out
from experiments.garden.scene_spec import (
    INVERSE,
    NUMBERS,
    RELATIONS,
    Group,
    SceneSpec,
    caption,
    plain_caption,
    sample_spec,
)
from support.scene_sets import EXTRA, write_sets


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    return write_sets(tmp_path_factory.mktemp("sets"))


@pytest.fixture(scope="module")
def composer(sets):
    return Composer(*sets)


def horseshoe():
    """Concave, with a white place inside, soft edges."""
    large = Image.new("RGB", (320, 320), "white")
    draw = ImageDraw.Draw(large)
    draw.ellipse((40, 40, 280, 280), fill=(180, 40, 60))
    draw.rectangle((140, 150, 180, 320), fill="white")  # open to the border
    draw.ellipse((80, 90, 110, 120), fill="white")  # closed
    return large.resize((80, 80), Image.Resampling.BOX)


def test_a_cut_out_on_white_is_the_image_again():
    picture = horseshoe()
    cut = cut_out(picture)
    assert cut.size == (60, 60)
    again = Image.new("RGB", (80, 80), "white")
    again.paste(cut, (10, 10), cut)
    difference = np.abs(np.asarray(again, int) - np.asarray(picture, int))
    assert difference.mean() < 0.6
    assert difference.max() < 70


def test_the_background_goes_and_white_inside_stays():
    alpha = np.asarray(cut_out(horseshoe()).getchannel("A"))
    assert alpha[50, 30] == 0  # the open notch
    assert alpha[16, 13] == 255  # the place
    dark = Image.new("RGB", (60, 60), "black")
    cut = cut_out(horseshoe())
    dark.paste(cut, (0, 0), cut)
    rim = (alpha > 0) & (alpha < 255)
    assert np.asarray(dark)[rim].max(-1).mean() < 190  # no white fringe
    with pytest.raises(InputError, match="white all over"):
        cut_out(Image.new("RGB", (9, 9), "white"))


@pytest.mark.parametrize("name", TINTS)
def test_a_tint_gives_the_colour_and_keeps_the_shape(name):
    rng = np.random.default_rng(0)
    rgba = np.dstack((rng.integers(0, 256, (30, 30, 3)), np.full((30, 30), 255))).astype(np.uint8)
    rgba[:5, :, 3] = 0
    tinted = np.asarray(tint(Image.fromarray(rgba), TINTS[name]), float)
    assert np.array_equal(tinted[..., 3], rgba[..., 3])
    mean = tinted[5:, :, :3].mean((0, 1))
    nearest = min(TINTS, key=lambda other: np.abs(mean / mean.sum() - np.array(TINTS[other]) / sum(TINTS[other])).sum())
    assert nearest == name
    light = rgba[5:, :, :3] @ np.array([0.299, 0.587, 0.114])
    assert np.corrcoef(light.ravel(), tinted[5:, :, :3].mean(-1).ravel())[0, 1] > 0.9


def test_a_scene_is_a_function_of_its_seed(composer, sets):
    again = Composer(*sets)
    for seed in (0, 1, 12345):
        a, b = composer.scene(seed), again.scene(seed)
        assert np.array_equal(a.pixels_HW3, b.pixels_HW3)
        assert np.array_equal(a.depth_HW, b.depth_HW)
        assert (a.caption, a.objects, a.spec) == (b.caption, b.objects, b.spec)
    assert len({composer.scene(seed).pixels_HW3.tobytes() for seed in range(40)}) == 40


def test_boxes_order_and_depth_agree_with_the_pixels(composer):
    for seed in range(80):
        scene = composer.scene(seed)
        assert scene.pixels_HW3.shape == (96, 96, 3)
        assert [o.kind for o in scene.objects] == [g.kind for g in scene.spec.groups for _ in range(g.count)]
        assert {o.order for o in scene.objects} == set(range(len(scene.objects)))
        nearer = sorted(scene.objects, key=lambda o: o.depth, reverse=True)
        assert [o.order for o in nearer] == list(range(len(nearer)))
        depths = {FAR, *(np.float32(o.depth) for o in scene.objects)}
        assert set(np.unique(scene.depth_HW)) <= {np.float32(d) for d in depths}
        nearest = nearer[-1]  # nothing hides it: its pixels fill its box
        rows, columns = np.nonzero(scene.depth_HW == np.float32(nearest.depth))
        left, top, right, bottom = nearest.box
        found = columns.min(), rows.min(), columns.max() + 1, rows.max() + 1
        assert np.abs(np.array(found) - (left, top, right, bottom)).max() <= 2
        for o in scene.objects:
            assert 0 <= o.box[0] < o.box[2] <= 96
            assert 0 <= o.box[1] < o.box[3] <= 96
            shown = (scene.depth_HW == np.float32(o.depth)).sum()
            assert shown > 0.2 * (o.box[2] - o.box[0]) * (o.box[3] - o.box[1])


def centre(o):
    return (o.box[0] + o.box[2]) / 2, (o.box[1] + o.box[3]) / 2


def test_objects_stand_as_specified(composer):
    rng = np.random.default_rng(5)
    for relation in RELATIONS:
        for counts in ((1, 1), (2, 1), (1, 3), (2, 2)) if relation != "front" else ((1, 1),) * 4:
            spec = SceneSpec((Group("banana", counts[0]), Group("key", counts[1])), relation, "blue")
            scene = composer.compose(spec, rng)
            first, second = scene.objects[: counts[0]], scene.objects[counts[0] :]
            for a, b in itertools.product(first, second):
                (ax, ay), (bx, by) = centre(a), centre(b)
                if relation == "front":
                    assert a.order > b.order
                    assert min(a.box[2], b.box[2]) > max(a.box[0], b.box[0])
                    assert min(a.box[3], b.box[3]) > max(a.box[1], b.box[1])
                    continue
                along = {"left": bx - ax, "right": ax - bx, "above": by - ay, "below": ay - by}[relation]
                assert along >= 8
                assert along >= (abs(ay - by) if relation in ("left", "right") else abs(ax - bx))


def test_colours_are_those_specified(composer):
    """A tinted object's pixels are nearest to its tint, as shares of the channels."""
    rng = np.random.default_rng(1)
    for name in TINTS:
        scene = composer.compose(SceneSpec((Group("key", colour=name),), background="white"), rng)
        inside = scene.pixels_HW3[scene.depth_HW < FAR].astype(float).mean(0)
        nearest = min(TINTS, key=lambda n: np.abs(inside / inside.sum() - np.array(TINTS[n]) / sum(TINTS[n])).sum())
        assert nearest == name
    for name, colour in BACKGROUNDS.items():
        scene = composer.compose(SceneSpec((Group("key", size="small"),), background=name), rng)
        corner = scene.pixels_HW3[:4, :4].reshape(-1, 3).mean(0)
        assert np.abs(corner - colour).max() < 45


def test_training_never_sees_what_is_held_out(composer):
    rng = np.random.default_rng(0)
    seen = [sample_spec(rng, extra=composer.extra) for _ in range(4000)]
    pairs = {frozenset((a.kind, b.kind)) for spec in seen for a, b in itertools.combinations(spec.groups, 2)}
    counts = {(g.kind, g.count) for spec in seen for g in spec.groups if g.count > 1}
    tints = {
        (g.kind, g.colour) for spec in seen for g in spec.groups if g.colour and g.colour not in KINDS[g.kind].natural
    }
    backgrounds = {(g.kind, spec.background) for spec in seen for g in spec.groups}
    assert not any(held_out("pair", *pair) for pair in pairs)
    assert not any(held_out("count", kind, str(n)) for kind, n in counts)
    assert not any(held_out("colour", *both) for both in tints)
    assert not any(held_out("ground", *both) for both in backgrounds)
    # All that is not held out does appear: the rest is learnt.
    for kind in KINDS:
        assert all((kind, n) in counts or held_out("count", kind, str(n)) for n in (2, 3, 4))
    assert {g.kind for spec in seen for g in spec.groups} >= set(KINDS)
    assert any(g.kind.endswith("emoji") for spec in seen for g in spec.groups)


def test_enough_is_held_out_and_it_never_changes():
    pairs = [pair for pair in itertools.combinations(KINDS, 2) if held_out("pair", *pair)]
    assert len(pairs) == pytest.approx(len(KINDS) * (len(KINDS) - 1) / 2 / RARITY["pair"], rel=0.2)
    assert held_out("pair", "key", "cat") == held_out("pair", "cat", "key")
    tints = [(k, c) for k in KINDS if KINDS[k].tintable for c in TINTS if held_out("colour", k, c)]
    counts = [(k, n) for k in KINDS for n in "234" if held_out("count", k, n)]
    assert min(len(tints), len(counts)) >= 30
    # What was trained on must stay what it was.
    assert [n for n in "234" if held_out("count", "cat", n)] == ["4"]
    assert sorted(c for c in TINTS if held_out("colour", "star", c)) == ["blue", "orange", "purple"]


PHRASES = {
    "left": r"(?:to the |on the )?left of",
    "right": r"(?:to the |on the )?right of",
    "above": r"above|over",
    "below": r"below|under|beneath",
    "front": r"in front of|partly covering",
}


def said(text, group):
    """Whether the caption speaks of the group as it is."""
    kind = KINDS.get(group.kind)
    if group.count > 1:
        number, noun = rf"(?:{NUMBERS[group.count]}|{group.count})", kind.plural
    else:
        number, noun = r"(?:an?|one)", kind.noun if kind else group.kind
    size = {"": "", "small": "(?:(?:small|little|tiny) )?", "large": "(?:(?:large|big|huge) )?"}[group.size]
    colour = f"{group.colour} " if group.colour else ""
    return re.search(rf"(?<!\w){number} {size}{colour}{re.escape(noun)}(?!\w)", text)


def test_captions_are_true(composer):
    rng = np.random.default_rng(2)
    texts = set()
    for _ in range(1500):
        spec = sample_spec(rng, extra=composer.extra)
        text = caption(spec, rng)
        texts.add(text)
        found = [said(text, group) for group in spec.groups]
        assert all(found), (text, spec)
        relations = [name for name, phrase in PHRASES.items() if re.search(rf"\b(?:{phrase})\b", text)]
        if spec.relation:
            (name,) = relations
            straight = found[0].start() < found[1].start()
            assert name == (spec.relation if straight else INVERSE.get(spec.relation)), text
        else:
            assert not [name for name in relations if name != "front"], text
        backgrounds = re.findall(r"\b(?:on|against) (?:an? )?(\w+)(?: background|$|,)", text)
        assert set(backgrounds) <= {spec.background}, text
        assert not re.search(r"\ba [aeio]|\ban [^aeiou]", text), text
    assert len(texts) > 1200


def test_plain_captions():
    two = SceneSpec((Group("cat", colour="blue"), Group("umbrella", colour="red")))
    assert plain_caption(two) == "a photo of a blue cat and a red umbrella"
    assert plain_caption(SceneSpec((Group("orange", 3),))) == "a photo of three oranges"
    there = SceneSpec((Group("onion"), Group("fox")), "left", "orange")
    assert plain_caption(there) == "a photo of an onion left of a fox on an orange background"


def test_bad_specs_and_sets_are_refused(composer, tmp_path, sets):
    with pytest.raises(InputError, match="count is 5"):
        Group("cat", 5)
    with pytest.raises(InputError, match="5 objects"):
        SceneSpec((Group("cat", 3), Group("key", 2)))
    with pytest.raises(InputError, match="different kinds"):
        SceneSpec((Group("cat"), Group("cat", colour="red")))
    with pytest.raises(InputError, match="needs two groups"):
        SceneSpec((Group("cat"),), "left")
    with pytest.raises(InputError, match="neither in KINDS"):
        composer.compose(SceneSpec((Group("spoon"),)), np.random.default_rng(0))
    with pytest.raises(InputError, match="no class folders"):
        Composer(sets[1], sets[1])
    assert composer.extra == tuple(f"{name} emoji" for name in EXTRA)
