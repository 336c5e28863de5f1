"""Training of `meadow` on a machine that is lent for half an hour: data that travels, tokens, runs in calls of minutes.

    python -m experiments.meadow pack data carry                     # pieces of 60 MB: what one call can carry
    python -m experiments.meadow unpack carry data                   # on the other side
    python -m experiments.meadow tokenize --tokenizer T --views 6 --out runs/tokens
    python -m experiments.meadow pack-tokens runs/tokens/meadow-train carry-tokens/train --views 3
    python -m experiments.meadow train recipes/meadow.toml --work runs/meadow --out results --pieces $OUT --minutes 9
    python -m experiments.meadow unpack PIECES results               # what came back: the weights so far in 8 bits

`train` takes recipes of models and of tokenizers. The next call with the same --work resumes; where the machine has
forgotten it, `--set init_from=results/model` starts from the weights that came back.
"""

from __future__ import annotations

import argparse
import logging
import time
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from arpg.checkpoint import load_tokenizer, require_tokenizer_of, store_folder, write_difference
from arpg.data.tokenize import tokenize as tokenize_images
from arpg.data.tokens import open_tokens
from arpg.device import choose_device
from arpg.hub import resolve
from arpg.train.recipe import ModelRecipe, TokenizerRecipe, read_recipe
from experiments.photos import photo_set
from experiments.staged_run import join_pieces, train_until, write_pieces
from experiments.token_bits import pack_tokens, unpack_tokens

log = logging.getLogger("experiments")

CARRIED = 60_000_000  # bytes of a piece that is sent: 64 MiB go with a call


def _parser(verb: str, about: Callable[..., None]) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(prog=f"experiments.meadow {verb}", description=about.__doc__)


def pack(arguments: Sequence[str] | None = None) -> None:
    """Write the files of a folder as pieces of a zip, none larger than a call can carry."""
    parser = _parser("pack", pack)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--bytes", type=int, default=CARRIED, help="Of a piece.")
    options = parser.parse_args(arguments)
    pieces = write_pieces(options.folder, options.out, options.bytes)
    log.info("%s", "  ".join(f"{path.name} {path.stat().st_size / 1e6:.1f} MB" for path in pieces))


def unpack(arguments: Sequence[str] | None = None) -> None:
    """Unpack the pieces that `pack` or `train` wrote."""
    parser = _parser("unpack", unpack)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args(arguments)
    join_pieces(options.folder, options.out)


def tokenize(arguments: Sequence[str] | None = None) -> None:
    """Encode both splits: several views of each training image, the centre crop of each test image."""
    parser = _parser("tokenize", tokenize)
    parser.add_argument("--set", default="meadow", help="A set of photographs (experiments/photos.py).")
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--views", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0, help="Of the crops; a later piece of training takes others.")
    parser.add_argument("--control", default="", help="Also keep condition images of this kind.")
    parser.add_argument("--depth-model", help="For depth: an .onnx file or a model of transformers; none: FastDepth.")
    parser.add_argument("--batch-size", type=int, default=1536)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=Path("runs/tokens"))
    options = parser.parse_args(arguments)
    photos, device = photo_set(options.set), choose_device(options.device)
    tokenizer = load_tokenizer(resolve(options.tokenizer), device=device, dtype=torch.float32)
    name = "-".join([options.set, *([options.control] if options.control else [])])
    for split, views in (("train", options.views), ("test", 1)):
        began = time.monotonic()
        tokens = tokenize_images(
            tokenizer,
            photos.open(options.data, split),
            options.out / f"{name}-{split}",
            size=photos.size,
            views=views,
            zoom=True,
            seed=options.seed,
            batch_size=options.batch_size,
            control=options.control,
            depth=options.depth_model,
        )
        log.info("%s: %d images, %d views, %.0f s", split, tokens.num_images, tokens.views, time.monotonic() - began)


def pack_token_set(arguments: Sequence[str] | None = None) -> None:
    """Write a token set with as few bits for an id as it needs."""
    parser = _parser("pack-tokens", pack_token_set)
    parser.add_argument("tokens", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--views", type=int, required=True, help="The first views of each image.")
    options = parser.parse_args(arguments)
    size = pack_tokens(open_tokens(options.tokens), options.out, views=options.views)
    log.info("%s: %.1f MB", options.out, size / 1e6)


def unpack_token_set(arguments: Sequence[str] | None = None) -> None:
    """Write the token set that `pack-tokens` packed."""
    parser = _parser("unpack-tokens", unpack_token_set)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args(arguments)
    tokens = unpack_tokens(options.folder, options.out)
    log.info("%d images, %d views", tokens.num_images, tokens.views)


def train(arguments: Sequence[str] | None = None) -> None:
    """Train or resume training for some minutes; the weights so far are stored in 8 bits, in pieces."""
    parser = _parser("train", train)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--set", action="append", default=[], help="Override a value of the recipe.")
    parser.add_argument("--work", type=Path, required=True, help="Snapshots; kept while the machine is held.")
    parser.add_argument("--out", type=Path, required=True, help="The results: model, metrics, the newest sheet.")
    parser.add_argument("--pieces", type=Path, help="Also write the results here, in pieces that come back.")
    parser.add_argument("--as", dest="form", default="int8", help="The form in which the weights are stored.")
    parser.add_argument("--base", help="An installed model: store differences from it.")
    parser.add_argument("--minutes", type=float, default=9.0, help="Time of this call.")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args(arguments)
    deadline = time.monotonic() + 60 * options.minutes
    is_tokenizer = options.recipe.is_file() and "tokenizer" in _sections(options.recipe)
    kind: type[ModelRecipe | TokenizerRecipe] = TokenizerRecipe if is_tokenizer else ModelRecipe
    recipe = read_recipe(options.recipe, kind, options.set)
    if options.base is not None and isinstance(recipe, ModelRecipe) and recipe.tokenizer is not None:  # before training
        require_tokenizer_of(options.base, resolve(recipe.tokenizer))
    options.out.mkdir(parents=True, exist_ok=True)

    def store(folder: Path, target: Path) -> None:
        if options.base is None:
            store_folder(folder, target, form=options.form)
        else:
            write_difference(folder, target, base=options.base, form=options.form)

    done = train_until(deadline, recipe, options.work, options.out, device=options.device, store=store)
    log.info("done" if done else "train is not finished; run this again")
    if options.pieces is not None:  # 64 MiB come back: a model without its tokenizer, which training does not change
        leave_out = () if is_tokenizer else (options.out / "model" / "tokenizer.safetensors",)
        write_pieces(options.out, options.pieces, leave_out=leave_out)


def _sections(path: Path) -> set[str]:
    return {name for name, value in tomllib.loads(path.read_text(encoding="utf-8")).items() if isinstance(value, dict)}
