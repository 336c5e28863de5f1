"""Fetching: a local stand-in for the Hugging Face hub serves small files in the published format."""

import dataclasses
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from huggingface_hub import close_session, constants

from arpg import InputError, Pipeline, hub
from arpg.config import DEFAULT_MODEL
from arpg.convert import model_to_published
from arpg.storage import home
from support.small import SMALL, small_model, small_tokenizer

COMMIT = "c" * 40


class StandIn:
    """Serves `files[repository][name]` the way the hub does: HEAD with metadata, GET with the content."""

    def __init__(self):
        self.files, self.log = {}, []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def find(self):
                owner, name, _, _, *file = self.path.strip("/").split("?")[0].split("/")
                return outer.files.get(f"{owner}/{name}", {}).get("/".join(file))

            def do_HEAD(self):
                self.do_GET(body=False)

            def do_GET(self, body=True):
                outer.log.append((self.command, self.path))
                content = self.find()
                self.send_response(404 if content is None else 200)
                if content is None:
                    self.send_header("X-Error-Code", "EntryNotFound")
                    content = b""
                else:
                    self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
                    self.send_header("X-Repo-Commit", COMMIT)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if body:
                    self.wfile.write(content)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    server = StandIn()
    monkeypatch.setenv("HF_ENDPOINT", server.address)
    monkeypatch.setenv("ARPG_HOME", str(tmp_path / "home"))
    close_session()  # no connection may survive from another stand-in
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    yield server
    server.server.shutdown()
    server.server.server_close()


def published_bytes(tmp_path, state):
    torch.save({"model": state}, tmp_path / "published.pt")
    return (tmp_path / "published.pt").read_bytes()


@pytest.fixture
def small_l(tmp_path, monkeypatch):
    """`arpg-l`, but small: the same table entry with small configurations."""
    tokenizer = small_tokenizer()
    config = dataclasses.replace(SMALL, grid=(16, 16))
    entry = dataclasses.replace(hub.PUBLISHED["arpg-l"], model=config, tokenizer=tokenizer.config)
    monkeypatch.setitem(hub.PUBLISHED, "arpg-l", entry)
    model_file = published_bytes(tmp_path, model_to_published(config, small_model(config).state_dict()))
    return model_file, published_bytes(tmp_path, tokenizer.state_dict())


def test_the_table_names_the_published_files():
    assert {name: entry.source.file for name, entry in hub.PUBLISHED.items()} == {
        "arpg-l": "arpg_300m.pt",
        "arpg-xl": "arpg_700m.pt",
        "arpg-xxl": "arpg_1b.pt",
    }
    assert {entry.source.repo for entry in hub.PUBLISHED.values()} == {"hp-l33/ARPG"}
    assert hub.Source("FoundationVision/LlamaGen", "vq_ds16_c2i.pt") == hub.TOKENIZER_SOURCE
    defaults = {name: entry.sampling.settings().guidance for name, entry in hub.PUBLISHED.items()}
    assert defaults == {"arpg-l": 5.4, "arpg-xl": 6.6, "arpg-xxl": 6.5}


def test_pull_fetches_converts_and_keeps(stand_in, small_l):
    stand_in.files = {
        "hp-l33/ARPG": {"arpg_300m.pt": small_l[0]},
        "FoundationVision/LlamaGen": {"vq_ds16_c2i.pt": small_l[1]},
    }
    pipe = Pipeline.from_pretrained("arpg-l", device="cpu")
    assert torch.equal(pipe.model.head.weight, small_model().head.weight)
    assert pipe.sampling.guidance_for(32) == 5.4
    assert pipe.license.startswith("MIT")
    asked = len(stand_in.log)
    assert any(path.endswith("arpg_300m.pt") for _, path in stand_in.log)
    assert hub.pull("arpg-l") == home() / "models" / "arpg-l"
    assert len(stand_in.log) == asked, "the second time nothing is fetched"


def test_offline_says_which_files_and_where(stand_in, small_l, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # a dead address would be tried for half a minute
    with pytest.raises(InputError) as caught:
        hub.pull("arpg-l")
    message = str(caught.value)
    downloads = home() / "downloads"
    for part in ("arpg_300m.pt", "hp-l33/ARPG", "vq_ds16_c2i.pt", "FoundationVision/LlamaGen", str(downloads)):
        assert part in message
    assert "\n" not in message
    assert not (home() / "models").exists()
    # And what the message says works.
    downloads.mkdir(parents=True)
    (downloads / "arpg_300m.pt").write_bytes(small_l[0])
    (downloads / "vq_ds16_c2i.pt").write_bytes(small_l[1])
    assert (hub.pull("arpg-l") / "model.safetensors").is_file()


def test_a_file_of_another_size_is_refused(stand_in, small_l):
    other = dataclasses.replace(SMALL, pass1_layers=1, grid=(16, 16))
    stand_in.files = {
        "hp-l33/ARPG": {"arpg_300m.pt": small_l[0]},
        "FoundationVision/LlamaGen": {"vq_ds16_c2i.pt": small_l[1]},
    }
    hub.PUBLISHED["arpg-l"] = dataclasses.replace(hub.PUBLISHED["arpg-l"], model=other)
    with pytest.raises(InputError, match="is not arpg-l"):
        hub.pull("arpg-l")
    assert not (home() / "models").exists()


def test_a_lock_file_pins_revision_and_sums(stand_in, small_l, tmp_path):
    stand_in.files = {
        "hp-l33/ARPG": {"arpg_300m.pt": small_l[0]},
        "FoundationVision/LlamaGen": {"vq_ds16_c2i.pt": small_l[1]},
    }
    lock = tmp_path / "lock.json"
    folder = hub.pull("arpg-l", lock=lock)
    pinned = json.loads(lock.read_text())
    assert pinned["hp-l33/ARPG"] == {
        "revision": COMMIT,
        "files": {"arpg_300m.pt": hashlib.sha256(small_l[0]).hexdigest()},
    }
    assert all("/resolve/main/" in path for _, path in stand_in.log)
    stand_in.log.clear()
    assert hub.pull("arpg-l", lock=lock) == folder
    assert stand_in.log == [], "a folder made of the locked files is kept"

    (folder / hub.SOURCES).unlink()  # made of unknown files: fetched again, at the locked revision
    hub.pull("arpg-l", lock=lock)
    assert (folder / hub.SOURCES).is_file()
    hub.pull("arpg-l", lock=lock, force=True)
    assert all(f"/resolve/{COMMIT}/" in path for _, path in stand_in.log)
    assert json.loads(lock.read_text()) == pinned


def test_a_file_with_another_sum_is_refused(stand_in, small_l, tmp_path, monkeypatch):
    stand_in.files = {
        "hp-l33/ARPG": {"arpg_300m.pt": small_l[0]},
        "FoundationVision/LlamaGen": {"vq_ds16_c2i.pt": small_l[1]},
    }
    lock = tmp_path / "lock.json"
    lock.write_text(json.dumps({"hp-l33/ARPG": {"revision": COMMIT, "files": {"arpg_300m.pt": "0" * 64}}}))
    monkeypatch.setenv(hub.LOCK_VARIABLE, str(lock))  # so that every verb and the server check it
    with pytest.raises(InputError, match=f"lock.json expects {'0' * 64} for arpg_300m.pt of hp-l33/ARPG"):
        Pipeline.from_pretrained("arpg-l", device="cpu")
    downloads = home() / "downloads"
    downloads.mkdir(parents=True)
    (downloads / "arpg_300m.pt").write_bytes(small_l[0])
    with pytest.raises(InputError, match="SHA-256"):
        hub.pull("arpg-l")
    assert not (home() / "models").exists()
    lock.write_text("[]")
    with pytest.raises(InputError, match="is no lock file"):
        hub.pull("arpg-l")


def test_hub_ids_are_fetched_at_the_revision_they_name(stand_in, folder, tmp_path, monkeypatch):
    stand_in.files = {"someone/garden": {path.name: path.read_bytes() for path in folder.iterdir()}}
    Pipeline.from_pretrained(f"someone/garden@{COMMIT}", device="cpu")
    assert all(f"/resolve/{COMMIT}/" in path for _, path in stand_in.log)
    lock = tmp_path / "lock.json"
    monkeypatch.setenv(hub.LOCK_VARIABLE, str(lock))
    Pipeline.from_pretrained("someone/garden", device="cpu")
    assert json.loads(lock.read_text())["someone/garden"]["revision"] == COMMIT
    stand_in.files["someone/garden"]["model.safetensors"] = b"other"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "empty"))
    with pytest.raises(InputError, match=r"model\.safetensors of someone/garden"):
        Pipeline.from_pretrained("someone/garden", device="cpu")


def test_hub_ids(stand_in, folder):
    stand_in.files = {"someone/garden": {path.name: path.read_bytes() for path in folder.iterdir()}}
    pipe = Pipeline.from_pretrained("someone/garden", device="cpu")
    assert torch.equal(pipe.model.head.weight, small_model().head.weight)
    with pytest.raises(InputError, match="'someone/nothing' is no folder here, and the hub did not give it"):
        Pipeline.from_pretrained("someone/nothing")


def test_unknown_names():
    with pytest.raises(InputError, match=rf"neither installed .*{DEFAULT_MODEL}.*, a folder, a published name"):
        Pipeline.from_pretrained("arpg-m")
    with pytest.raises(InputError, match="neither installed"):
        Pipeline.from_pretrained("./nowhere/model")
    with pytest.raises(InputError, match="'arpg-m' is not published"):
        hub.pull("arpg-m")
