"""Shared fixtures: golden files and a small network whose head is not zero."""

import dataclasses
import json
import logging
import os
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from arpg import ARPG, ModelConfig, Pipeline, TokenizerConfig, VQTokenizer
from arpg.config import ControlConfig, TextConfig
from arpg.convert import model_from_published, read_published

pytest_plugins = ["page_browser"]

GOLDEN = Path(__file__).parent / "golden"

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: its own functions are made for one of both ways


class Golden:
    """One recorded network: our model with its weights, the settings and the tensors."""

    def __init__(self, name):
        self.info = json.loads((GOLDEN / f"{name}.json").read_text())
        self.tensors = load_file(GOLDEN / f"{name}.safetensors")
        self.published = read_published(GOLDEN / f"{name}.pt")
        self.path = GOLDEN / f"{name}.pt"


@pytest.fixture(scope="session", params=["arpg_a", "arpg_b"])
def golden(request):
    recorded = Golden(request.param)
    side = round(recorded.info["config"]["block_size"] ** 0.5)
    config, state = model_from_published(
        recorded.published, where="golden", num_heads=recorded.info["config"]["n_head"], grid=(side, side)
    )
    recorded.model = ARPG(config).eval()
    recorded.model.load_state_dict(state)
    return recorded


SMALL = ModelConfig(width=32, num_heads=2, pass1_layers=2, pass2_layers=2, vocab_size=24, num_classes=5, grid=(4, 4))


TEXT = dataclasses.replace(SMALL, num_classes=0, text=TextConfig("minilm", width=12, max_tokens=7))

CONTROL = ControlConfig(patch=2, width=16, num_heads=2, layers=2)


def text_states(*lengths, seed=0, width=12):
    """Random encoder states of prompts of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length, width, generator=generator) for length in lengths]


class FakeEncoder:
    """States that follow from the words: one token for each, and one for the end."""

    def __init__(self, width=12, max_tokens=7):
        self.width, self.max_tokens, self.asked = width, max_tokens, 0

    def states(self, prompts, *, batch_size=1):
        self.asked += len(prompts)
        return [torch.stack([self._word(w) for w in (*p.split(), ".")][: self.max_tokens]) for p in prompts]

    def _word(self, word):
        return torch.randn(self.width, generator=torch.Generator().manual_seed(zlib.crc32(word.encode())))


def small_model(config=SMALL, seed=0):
    """Random weights, large enough for attention to matter, and a head that is not zero."""
    model = ARPG(config).init_weights(seed=seed, std=0.15)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        model.head.weight.copy_(torch.randn(model.head.weight.shape, generator=generator) * 0.5)
    return model.eval()


def controlled_model(config=None, seed=0):
    """A small network that takes condition images, with an MLP that does not end in zeros."""
    model = small_model(config or dataclasses.replace(SMALL, control=CONTROL), seed)
    generator = torch.Generator().manual_seed(seed + 2)
    with torch.no_grad():
        weight = model.control.down.weight
        weight.copy_(torch.randn(weight.shape, generator=generator) * 0.5)
    return model


@pytest.fixture(autouse=True)
def own_logging():
    """What a command or a server does to our loggers does not reach the next test."""
    yield
    logging.disable(logging.NOTSET)
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if name.split(".")[0] == "arpg" and isinstance(logger, logging.Logger):
            logger.disabled, logger.propagate = False, True
            logger.setLevel(logging.NOTSET)


@pytest.fixture(scope="session")
def model():
    return small_model()


@pytest.fixture(scope="session")
def text_model():
    return small_model(TEXT)


def small_tokenizer(codebook_size=24):
    torch.manual_seed(0)
    config = TokenizerConfig(
        channels=32, multipliers=(1, 1), res_blocks=1, z_channels=8, codebook_size=codebook_size, codebook_dim=4
    )
    return VQTokenizer(config).eval()


@pytest.fixture(scope="session")
def pipeline(model):
    return Pipeline(model, small_tokenizer(), license="MIT")


@pytest.fixture
def folder(pipeline, tmp_path):
    """A saved pipeline."""
    pipeline.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def served(pipeline):
    """A function that opens a house around the small pipeline; all of them are closed at the end."""
    from arpg.serve.house import House, ServeSettings

    opened = []

    def serve(*, keys=None, pipeline=pipeline, **settings):
        house = House(lambda: pipeline, name="small", keys=keys, settings=ServeSettings(**settings))
        house.open()
        opened.append(house)
        return house

    yield serve
    for house in opened:
        house.close()


@pytest.fixture
def live(served):
    """A function that runs a real server on a free port of this machine and gives its address and house."""
    import socket
    import threading

    import uvicorn

    from arpg.serve.app import create_app
    from arpg.serve.server import Server

    running = []

    def run(**settings):
        house = served(**settings)
        bound = socket.create_server(("127.0.0.1", 0))
        server = Server(uvicorn.Config(create_app(house), log_config=None, lifespan="off"), house)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
        thread.start()
        running.append((server, thread))
        return f"http://127.0.0.1:{bound.getsockname()[1]}", house

    yield run
    for server, thread in running:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


def noise(width, height, seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def write_zip(folder, path, prefix=""):
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(folder.rglob("*"), reverse=True):  # a zip file is in no particular order
            if file.is_file():
                archive.write(file, prefix + file.relative_to(folder).as_posix())
    return path


@pytest.fixture
def photos(tmp_path):
    """Three classes with 2, 3 and 4 images of different sizes."""
    root = tmp_path / "photos"
    for c, name in enumerate(["pear", "apple", "apple red"]):
        (root / name).mkdir(parents=True)
        for i in range(2 + c):
            noise(30 + 7 * i, 26 + 9 * c, seed=10 * c + i).save(root / name / f"{i}.png")
    (root / "LICENSE").write_text("MIT")
    return root
