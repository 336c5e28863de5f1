"""The run of meadow on tiny data: photographs, tokens that travel, training in calls, weights that come back."""

import zipfile

import numpy as np
import pytest
import torch

from arpg import InputError, load_model
from arpg.checkpoint import FolderConfig, load_tokenizer, read_folder, write_folder
from arpg.data.tokens import TokenWriter, open_tokens
from arpg.train import report
from experiments import photos, staged_run
from experiments.meadow.__main__ import main
from experiments.token_bits import pack_ids, pack_tokens, unpack_ids, unpack_tokens
from support.small import noise, small_tokenizer

RECIPE = """
[model]
width = 32
num_heads = 2
pass1_layers = 1
pass2_layers = 1
vocab_size = 24
num_classes = 2
grid = [8, 8]
[data]
train = "{tokens}/meadow-train"
validation = "{tokens}/meadow-test"
[optim]
lr = 1e-2
ema = 0.5
[run]
steps = 4
batch_size = 4
precision = "float32"
"""


@pytest.mark.parametrize("bits", [1, 5, 13, 16])
def test_ids_take_as_many_bits_as_they_need(bits):
    ids = np.random.default_rng(bits).integers(0, 2**bits, (7, 11))
    packed = pack_ids(ids, bits)
    assert packed.shape == (7, -(-11 * bits // 8))
    np.testing.assert_array_equal(unpack_ids(packed, 11, bits), ids)
    with pytest.raises(InputError, match="ids of more than"):
        pack_ids(ids + 2**bits, bits) if bits < 16 else pack_ids(ids - 2**16, 16)


def test_token_sets_travel(tmp_path):
    rng = np.random.default_rng(0)
    ids, labels = rng.integers(0, 8192, (9, 3, 16)), rng.integers(0, 2, 9)
    writer = TokenWriter(tmp_path / "tokens", grid=(4, 4), vocab_size=8192, classes=("a", "b"), views=3)
    writer.add(ids, labels)
    writer.close()
    pack_tokens(open_tokens(tmp_path / "tokens"), tmp_path / "packed", views=2)
    assert np.load(tmp_path / "packed" / "bits-0.npy").nbytes == 9 * 16 * 13 // 8
    back = unpack_tokens(tmp_path / "packed", tmp_path / "back")
    assert (back.num_images, back.views, back.grid, back.vocab_size, back.classes) == (9, 2, (4, 4), 8192, ("a", "b"))
    np.testing.assert_array_equal(back.labels, labels)
    for view in range(2):
        np.testing.assert_array_equal(back.gather(np.arange(9), np.full(9, view)), ids[:, view])
    assert unpack_tokens(tmp_path / "packed", tmp_path / "back").num_images == 9
    with pytest.raises(InputError, match="views is 4; the token set has 3"):
        pack_tokens(open_tokens(tmp_path / "tokens"), tmp_path / "packed", views=4)


@pytest.fixture
def data(tmp_path, monkeypatch):
    """Two zips of six images of two classes, at 16 pixels."""
    small = photos.PhotoSet("meadow", ("pets", "birds"), "meadow-{domain}.zip/{split}", 16)
    monkeypatch.setitem(photos.PHOTO_SETS, "meadow", small)
    monkeypatch.setattr(report, "plot_losses", lambda folder: None)
    monkeypatch.setattr(staged_run, "SHORTEST", 0.0)
    folder = tmp_path / "data"
    folder.mkdir()
    for number, domain in enumerate(small.domains):
        with zipfile.ZipFile(folder / f"meadow-{domain}.zip", "w") as archive:
            for i in range(6):
                path = tmp_path / "image.webp"
                noise(20, 20, seed=10 * number + i).save(path)
                split = "test" if i >= 4 else "train"
                archive.write(path, f"{split}/{('cat', 'wren')[number]}/{domain}-{i}.webp")
    return folder


def test_from_photographs_to_weights_that_come_back(data, tmp_path, capsys, monkeypatch):
    tokenizer = small_tokenizer()
    write_folder(tmp_path / "tok", FolderConfig(tokenizer=tokenizer.config), tokenizer=tokenizer.state_dict())
    carry, there = tmp_path / "carry", tmp_path / "there"
    assert main(["pack", str(data), str(carry), "--bytes", "2000"]) == 0
    assert max(path.stat().st_size for path in carry.iterdir()) <= 2000
    assert main(["unpack", str(carry), str(there)]) == 0
    options = ["--tokenizer", str(tmp_path / "tok"), "--views", "3", "--device", "cpu", "--out", str(tmp_path / "t")]
    assert main(["tokenize", "--data", str(there), *options]) == 0
    train, test = (open_tokens(tmp_path / "t" / f"meadow-{split}") for split in ("train", "test"))
    assert (train.num_images, train.views, test.num_images, test.views) == (8, 3, 4, 1)
    assert train.classes == ("cat", "wren")
    again = [*options[:-1], str(tmp_path / "t1")]
    assert main(["tokenize", "--data", str(there), *again, "--seed", "1"]) == 0
    others = open_tokens(tmp_path / "t1" / "meadow-train")
    first, last = (
        np.stack([each.gather(np.arange(8), np.full(8, view)) for view in range(3)]) for each in (train, others)
    )
    np.testing.assert_array_equal(first[0], last[0])  # the centre crop
    assert (first[1:] != last[1:]).any(axis=(1, 2)).all()

    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.format(tokens=tmp_path / "t"))
    run = ["train", str(recipe), "--device", "cpu", "--set", f"tokenizer={tmp_path / 'tok'}"]
    first = [*run, "--work", str(tmp_path / "w"), "--out", str(tmp_path / "r"), "--pieces", str(tmp_path / "p")]
    assert main(first) == 0
    assert main(["unpack", str(tmp_path / "p"), str(tmp_path / "back")]) == 0
    weights = load_model(tmp_path / "back" / "model", dtype=torch.float32).state_dict()
    trained = load_model(tmp_path / "w" / "model").state_dict()
    for key, tensor in trained.items():
        assert (weights[key] - tensor).abs().max() <= 0.02 * tensor.abs().max() + 1e-6, key
    assert not (tmp_path / "back" / "model" / "tokenizer.safetensors").exists()  # it is where the run was started
    assert load_tokenizer(tmp_path / "r" / "model").config == tokenizer.config
    assert (tmp_path / "back" / "metrics.jsonl").exists()
    capsys.readouterr()
    again = [*run, "--work", str(tmp_path / "w2"), "--out", str(tmp_path / "r2")]
    assert main([*again, "--set", f"init_from={tmp_path / 'back' / 'model'}"]) == 0
    assert "started from" in capsys.readouterr().out

    base = tmp_path / "r" / "model"
    monkeypatch.setattr("arpg.checkpoint.installed_folder", lambda name, **what: base)
    based = ["train", str(recipe), "--device", "cpu", "--set", f"tokenizer={base}", "--set", f"init_from={base}"]
    folders = ["--work", str(tmp_path / "w3"), "--out", str(tmp_path / "r3")]
    assert main([*based, *folders, "--as", "int6", "--base", "first"]) == 0
    described = read_folder(tmp_path / "r3" / "model")
    assert (described.base, described.tokenizer_of) == ("first", "first")
    weights, trained = (
        load_model(tmp_path / name / "model", dtype=torch.float32).state_dict() for name in ("r3", "w3")
    )
    for key, tensor in trained.items():
        assert (weights[key] - tensor).abs().max() <= 0.02 * tensor.abs().max() + 1e-6, key
    capsys.readouterr()
    folders = ["--work", str(tmp_path / "w4"), "--out", str(tmp_path / "r4")]
    assert main([*run, *folders, "--base", "first"]) == 2  # before anything is trained
    assert "is not that of first; take that of first" in capsys.readouterr().err
    assert not (tmp_path / "w4").exists()
    assert main(["tokenize", "--set", "orchard", "--tokenizer", "x"]) == 2
    assert "photo set is 'orchard'; expected one of garden, meadow" in capsys.readouterr().err
