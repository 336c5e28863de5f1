"""`arpg finetune`, and `--lora` in the verbs that load a model."""

import json

import pytest
from PIL import Image
from typer.main import get_command

from arpg import InputError, cli
from arpg.checkpoint import MODEL
from arpg.cli.evaluate import _remote_pipeline
from arpg.cli.options import SamplingOptions
from arpg.config import DEFAULT_MODEL
from arpg.evaluation.sample import fingerprint
from arpg.files import hash_file
from arpg.serve.auth import ApiKeys
from arpg.serve.server_config import ServeSettings
from arpg.serve.service import ImageService
from support.adapters import NAMES, save, write_base
from support.command import check_error

# What has a --model and generates nothing, or measures speed, which an adapter does not change.
WITHOUT = {"info", "classes", "pull", "plan", "evaluate-tokenizer", "bench"}


@pytest.fixture
def base(tmp_path):
    return write_base(tmp_path / "base")


def adapter(folder, base):
    about = {"base": str(base), "base_hash": hash_file(base / MODEL)}
    return save(folder, classes=("cat", "zebra"), names=(*NAMES, "zebra"), **about)[0]


def test_every_verb_that_loads_a_model_takes_adapters():
    commands = get_command(cli.app).commands
    options = {name: {flag for p in command.params for flag in p.opts} for name, command in commands.items()}
    models = {name for name, flags in options.items() if "--model" in flags}
    assert {name for name in models - WITHOUT if "--lora" not in options[name]} == set()
    assert {"generate", "inpaint", "edit", "expand", "score", "classify", "sample", "sweep", "serve"} <= models


def test_an_adapter_brings_its_base_and_its_classes(run, base, tmp_path):
    path = adapter(tmp_path / "mine", base)
    target = tmp_path / "zebra.png"
    common = ("--class", "zebra", "--steps", 3, "--device", "cpu", "-o", target)
    code, _, err = run("generate", "--lora", path, *common)
    assert code == 0, err
    with Image.open(target) as image:
        assert json.loads(image.text["arpg"])["model"] == str(base)
    whole = target.read_bytes()
    assert run("generate", "--lora", f"{path}:0.5", *common)[0] == 0
    assert target.read_bytes() != whole
    named, unnamed = (run("classify", target, *m, "--lora", path, "--device", "cpu") for m in (("-m", base), ()))
    assert named[0] == 0
    assert unnamed == named
    check_error(run("generate", "--lora", tmp_path / "no.safetensors", *common), "no.safetensors does not exist")
    check_error(run("generate", "--model", DEFAULT_MODEL, "--lora", path, *common), "was trained for", "--model")


def test_workers_of_a_cluster_load_the_adapters_and_the_cache_type(base, tmp_path):
    path = adapter(tmp_path / "mine", base)
    options = {"seed": 0, "device": "cpu", "dtype": "float32", "engine": "eager"}
    sampling = SamplingOptions(**options, kv_cache_dtype="fp8", settings={}, lora=[f"{path}:0.5"])
    classes, load = _remote_pipeline(sampling)
    assert classes.lines == (*NAMES, "zebra")
    here, there = sampling.load(), load()
    assert fingerprint(there) == fingerprint(here)
    assert there.classes.lines == here.classes.lines


def test_workers_load_the_model_as_this_process_does(run, base, tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr("arpg.evaluation.sample.sample_images", lambda *_, load, **__: given.append(load))
    options = ("-n", 4, "-m", base, "-o", tmp_path / "s.npz", "--ray", "--kv-cache-dtype", "fp8", "--precision", "int8")
    assert run("sample", *options)[0] == 0
    loading = {"device": "auto", "dtype": "int8", "engine": "auto", "kv_cache_dtype": "fp8"}
    assert [(load.args, load.keywords) for load in given] == [((str(base), []), loading)]


def test_a_server_merges_adapters_into_their_base(base, tmp_path):
    path = adapter(tmp_path / "mine", base)
    settings = ServeSettings(device="cpu", lora=(f"{path}:0.5",))
    service = ImageService.from_pretrained(str(base), DEFAULT_MODEL, keys=ApiKeys(), settings=settings)
    assert [model.lora for model in service.worker.models.values()] == [(f"{path}:0.5",), ()]
    assert service.worker.models["base"]._load().classes.lines == (*NAMES, "zebra")
    with pytest.raises(InputError, match=f"was trained for none of {DEFAULT_MODEL}; add its base with --model"):
        ImageService.from_pretrained(DEFAULT_MODEL, keys=ApiKeys(), settings=settings)


def test_finetune_says_how_to_go_on(run, tmp_path, monkeypatch):
    from arpg.train import finetune

    seen = {}

    def fake(images, output, **options):
        seen.update(options, images=images)
        return finetune.Finetuned(output / "model", 2.5, 30, 4.25, "arpg generate --class x")

    monkeypatch.setattr(finetune, "finetune", fake)
    code, out, _ = run("finetune", "photos", "-o", tmp_path / "mine", "--lora", 4, "--set", "optim.lr=1e-3")
    assert code == 0
    assert "validation loss 4.250 -> 2.500 (step 30)" in out
    assert "arpg generate --class x" in out
    assert (seen["images"], seen["lora"], seen["overrides"]) == ("photos", 4, ["optim.lr=1e-3"])
