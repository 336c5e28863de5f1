"""Published checkpoints: there and back without loss, safely, and with errors that list what is wrong."""

import argparse
import os
import pickle

import pytest
import torch

from arpg import InputError
from arpg.config import MODELS
from arpg.convert import (
    USAGE_BUFFER,
    key_map,
    model_from_published,
    model_to_published,
    read_published,
    tokenizer_from_published,
    write_published,
)
from support.paths import GOLDEN

HEADS = {"arpg_a": 2, "arpg_b": 3}


@pytest.mark.parametrize("name", ["arpg_a", "arpg_b"])
def test_model_there_and_back(name, tmp_path):
    published = read_published(GOLDEN / f"{name}.pt")
    config, ours = model_from_published(published, where=name, num_heads=HEADS[name])
    write_published(tmp_path / "back.pt", model_to_published(config, ours))
    back = read_published(tmp_path / "back.pt")
    assert back.keys() == published.keys()
    assert all(torch.equal(back[key], published[key]) for key in published)


@pytest.mark.parametrize("name", ["vq_a", "vq_b"])
def test_tokenizer_there_and_back(name):
    published = read_published(GOLDEN / f"{name}.pt")
    _, ours = tokenizer_from_published(published, where=name)
    assert set(published) - set(ours) == {USAGE_BUFFER}
    assert all(torch.equal(ours[key], published[key]) for key in ours)


@pytest.mark.parametrize("name", ["arpg-l", "arpg-xl", "arpg-xxl"])
def test_published_sizes_are_recognised(name):
    """On the meta device: a checkpoint of a published size needs no --heads, and every key has its place."""
    from arpg import ARPG

    with torch.device("meta"):
        model = ARPG(MODELS[name])
        published = {
            part: torch.empty(tensor.shape[0] // len(parts), *tensor.shape[1:])
            for key, tensor in model.state_dict().items()
            for parts in (key_map(MODELS[name])[key],)
            for part in parts
        }
        config, _ = model_from_published(published, where=name)
    assert config == MODELS[name]
    assert "layers.self_dec.0.attn.to_q.weight" in published
    assert "layers.cross_dec.11.ffn.w2.weight" in published


def test_ema_chooses_the_averaged_weights():
    path = GOLDEN / "arpg_a_training.pt"
    plain, averaged = read_published(path), read_published(path, ema=True)
    assert plain.keys() == averaged.keys()
    assert all(torch.equal(averaged[key], plain[key] / 2) for key in plain)
    with pytest.raises(InputError, match="no averaged weights"):
        read_published(GOLDEN / "arpg_a.pt", ema=True)


def test_wrappers(tmp_path):
    state = read_published(GOLDEN / "arpg_a.pt")
    path = tmp_path / "x.pt"
    prefixed = {f"module.{key}": tensor for key, tensor in state.items()}
    compiled = {f"_orig_mod.{key}": tensor for key, tensor in state.items()}
    for payload in (
        state,
        {"model": state, "steps": 3},
        {"module": state},
        {"state_dict": state},
        {"ema": state},
        {"model": {"module": state}},
        prefixed,
        {"model": compiled, "args": argparse.Namespace(lr=1.0)},
    ):
        torch.save(payload, path)
        found = read_published(path)
        assert found.keys() == state.keys()
    torch.save({"optimizer": {"lr": 1.0}}, path)
    with pytest.raises(InputError, match="holds optimizer; expected weights"):
        read_published(path)


class Evil:
    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return os.system, (f"touch {self.trace}",)


def test_pickles_cannot_run_code(tmp_path):
    path, trace = tmp_path / "evil.pt", tmp_path / "was-here"
    torch.save({"model": Evil(trace)}, path)
    with pytest.raises(InputError, match="refused by the safe loader"):
        read_published(path)
    for protocol in (2, 4):
        path.write_bytes(pickle.dumps(Evil(trace), protocol))
        with pytest.raises(InputError, match=r"evil\.pt"):
            read_published(path)
    assert not trace.exists()


def test_truncated_and_foreign_files(tmp_path):
    whole = (GOLDEN / "arpg_a.pt").read_bytes()
    path = tmp_path / "x.pt"
    for content, message in (
        (whole[: len(whole) // 2], "is cut short or damaged"),
        (whole[:100], "is cut short or damaged"),
        (b"PK\x03\x04 no", "is cut short or damaged"),
        (b"", "is empty"),
        (b"hello", "is a text file; expected a published checkpoint"),
        ("hällo".encode()[:2], "is a text file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "is a Git LFS pointer"),
        (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "is not a published checkpoint"),
    ):
        path.write_bytes(content)
        with pytest.raises(InputError, match=rf"x\.pt {message}"):
            read_published(path)
    with pytest.raises(InputError, match="is a folder; expected a published checkpoint"):
        read_published(tmp_path)
    with pytest.raises(InputError, match="does not exist"):
        read_published(tmp_path / "none.pt")
    torch.save([1, 2], path)
    with pytest.raises(InputError, match="holds a list"):
        read_published(path)


def test_unknown_and_missing_keys_are_listed():
    state = read_published(GOLDEN / "arpg_a.pt")
    renamed = dict(state)
    renamed["layers.self_dec.0.attn.bias"] = renamed.pop("layers.self_dec.0.attn.proj.weight")
    with pytest.raises(InputError, match=r"missing keys: .*attn\.proj\.weight; unknown keys: .*attn\.bias"):
        model_from_published(renamed, where="x", num_heads=2)
    short = {**state, "layers.norm.weight": torch.ones(3)}
    with pytest.raises(InputError, match=r"memory_norm\.weight is \[3\], not \[64\]"):
        model_from_published(short, where="x", num_heads=2)
    with pytest.raises(InputError, match="give --heads"):
        model_from_published(state, where="x")
    with pytest.raises(InputError, match=r"x is a VQ tokenizer, .* use `arpg convert tokenizer`"):
        model_from_published(read_published(GOLDEN / "vq_a.pt"), where="x")
    with pytest.raises(InputError, match=r"x is an ARPG checkpoint, .* use `arpg convert model`"):
        tokenizer_from_published(state, where="x")
    foreign = {"conv1.weight": torch.zeros(1)}
    with pytest.raises(InputError, match=r"it has conv1\.weight: is this an ARPG checkpoint"):
        model_from_published(foreign, where="x")
    with pytest.raises(InputError, match=r"it has conv1\.weight: is this a VQ tokenizer"):
        tokenizer_from_published(foreign, where="x")


def test_ablations_cannot_be_written_in_the_published_format(model):
    import dataclasses

    with pytest.raises(InputError, match="shared_kv=false"):
        key_map(dataclasses.replace(model.config, shared_kv=False))
