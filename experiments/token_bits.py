"""Token sets that travel: ids in as few bits as the vocabulary needs, 13 instead of 16 for 8,192 codes.

    FOLDER/tokens.json, labels.npy     as in the token set
    FOLDER/bits-VIEW.npy               the ids of one view of all images, `[images, bytes]`

Shapes: M images, N tokens, K bits of an id.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from arpg.data.tokens import TokenSet, TokenWriter, open_tokens
from arpg.errors import require
from arpg.files import read_json, write_array, write_json

INFO = "bits.json"


def pack_ids(ids_MN: NDArray[np.int64], bits: int) -> NDArray[np.uint8]:
    """Pack ids below 2^bits, most significant bit first; each image starts at a whole byte."""
    require(1 <= bits <= 16, f"bits is {bits}; expected 1 to 16")
    require(bool((ids_MN >= 0).all() and (ids_MN >> bits == 0).all()), f"there are ids of more than {bits} bits")
    shifts = np.arange(bits - 1, -1, -1)
    bits_MNK = (ids_MN[..., None] >> shifts & 1).astype(np.uint8)
    return np.packbits(bits_MNK.reshape(len(ids_MN), -1), axis=1)


def unpack_ids(packed: NDArray[np.uint8], num_tokens: int, bits: int) -> NDArray[np.int64]:
    """Invert `pack_ids`: `[M, num_tokens]`."""
    flat = np.unpackbits(packed, axis=1, count=num_tokens * bits)
    bits_MNK = flat.reshape(len(packed), num_tokens, bits).astype(np.int64)
    return bits_MNK @ (1 << np.arange(bits - 1, -1, -1))


def pack_tokens(tokens: TokenSet, folder: Path, *, views: int) -> int:
    """Write the first `views` views of a token set into `folder`; return the bytes."""
    require(1 <= views <= tokens.views, f"views is {views}; the token set has {tokens.views}")
    bits = max(1, (tokens.vocab_size - 1).bit_length())
    index = np.arange(tokens.num_images)
    for view in range(views):
        ids = tokens.gather(index, np.full(len(index), view))
        write_array(folder / f"bits-{view}.npy", pack_ids(ids, bits))
    write_array(folder / "labels.npy", tokens.labels.astype(np.int32))
    about = {"grid": list(tokens.grid), "vocab_size": tokens.vocab_size, "classes": list(tokens.classes)}
    write_json(folder / INFO, {**about, "views": views, "bits": bits, "images": len(index)})
    return sum(path.stat().st_size for path in folder.iterdir())


def unpack_tokens(folder: Path, target: Path) -> TokenSet:
    """Write the token set that `pack_tokens` packed; one that is there already is opened."""
    if (target / "tokens.json").exists():
        return open_tokens(target)
    about = read_json(folder / INFO)
    grid, num_tokens = tuple(about["grid"]), about["grid"][0] * about["grid"][1]
    labels = np.load(folder / "labels.npy")
    packed = [np.load(folder / f"bits-{view}.npy") for view in range(about["views"])]
    for view, array in enumerate(packed):
        require(len(array) == len(labels), f"{folder}/bits-{view}.npy has {len(array)} images, not {len(labels)}")
    writer = TokenWriter(
        target,
        grid=grid,
        vocab_size=about["vocab_size"],
        classes=tuple(about["classes"]),
        views=about["views"],
        shard_size=65536,
    )
    for start in range(writer.num_done, len(labels), 4096):
        rows = slice(start, start + 4096)
        ids = np.stack([unpack_ids(array[rows], num_tokens, about["bits"]) for array in packed], axis=1)
        writer.add(ids, labels[rows])
    writer.close()
    return open_tokens(target)
