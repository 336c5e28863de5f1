"""Image sets against plain Pillow, training crops against windows."""

import io
import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import Image

from arpg import InputError
from arpg.data import CropStream, center_crops, concatenate, open_images
from arpg.data.crops import crop_windows
from arpg.image import MAX_INTERMEDIATE_PIXELS, adm_crop, resize, ten_crop, to_rgb
from support.small import noise, write_zip

# Crops


def adm_recipe(image, size):
    """ADM's preprocessing as it was published: resize all of the image, then crop."""
    expected = image
    while min(*expected.size) >= 2 * size:
        expected = expected.resize(tuple(x // 2 for x in expected.size), resample=Image.BOX)
    scale = size / min(*expected.size)
    expected = expected.resize(tuple(round(x * scale) for x in expected.size), resample=Image.BICUBIC)
    array = np.array(expected)
    top, left = (array.shape[0] - size) // 2, (array.shape[1] - size) // 2
    return array[top : top + size, left : left + size]


ORDINARY = [(37, 52), (64, 64), (133, 70), (16, 16), (9, 20), (31, 200), (500, 375), (768, 96)]


@pytest.mark.parametrize(("width", "height"), ORDINARY)
@pytest.mark.parametrize("size", [8, 16, 17, 256])
def test_adm_crop_is_the_published_recipe(width, height, size):
    image = noise(width, height)
    np.testing.assert_array_equal(np.array(adm_crop(image, size)), adm_recipe(image, size))
    assert adm_crop(image, size).size == (size, size)


@pytest.mark.parametrize(("width", "height"), [(401, 7), (400, 7), (7, 400), (5, 333)])
def test_a_very_long_image_is_cropped_before_it_is_resized(width, height, monkeypatch):
    """Its crop is the published one up to the rounding of the longer side to whole pixels."""
    image = Image.fromarray(np.linspace(0, 255, width * height).reshape(height, width).astype(np.uint8)).convert("RGB")
    expected = adm_recipe(image, 24)
    monkeypatch.setattr("arpg.image.MAX_INTERMEDIATE_PIXELS", 6 * 24 * 24)
    found = np.array(adm_crop(image, 24))
    assert np.abs(found.astype(int) - expected).max() <= 2


@pytest.mark.parametrize(("width", "height"), [(2000, 1), (50000, 1), (1 << 22, 1), (1, 1 << 22), (3, 1 << 20)])
def test_no_image_becomes_large_while_it_is_resized(width, height, intermediates):
    image = Image.new("RGB", (width, height), (9, 80, 200))
    assert adm_crop(image, 768).size == (768, 768)
    crops = [resize(image, (768, 512)), resize(resize(image, (768, 512)), image.size), adm_crop(image, 768)]
    crops.append(resize(image, (768, 512), box=(0.5, 0, width - 0.25, height / 2)))
    assert [crop.getextrema() for crop in crops] == [((9, 9), (80, 80), (200, 200))] * 4
    assert max(intermediates) <= MAX_INTERMEDIATE_PIXELS


def test_either_order_of_the_passes_makes_the_same_image(monkeypatch):
    """Up to rounding: each pass rounds to 8 bits."""
    ramp = np.add.outer(np.arange(90), np.arange(40))
    image, box = Image.fromarray((128 + 90 * np.sin(ramp / 7)).astype(np.uint8)), (3.25, 4.5, 37.75, 80.0)
    expected = [image.resize((120, 30), Image.Resampling.BICUBIC, box=b) for b in (None, box)]
    assert [resize(image, (120, 30), box=b).tobytes() for b in (None, box)] == [e.tobytes() for e in expected]
    monkeypatch.setattr("arpg.image.MAX_INTERMEDIATE_PIXELS", 1)
    for found, e in zip((resize(image, (120, 30), box=b) for b in (None, box)), expected, strict=True):
        assert np.abs(np.array(found, int) - np.array(e, int)).max() <= 2


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
    with pytest.raises(InputError, match="floating-point pixels; expected 8 or 16 bits"):
        to_rgb(Image.fromarray(np.full((4, 4), 0.5, np.float32)))


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


def test_some_of_the_images(photos):
    images = open_images(photos)
    last, first = images.only([len(images) - 1, 0]), images.only([0])
    assert last.names == (images.names[-1], images.names[0])
    assert last.labels == (images.labels[-1], images.labels[0])
    assert (last.classes, last.captions) == (images.classes, None)
    np.testing.assert_array_equal(last.read(1), images.read(0))
    np.testing.assert_array_equal(first.read(0), images.read(0))


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
    return CropStream(sources, 16, **{"seed": 3, "batch_size": 12, **settings})


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
    assert whole._memory is not None
    assert on_demand._memory is None
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


def test_center_crops(photos):
    images = open_images(photos)
    expected = np.stack([np.array(adm_crop(images.read(i), 20)) for i in range(9)])
    np.testing.assert_array_equal(center_crops(images, 20), expected)
    np.testing.assert_array_equal(center_crops(images, 20, limit=4), expected[:4])
    assert len(center_crops(images, 20, limit=40)) == 9


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


@pytest.mark.parametrize(("scale", "most"), [((1.0, 1.0), 0.01), ((1.0, 1.5), 1.5)])
def test_windows_cut_on_a_device_are_those_of_the_batch(photos, scale, most):
    """`crop_windows` is what an accelerator runs: the same windows, enlarged the same way but for rounding.

    At the rim of an enlarged window it also sees the pixels beyond, so the rim is left out.
    """
    crops = stream([(open_images(photos), 1.0)], batch_size=64, margin=1.5, scale=scale)
    squares = torch.from_numpy(crops._memory).permute(0, 3, 1, 2)
    made = crop_windows(squares, torch.tensor(crops._windows(2)), 16).permute(0, 2, 3, 1)
    error = (made - torch.from_numpy(crops.batch(2)).float()).abs()
    assert error[:, 1:-1, 1:-1].max() < most
    on_cpu = crops.images(2, torch.device("cpu"))
    assert torch.equal(on_cpu, torch.from_numpy(crops.batch(2)).permute(0, 3, 1, 2).float() / 127.5 - 1)
