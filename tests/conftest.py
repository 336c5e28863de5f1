"""Shared fixtures: golden files and a small network whose head is not zero."""

import logging
import os
import sys

import pytest
import torch
from PIL import Image

from arpg import ARPG, Pipeline, cli
from arpg.convert import model_from_published
from support.features import Eye
from support.lpips import labelled_textures, small_lpips
from support.recorded import Golden
from support.small import TEXT, noise, small_model, small_tokenizer

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # also for the processes that tests start
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: its own functions are made for one of both ways


def pytest_collection_modifyitems(items):
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker("browser")


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
    """A function that opens a service around the small pipeline."""
    from support.served import services

    with services(pipeline) as serve:
        yield serve


@pytest.fixture(scope="module")
def served_module(pipeline):
    """As `served`; for the tests of a module that leave a service as it is."""
    from support.served import services

    with services(pipeline) as serve:
        yield serve


@pytest.fixture
def live(served):
    """A function that runs a real server and returns its address and service."""
    from support.served import servers

    with servers(served) as run:
        yield run


@pytest.fixture(scope="module")
def live_module(served_module):
    """As `live`; for the tests of a module that leave a server as it is."""
    from support.served import servers

    with servers(served_module) as run:
        yield run


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


@pytest.fixture
def run(monkeypatch, capsys):
    """Run `arpg ...` in this process; returns (exit code, stdout, stderr)."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["arpg", *map(str, arguments)])
        with pytest.raises(SystemExit) as exited:
            cli.main()
        captured = capsys.readouterr()
        return exited.value.code or 0, captured.out, captured.err

    return run


@pytest.fixture
def eye():
    return Eye()


@pytest.fixture(scope="module")
def lpips():
    return small_lpips()


@pytest.fixture(scope="module")
def textures():
    return labelled_textures()


@pytest.fixture
def intermediates(monkeypatch):
    """The pixels of all images that resizing makes: outputs, and what is between the passes over width and height."""
    made, original = [], Image.Image.resize

    def spied(image, size, *args, box=None, **options):
        box = box or (0, 0, *image.size)
        made.extend([size[0] * size[1], size[0] * (box[3] - box[1])])
        assert max(made) < 2**26, f"{box} to {size} would take {max(made) >> 18} MiB"
        return original(image, size, *args, box=box, **options)

    monkeypatch.setattr(Image.Image, "resize", spied)
    return made


@pytest.fixture(scope="session")
def s3():
    """The address and the faults of an S3 server on loopback."""
    from support.object_store import s3_server

    with s3_server() as server:
        yield server


@pytest.fixture
def fresh_filesystems():
    """A function that forgets open file systems, which keep their credentials and addresses."""
    from arpg.storage import _filesystem

    yield _filesystem.cache_clear
    _filesystem.cache_clear()


@pytest.fixture
def bucket(s3, monkeypatch, tmp_path, fresh_filesystems):
    """The URL of a bucket of the S3 server, reached with the usual variables; retries wait only briefly."""
    from arpg import storage
    from support.object_store import KEYS

    for name, value in {**KEYS, "AWS_ENDPOINT_URL": s3[0], "ARPG_HOME": str(tmp_path / "home")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(storage, "BACKOFF_SECONDS", 0.01)
    fresh_filesystems()
    name = f"bucket-{tmp_path.name.replace('_', '-').lower()}"
    storage._filesystem("s3").mkdir(name)
    return f"s3://{name}"


@pytest.fixture
def faults(s3):
    """The faults of the S3 server; those that are left are forgotten after the test."""
    from support.object_store import Faults

    yield s3[1]
    for name, value in vars(Faults()).items():
        setattr(s3[1], name, value)


@pytest.fixture(scope="module")
def ray_cluster():
    """A local Ray cluster with two cores, for all tests of a module."""
    import ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))  # workers import tests/support
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        sizes = {"num_cpus": 2, "object_store_memory": 200 << 20}
        ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False, **sizes)
        yield ray
        ray.shutdown()
