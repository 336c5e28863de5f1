"""Data: image sets against plain Pillow, crops against windows, token sets against plain arrays."""

import io
import json
import shutil
import zipfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import Image

from arpg import InputError
from arpg.data import PixelStream, TokenWriter, concatenate, eval_pixels, open_images, open_tokens, tokenize
from arpg.image import adm_crop, ten_crop
from conftest import small_tokenizer


def noise(width, height, seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def write_zip(folder, path, prefix=""):
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(folder.rglob("*"), reverse=True):  # a zip file is in no particular order
            if file.is_file():
                archive.write(file, prefix + file.relative_to(folder).as_posix())
    return path


@pytest.fixture
def photos(tmp_path):
    """Three classes with 2, 3 and 4 images of different sizes."""
    root = tmp_path / "photos"
    for c, name in enumerate(["pear", "apple", "apple red"]):
        (root / name).mkdir(parents=True)
        for i in range(2 + c):
            noise(30 + 7 * i, 26 + 9 * c, seed=10 * c + i).save(root / name / f"{i}.png")
    (root / "LICENSE").write_text("MIT")
    return root


# Crops


@pytest.mark.parametrize(("width", "height"), [(37, 52), (64, 64), (133, 70), (16, 16), (9, 20), (31, 200)])
@pytest.mark.parametrize("size", [8, 16, 17])
def test_adm_crop_is_the_published_recipe(width, height, size):
    image = noise(width, height)
    expected = image
    while min(*expected.size) >= 2 * size:
        expected = expected.resize(tuple(x // 2 for x in expected.size), resample=Image.BOX)
    scale = size / min(*expected.size)
    expected = expected.resize(tuple(round(x * scale) for x in expected.size), resample=Image.BICUBIC)
    array = np.array(expected)
    top, left = (array.shape[0] - size) // 2, (array.shape[1] - size) // 2
    np.testing.assert_array_equal(np.array(adm_crop(image, size)), array[top : top + size, left : left + size])
    assert adm_crop(image, size).size == (size, size)


def test_ten_crops_are_windows_of_the_adm_square_and_their_mirror_images():
    image, size = noise(90, 70), 30
    square = np.array(adm_crop(image, 33))
    views = [np.array(view) for view in ten_crop(image, size)]
    assert len(views) == 10
    corners = [square[:30, :30], square[:30, 3:], square[3:, :30], square[3:, 3:]]
    for view, expected in zip(views, corners, strict=False):
        np.testing.assert_array_equal(view, expected)
    np.testing.assert_array_equal(views[4], square[2:32, 2:32])
    for view, mirrored in zip(views[:5], views[5:], strict=True):
        np.testing.assert_array_equal(view[:, ::-1], mirrored)


# Image sets


def test_folder_and_zip_are_the_same_set(photos, tmp_path):
    folder = open_images(photos)
    assert folder.classes == ("apple", "apple red", "pear")
    assert folder.names == tuple(sorted(folder.names))
    assert len(folder) == 9
    assert [folder.classes[label] for label in folder.labels] == [name.split("/")[0] for name in folder.names]
    assert folder.captions is None
    plain = write_zip(photos, tmp_path / "plain.zip")
    deep = write_zip(photos, tmp_path / "deep.zip", prefix="set/train/")
    for source in (str(photos), plain, deep / "set" / "train"):
        images = open_images(source)
        assert (images.names, images.labels, images.classes) == (folder.names, folder.labels, folder.classes)
        for i, name in enumerate(images.names):
            assert images.read(i).tobytes() == Image.open(photos / name).tobytes()


def test_nesting_below_a_class_and_hidden_files(photos):
    (photos / "pear" / "more").mkdir()
    noise(20, 20).save(photos / "pear" / "more" / "9.jpg")
    (photos / "pear" / "._9.jpg").write_bytes(b"mac")
    images = open_images(photos)
    assert len(images) == 10
    assert images.classes[images.labels[images.names.index("pear/more/9.jpg")]] == "pear"


def test_a_zip_is_read_from_many_threads(photos, tmp_path):
    images = open_images(write_zip(photos, tmp_path / "set.zip"))
    expected = [images.read(i).tobytes() for i in range(9)]
    order = np.random.default_rng(0).integers(0, 9, 300).tolist()
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda i: images.read(i).tobytes(), order)) == [expected[i] for i in order]


def test_every_mode_becomes_rgb(tmp_path):
    grey = Image.new("L", (4, 4), 90)
    clear = Image.new("RGBA", (4, 4), (200, 0, 100, 0))
    half = Image.new("RGBA", (4, 4), (200, 0, 100, 51))  # alpha 0.2
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([0, 0, 0, 10, 20, 30])
    palette_clear = palette.copy()
    palette_clear.info["transparency"] = b"\xff\x00"
    deep = Image.fromarray(np.full((4, 4), 90 * 257, np.uint16))
    cases = {
        "0.png": (grey, (90, 90, 90)),
        "1.png": (clear, (255, 255, 255)),
        "2.png": (half, (244, 204, 224)),
        "3.png": (palette, (10, 20, 30)),
        "4.png": (palette_clear, (255, 255, 255)),
        "5.gif": (palette, (10, 20, 30)),
        "6.bmp": (Image.new("RGB", (4, 4), (1, 2, 3)), (1, 2, 3)),
        "7.png": (deep, (90, 90, 90)),
        "8.png": (Image.new("LA", (4, 4), (0, 0)), (255, 255, 255)),
    }
    for name, (image, _) in cases.items():
        image.save(tmp_path / name)
    Image.new("CMYK", (4, 4), (0, 255, 255, 0)).save(tmp_path / "9.jpg", quality=100)
    images = open_images(tmp_path)
    assert (images.classes, set(images.labels)) == ((), {0})
    for i, (image, colour) in enumerate(cases.values()):
        read = images.read(i)
        assert (read.mode, read.size) == ("RGB", image.size)
        assert np.abs(np.array(read).astype(int) - colour).max() <= 1, images.names[i]
    assert np.abs(np.array(images.read(9)).astype(int) - (255, 0, 0)).max() <= 3


def test_exif_rotation_is_applied(tmp_path):
    image = noise(6, 4)
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: rotate by 90 degrees clockwise
    image.save(tmp_path / "turned.png", exif=exif)
    np.testing.assert_array_equal(np.array(open_images(tmp_path).read(0)), np.rot90(np.array(image), -1))


def test_captions(tmp_path):
    for i in range(3):
        noise(8, 8, seed=i).save(tmp_path / f"{i}.png")
    table = {"2.png": {"name": "two", "group": "x"}, "0.png": {"name": "zero"}, "1.png": "plain text"}
    (tmp_path / "captions.json").write_text(json.dumps(table))
    assert open_images(tmp_path).captions == ("zero", "plain text", "two")
    archive = write_zip(tmp_path, tmp_path.parent / "captioned.zip", prefix="emoji/")
    for source in (archive, archive / "emoji"):  # with and without a class folder above them
        assert open_images(source).captions == ("zero", "plain text", "two")
    (tmp_path / "captions.json").unlink()
    lines = [json.dumps({"file": f"{i}.png", "caption": f"line {i}"}) for i in (1, 0, 2)]
    (tmp_path / "captions.jsonl").write_text("\n".join(lines) + "\n")
    assert open_images(tmp_path).captions == ("line 0", "line 1", "line 2")
    (tmp_path / "captions.jsonl").write_text("\n".join(lines[:2]))
    with pytest.raises(InputError, match=r"1 images have none, like 2\.png"):
        open_images(tmp_path)
    (tmp_path / "captions.jsonl").write_text('{"file": 3}')
    with pytest.raises(InputError, match="not a caption file"):
        open_images(tmp_path)


def test_concatenate_shares_classes(photos, tmp_path):
    other = tmp_path / "other"
    for name in ("fig", "pear"):
        (other / name).mkdir(parents=True)
        noise(12, 12, seed=99).save(other / name / "a.png")
    first, second = open_images(photos), open_images(other)
    both = concatenate([first, second])
    assert both.classes == ("apple", "apple red", "pear", "fig")
    assert [both.classes[label] for label in both.labels] == [name.split("/")[0] for name in both.names]
    assert both.names == first.names + second.names
    assert both.captions is None
    assert both.read(9).tobytes() == second.read(0).tobytes()
    bare = tmp_path / "bare"
    bare.mkdir()
    noise(8, 8).save(bare / "x.png")
    (bare / "captions.json").write_text('{"x.png": "a fig"}')
    assert concatenate([open_images(bare)] * 2).captions == ("a fig", "a fig")
    with pytest.raises(InputError, match="bare has no class folders"):
        concatenate([first, open_images(bare)])


def test_image_sources_that_are_wrong_are_named(photos, tmp_path):
    archive = write_zip(photos, tmp_path / "set.zip")
    (tmp_path / "text.txt").write_text("hello")
    (tmp_path / "empty").mkdir()
    for path, message in [
        (tmp_path / "nowhere", "nowhere does not exist"),
        (tmp_path / "text.txt", "text.txt is not a zip file"),
        (tmp_path / "empty", "empty has no images"),
        (archive / "train", r"set.zip has no folder train; at its top are .*pear"),
        (archive / "LICENSE", "has no folder LICENSE"),
    ]:
        with pytest.raises(InputError, match=message):
            open_images(path)
    noise(8, 8).save(photos / "loose.png")
    with pytest.raises(InputError, match=r"also loose images, like loose\.png"):
        open_images(photos)


@pytest.mark.parametrize("ending", [".png", ".jpg", ".webp", ".gif", ".bmp"])
def test_a_broken_image_is_named(tmp_path, ending):
    buffer = io.BytesIO()
    noise(40, 40).save(buffer, format=Image.registered_extensions()[ending])
    for content in (buffer.getvalue()[: len(buffer.getvalue()) // 2], b"not an image", b""):
        (tmp_path / f"broken{ending}").write_bytes(content)
        images = open_images(tmp_path)
        with pytest.raises(InputError, match=rf"broken\{ending} cannot be read as an image"):
            images.read(0)


# Training crops


def stream(sources, **settings):
    return PixelStream(sources, 16, **{"seed": 3, "batch_size": 12, "threads": 2, **settings})


def windows(images, size, margin=1.1):
    """Every crop that there can be: its bytes, and the image it is of."""
    found = {}
    side = int(margin * size)
    for i in range(len(images)):
        square = np.array(adm_crop(images.read(i), side))
        for top in range(side - size + 1):
            for left in range(side - size + 1):
                crop = square[top : top + size, left : left + size]
                found[crop.tobytes()] = (i, top, left, False)
                found[crop[:, ::-1].tobytes()] = (i, top, left, True)
    return found


def test_crops_are_windows_and_every_pass_sees_every_image_once(photos):
    images = open_images(photos)
    known = windows(images, 16, margin=1.2)
    pixels = stream([(images, 1.0)], margin=1.2)
    samples = [known[crop.tobytes()] for step in range(60) for crop in pixels.batch(step)]  # 720 = 80 passes of 9
    passes = [[sample[0] for sample in samples[k : k + 9]] for k in range(0, len(samples), 9)]
    assert all(sorted(p) == list(range(9)) for p in passes)
    assert len({tuple(p) for p in passes}) > 70  # each in an order of its own
    tops, lefts = ([sample[axis] for sample in samples] for axis in (1, 2))
    assert set(tops) == set(lefts) == {0, 1, 2, 3}
    assert 300 < sum(sample[3] for sample in samples) < 420
    assert abs(np.corrcoef(tops, lefts)[0, 1]) < 0.15


@pytest.mark.parametrize("scale", [(1.0, 1.0), (0.95, 2.0)])
def test_batches_depend_on_seed_and_step_only(photos, scale):
    images = open_images(photos)
    whole = stream([(images, 1.0)], scale=scale)
    batches = [whole.batch(step) for step in range(4)]
    assert batches[0].shape == (12, 16, 16, 3)
    assert batches[0].dtype == np.uint8
    assert len({batch.tobytes() for batch in batches}) == 4
    on_demand = stream([(images, 1.0)], scale=scale, memory_limit=0)
    assert whole.in_memory
    assert not on_demand.in_memory
    parts = [stream([(images, 1.0)], scale=scale, rank=rank, world_size=3) for rank in range(3)]
    for step in (0, 1, 2, 3, 1):  # and back again
        np.testing.assert_array_equal(whole.batch(step), batches[step])
        np.testing.assert_array_equal(on_demand.batch(step), batches[step])
        np.testing.assert_array_equal(np.concatenate([part.batch(step) for part in parts]), batches[step])
    assert not np.array_equal(stream([(images, 1.0)], scale=scale, seed=4).batch(0), batches[0])


def test_zoomed_crops_are_resized_windows(photos):
    images = open_images(photos)
    side = int(1.1 * 16)
    resized = set()
    for i in range(len(images)):
        square = adm_crop(images.read(i), side)
        for top in range(side - 8 + 1):
            for left in range(side - 8 + 1):
                crop = square.crop((left, top, left + 8, top + 8)).resize((16, 16), Image.Resampling.BILINEAR)
                resized |= {crop.tobytes(), crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT).tobytes()}
    batch = stream([(images, 1.0)], scale=(2.0, 2.0)).batch(5)
    assert all(crop.tobytes() in resized for crop in batch)
    wide = stream([(images, 1.0)], scale=(0.1, 0.1)).batch(0)  # a zoom out ends at the whole square
    whole = {adm_crop(images.read(i), side).resize((16, 16), Image.Resampling.BILINEAR).tobytes() for i in range(9)}
    assert all(crop.tobytes() in whole or np.ascontiguousarray(crop[:, ::-1]).tobytes() in whole for crop in wide)


def test_weights_are_shares(tmp_path):
    sets = []
    for c, colour in enumerate(["red", "lime", "blue"]):
        (tmp_path / colour).mkdir()
        for i in range(1 + c):
            Image.new("RGB", (16, 16), colour).save(tmp_path / colour / f"{i}.png")
        sets.append(open_images(tmp_path / colour))
    pixels = stream(list(zip(sets, (1.0, 5.0, 2.0), strict=True)), batch_size=64)
    counts = np.array([(pixels.batch(step)[:, 0, 0] == 255).sum(0) for step in range(128)])
    np.testing.assert_array_equal(counts[:64].sum(0), [512, 2560, 1024])  # exactly, in a cycle of 4096
    np.testing.assert_array_equal(counts[64:].sum(0), [512, 2560, 1024])
    assert not np.array_equal(counts[:64], counts[64:])
    expected = 64 * np.array([1, 5, 2]) / 8
    deviation = np.sqrt(expected * (1 - expected / 64))
    assert (np.abs(counts - expected) < 5 * deviation).all()


def test_two_sources_are_each_walked_pass_by_pass(photos, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    for i in range(5):
        noise(20, 20, seed=50 + i).save(other / f"{i}.png")
    first, second = open_images(photos), open_images(other)
    known = [windows(first, 16), windows(second, 16)]
    pixels = stream([(first, 3.0), (second, 1.0)])
    walked = [[], []]
    for step in range(700):  # beyond two cycles, so the count goes on across their borders
        for crop in pixels.batch(step):
            source = 0 if crop.tobytes() in known[0] else 1
            walked[source].append(known[source][crop.tobytes()][0])
    for images, seen in zip((first, second), walked, strict=True):
        n = len(images)
        assert len(seen) > 20 * n
        assert all(sorted(seen[k : k + n]) == list(range(n)) for k in range(0, len(seen) - n + 1, n))


def test_progress_and_eval_pixels(photos):
    images = open_images(photos)
    seen = []
    stream([(images, 1.0)], progress=lambda done, total: seen.append((done, total)))
    assert seen == [(i + 1, 9) for i in range(9)]
    expected = np.stack([np.array(adm_crop(images.read(i), 20)) for i in range(9)])
    np.testing.assert_array_equal(eval_pixels(images, 20), expected)
    np.testing.assert_array_equal(eval_pixels(images, 20, limit=4), expected[:4])
    assert len(eval_pixels(images, 20, limit=40)) == 9


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 10, "world_size": 4}, "batch_size is 10; expected a multiple .*, 4"),
        ({"margin": 0.9}, "margin is 0.9"),
        ({"scale": (2.0, 1.0)}, r"scale is \(2.0, 1.0\)"),
    ],
)
def test_stream_settings_are_checked(photos, settings, message):
    with pytest.raises(InputError, match=message):
        stream([(open_images(photos), 1.0)], **settings)


def test_stream_sources_are_checked(photos):
    images = open_images(photos)
    with pytest.raises(InputError, match="no image sources"):
        stream([])
    with pytest.raises(InputError, match="expected numbers above 0"):
        stream([(images, 1.0), (images, 0.0)])
    with pytest.raises(InputError, match="at least 1/4096"):
        stream([(images, 1.0), (images, 1e-5)])
    (photos / "pear" / "0.png").write_bytes(b"broken")
    with pytest.raises(InputError, match=r"pear/0\.png cannot be read"):
        stream([(images, 1.0)])


# Token sets

CLASSES = ("a", "b", "c")


def random_tokens(n, views=3, length=6, vocab_size=50):
    rng = np.random.default_rng(0)
    return rng.integers(0, vocab_size, (n, views, length)), rng.integers(0, 3, n)


def write_tokens(folder, ids, labels, *, vocab_size=50, parts=7, shard_size=10, close=True):
    writer = TokenWriter(
        folder, grid=(2, 3), vocab_size=vocab_size, classes=CLASSES, views=ids.shape[1], shard_size=shard_size
    )
    for start in range(writer.num_done, len(labels), parts):
        writer.add(ids[start : start + parts], labels[start : start + parts])
    if close:
        writer.close()
    return writer


@pytest.mark.parametrize("vocab_size", [50, 65536, 100_000])
@pytest.mark.parametrize("shard_size", [3, 10, 64])
def test_tokens_round_trip(tmp_path, vocab_size, shard_size):
    ids, labels = random_tokens(38, vocab_size=vocab_size)
    write_tokens(tmp_path, ids, labels, vocab_size=vocab_size, shard_size=shard_size)
    assert len(list(tmp_path.glob("ids-*.npy"))) == -(-38 // shard_size)
    assert np.load(tmp_path / "ids-00000.npy").dtype == (np.uint16 if vocab_size <= 65536 else np.uint32)
    tokens = open_tokens(tmp_path, vocab_size=vocab_size, num_classes=3)
    assert (tokens.num_images, tokens.views, tokens.grid) == (38, 3, (2, 3))
    assert (tokens.vocab_size, tokens.num_classes, tokens.classes) == (vocab_size, 3, CLASSES)
    assert tokens.labels.dtype == np.int32
    np.testing.assert_array_equal(tokens.labels, labels)
    rng = np.random.default_rng(1)
    index, view = rng.integers(0, 38, 200), rng.integers(0, 3, 200)
    gathered = tokens.gather(index, view)
    assert gathered.dtype == np.int64
    np.testing.assert_array_equal(gathered, ids[index, view])
    for bad_index, bad_view in ((38, 0), (-1, 0), (0, 3), (0, -1)):
        with pytest.raises(IndexError):
            tokens.gather(np.array([bad_index]), np.array([bad_view]))


def test_an_unfinished_set_is_continued(tmp_path):
    ids, labels = random_tokens(38)
    write_tokens(tmp_path / "whole", ids, labels)
    write_tokens(tmp_path / "halves", ids[:25], labels[:25], close=False)
    with pytest.raises(InputError, match="unfinished token set"):
        open_tokens(tmp_path / "halves")
    (tmp_path / "halves" / "ids-00002.npy").write_bytes(b"ids without labels are no whole shard")
    with pytest.raises(InputError, match="begun with another tokenizer"):
        write_tokens(tmp_path / "halves", ids, labels, vocab_size=51)
    with pytest.raises(InputError, match=r"ids-00000\.npy has the shape .10, 3, 6.; expected .10, 1, 6."):
        write_tokens(tmp_path / "halves", ids[:, :1], labels)
    resumed = write_tokens(tmp_path / "halves", ids, labels, close=False)
    assert resumed.num_done == 30
    resumed.close()
    files = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "halves").iterdir())
    for name in files:
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "halves" / name).read_bytes()
    with pytest.raises(InputError, match="finished token set"):
        write_tokens(tmp_path / "halves", ids, labels)


@pytest.mark.parametrize("leading", [False, True])
@pytest.mark.parametrize("dtype", [np.int64, np.uint16])
def test_the_published_layout(tmp_path, leading, dtype):
    ids, _ = random_tokens(5, length=9)
    places = ["0/b", "10/a", "2/c", "2/d", "0/a"]
    for place, array in zip(places, ids.astype(dtype), strict=True):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        np.save(tmp_path / f"{place}.npy", array[None] if leading else array)
    tokens = open_tokens(tmp_path, vocab_size=50)
    assert (tokens.num_images, tokens.views, tokens.grid, tokens.num_classes) == (5, 3, (3, 3), 11)
    np.testing.assert_array_equal(tokens.labels, [0, 0, 2, 2, 10])
    order = [4, 0, 2, 3, 1]
    for view in range(3):
        np.testing.assert_array_equal(tokens.gather(np.arange(5), np.full(5, view)), ids[order, view])
    with pytest.raises(InputError, match="give vocab_size"):
        open_tokens(tmp_path)
    with pytest.raises(InputError, match="11 classes; expected at most 10"):
        open_tokens(tmp_path, vocab_size=50, num_classes=10)
    with pytest.raises(InputError, match="expected 0 to 19"):
        open_tokens(tmp_path, vocab_size=20)
    np.save(tmp_path / "2" / "e.npy", ids[0, :2])
    with pytest.raises(InputError, match=r"e\.npy has the shape .2, 9."):
        open_tokens(tmp_path, vocab_size=50)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((3, 8), np.int64), "8 tokens per view, which is no square"),
        (np.zeros(9, np.int64), r"shape .9,.; expected .views, tokens."),
        (np.zeros((2, 3, 9), np.int64), "expected .views, tokens."),
        (np.zeros((3, 9), np.float32), "holds float32; expected whole numbers"),
        (np.full((3, 9), -1), "has -1; expected 0 to 49"),
    ],
)
def test_published_files_that_do_not_fit_are_named(tmp_path, array, message):
    (tmp_path / "0").mkdir()
    np.save(tmp_path / "0" / "a.npy", array)
    with pytest.raises(InputError, match=message):
        open_tokens(tmp_path, vocab_size=50)


def edit_tokens(folder, change):
    data = json.loads((folder / "tokens.json").read_text())
    change(data)
    (folder / "tokens.json").write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "ids-00001.npy").unlink(), r"ids-00001\.npy does not exist"),
        (lambda f: (f / "ids-00001.npy").write_bytes(b""), r"ids-00001\.npy is not a whole \.npy file"),
        (lambda f: (f / "ids-00001.npy").write_bytes(b"x" * 500), r"ids-00001\.npy is not a whole \.npy file"),
        (
            lambda f: (f / "ids-00001.npy").write_bytes((f / "ids-00001.npy").read_bytes()[:-8]),
            r"ids-00001\.npy is not a whole \.npy file",
        ),
        (
            lambda f: np.save(f / "ids-00001.npy", np.zeros((9, 3, 6), np.uint16)),
            r"ids-00001\.npy has the shape .9, 3, 6.; expected .10, 3, 6.",
        ),
        (lambda f: np.save(f / "labels-00001.npy", np.zeros(9, np.int32)), r"labels-00001\.npy has the shape .9,."),
        (lambda f: np.save(f / "ids-00001.npy", np.zeros((10, 3, 6), np.int64)), "holds int64; expected uint16"),
        (lambda f: np.save(f / "ids-00001.npy", np.full((10, 3, 6), 50, np.uint16)), "has 50; expected 0 to 49"),
        (lambda f: np.save(f / "labels-00001.npy", np.full(10, 3, np.int32)), "has 3; expected 0 to 2"),
        (lambda f: (f / "tokens.json").write_text("{"), "not valid JSON"),
        (lambda f: (f / "tokens.json").write_text("[]"), "expected an object"),
        (lambda f: edit_tokens(f, lambda d: d.update(format="x")), "format"),
        (lambda f: edit_tokens(f, lambda d: d.update(num_images=39)), "num_images is 39, but its shards have 38"),
        (lambda f: edit_tokens(f, lambda d: d.update(shards=[])), "lists no shards"),
        (lambda f: edit_tokens(f, lambda d: d.update(extra=1)), "unknown key extra"),
        (lambda f: edit_tokens(f, lambda d: d.update(grid=[3, 3])), "expected .10, 3, 9."),
        (lambda f: edit_tokens(f, lambda d: d["classes"].pop()), "classes has 2 names; num_classes is 3"),
        (lambda f: (f / "tokens.json").unlink(), r"no tokens\.json and no CLASS_ID/NAME\.npy"),
        (shutil.rmtree, "is not a folder"),
    ],
)
def test_token_sets_that_are_wrong_are_named(tmp_path, change, message):
    write_tokens(tmp_path / "set", *random_tokens(38))
    change(tmp_path / "set")
    with pytest.raises(InputError, match=message):
        open_tokens(tmp_path / "set")


def test_tokens_must_fit_the_model(tmp_path):
    write_tokens(tmp_path, *random_tokens(38))
    with pytest.raises(InputError, match="ids of 50 codes; expected 64"):
        open_tokens(tmp_path, vocab_size=64)
    with pytest.raises(InputError, match="3 classes; expected at most 2"):
        open_tokens(tmp_path, num_classes=2)
    assert open_tokens(tmp_path, num_classes=8).num_classes == 3


def test_a_writer_takes_nothing_that_does_not_fit(tmp_path):
    writer = TokenWriter(tmp_path, grid=(2, 3), vocab_size=50, classes=(), views=1)
    for bad in (np.zeros((1, 2, 6), int), np.full((1, 1, 6), 50), np.full((1, 1, 6), -1)):
        with pytest.raises(ValueError, match="ids"):
            writer.add(bad, np.zeros(1, int))
    with pytest.raises(InputError, match="without images"):
        writer.close()


# Tokenizing


def encode_directly(tokenizer, images, size, ten):
    rows = []
    for i in range(len(images)):
        views = ten_crop(images.read(i), size) if ten else [adm_crop(images.read(i), size)]
        pixels = torch.from_numpy(np.stack([np.array(view) for view in views])).permute(0, 3, 1, 2)
        with torch.no_grad():
            rows.append(tokenizer.encode(pixels / 127.5 - 1).numpy())
    return np.stack(rows)


@pytest.mark.parametrize("ten", [False, True])
def test_tokenize_encodes_every_view(photos, tmp_path, ten):
    tokenizer, images = small_tokenizer(), open_images(photos)
    seen = []
    tokens = tokenize(
        tokenizer, images, tmp_path / "t", size=12, ten_crops=ten, batch_size=4, progress=lambda *p: seen.append(p)
    )
    expected = encode_directly(tokenizer, images, 12, ten)
    assert (tokens.num_images, tokens.views, tokens.grid) == (9, 10 if ten else 1, (6, 6))
    assert (tokens.vocab_size, tokens.classes) == (24, images.classes)
    assert tuple(tokens.labels.tolist()) == images.labels
    index, view = (axis.ravel() for axis in np.indices(expected.shape[:2]))
    np.testing.assert_array_equal(tokens.gather(index, view), expected[index, view])
    assert len(np.unique(expected)) > 5  # the comparison means something
    assert seen == [(done, 9) for done in (range(1, 10) if ten else (4, 8, 9))]


def test_an_interrupted_tokenize_goes_on(photos, tmp_path):
    tokenizer, images = small_tokenizer(), open_images(photos)

    def run(folder, progress=None, **changes):
        settings = {"size": 12, "ten_crops": False, "batch_size": 2, "shard_size": 4, **changes}
        return tokenize(settings.pop("tokenizer", tokenizer), images, folder, progress=progress, **settings)

    def stop(done, total):
        if done >= 6:
            raise KeyboardInterrupt

    whole = run(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "halves", progress=stop)
    assert not (tmp_path / "halves" / "tokens.json").exists()
    other = small_tokenizer()
    with torch.no_grad():
        other.quantize.embedding.weight.neg_()
    with pytest.raises(InputError, match="another tokenizer"):
        run(tmp_path / "halves", tokenizer=other)
    seen = []
    again = run(tmp_path / "halves", progress=lambda done, total: seen.append(done))
    assert seen == [6, 8, 9]  # the first shard of 4 was there
    files = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "halves").iterdir())
    for name in files:
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "halves" / name).read_bytes()
    everything = np.arange(9), np.zeros(9, int)
    np.testing.assert_array_equal(whole.gather(*everything), again.gather(*everything))

    def unexpected(done, total):
        raise AssertionError("a finished set is not made again")

    assert run(tmp_path / "whole", progress=unexpected).num_images == 9
    for change in ({"tokenizer": other}, {"ten_crops": True}, {"size": 16}):
        with pytest.raises(InputError, match="another tokenizer, other images or other settings"):
            run(tmp_path / "whole", **change)


def test_tokenize_names_what_is_wrong(photos, tmp_path):
    images = open_images(photos)
    with pytest.raises(InputError, match="multiples of 2"):
        tokenize(small_tokenizer(), images, tmp_path / "t", size=13, ten_crops=False)
    (photos / "pear" / "1.png").write_bytes(b"broken")
    with pytest.raises(InputError, match=r"pear/1\.png cannot be read"):
        tokenize(small_tokenizer(), images, tmp_path / "t", size=12, ten_crops=False)
