"""The photographs of meadow: classes by path, splits by hash, and zips from a small git repository."""

import hashlib
import io
import subprocess
import zipfile

import pytest
from PIL import Image

from arpg import InputError
from arpg.data import open_images
from experiments.meadow.build_data import SOURCES, build, label, split_of
from support.small import noise


@pytest.mark.parametrize(
    ("source", "path", "expected"),
    [
        ("pets", "images/Maine_Coon_12.jpg", "maine coon cat"),
        ("pets", "images/german_shorthaired_3.jpg", "german shorthaired"),
        ("pets", "annotations/Maine_Coon_12.jpg", None),
        ("pets", "images/Maine_Coon_12.png", None),
        ("flowers", "flowers/train/7/image_1.jpg", "rose"),
        ("flowers", "flowers/valid/9/image_2.JPG", "lotus"),
        ("flowers", "other/7/image_1.jpg", None),
        ("birds", "train/001.Black_footed_Albatross/a.jpg", "albatross"),
        ("birds", "test/105.Whip_poor_Will/b.jpg", "nightjar"),
        ("birds", "images/001.Black_footed_Albatross/a.jpg", None),
        ("things", "train/n03028079/c.JPEG", "church"),
        ("things", "train/n00000000/c.jpg", None),
        ("things", "c.jpg", None),
        ("dogs", "val/n02115641/d.jpeg", "dingo"),
    ],
)
def test_the_path_of_a_file_gives_its_class(source, path, expected):
    assert label(source, path, {"7": "Rose ", "9": "lotus lotus"}) == expected


def test_splits_are_a_function_of_the_name():
    names = [f"image_{i}" for i in range(3000)]
    test = [name for name in names if split_of("pets", name) == "test"]
    assert 240 < len(test) < 360
    for name in test[:5]:
        assert int(hashlib.sha256(f"pets/{name}".encode()).hexdigest(), 16) % 10 == 0
    assert test != [name for name in names if split_of("birds", name) == "test"]


@pytest.fixture
def mirrors(tmp_path):
    """A bare repository like that of the pets, with one file that is no image."""
    work, bare = tmp_path / "work", tmp_path / "mirrors" / SOURCES["pets"].repository / "repo"
    (work / "images").mkdir(parents=True)
    for i in range(6):
        noise(90 + 30 * i, 70 + 20 * i, seed=i).save(work / "images" / f"Siamese_{i}.jpg", quality=95)
    noise(64, 64).save(work / "images" / "pug_1.jpg")
    (work / "images" / "pug_2.jpg").write_bytes(b"no image")
    (work / "README.md").write_text("pets")

    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        subprocess.run(["git", *identity, "-C", str(work), *arguments], check=True, capture_output=True)

    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "images")
    bare.parent.mkdir(parents=True)
    subprocess.run(["git", "clone", "-q", "--bare", str(work), str(bare)], check=True, capture_output=True)
    return tmp_path / "mirrors"


def test_zips_are_made_of_a_repository(mirrors, tmp_path):
    made = [build(mirrors, tmp_path / name, size=48, quality=80, only=["pets"], processes=1) for name in ("one", "two")]
    assert made[0] == made[1] == {"siamese cat": 6, "pug": 1}
    assert (tmp_path / "one" / "classes.txt").read_text() == "pug\nsiamese cat\n"
    files = [(tmp_path / name / "meadow-pets.zip").read_bytes() for name in ("one", "two")]
    assert files[0] == files[1]
    with zipfile.ZipFile(io.BytesIO(files[0])) as archive:
        names = archive.namelist()
        assert sorted(names) == sorted(
            f"{split_of('pets', stem)}/{kind}/pets-{stem}.webp"
            for kind, stem in [("pug", "pug_1"), *(("siamese cat", f"Siamese_{i}") for i in range(6))]
        )
        for name in names:
            with Image.open(io.BytesIO(archive.read(name))) as image:
                assert (image.format, image.size) == ("WEBP", (48, 48))
        # The largest image by hand: centre square, box filter, bicubic.
        (name,) = [name for name in names if name.endswith("Siamese_5.webp")]
        found = archive.read(name)
    original = Image.open(tmp_path / "work" / "images" / "Siamese_5.jpg").convert("RGB")
    square = original.crop((35, 0, 205, 170)).reduce(3).resize((48, 48), Image.Resampling.BICUBIC)
    expected = io.BytesIO()
    square.save(expected, "webp", quality=80, method=4)
    assert found == expected.getvalue()
    train = open_images(tmp_path / "one" / "meadow-pets.zip" / "train")
    assert set(train.classes) <= {"pug", "siamese cat"}
    options = {"size": 48, "quality": 80, "only": ["pets"], "processes": 1}
    for split in ("train", "test"):
        build(mirrors, tmp_path / split, splits=[split], **options)
        with zipfile.ZipFile(tmp_path / split / "meadow-pets.zip") as archive:
            assert archive.namelist() == [name for name in names if name.startswith(split)]
    with pytest.raises(InputError, match="expected the git directory of 3ba2ii"):
        build(mirrors, tmp_path / "no", size=48, quality=80, only=["flowers"], processes=1)
