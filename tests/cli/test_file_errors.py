"""Files that are not what an option expects: each case is a sentence of its own, and one line."""

import shutil
import socket
import threading

import numpy as np
import pytest
import torch

from support.command import check_error
from support.paths import GOLDEN
from support.small import noise


@pytest.fixture
def files(tmp_path, folder):
    """A folder, a text file, a file that is cut short, and a file of something else."""
    noise(20, 12).save(tmp_path / "image.png")
    whole = (tmp_path / "image.png").read_bytes()
    (tmp_path / "text").write_text("hello\n")
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "cut.pt").write_bytes((GOLDEN / "arpg_a.pt").read_bytes()[:5000])
    np.savez(tmp_path / "whole.npz", arr_0=np.zeros((4, 8, 8, 3), np.uint8))
    (tmp_path / "cut.npz").write_bytes((tmp_path / "whole.npz").read_bytes()[:300])
    torch.save({"conv1.weight": torch.zeros(1)}, tmp_path / "foreign.pt")
    return tmp_path


CASES = [
    ("edit {} --box 1,1,5,5 -c 1", "model", "image {} is a folder; expected an image file"),
    ("edit {} --box 1,1,5,5 -c 1", "text", "image {} is a text file; expected an image file"),
    ("edit {} --box 1,1,5,5 -c 1", "cut.png", "image {} is cut short or damaged"),
    ("edit {} --box 1,1,5,5 -c 1", "foreign.pt", "image {} is not an image file"),
    ("inpaint image.png --mask {}", "model", "mask {} is a folder"),
    ("generate -c 0 --condition {}", "text", "condition image {} is a text file"),
    ("convert model {} new", "text", "{} is a text file; expected a published checkpoint"),
    ("convert model {} new", "cut.pt", "{} is cut short or damaged"),
    ("convert model {} new", "image.png", "{} is not a published checkpoint"),
    ("convert model {} new", "foreign.pt", "it has conv1.weight: is this an ARPG checkpoint?"),
    ("convert tokenizer {} new", "foreign.pt", "it has conv1.weight: is this a VQ tokenizer checkpoint?"),
    ("generate -c 0 --model {}", "foreign.pt", "model {} is a file; expected a model folder, which `arpg convert"),
    ("generate -c 0 --model {}", "empty", "{} is not a model folder: it has no config.json"),
    ("generate --prompts {}", "model", "{} is a folder; expected a file with a prompt per line"),
    ("generate --prompts {}", "image.png", "{} is not UTF-8 text"),
    ("evaluate {} --reference whole.npz", "text", "text is not a zip file; expected a folder of images or a zip file"),
    ("evaluate whole.npz --reference {}", "cut.npz", "{} is cut short or damaged"),
    ("evaluate whole.npz --reference whole.npz --inception {}", "model", "{} is a folder; expected Inception weights"),
    ("train {} -o run", "model", "{} is a folder; expected a recipe"),
    ("train {} -o run", "image.png", "{} is not valid TOML"),
]


@pytest.mark.parametrize(("line", "name", "message"), CASES, ids=[f"{c[0].split()[0]}-{c[1]}" for c in CASES])
def test_each_wrong_file_has_its_own_sentence(run, files, monkeypatch, line, name, message):
    monkeypatch.chdir(files)
    (files / "empty").mkdir()
    check_error(run(*line.format(name).split()), message.format(name))
    assert not (files / "new").exists()


def test_weights_of_another_model_in_a_folder(run, files, tmp_path):
    folder = tmp_path / "model"
    shutil.copy(folder / "tokenizer.safetensors", folder / "model.safetensors")
    check_error(run("generate", "-c", 0, "-m", folder), "model.safetensors", "missing keys")


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="there is one here")
def test_an_apple_gpu_where_there_is_none(run, folder):
    message = "device is 'mps', but torch sees no Apple GPU; use --device cpu"
    check_error(run("generate", "-c", 0, "-m", folder, "--device", "mps"), message)


def test_offline_is_said_once_without_retries(run, tmp_path, monkeypatch):
    """One connection is tried; the hub's own library would try six times, for half a minute."""
    with socket.socket() as closed:  # bound, but nothing listens
        closed.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}"
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        monkeypatch.setenv("ARPG_HOME", str(tmp_path))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
        tried = []
        connect = socket.create_connection
        monkeypatch.setattr(socket, "create_connection", lambda *a, **k: (tried.append(a), connect(*a, **k))[1])
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: pytest.fail("a retry"))
        result = run("generate", "-c", 1, "-m", "arpg-xl")
        check_error(result, f"{endpoint} cannot be reached: Connection refused", "arpg_700m.pt", "vq_ds16_c2i.pt")
        assert len(tried) == 1
        check_error(run("generate", "-c", 1, "-m", "user/model"), "'user/model'", "cannot be reached")


def test_a_hub_that_does_not_answer_is_given_up(run, tmp_path, monkeypatch):
    given_up = threading.Event()

    def connect(*_, **__):
        given_up.wait()
        raise OSError("too late")

    monkeypatch.setattr("arpg.hub.CONNECT_SECONDS", 0.1)
    monkeypatch.setattr("arpg.hub.socket.create_connection", connect)
    monkeypatch.setenv("ARPG_HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    check_error(run("pull", "arpg-l"), "no answer within two seconds")
    given_up.set()
