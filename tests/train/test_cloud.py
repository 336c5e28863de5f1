"""Images, tokens, samples and models in object stores: the same bytes as on a local disk."""

import io
import tarfile
import zipfile

import numpy as np
import pytest

from arpg import Pipeline
from arpg.data import open_images, open_tokens, tokenize
from arpg.errors import InputError
from arpg.evaluation.features import open_source
from arpg.evaluation.sample import balanced_labels, sample_images
from arpg.storage import as_path, list_files
from support.small import noise, small_tokenizer


def upload(folder, target):
    for name in list_files(folder):
        path = as_path(f"{target}/{name}")
        path.upload(folder / name).replace(path)


def same_files(ours, theirs):
    assert sorted(list_files(ours)) == sorted(list_files(theirs))
    for name in list_files(ours):
        assert (ours / name).read_bytes() == (theirs / name).read_bytes(), name


def png(image):
    data = io.BytesIO()
    image.save(data, format="PNG")
    return data.getvalue()


@pytest.fixture
def sources(photos, tmp_path):
    """The same images as a folder, a zip, a WebDataset tar and a Parquet file, below one folder."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    root = tmp_path / "sources"
    root.mkdir()
    photos.rename(root / "folder")
    files = [root / "folder" / name for name in open_images(root / "folder").names]
    with zipfile.ZipFile(root / "images.zip", "w") as archive, tarfile.open(root / "images.tar", "w") as tar:
        for i, file in enumerate(files):
            archive.write(file, f"set/{file.relative_to(root / 'folder')}")
            tar.add(file, f"{i:03d}.png")
    classes = sorted({file.parent.name for file in files})
    columns = {
        "image": [{"bytes": file.read_bytes(), "path": file.name} for file in files],
        "label": [classes.index(file.parent.name) for file in files],
        "caption": [f"image {i}" for i in range(len(files))],
    }
    parquet.write_table(pyarrow.table(columns), root / "images.parquet", row_group_size=4)
    return root


KINDS = ["folder", "images.zip/set", "images.tar", "images.parquet"]


def test_every_kind_of_source_has_the_same_images(sources, bucket):
    expected = [open_images(sources / "folder").read(i) for i in range(9)]
    upload(sources, f"{bucket}/sources")
    for kind in KINDS:
        for root in (sources, f"{bucket}/sources"):
            images = open_images(f"{root}/{kind}")
            assert len(images) == 9
            assert [images.read(i) for i in range(9)] == expected
            assert [images.only([7, 2]).read(i) for i in range(2)] == [expected[7], expected[2]]
    table = open_images(sources / "images.parquet")
    assert table.labels == open_images(sources / "folder").labels
    assert table.captions == tuple(f"image {i}" for i in range(9))
    assert table.classes == ("0", "1", "2")


def test_parquet_files_that_do_not_fit_are_named(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "x.parquet"
    path.write_bytes(b"PAR1")
    with pytest.raises(InputError, match="is not a whole Parquet file"):
        open_images(path)
    parquet.write_table(pyarrow.table({"a": [1]}), path)
    with pytest.raises(InputError, match=r"has the columns .'a'.; expected images in image"):
        open_images(path)
    parquet.write_table(pyarrow.table({"image": [png(noise(8, 8)), None], "label": [0, 1]}), path)
    with pytest.raises(InputError, match="row 1 of image is empty"):
        open_images(path).read(1)
    parquet.write_table(pyarrow.table({"image": [b"x"], "label": ["cat"]}), path)
    with pytest.raises(InputError, match="label is not a whole number"):
        open_images(path)


def test_tokens_in_a_store_are_those_on_disk(sources, bucket, tmp_path, faults):
    upload(sources, f"{bucket}/sources")
    settings = {"size": 16, "shard_size": 4, "batch_size": 4}
    tokenizer = small_tokenizer()
    tokenize(tokenizer, open_images(sources / "images.zip/set"), tmp_path / "tokens", **settings)
    faults.errors, faults.truncated_uploads, faults.truncated_downloads = 3, 1, 1
    there = as_path(f"{bucket}/tokens")
    made = tokenize(tokenizer, open_images(f"{bucket}/sources/images.zip/set"), there, **settings)
    same_files(tmp_path / "tokens", there)
    index = np.array([8, 0, 5])
    np.testing.assert_array_equal(
        made.gather(index, index * 0), open_tokens(tmp_path / "tokens").gather(index, index * 0)
    )
    np.testing.assert_array_equal(open_tokens(str(there)).labels, made.labels)


def test_models_and_samples_in_a_store(pipeline, bucket, tmp_path):
    pipeline.save_pretrained(f"{bucket}/model")
    loaded = Pipeline.from_pretrained(f"{bucket}/model")
    labels = balanced_labels(6, len(loaded.classes))
    for place in (tmp_path / "x.npz", as_path(f"{bucket}/x.npz")):
        sample_images(loaded, place, labels=labels, batch_size=4, steps=3)
    assert as_path(f"{bucket}/x.npz").read_bytes() == (tmp_path / "x.npz").read_bytes()
    assert sorted(list_files(as_path(bucket))) == [
        "model/" + n for n in sorted(list_files(as_path(f"{bucket}/model")))
    ] + ["x.npz"]
    source = open_source(f"{bucket}/x.npz")
    assert source.count == 6
    sample_images(loaded, as_path(f"{bucket}/x.npz"), labels=labels, batch_size=4, steps=3)  # finished: nothing to do
    with pytest.raises(InputError, match="was made with other settings"):
        sample_images(loaded, as_path(f"{bucket}/x.npz"), labels=labels, batch_size=4, steps=4)
    with pytest.raises(InputError, match="is not a model folder: there are no files below it"):
        Pipeline.from_pretrained(f"{bucket}/other")
