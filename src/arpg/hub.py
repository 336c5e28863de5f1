"""Find models by name: installed, in a folder, published (fetched, converted and cached) or a Hugging Face hub id."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from arpg.checkpoint import CLASSES, MODEL, TOKENIZER, FolderConfig, write_folder
from arpg.classes import imagenet_classes
from arpg.config import MODELS, SAMPLING, TOKENIZERS, ModelConfig, TokenizerConfig
from arpg.convert import model_from_published, read_published, tokenizer_from_published
from arpg.errors import InputError, first_line, require
from arpg.installed import CONFIG, installed_folder, installed_models
from arpg.settings import SamplingDefaults

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """A file in a hub repository."""

    repo: str
    file: str


@dataclass(frozen=True)
class Published:
    """A published model: where its files are and which configuration they must have."""

    model_source: Source
    tokenizer_source: Source
    model: ModelConfig
    tokenizer: TokenizerConfig
    sampling: SamplingDefaults
    license: str


def _published(name: str, file: str) -> Published:
    return Published(
        model_source=Source("hp-l33/ARPG", file),
        tokenizer_source=Source("FoundationVision/LlamaGen", "vq_ds16_c2i.pt"),
        model=MODELS[name],
        tokenizer=TOKENIZERS["vq-16"],
        sampling=SAMPLING[name],
        license="MIT (weights by the authors of ARPG, hp-l33/ARPG; tokenizer by those of LlamaGen)",
    )


PUBLISHED = {
    "arpg-l": _published("arpg-l", "arpg_300m.pt"),
    "arpg-xl": _published("arpg-xl", "arpg_700m.pt"),
    "arpg-xxl": _published("arpg-xxl", "arpg_1b.pt"),
}


def home() -> Path:
    """Return the folder of fetched models: $ARPG_HOME, or else one in the user's cache folder."""
    if value := os.environ.get("ARPG_HOME"):
        return Path(value)
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "arpg"


def resolve(name: str | Path) -> Path:
    """Return the folder of a model: an installed name, a folder, a published name, or `user/repository` on the hub."""
    folder, text = Path(name), str(name)
    if text in (installed := installed_models()):
        return installed_folder(text)
    if folder.is_dir():
        return folder
    if text in PUBLISHED:
        return pull(text)
    if text.count("/") == 1 and not text.startswith((".", "~", "/")) and not text.endswith("/"):
        return _snapshot(text)
    raise InputError(
        f"model {text!r} is neither installed ({', '.join(installed)}), a folder, a published name "
        f"({', '.join(PUBLISHED)}) nor a hub id (user/repository)"
    )


def pull(name: str, *, force: bool = False) -> Path:
    """Fetch and convert a published model with its tokenizer, and return its folder; `force` does so again."""
    require(name in PUBLISHED, f"model {name!r} is not published; expected one of {', '.join(PUBLISHED)}")
    published = PUBLISHED[name]
    folder = home() / "models" / name
    if not force and (folder / CONFIG).is_file():
        return folder
    model_file = _fetch(name, published, published.model_source)
    tokenizer_file = _fetch(name, published, published.tokenizer_source)
    log.info("converting %s", name)
    model_config, model = model_from_published(
        read_published(model_file), where=str(model_file), num_heads=published.model.num_heads
    )
    tokenizer_config, tokenizer = tokenizer_from_published(read_published(tokenizer_file), where=str(tokenizer_file))
    for what, found, expected in (
        (model_file, model_config, published.model),
        (tokenizer_file, tokenizer_config, published.tokenizer),
    ):
        require(found == expected, f"{what} is not {name}: it holds {found}, expected {expected}")
    config = FolderConfig(
        model=model_config,
        tokenizer=tokenizer_config,
        sampling=published.sampling,
        license=published.license,
        classes=imagenet_classes() if model_config.num_classes == 1000 else None,
    )
    write_folder(folder, config, model=model, tokenizer=tokenizer)
    return folder


def _fetch(name: str, published: Published, source: Source) -> Path:
    """Return a file that the user put into the downloads folder, or else fetch it from the hub."""
    by_hand = home() / "downloads" / source.file
    if by_hand.is_file():
        return by_hand
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError

    log.info("fetching %s from %s", source.file, source.repo)
    try:
        return Path(hf_hub_download(source.repo, source.file, endpoint=os.environ.get("HF_ENDPOINT")))
    except (HfHubHTTPError, OSError, ValueError) as error:
        both = (published.model_source, published.tokenizer_source)
        files = " and ".join(f"{s.file} (huggingface.co/{s.repo})" for s in both)
        raise InputError(
            f"{source.file} could not be fetched ({first_line(error)}); get {files}, put them into "
            f"{by_hand.parent} and run `arpg pull {name}` again"
        ) from None


def _snapshot(repo: str) -> Path:
    """Fetch the files of a model folder on the hub."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

    def fetch(file: str) -> Path:
        log.info("fetching %s from %s", file, repo)
        return Path(hf_hub_download(repo, file, endpoint=os.environ.get("HF_ENDPOINT")))

    try:
        folder = fetch(CONFIG).parent
        described = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        for section, file in (("model", MODEL), ("tokenizer", TOKENIZER)):
            if section in described:
                fetch(file)
        with contextlib.suppress(EntryNotFoundError):
            fetch(CLASSES)
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise InputError(
            f"model {repo!r} is no folder here, and the hub did not give it ({first_line(error)}); "
            "check the name and the connection, or give the path of a folder"
        ) from None
    return folder
