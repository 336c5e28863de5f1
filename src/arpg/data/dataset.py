"""What a model trains on: tokens with text states and condition maps as one dataset, and its batches.

The text states of a token set are memory-mapped files in its folder:

    text.json                 which encoder, its width, and the most tokens of a caption
    text-00000.npy            float16, [tokens of all captions of the shard, E]
    text-lengths-00000.npy    int32, [n]: tokens of each caption
    text-unfinished.json      text.json while the states are being written, so that no other encoder continues them

A batch is a pure function of (seed, step), whatever the number of processes: sample number = step * batch size + index
in the batch, and everything about a sample follows from its number.
Shapes: n images of a shard, B local batch, N grid tokens, T most tokens of a caption, E width of the text states,
H W pixels.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from arpg.config import ModelConfig, TextConfig, from_dict, to_dict
from arpg.data.tokens import (
    CHECKED_SHARDS,
    NO_CLASS,
    SHARD_SIZE,
    THREADS,
    LazyShards,
    MapSet,
    TokenSet,
    open_tokens,
    unpack_maps,
)
from arpg.device import send
from arpg.errors import present, require
from arpg.executor import RayOptions, Report, open_workers
from arpg.files import read_array, read_json, write_array, write_json
from arpg.noise import Stream, random_words, seed_keys
from arpg.storage import AnyPath, Lease, list_files

if TYPE_CHECKING:
    from arpg.text_encoder import TextEncoder

TEXT, UNFINISHED_TEXT = "text.json", "text-unfinished.json"
SHUFFLE_IMAGES = 1 << 21  # a set of more images is shuffled in windows
PREFETCH_THREADS = 4
ENCODE_CHUNK = 4096  # captions whose states are in memory together, as a list of tensors
MAX_RESIDENT_BYTES = 24 << 30  # condition maps that may stay in the memory of an accelerator

Array = NDArray[Any]


@dataclass(frozen=True)
class Dataset:
    """Tokens, with the states of their captions and their condition maps where the model takes them."""

    tokens: TokenSet
    text: TextStates | None = None
    control: ControlMaps | None = None


def open_dataset(folders: str | Sequence[str], config: ModelConfig, device: torch.device) -> Dataset:
    """Open the token folders of a recipe as one dataset, and check that it fits the model."""
    names = (folders,) if isinstance(folders, str) else tuple(folders)
    require(bool(names), "data names no token folder; expected one or more")
    opened = {name: open_tokens(name, vocab_size=config.vocab_size) for name in dict.fromkeys(names)}
    tokens = join_tokens([opened[name] for name in names])
    # Published tokens have numbers instead of names, and may lack the last classes.
    fits = tokens.num_classes == config.num_classes if tokens.classes else tokens.num_classes <= config.num_classes
    require(
        config.text is not None or fits,
        f"the tokens have {tokens.num_classes} classes; model.num_classes is {config.num_classes}; set it to "
        f"{tokens.num_classes}",
    )
    require(
        tuple(tokens.grid) == config.grid,
        f"the tokens are on a {tokens.grid[0]}x{tokens.grid[1]} grid; model.grid is {config.grid[0]}x{config.grid[1]}",
    )
    text = None
    if config.text is not None:
        text = open_text_states(tokens)
        require(text.config == config.text, f"{tokens.folder} has states of {text.config}; model.text is {config.text}")
    control = None
    if config.control is not None:
        missing = f"{tokens.folder} has no condition images; make it with `arpg tokenize --control`"
        require(bool(tokens.controls), missing)
        control = ControlMaps(tokens.controls, config.control.kinds, device)
        height, width = (side * config.control.patch for side in tokens.grid)
        require(
            control.size == (height, width),
            f"the condition images are {control.size[1]}x{control.size[0]} pixels; model.control.patch "
            f"{config.control.patch} and the grid need {width}x{height}",
        )
    return Dataset(tokens, text, control)


def read_orders(path: AnyPath, tokens: TokenSet) -> Array:
    """Read an order of each image and view, `[images, views, N]` raster positions, from an npy file."""
    orders = read_array(path, advice="make it with the model whose orders are wanted")
    shape = (tokens.num_images, tokens.views, tokens.grid[0] * tokens.grid[1])
    require(
        orders.shape == shape,
        f"{path} has orders of the shape {list(orders.shape)}; expected {list(shape)} (images, views, positions)",
    )
    first = np.sort(orders[0], axis=-1)
    require(bool((first == np.arange(shape[2])).all()), f"{path}: the first order does not visit every position once")
    return orders


def join_tokens(sets: Sequence[TokenSet]) -> TokenSet:
    """Join sets of one tokenizer. Where some have classes, the images of the others get the null class.

    An image that is described by its condition map alone needs no class: it is learned as if its class was dropped.
    """
    if len(sets) == 1:
        return sets[0]
    first = next((tokens for tokens in sets if tokens.classes), sets[0])
    for tokens in sets:
        where = f"{tokens.folder} cannot be joined with {first.folder}"
        for name in ("grid", "vocab_size"):
            found, expected = getattr(tokens, name), getattr(first, name)
            require(found == expected, f"{where}: {name} is {found}, not {expected}; use the tokenizer that made them")
        require(tokens.classes in ((), first.classes), f"{where}: it has other classes; tokenize the images together")
        require(bool(tokens.controls) == bool(first.controls), f"{where}: only one of them has condition images")
    info = replace(first.info, views=max(tokens.views for tokens in sets), captioned=False)
    return TokenSet(
        info,
        LazyShards.join([tokens.shards for tokens in sets]),
        np.concatenate(
            [t.labels if t.classes or not first.classes else np.full(len(t), NO_CLASS, np.int32) for t in sets]
        ),
        folder=first.folder,
        views_of=np.concatenate([tokens.views_of for tokens in sets]),
        controls=[maps for tokens in sets for maps in tokens.controls],
    )


class TextStates:
    """The encoder's states of every caption of a token set, by image, over all shards."""

    def __init__(self, config: TextConfig, shards: LazyShards, lengths: Sequence[NDArray[np.int32]]) -> None:
        self.config, self.shards, self._lengths = config, shards, list(lengths)

    def __len__(self) -> int:
        return int(self.shards.ends[-1])

    def gather(self, index: NDArray[np.int64]) -> tuple[NDArray[np.float16], NDArray[np.int64]]:
        """Return states `[B, T, E]`, zero after the end of a caption, and lengths `[B]`."""
        length_B = np.empty(len(index), np.int64)
        out = np.zeros((len(index), self.config.max_tokens, self.config.width), np.float16)
        for number, mask, own in self.shards.split(index):
            lengths, (here,) = self._lengths[number], np.nonzero(mask)
            length = length_B[here] = lengths[own]
            first = (np.cumsum(lengths, dtype=np.int64) - lengths)[own]  # row of each caption's first token
            token = np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length)
            out[np.repeat(here, length), token] = self.shards[number][np.repeat(first, length) + token]
        return out, length_B


def open_text_states(tokens: TokenSet) -> TextStates:
    """Open the text states of a token set."""
    folder, captions = _captioned(tokens)
    path = folder / TEXT
    require(path.is_file(), f"{folder} has captions but no text states; run `arpg embed {folder}` first")
    config = from_dict(TextConfig, read_json(path), where=str(path))
    files, count, advice = set(list_files(folder)), 0, "delete it and embed again"
    while files.issuperset(_text_names(count)):
        count += 1

    def open_lengths(number: int) -> Array:
        array = read_array(folder / _text_names(number)[1], advice=advice)
        valid = array.ndim == 1 and array.min(initial=1) >= 1
        require(valid, f"{folder / _text_names(number)[0]}: embed again, its lengths are damaged")
        return array

    with ThreadPoolExecutor(THREADS) as pool:
        lengths = list(pool.map(open_lengths, range(count)))

    def open_states(number: int) -> Array:
        path, total = folder / _text_names(number)[0], int(lengths[number].sum())
        states = read_array(path, advice=advice)
        require(
            states.shape == (total, config.width) and int(lengths[number].max()) <= config.max_tokens,
            f"{path}: embed again, it has the shape {states.shape} for {total} tokens of {config.width}",
        )
        return states

    found = sum(map(len, lengths))
    require(
        found == len(captions), f"{folder} has text states of {found} captions; expected {len(captions)}; embed again"
    )
    shards = LazyShards([len(part) for part in lengths], open_states)
    if count <= CHECKED_SHARDS and isinstance(folder, Path):
        for number in range(count):
            shards[number]
    return TextStates(config, shards, lengths)


def write_text_states(
    tokens: TokenSet,
    config: TextConfig,
    encoder: TextEncoder | None,
    *,
    batch_size: int = 256,
    shard_size: int = SHARD_SIZE,
    progress: Callable[[int, int], None] | None = None,
    ray: RayOptions | None = None,
    load: Callable[[], TextEncoder] | None = None,
) -> TextStates:
    """Encode the captions of a token set; continues where it stopped. A finished set needs no encoder.

    `ray`: encode on a Ray cluster, where every worker calls `load`; the files are the same.
    """
    folder, captions = _captioned(tokens)
    for name in (TEXT, UNFINISHED_TEXT):
        if (folder / name).exists():
            found = from_dict(TextConfig, read_json(folder / name), where=str(folder / name))
            ours, theirs = (f"{c.encoder} ({c.width} wide, {c.max_tokens} tokens)" for c in (config, found))
            message = f"{folder} has text states of {theirs}, not of {ours}; delete {name} and text-*.npy"
            require(found == config, message)
    if (folder / TEXT).exists():
        return open_text_states(tokens)
    starts = range(0, len(captions), shard_size)
    with Lease(folder) as lease:
        write_json(folder / UNFINISHED_TEXT, to_dict(config))
        found_names = set(list_files(folder))
        todo = [number for number in range(len(starts)) if _text_names(number)[1] not in found_names]
        before = len(captions) - sum(len(captions[starts[n] : starts[n] + shard_size]) for n in todo)
        jobs = ((number, captions[starts[number] : starts[number] + shard_size]) for number in todo)
        make = load or (lambda: present(encoder, f"{folder} is not embedded yet"))
        with open_workers(lambda: CaptionEncoder(make(), folder, batch_size), ray) as workers:
            on_progress = None if progress is None else (lambda done: progress(before + done, len(captions)))
            for _ in workers.map(jobs, on_progress=on_progress):
                pass
        lease.check()
        write_json(folder / TEXT, to_dict(config))
        (folder / UNFINISHED_TEXT).unlink()
    return open_text_states(tokens)


@dataclass(frozen=True, eq=False)
class CaptionEncoder:
    """Encodes the captions of a shard and writes their states: the work of one worker."""

    encoder: TextEncoder
    folder: AnyPath
    batch_size: int

    def __call__(self, job: tuple[int, Sequence[str]], report: Report) -> None:
        """Encode and write shard `job[0]` with the captions `job[1]`."""
        number, captions = job
        parts, lengths = [], []
        for start in range(0, len(captions), ENCODE_CHUNK):
            states = self.encoder.states(captions[start : start + ENCODE_CHUNK], batch_size=self.batch_size)
            parts.append(np.concatenate([s.numpy().astype(np.float16) for s in states]))
            lengths += [len(s) for s in states]
            report(len(lengths))
        # The lengths are written last: they make the shard complete.
        for name, array in zip(_text_names(number), (np.concatenate(parts), np.array(lengths, np.int32)), strict=True):
            write_array(self.folder / name, array)


def _captioned(tokens: TokenSet) -> tuple[AnyPath, Sequence[str]]:
    captions = present(tokens.captions, f"{tokens.folder} has no captions; tokenize images that have them")
    assert tokens.folder is not None
    return tokens.folder, captions


def _text_names(number: int) -> tuple[str, str]:
    return f"text-{number:05d}.npy", f"text-lengths-{number:05d}.npy"


class ControlMaps:
    """Condition maps by image and view, over one or several sets. They stay on the device where they fit."""

    def __init__(self, sets: Sequence[MapSet], kinds: Sequence[str], device: torch.device) -> None:
        """`kinds`: those of the model, in its order."""
        self.device, self.kinds, self.size = device, tuple(kinds), sets[0].size
        for each in sets:
            require(
                each.kind in kinds, f"there are condition images of kind {each.kind!r}; the model takes {list(kinds)}"
            )
            require(
                each.size == self.size,
                f"condition images are {each.size[1]}x{each.size[0]} and {self.size[1]}x{self.size[0]} pixels; "
                "expected one size",
            )
        self.shards = LazyShards.join([each.shards for each in sets])  # on the CPU
        self._kind = np.repeat([kinds.index(each.kind) for each in sets], [len(each.shards) for each in sets])
        self._on_device: dict[int, Tensor] = {}  # by shard
        distinct = {id(each): each for each in sets}  # a set that is listed several times is stored once
        if device.type != "cpu" and sum(each.nbytes for each in distinct.values()) <= MAX_RESIDENT_BYTES:
            stored = {
                key: [_as_tensor(each.shards[number]).to(device) for number in range(len(each.shards))]
                for key, each in distinct.items()
            }
            self._on_device = dict(enumerate(tensor for each in sets for tensor in stored[id(each)]))

    def __len__(self) -> int:
        return int(self.shards.ends[-1])

    def gather(self, index: NDArray[np.int64], view: Array) -> tuple[Tensor, Tensor]:
        """Return maps `[B, H, W]` of 8 bits and the index of each one's kind `[B]`, on the device."""
        found: dict[int, list[Tensor]] = {}  # stored maps by kind, which are sent together
        members: dict[int, list[NDArray[np.int64]]] = {}
        for s, mask, row_b in self.shards.split(index):
            number, (here,) = int(self._kind[s]), np.nonzero(mask)
            stored = self._on_device[s] if s in self._on_device else _as_tensor(self.shards[s])
            row_column = torch.from_numpy(np.stack((row_b, np.asarray(view)[here])).astype(np.int64))
            row, column = send(row_column, stored.device)
            found.setdefault(number, []).append(stored[row, column])
            members.setdefault(number, []).append(here)
        maps = [unpack_maps(send(torch.cat(parts), self.device), self.kinds[k]) for k, parts in found.items()]
        index_B = np.concatenate([np.concatenate(parts) for parts in members.values()])
        kind_B = np.concatenate([np.full(sum(map(len, parts)), k) for k, parts in members.items()])
        inverse_B = np.argsort(index_B)
        both = send(torch.from_numpy(np.stack((inverse_B, kind_B[inverse_B]))), self.device)
        return torch.cat(maps)[both[0]], both[1]


def _as_tensor(shard: Array) -> Tensor:
    """Wrap a read-only mapped file without a copy."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is not writable
        return torch.from_numpy(np.asarray(shard))


@dataclass(frozen=True)
class Batch:
    """One part of a training batch, on the device."""

    ids_BN: Tensor
    labels_B: Tensor  # the null class (num_classes) where the label is dropped
    order_BN: Tensor
    dropout_key_B: Tensor
    states_BTE: Tensor | None = None  # of the captions, where the model takes prompts
    length_B: Tensor | None = None  # tokens of each caption; 0 where it is dropped
    pixels_BHW: Tensor | None = None  # condition maps, where the model takes them
    kind_B: Tensor | None = None
    dropped_B: Tensor | None = None  # whose condition map is dropped


class TokenBatches:
    """Every image once per epoch, in a new permutation; each sample with one of its views, an order and label drop.

    A set of more than `shuffle` images is read in windows: every epoch has a new order of shards, a window is the next
    shards with together `shuffle` images, and its images are permuted. Only the shards of a window and (from a
    thread) of the next one are open, so memory and the local cache do not grow with the set.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        batch_size: int,
        parts: int,
        num_classes: int,
        label_drop: float,
        seed: int,
        device: torch.device,
        shuffle: int = SHUFFLE_IMAGES,
        orders: Array | None = None,
        orders_share: float = 0.0,
        control_drop: float = 0.0,
    ) -> None:
        """`parts`: the number of equal parts of a batch (processes times accumulation).

        `label_drop`: the share of samples without class, caption and condition map. `control_drop`: of the others, the
        share without a condition map alone.
        `orders`: an order of each image and view, see `read_orders`; so large a share of the samples has its own, the
        others have random ones.
        """
        require(shuffle >= 1, f"data.shuffle is {shuffle}; expected 1 or more images")
        require(
            batch_size % parts == 0,
            f"run.batch_size {batch_size} cannot be cut into {parts} equal parts (processes x run.accumulate)",
        )
        self.dataset, self.tokens = dataset, dataset.tokens
        self.batch_size, self.part_size = batch_size, batch_size // parts
        self.num_classes, self.label_drop, self.seed, self.device = num_classes, label_drop, seed, device
        self.orders, self.orders_share, self.control_drop = orders, orders_share, control_drop
        self.key = seed_keys([seed])  # on the CPU: on a GPU this would be a hundred small kernels
        self.shuffle, self._counts = shuffle, np.array(dataset.tokens.shards.counts)
        self._windowed = dataset.tokens.num_images > shuffle
        self._shards_of = functools.lru_cache(maxsize=2)(self._make_windows)
        self._permutation = functools.lru_cache(maxsize=2)(self._make_permutation)
        self._open: set[tuple[int, int]] = set()
        self._ahead: ThreadPoolExecutor | None = None

    def indices(self, step: int, part: int) -> NDArray[np.int64]:
        """Return the indices of the images in a part of a step's batch."""
        numbers = self._sample_numbers(step, part)
        result = np.empty(len(numbers), dtype=np.int64)
        windows: set[tuple[int, int]] = set()
        for epoch in np.unique(numbers // self.tokens.num_images).tolist():
            chosen = numbers // self.tokens.num_images == epoch
            place = numbers[chosen] % self.tokens.num_images
            _, ends = self._shards_of(epoch)
            window = np.searchsorted(ends, place, side="right")
            found = np.empty(len(place), np.int64)
            for w in np.unique(window).tolist():
                here = window == w
                found[here] = self._permutation(epoch, w)[place[here] - (ends[w - 1] if w else 0)]
                windows.add((epoch, w))
            result[chosen] = found
        if self._windowed and windows != self._open:
            self._move_to(windows)
        return result

    def batch(self, step: int, part: int) -> Batch:
        """Return a part of a step's batch."""
        index = self.indices(step, part)
        number = torch.from_numpy(self._sample_numbers(step, part))[None]
        view = random_words(self.key, Stream.VIEW, number, 1)[0, :, 0].numpy() % self.tokens.views_of[index]
        ids = torch.from_numpy(self.tokens.gather(index, view))
        labels = torch.from_numpy(self.tokens.labels[index].astype(np.int64))
        drops = random_words(self.key, Stream.LABEL_DROP, number, 2)[0]
        dropped, no_map = (drops < torch.tensor([round(p * 2**32) for p in (self.label_drop, self.control_drop)])).T
        labels = torch.where(dropped | (labels == NO_CLASS), self.num_classes, labels)
        words = random_words(self.key, Stream.TRAIN_ORDER, number, ids.shape[1] + 2)[0]
        order = words[:, 1:-1].argsort(-1)
        if self.orders is not None:
            own = torch.from_numpy(self.orders[index, view].astype(np.int64))
            order = torch.where(words[:, -1:] < round(self.orders_share * 2**32), own, order)
        text, control = self.dataset.text, self.dataset.control
        states = length = None
        if text is not None:
            states, length = (torch.from_numpy(array) for array in text.gather(index))
            states, length = send(states, self.device), send(length.masked_fill(dropped, 0), self.device)
        pixels, kind = (None, None) if control is None else control.gather(index, view)
        return Batch(
            ids_BN=send(ids, self.device),
            labels_B=send(labels, self.device),
            order_BN=send(order, self.device),
            dropout_key_B=send(words[:, 0].to(torch.int32), self.device),
            states_BTE=states,
            length_B=length,
            pixels_BHW=pixels,
            kind_B=kind,
            dropped_B=None if pixels is None else send(dropped | no_map, self.device),
        )

    def _sample_numbers(self, step: int, part: int) -> NDArray[np.int64]:
        start = step * self.batch_size + part * self.part_size
        return np.arange(start, start + self.part_size)

    def _make_windows(self, epoch: int) -> tuple[list[NDArray[np.int64]], NDArray[np.int64]]:
        """Return the shards of each window of an epoch, and the number of images up to its end."""
        if not self._windowed:
            return [np.arange(len(self._counts))], np.array([self.tokens.num_images])
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self._counts))
        window = (np.cumsum(self._counts[order]) - self._counts[order]) // self.shuffle
        shards = [order[window == w] for w in np.unique(window)]
        return shards, np.cumsum([self._counts[numbers].sum() for numbers in shards])

    def _make_permutation(self, epoch: int, window: int) -> NDArray[np.int64]:
        """Return the images of a window in their order."""
        if not self._windowed:
            return np.random.default_rng([self.seed, epoch]).permutation(self.tokens.num_images)
        parts = [np.arange(first, stop) for first, stop in self._ranges(epoch, window)]
        return np.random.default_rng([self.seed, epoch, window]).permutation(np.concatenate(parts))

    def _ranges(self, epoch: int, window: int) -> list[tuple[int, int]]:
        """Return the images of each shard of a window: [first, stop)."""
        shards, ends = self._shards_of(epoch)[0][window], self.tokens.shards.ends
        return [(int(ends[s] - self._counts[s]), int(ends[s])) for s in shards]

    def _move_to(self, windows: set[tuple[int, int]]) -> None:
        """Close the shards of other windows, and open those of the next one in the background."""
        epoch, last = max(windows)
        after = (epoch, last + 1) if last + 1 < len(self._shards_of(epoch)[0]) else (epoch + 1, 0)
        ranges = [each for window in (*sorted(windows), after) for each in self._ranges(*window)]
        self._ahead = self._ahead or ThreadPoolExecutor(PREFETCH_THREADS, thread_name_prefix="shards")
        text, control = self.dataset.text, self.dataset.control
        for shards in (self.tokens.shards, *(part.shards for part in (text, control) if part is not None)):
            numbers = shards.of_images(ranges)
            shards.retain(numbers)
            for number in sorted(shards.of_images(self._ranges(*after))):
                self._ahead.submit(shards.__getitem__, number)
        self._open = windows
