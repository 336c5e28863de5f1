"""Build the photographs of `meadow`: 225 classes of cats, dogs, birds, flowers and things, as zips of square WebPs.

    python -m experiments.meadow build-data MIRRORS data --size 144                      # 128 px with room for crops
    python -m experiments.meadow build-data MIRRORS data-288 --size 288 --only pets flowers --splits test

MIRRORS holds bare git directories of public repositories, as OWNER+NAME/repo (`SOURCES`). OUT gets
meadow-{pets,flowers,birds,things,dogs}.zip, each with {train,test}/CLASS/SOURCE-NAME.webp, and classes.txt. An image is
cropped to its centre square and reduced by a box filter, then bicubically. About a tenth of the images, by the hash of
their names, are `test`, whatever the split of the source, so that every class has both.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import logging
import re
import subprocess
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from arpg.errors import InputError, first_line, require
from arpg.files import write_text

log = logging.getLogger("experiments")

SPLITS = ("train", "test")
CHUNK = 200  # images that a process reads at once
METHOD = 4  # effort of the WebP encoder; another one gives other bytes
IMAGENETTE = {
    "n01440764": "tench",
    "n02102040": "english springer",
    "n02979186": "cassette player",
    "n03000684": "chain saw",
    "n03028079": "church",
    "n03394916": "french horn",
    "n03417042": "garbage truck",
    "n03425413": "gas pump",
    "n03445777": "golf ball",
    "n03888257": "parachute",
}
IMAGEWOOF = {
    "n02086240": "shih-tzu",
    "n02087394": "rhodesian ridgeback",
    "n02088364": "beagle",
    "n02089973": "english foxhound",
    "n02093754": "border terrier",
    "n02096294": "australian terrier",
    "n02099601": "golden retriever",
    "n02105641": "old english sheepdog",
    "n02111889": "samoyed",
    "n02115641": "dingo",
}
# Species whose last word does not say what bird they are.
BIRDS = {
    "widow": "nightjar",
    "will": "nightjar",
    "geococcyx": "roadrunner",
    "sayornis": "phoebe",
    "violetear": "hummingbird",
}
FLOWERS = {"lotus lotus": "lotus"}

Label = Callable[[list[str], dict[str, str]], str | None]  # path parts and names of the source -> class


def _pet(parts: list[str], names: dict[str, str]) -> str | None:
    if parts[0] != "images":
        return None
    name = re.sub(r"_\d+\.jpg$", "", parts[-1]).replace("_", " ")
    return f"{name.lower()} cat" if name[0].isupper() else name.lower()  # cats are capitalised there, dogs are not


def _flower(parts: list[str], names: dict[str, str]) -> str | None:
    if parts[0] != "flowers":
        return None
    name = names[parts[-2]].strip().lower()
    return FLOWERS.get(name, name)


def _bird(parts: list[str], names: dict[str, str]) -> str | None:
    if parts[0] not in ("train", "test"):
        return None
    name = parts[1].split(".")[1].split("_")[-1].lower()  # 200 species, grouped by the last word of their name
    return BIRDS.get(name, name)


def _by_folder(classes: dict[str, str], parts: list[str], names: dict[str, str]) -> str | None:
    return classes.get(parts[1]) if len(parts) > 1 else None


@dataclass(frozen=True)
class Source:
    """A public repository of photographs, its terms, and how the path of a file gives its class."""

    repository: str
    terms: str
    label: Label
    names: str | None = None  # a JSON file of the repository with the names of its folders


SOURCES = {
    "pets": Source("ml4py+dataset-iiit-pet", "Oxford-IIIT Pet, 37 breeds: CC BY-SA 4.0", _pet),
    "flowers": Source(
        "3ba2ii+Flower-Classifier", "Oxford Flowers 102: research use", _flower, names="cat_to_name.json"
    ),
    "birds": Source("cyizhuo+CUB-200-2011-dataset", "CUB-200-2011: non-commercial research", _bird),
    "things": Source(
        "thunderInfy+imagenette",
        "Imagenette, 10 classes of ImageNet: non-commercial research",
        partial(_by_folder, IMAGENETTE),
    ),
    "dogs": Source(
        "q878787+imagewoof2-320",
        "Imagewoof, 10 dogs of ImageNet: non-commercial research",
        partial(_by_folder, IMAGEWOOF),
    ),
}


def label(source: str, path: str, names: dict[str, str]) -> str | None:
    """Return the class of a file of a source; None where it is no image of the set."""
    if not path.lower().endswith((".jpg", ".jpeg")):
        return None
    return SOURCES[source].label(path.split("/"), names)


def split_of(source: str, name: str) -> str:
    """Return "test" for about a tenth of the names, by their hash, and "train" for the others."""
    digest = hashlib.sha256(f"{source}/{name}".encode()).hexdigest()
    return "test" if int(digest, 16) % 10 == 0 else "train"


def build(
    mirrors: Path,
    out: Path,
    *,
    size: int,
    quality: int,
    only: Sequence[str],
    processes: int,
    splits: Sequence[str] = SPLITS,
) -> dict[str, int]:
    """Write `splits` of the sources `only` as zips, and classes.txt; return how many images each class has."""
    out.mkdir(parents=True, exist_ok=True)
    classes: Counter[str] = Counter()
    for source in only:
        folder = mirrors / SOURCES[source].repository / "repo"
        require(folder.is_dir(), f"{folder} does not exist; expected the git directory of {SOURCES[source].repository}")
        found = [each for each in _list(source, folder) if split_of(source, Path(each[1]).stem) in splits]
        chunks = [found[i : i + CHUNK] for i in range(0, len(found), CHUNK)]
        jobs = [(str(folder), [blob for blob, _, _ in chunk], size, quality) for chunk in chunks]
        target = out / f"meadow-{source}.zip"
        with ProcessPoolExecutor(processes) as pool, zipfile.ZipFile(target, "w") as archive:
            for chunk, made in zip(chunks, pool.map(_shrink, jobs), strict=True):
                for (_, path, name_of_class), data in zip(chunk, made, strict=True):
                    if data is None:
                        continue
                    name = Path(path).stem
                    inner = f"{split_of(source, name)}/{name_of_class}/{source}-{name}.webp"
                    archive.writestr(zipfile.ZipInfo(inner), data)  # without a date: the same bytes every time
                    classes[name_of_class] += 1
        log.info("%s: %d images, %.1f MB", source, len(found), target.stat().st_size / 1e6)
    write_text(out / "classes.txt", "".join(f"{name}\n" for name in sorted(classes)))
    fewest = ", ".join(f"{name} {count}" for name, count in classes.most_common()[:-6:-1])
    log.info("%d classes, %d images; fewest: %s", len(classes), classes.total(), fewest)
    return dict(classes)


def _list(source: str, folder: Path) -> Iterator[tuple[str, str, str]]:
    """Yield blob, path and class of each image of a repository, in the order of its tree."""
    described = SOURCES[source].names
    names = {} if described is None else json.loads(_git(folder, "show", f"HEAD:{described}"))
    for line in _git(folder, "ls-tree", "-r", "-l", "HEAD").decode().splitlines():
        _, _, blob, _, path = line.split(None, 4)
        if (found := label(source, path, names)) is not None:
            yield blob, path, found


def _shrink(job: tuple[str, list[str], int, int]) -> list[bytes | None]:
    """Return the WebP bytes of some blobs of a repository; None for one that is no image."""
    folder, blobs, size, quality = job
    out = _git(Path(folder), "cat-file", "--batch", given="".join(f"{blob}\n" for blob in blobs).encode())
    made: list[bytes | None] = []
    at = 0
    while at < len(out):
        end = out.index(b"\n", at)
        length = int(out[at:end].split()[2])
        data, at = out[end + 1 : end + 1 + length], end + 2 + length
        try:
            made.append(_webp(data, size, quality))
        except (UnidentifiedImageError, OSError, ValueError, SyntaxError):
            made.append(None)
    return made


def _webp(data: bytes, size: int, quality: int) -> bytes:
    image: Image.Image = Image.open(io.BytesIO(data))
    image.draft("RGB", (2 * size, 2 * size))
    image = image.convert("RGB")
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    image = image.crop((left, top, left + side, top + side))
    if side >= 2 * size:
        image = image.reduce(side // size)
    image = image.resize((size, size), Image.Resampling.BICUBIC)
    kept = io.BytesIO()
    image.save(kept, "webp", quality=quality, method=METHOD)
    return kept.getvalue()


def _git(folder: Path, *arguments: str, given: bytes | None = None) -> bytes:
    try:
        done = subprocess.run(["git", f"--git-dir={folder}", *arguments], check=True, capture_output=True, input=given)
    except subprocess.CalledProcessError as error:
        raise InputError(f"{folder} cannot be read by git ({error.stderr.decode(errors='replace').strip()})") from None
    except FileNotFoundError as error:
        raise InputError(f"git is not installed ({first_line(error)}); install it") from None
    return done.stdout


def main(arguments: Sequence[str] | None = None) -> None:
    """Build the photographs from mirrors of public repositories."""
    parser = argparse.ArgumentParser(
        prog="experiments.meadow build-data", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("mirrors", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", type=int, default=144, help="Side of the squares, in pixels.")
    parser.add_argument("--quality", type=int, default=80, help="Of the WebP encoder.")
    parser.add_argument("--only", nargs="+", choices=SOURCES, default=list(SOURCES))
    parser.add_argument("--splits", nargs="+", choices=SPLITS, default=list(SPLITS))
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args(arguments)
    build(
        options.mirrors,
        options.out,
        size=options.size,
        quality=options.quality,
        only=options.only,
        splits=options.splits,
        processes=options.processes,
    )
