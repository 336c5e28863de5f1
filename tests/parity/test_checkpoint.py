"""Model folders: exact round trips, strict loading, nothing half-written."""

import dataclasses
import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from arpg import InputError, Pipeline, SamplingDefaults, load_model, load_tokenizer
from arpg.checkpoint import FolderConfig, read_folder, write_folder
from arpg.classes import ClassNames
from support.small import SMALL, small_model, small_tokenizer


def test_round_trip_is_exact(pipeline, folder):
    again = Pipeline.from_pretrained(folder, device="cpu")
    for ours, theirs in ((pipeline.model, again.model), (pipeline.tokenizer, again.tokenizer)):
        assert ours.config == theirs.config
        a, b = ours.state_dict(), theirs.state_dict()
        assert a.keys() == b.keys()
        assert all(torch.equal(a[key], b[key]) for key in a)
    assert again.sampling == pipeline.sampling
    assert again.classes == pipeline.classes
    assert again.license == "MIT"
    before = pipeline.generate(3, num_images=2, steps=4)
    after = again.generate(3, num_images=2, steps=4)
    assert [image.tobytes() for image in before] == [image.tobytes() for image in after]


def test_every_field_survives(tmp_path):
    config = dataclasses.replace(SMALL, shared_kv=False, positions="cosine", dropout=0.0, grid=(3, 4))
    sampling = SamplingDefaults(steps=7, guidance_by_steps=((4, 2.5), (9, 1.5)), order="halton", top_k=5, top_p=0.9)
    classes = ClassNames(("apple, red apple", "pear", "fig", "plum", "Kiwi"))
    known = {"about": "Five fruits.", "examples": ("pear", "plum")}
    written = FolderConfig(model=config, sampling=sampling, classes=classes, license="CC BY 4.0", **known)
    write_folder(tmp_path, written, model=small_model(config).state_dict())
    assert read_folder(tmp_path) == written
    assert load_model(tmp_path).config == config
    write_folder(tmp_path, FolderConfig(license="MIT"))
    assert read_folder(tmp_path).about == "Five fruits."
    write_folder(tmp_path, FolderConfig(), model=small_model(config, seed=1).state_dict())  # it may know something else
    assert read_folder(tmp_path).about == ""


def test_the_parts_can_be_written_one_after_the_other(tmp_path):
    write_folder(tmp_path, FolderConfig(model=SMALL, license="MIT"), model=small_model().state_dict())
    with pytest.raises(InputError, match="describes no tokenizer"):
        load_tokenizer(tmp_path)
    tokenizer = small_tokenizer()
    write_folder(tmp_path, FolderConfig(tokenizer=tokenizer.config), tokenizer=tokenizer.state_dict())
    assert read_folder(tmp_path).license == "MIT"
    assert Pipeline.from_pretrained(tmp_path, device="cpu").generate(0, steps=2)[0].size == (8, 8)


def test_stored_type_is_kept_or_cast(tmp_path):
    write_folder(tmp_path, FolderConfig(model=SMALL), model=small_model().bfloat16().state_dict())
    assert load_model(tmp_path).dtype == torch.bfloat16
    assert load_model(tmp_path, dtype=torch.float32).dtype == torch.float32


def edit_config(folder, change):
    path = folder / "config.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["model"].update(depth=3), "unknown key depth"),
        (lambda d: d["model"].pop("width"), "missing key width"),
        (lambda d: d["model"].update(width="wide"), "model.width is 'wide'; expected int"),
        (lambda d: d["model"].update(grid=[4]), "model.grid is"),
        (lambda d: d["model"].update(width=30), "width 30"),
        (lambda d: d["sampling"].update(order="zigzag"), "order is 'zigzag'"),
        (lambda d: d.update(format="arpg-9"), "format"),
        (lambda d: d.update(extra=1), "unknown key extra"),
        (lambda d: d["model"].update(pass1_layers=1), "unknown keys: pass1.1"),
        (lambda d: d["model"].update(pass1_layers=3), "missing keys: pass1.2"),
        (lambda d: d["model"].update(vocab_size=25), "embedding.weight is .32, 32., not .33, 32."),
        (lambda d: d["model"].update(num_classes=6), "names 5 classes; the model has 6"),
    ],
)
def test_a_config_that_does_not_fit_is_named(folder, change, message):
    edit_config(folder, change)
    with pytest.raises(InputError, match=message):
        Pipeline.from_pretrained(folder)


def test_broken_files_are_named(folder, tmp_path):
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for content, message in (
        (whole[: len(whole) // 2], "is cut short or damaged"),
        (b"\xff" * 100, "is not a safetensors file"),
        (b"weights", "is a text file; expected a safetensors file"),
        (b"", "is empty"),
    ):
        weights.write_bytes(content)
        with pytest.raises(InputError, match=message):
            load_model(folder)
    weights.unlink()
    with pytest.raises(InputError, match="does not exist"):
        load_model(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(InputError, match="not valid JSON"):
        load_model(folder)
    with pytest.raises(InputError, match="not a model folder"):
        load_model(tmp_path)


def test_strict_about_tensors(folder):
    state = load_file(folder / "model.safetensors")
    save_file({**state, "extra.weight": torch.zeros(1)}, folder / "model.safetensors")
    with pytest.raises(InputError, match=r"unknown keys: extra\.weight"):
        load_model(folder)


def test_model_and_tokenizer_must_speak_the_same_codes(model):
    with pytest.raises(InputError, match="24 codes, the tokenizer 25"):
        Pipeline(model, small_tokenizer(codebook_size=25))


def test_a_failed_write_leaves_the_old_file(folder, monkeypatch):
    from arpg import checkpoint

    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def full_disk(tensors, path):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_tensors", full_disk)
    with pytest.raises(InputError, match="No space left on device"):
        write_folder(folder, FolderConfig(model=SMALL), model=small_model(seed=5).state_dict())
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_new_folder_is_there_whole_or_not_at_all(tmp_path, monkeypatch):
    """The weights are written first; when the configuration after them fails, they do not stay behind either."""
    from pathlib import Path

    write_text = Path.write_text

    def full_disk(self, text, **options):
        if "config.json" in self.name:
            raise OSError(28, "No space left on device")
        return write_text(self, text, **options)

    monkeypatch.setattr(Path, "write_text", full_disk)
    with pytest.raises(InputError, match=r"config\.json cannot be written: No space left"):
        write_folder(tmp_path / "a" / "new", FolderConfig(model=SMALL), model=small_model().state_dict())
    assert list(tmp_path.iterdir()) == []


def test_loading_needs_no_compiler(folder):
    """Initial values on the meta device would import torch's compiler, which takes seconds."""
    code = (
        "import sys; from arpg import Pipeline; "
        f"Pipeline.from_pretrained({str(folder)!r}, device='cpu').generate(0, steps=2); "
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
