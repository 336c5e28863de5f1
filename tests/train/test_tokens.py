"""Token sets against plain arrays, tokenizing against encoding directly."""

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from arpg import InputError
from arpg.data import TokenWriter, open_images, open_tokens, tokenize
from arpg.data.crops import random_views
from arpg.data.dataset import Dataset, TokenBatches, read_orders
from arpg.image import adm_crop, ten_crop
from support.small import small_tokenizer

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
    tokens = open_tokens(tmp_path, vocab_size=vocab_size)
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
    with pytest.raises(InputError, match="other settings; delete it or choose another folder"):
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
        (
            lambda f: np.save(f / "ids-00001.npy", np.load(f / "ids-00002.npy")),
            r"ids-00001\.npy is not the shard of this set: its checksum differs from that in tokens\.json",
        ),
        (lambda f: np.save(f / "labels-00001.npy", np.load(f / "labels-00002.npy")), "is not the shard of this set"),
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


def test_sets_without_checksums_open(tmp_path):
    ids, labels = random_tokens(38)
    write_tokens(tmp_path / "set", ids, labels)

    def forget(data):
        for shard in data["shards"]:
            del shard["ids_crc32"], shard["labels_crc32"]

    edit_tokens(tmp_path / "set", forget)
    found, index = open_tokens(tmp_path / "set"), np.arange(38)
    np.testing.assert_array_equal(found.gather(index, index * 0), ids[:, 0])


def test_tokens_must_fit_the_model(tmp_path):
    write_tokens(tmp_path, *random_tokens(38))
    with pytest.raises(InputError, match="ids of 50 codes; expected 64"):
        open_tokens(tmp_path, vocab_size=64)


def test_a_share_of_the_samples_has_the_order_of_its_image(tmp_path):
    ids, labels = random_tokens(40)
    write_tokens(tmp_path / "tokens", ids, labels)
    orders = np.random.default_rng(2).permuted(np.tile(np.arange(6), (40, 3, 1)), axis=-1).astype(np.uint8)
    path = tmp_path / "orders.npy"
    np.save(path, orders)
    dataset = Dataset(open_tokens(tmp_path / "tokens"))

    def batches(**more):
        options = {"parts": 1, "num_classes": 3, "label_drop": 0.0, "seed": 0, "device": torch.device("cpu")}
        return TokenBatches(dataset, batch_size=40, **options, **more)

    found = read_orders(path, dataset.tokens)
    plain, own, half = (
        batches(**more).batch(3, 0)
        for more in ({}, {"orders": found, "orders_share": 1.0}, {"orders": found, "orders_share": 0.5})
    )
    for batch in (own, half):  # all else stays as it is
        assert torch.equal(batch.ids_BN, plain.ids_BN)
        assert torch.equal(batch.dropout_key_B, plain.dropout_key_B)
    index = batches().indices(3, 0)
    expected = {(tuple(ids[i, v]), tuple(orders[i, v])) for i in index for v in range(3)}
    rows = zip(own.ids_BN.tolist(), own.order_BN.tolist(), strict=True)
    assert {(tuple(row), tuple(order)) for row, order in rows} <= expected
    is_own = (half.order_BN == own.order_BN).all(1)
    assert torch.equal(half.order_BN[~is_own], plain.order_BN[~is_own])
    assert 10 <= is_own.sum() <= 30
    np.save(path, orders[:, :2])
    with pytest.raises(InputError, match=r"\[40, 2, 6\]; expected \[40, 3, 6\] \(images, views, positions\)"):
        read_orders(path, dataset.tokens)
    np.save(path, np.zeros_like(orders))
    with pytest.raises(InputError, match="does not visit every position once"):
        read_orders(path, dataset.tokens)


def test_a_writer_takes_nothing_that_does_not_fit(tmp_path):
    writer = TokenWriter(tmp_path, grid=(2, 3), vocab_size=50, classes=(), views=1)
    for bad in (np.zeros((1, 2, 6), int), np.full((1, 1, 6), 50), np.full((1, 1, 6), -1)):
        with pytest.raises(ValueError, match="ids"):
            writer.add(bad, np.zeros(1, int))
    with pytest.raises(InputError, match="without images"):
        writer.close()


# Tokenizing


def encode_directly(tokenizer, images, size, crops):
    rows = []
    for i in range(len(images)):
        views = crops(images.read(i), size, images.names[i])
        pixels = torch.from_numpy(np.stack([np.array(view) for view in views])).permute(0, 3, 1, 2)
        with torch.no_grad():
            rows.append(tokenizer.encode(pixels / 127.5 - 1).numpy())
    return np.stack(rows)


def random_crops(image, size, name):
    """The centre crop, and windows of the larger square: cut, resized and mirrored with NumPy and Pillow."""
    square, crops = np.array(adm_crop(image, int(1.1 * size))), [adm_crop(image, size)]
    for left, top, side, mirror in random_views(name, 3, size, seed=5, zoom=True):
        window = Image.fromarray(square[top : top + side, left : left + side])
        window = np.array(window.resize((size, size), Image.Resampling.BICUBIC))
        crops.append(window[:, ::-1] if mirror else window)
    return crops


VIEWS = {
    "centre": ({}, lambda image, size, name: [adm_crop(image, size)]),
    "ten": ({"ten_crops": True}, lambda image, size, name: ten_crop(image, size)),
    "random": ({"views": 4, "zoom": True, "seed": 5}, random_crops),
}


@pytest.mark.parametrize("kind", VIEWS)
def test_tokenize_encodes_every_view(photos, tmp_path, kind):
    options, crops = VIEWS[kind]
    tokenizer, images = small_tokenizer(), open_images(photos)
    seen = []
    tokens = tokenize(
        tokenizer, images, tmp_path / "t", size=12, batch_size=4, progress=lambda *p: seen.append(p), **options
    )
    expected = encode_directly(tokenizer, images, 12, crops)
    assert (tokens.num_images, tokens.views, tokens.grid) == (9, {"centre": 1, "ten": 10, "random": 4}[kind], (6, 6))
    assert (tokens.vocab_size, tokens.classes) == (24, images.classes)
    assert tuple(tokens.labels.tolist()) == images.labels
    index, view = (axis.ravel() for axis in np.indices(expected.shape[:2]))
    np.testing.assert_array_equal(tokens.gather(index, view), expected[index, view])
    assert len(np.unique(expected)) > 5  # the comparison means something
    assert seen == [(done, 9) for done in ((4, 8, 9) if kind == "centre" else range(1, 10))]


def test_an_interrupted_tokenize_goes_on(photos, tmp_path):
    tokenizer, images = small_tokenizer(), open_images(photos)

    def run(folder, progress=None, **changes):
        settings = {"size": 12, "batch_size": 2, "shard_size": 4, **changes}
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
    for change in ({"tokenizer": other}, {"ten_crops": True}, {"views": 10}, {"size": 16}):
        with pytest.raises(InputError, match="another tokenizer, other images or other settings"):
            run(tmp_path / "whole", **change)


def test_random_views_are_a_function_of_name_and_seed(photos, tmp_path):
    def views(name="a/1.png", count=400, size=40, seed=0, zoom=True):
        return random_views(name, count, size, seed=seed, zoom=zoom)

    assert views() == views()
    assert views(count=7) == views()[:7]  # more views keep the first ones
    assert views(name="a/2.png") != views() != views(seed=1)
    for zoom, sides in ((False, {40}), (True, set(range(35, 45)))):
        found = views(zoom=zoom)
        assert {view.side for view in found} == sides
        assert all(min(v.left, v.top) >= 0 and max(v.left, v.top) + v.side <= 44 for v in found)
        assert {v.left for v in found if v.side == 40} == set(range(5))  # all places
        assert 150 < sum(view.mirror for view in found) < 250
    images, tokenizer = open_images(photos), small_tokenizer()
    whole, part = (
        tokenize(tokenizer, each, tmp_path / str(i), size=12, views=3)
        for i, each in enumerate((images, images.only([4, 2])))
    )
    for view in range(3):  # whatever other images there are
        np.testing.assert_array_equal(
            part.gather(np.arange(2), np.full(2, view)), whole.gather(np.array([4, 2]), np.full(2, view))
        )
    with pytest.raises(InputError, match="other settings"):
        tokenize(tokenizer, images, tmp_path / "0", size=12, views=3, zoom=True)


def test_tokenize_names_what_is_wrong(photos, tmp_path):
    images = open_images(photos)
    with pytest.raises(InputError, match="multiples of 2"):
        tokenize(small_tokenizer(), images, tmp_path / "t", size=13)
    with pytest.raises(InputError, match="views is 0; expected 1 or more"):
        tokenize(small_tokenizer(), images, tmp_path / "t", size=12, views=0)
    with pytest.raises(InputError, match="views is 3 and ten crops are asked for"):
        tokenize(small_tokenizer(), images, tmp_path / "t", size=12, ten_crops=True, views=3)
    (photos / "pear" / "1.png").write_bytes(b"broken")
    with pytest.raises(InputError, match=r"pear/1\.png cannot be read"):
        tokenize(small_tokenizer(), images, tmp_path / "t", size=12)
