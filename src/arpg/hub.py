"""Find models by name: installed, in a folder, published (fetched, converted and cached) or a Hugging Face hub id."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arpg.checkpoint import (
    CLASSES,
    CONFIG,
    DISTRIBUTIONS,
    MODEL,
    TOKENIZER,
    FolderConfig,
    installed_folder,
    installed_models,
    write_folder,
)
from arpg.classes import imagenet_classes
from arpg.config import MODELS, SAMPLING, TOKENIZERS, ModelConfig, TokenizerConfig
from arpg.convert import model_from_published, read_published, tokenizer_from_published
from arpg.errors import InputError, first_line, require
from arpg.files import hash_file, read_json, write_json
from arpg.settings import SamplingDefaults
from arpg.storage import AnyPath, as_path, home

log = logging.getLogger(__name__)

CONNECT_SECONDS = 2.0
LOCK_VARIABLE = "ARPG_LOCK"
SOURCES = "sources.json"  # in a converted folder: the files that it was made of


@dataclass(frozen=True)
class Source:
    """A file in a hub repository."""

    repo: str
    file: str


TOKENIZER_SOURCE = Source("FoundationVision/LlamaGen", "vq_ds16_c2i.pt")  # of all published models
LICENSE = "MIT (weights by the authors of ARPG, hp-l33/ARPG; tokenizer by those of LlamaGen)"


@dataclass(frozen=True)
class Published:
    """A published model: where its weights are, and which configuration they and the tokenizer must have."""

    source: Source
    model: ModelConfig
    sampling: SamplingDefaults
    tokenizer: TokenizerConfig = TOKENIZERS["vq-16"]


FILES = {"arpg-l": "arpg_300m.pt", "arpg-xl": "arpg_700m.pt", "arpg-xxl": "arpg_1b.pt"}
PUBLISHED = {name: Published(Source("hp-l33/ARPG", file), MODELS[name], SAMPLING[name]) for name, file in FILES.items()}


def resolve(name: str | AnyPath) -> AnyPath:
    """Return the folder of a model: an installed name, a folder, a published name, or `user/repository` on the hub.

    A folder may also be a URL, like s3://bucket/model.
    """
    folder, text = as_path(name), str(name)
    if text in (installed := installed_models()):
        return installed_folder(text)
    if folder.is_dir():
        return folder
    if text in DISTRIBUTIONS:
        return installed_folder(text)  # says how to install it
    require(
        not folder.is_file(),
        f"model {text} is a file; expected a model folder, which `arpg convert model {text} FOLDER` makes",
    )
    if text in PUBLISHED:
        return pull(text)
    require(isinstance(folder, Path), f"{text} is not a model folder: there are no files below it")
    if text.count("/") == 1 and not text.startswith((".", "~", "/")) and not text.endswith("/"):
        return _snapshot(text)
    raise InputError(
        f"model {text!r} is neither installed ({', '.join(installed)}), a folder, a published name "
        f"({', '.join(PUBLISHED)}) nor a hub id (user/repository)"
    )


def pull(name: str, *, force: bool = False, lock: Path | None = None) -> Path:
    """Fetch and convert a published model with its tokenizer, and return its folder; `force` does so again.

    `lock` (default: $ARPG_LOCK) is a JSON file of the revision and the SHA-256 sums of each hub repository: files that
    it lists are fetched at that revision and must have those sums; what it does not list yet is added to it.
    """
    require(name in PUBLISHED, f"model {name!r} is not published; expected one of {', '.join(PUBLISHED)}")
    published = PUBLISHED[name]
    folder = home() / "models" / name
    pins = Pins.read(lock)
    if not force and (folder / CONFIG).is_file() and pins.agree_with(folder / SOURCES):
        return folder
    model_file, tokenizer_file = (_fetch(name, source, pins) for source in (published.source, TOKENIZER_SOURCE))
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
        license=LICENSE,
        classes=imagenet_classes() if model_config.num_classes == 1000 else None,
    )
    write_folder(folder, config, model=model, tokenizer=tokenizer)
    write_json(folder / SOURCES, pins.used)
    pins.write()
    return folder


def _fetch(name: str, source: Source, pins: Pins) -> Path:
    """Return a file that the user put into the downloads folder, or else fetch it from the hub."""
    by_hand = home() / "downloads" / source.file
    if by_hand.is_file():
        pins.check(source.repo, source.file, by_hand, revision=None)
        return by_hand
    both = (PUBLISHED[name].source, TOKENIZER_SOURCE)
    files = " and ".join(f"{s.file} (huggingface.co/{s.repo})" for s in both)
    advice = f"get {files}, put them into {by_hand.parent} and run `arpg pull {name}` again"
    with _hub_errors(f"{source.file} could not be fetched", advice):
        return _download(source.repo, source.file, pins)


@contextlib.contextmanager
def _hub_errors(problem: str, advice: str) -> Iterator[None]:
    """Turn an error of the hub, the network or a file into an `InputError`: the problem, why, and what to do."""
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except InputError:
        raise
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise InputError(f"{problem} ({first_line(error)}); {advice}") from None


def _download(repo: str, file: str, pins: Pins) -> Path:
    """Fetch a file from the hub at its pinned revision, or at the newest, and check it."""
    from huggingface_hub import _CACHED_NO_EXIST, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import LocalEntryNotFoundError

    endpoint, revision = os.environ.get("HF_ENDPOINT", "https://huggingface.co"), pins.revision(repo)
    if problem := _unreachable(endpoint):
        cached = try_to_load_from_cache(repo, file, revision=revision)
        if cached is _CACHED_NO_EXIST:
            raise LocalEntryNotFoundError(f"{repo} has no {file}")
        if not isinstance(cached, str):
            raise ConnectionError(f"{endpoint} cannot be reached: {problem}")
        path = Path(cached)
    else:
        log.info("fetching %s from %s", file, repo)
        path = Path(hf_hub_download(repo, file, revision=revision, endpoint=endpoint))
    commit = path.parts[path.parts.index("snapshots") + 1] if "snapshots" in path.parts else None
    pins.check(repo, file, path, revision=commit)
    return path


def _unreachable(endpoint: str) -> str | None:
    """Return why no connection to the hub can be made, within two seconds; None where it can.

    The hub's library tries a dead address six times, for half a minute. Where a proxy is set, only the proxy knows.
    """
    parts = urllib.parse.urlsplit(endpoint)
    if parts.scheme in urllib.request.getproxies():
        return None
    problem: list[str] = ["no answer within two seconds"]

    def connect() -> None:
        try:
            port = parts.port or (443 if parts.scheme == "https" else 80)
            socket.create_connection((parts.hostname or "", port), timeout=CONNECT_SECONDS).close()
            problem.clear()
        except OSError as error:
            problem[:] = [error.strerror or str(error)]

    # Looking up a name has no time limit of its own.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(CONNECT_SECONDS)
    return problem[0] if problem else None


class Pins:
    """The revision and the SHA-256 sums of hub repositories, from a lock file and from what was fetched."""

    def __init__(self, path: Path | None, locked: dict[str, Any]) -> None:
        self.path, self.locked = path, locked
        self.used: dict[str, Any] = {}  # of this model, in the format of the lock file

    @classmethod
    def read(cls, path: Path | None) -> Pins:
        """Read a lock file, which need not exist yet; the default is $ARPG_LOCK, or none."""
        if path is None and (value := os.environ.get(LOCK_VARIABLE)):
            path = Path(value)
        locked = read_json(path) if path is not None and path.exists() else {}
        good = isinstance(locked, dict) and all(
            isinstance(entry, dict) and isinstance(entry.get("files"), dict) for entry in locked.values()
        )
        require(good, f"{path} is no lock file of `arpg pull`; delete it, or choose another file")
        return cls(path, locked)

    def revision(self, repo: str) -> str | None:
        """Return the revision at which to fetch files of `repo`; None is the newest."""
        revision: str | None = (self.locked.get(repo) or self.used.get(repo) or {}).get("revision")
        return revision

    def check(self, repo: str, file: str, path: Path, *, revision: str | None) -> None:
        """Compare the sum of a file with the lock file, and keep it."""
        found = hash_file(path)
        expected = self.locked.get(repo, {}).get("files", {}).get(file)
        require(
            expected in (None, found),
            f"{path} has the SHA-256 sum {found}, but {self.path} expects {expected} for {file} of {repo}; "
            "delete the file, or lock the new one by deleting the entry",
        )
        entry = self.used.setdefault(repo, {"revision": self.revision(repo) or revision, "files": {}})
        entry["files"][file] = found

    def agree_with(self, sources: Path) -> bool:
        """Return whether a converted model was made of the files that the lock file lists."""
        if not self.locked:
            return True
        if not sources.is_file():
            return False
        made_of = read_json(sources)
        return all(
            self.locked.get(repo, {}).get("files", {}).get(file) == found
            for repo, entry in made_of.items()
            for file, found in entry["files"].items()
        )

    def write(self) -> None:
        """Add what was fetched to the lock file, if there is one."""
        if self.path is None:
            return
        merged = dict(self.locked)
        for repo, entry in self.used.items():
            files = {**merged.get(repo, {}).get("files", {}), **entry["files"]}
            merged[repo] = {"revision": entry["revision"], "files": files}
        if merged != self.locked:
            write_json(self.path, merged)


def _snapshot(repo: str) -> Path:
    """Fetch the files of a model folder on the hub; `user/repository@revision` names a revision."""
    from huggingface_hub.errors import EntryNotFoundError

    name, _, revision = repo.partition("@")
    pins = Pins.read(None)
    if revision:
        pins.locked.setdefault(name, {"files": {}})["revision"] = revision
    advice = "check the name and the connection, or give the path of a folder"
    with _hub_errors(f"model {repo!r} is no folder here, and the hub did not give it", advice):
        folder = _download(name, CONFIG, pins).parent
        described = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        for section, file in (("model", MODEL), ("tokenizer", TOKENIZER)):
            if section in described:
                _download(name, file, pins)
        with contextlib.suppress(EntryNotFoundError):
            _download(name, CLASSES, pins)
    if not revision:
        pins.write()
    return folder


def push(
    folder: Path, repo: str, *, license: str, private: bool | None, token: str | None, message: str, create_pr: bool
) -> str:
    """Upload a model folder to a repository of the hub and return the address of the commit, see `push_to_hub`."""
    from huggingface_hub import HfApi

    advice = "check the name, the connection and the token (`hf auth login`, or token=)"
    with _hub_errors(f"the hub did not take {repo!r}", advice):
        api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=token)
        repo_id = api.create_repo(repo, private=private, exist_ok=True).repo_id
        if not api.file_exists(repo_id, "README.md"):
            (folder / "README.md").write_text(_model_card(repo_id, license), encoding="utf-8")
        commit = api.upload_folder(
            repo_id=repo_id, folder_path=folder, commit_message=message, create_pr=create_pr or None
        )
    return str(commit)


def _model_card(repo: str, license: str) -> str:
    known = license.lower() in ("mit", "apache-2.0")
    named = f"license: {license.lower()}" if known else f"license: other\nlicense_name: {json.dumps(license)}"
    return (
        f"---\n{named}\nlibrary_name: arpg\npipeline_tag: unconditional-image-generation\n---\n\n# {repo}\n\n"
        "An [ARPG](https://arxiv.org/abs/2503.10568) model: autoregressive image generation with randomized parallel "
        f'decoding.\n\n```python\nfrom arpg import Pipeline\n\npipe = Pipeline.from_pretrained("{repo}")\n'
        "image = pipe().images[0]\n```\n"
    )
