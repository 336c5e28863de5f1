"""From captioned images to a model that takes prompts: tokens, captions, text states, composed scenes, training."""

import io
import json
import sys
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from arpg import InputError, Pipeline, Request, SamplingSettings, decode, load_model, make_plan
from arpg.checkpoint import FolderConfig, write_folder
from arpg.config import TextConfig
from arpg.data import TokenWriter, open_images, open_tokens, tokenize
from arpg.data.dataset import open_text_states, write_text_states
from arpg.model import text_condition
from arpg.train.model import ModelTraining, train_model
from arpg.train.recipe import ModelRecipe, read_recipe
from experiments.garden.composer import Composer
from experiments.garden.scene_sets import compose_tokens
from support.scene_sets import write_sets
from support.small import FakeEncoder, noise, small_tokenizer, write_zip

TEXT = TextConfig("fake", 12, 7)
CAPTIONS = ["a red apple", "two green pears on blue", "x", "дом и дерево", "a b c d e f g h i j", "", "🍓"]


def write_tokens(folder, captions, *, shard_size=3, ids=None, close=True):
    ids = np.arange(len(captions))[:, None, None].repeat(16, 2) % 24 if ids is None else ids
    writer = TokenWriter(folder, grid=(4, 4), vocab_size=24, classes=(), views=1, shard_size=shard_size, captioned=True)
    for start in range(writer.num_done, len(captions), 2):
        part = slice(start, start + 2)
        writer.add(ids[part], np.zeros(len(captions[part]), np.int32), captions[part])
    if close:
        writer.close()
    return writer


# Captions


def test_captions_stay_with_their_images(tmp_path):
    write_tokens(tmp_path, CAPTIONS)
    tokens = open_tokens(tmp_path)
    assert list(tokens.captions) == CAPTIONS
    assert tokens.gather(np.arange(7), np.zeros(7, int))[:, 0].tolist() == list(range(7))


def test_a_captioned_set_is_continued(tmp_path):
    write_tokens(tmp_path, CAPTIONS, close=False)
    (tmp_path / "labels-00001.npy").unlink()  # stopped inside a shard
    assert write_tokens(tmp_path, CAPTIONS).num_done == 7
    tokens = open_tokens(tmp_path)
    assert list(tokens.captions) == CAPTIONS
    assert tokens.gather(np.arange(7), np.zeros(7, int))[:, 5].tolist() == list(range(7))


def test_damaged_captions_are_said(tmp_path):
    write_tokens(tmp_path, CAPTIONS)
    file = tmp_path / "captions-00001.json"
    for damage, message in (("[1, 2, 3]", "not a list of 3 texts"), ("[", "not valid JSON"), (None, "does not exist")):
        file.unlink() if damage is None else file.write_text(damage)
        with pytest.raises(InputError, match=message):
            open_tokens(tmp_path)
    writer = TokenWriter(tmp_path / "b", grid=(4, 4), vocab_size=24, classes=(), views=1, captioned=True)
    with pytest.raises(ValueError, match="0 captions for 2 images"):
        writer.add(np.zeros((2, 1, 16)), np.zeros(2))


def add_member(archive, name, data):
    info = tarfile.TarInfo(name)
    info.size = len(data)
    archive.addfile(info, io.BytesIO(data))


def png(image):
    file = io.BytesIO()
    image.save(file, "png")
    return file.getvalue()


def write_tar(path, entries, *, kind="txt"):
    with tarfile.open(path, "w") as archive:
        for key, image, text in entries:
            add_member(archive, f"{key}.png", png(image))
            if text is not None:
                data = text if kind == "txt" else json.dumps({"caption": text, "width": 8})
                add_member(archive, f"{key}.{kind}", data.encode())
    return path


def test_folder_zip_and_tar_give_the_same_tokens(tmp_path):
    """Folder and JSON lines, a zip of it, WebDataset tars with text or JSON: the same ids and captions."""
    entries = [(f"{i:03d}", noise(16 + i, 18, seed=i), f"picture number {i}") for i in range(5)]
    folder = tmp_path / "images"
    folder.mkdir()
    for key, image, _ in entries:
        image.save(folder / f"{key}.png")
    lines = [json.dumps({"file": f"{key}.png", "caption": text}) for key, _, text in entries]
    (folder / "captions.jsonl").write_text("\n".join(lines))
    (tmp_path / "tars").mkdir()
    write_tar(tmp_path / "tars" / "0.tar", entries[:2])
    write_tar(tmp_path / "tars" / "1.tar", entries[2:])
    sources = [
        folder,
        write_zip(folder, tmp_path / "images.zip"),
        write_tar(tmp_path / "one.tar", entries),
        write_tar(tmp_path / "json.tar", entries, kind="json"),
        tmp_path / "tars",
    ]
    tokenizer, found = small_tokenizer(), []
    for i, source in enumerate(sources):
        tokens = tokenize(tokenizer, open_images(source), tmp_path / f"t{i}", size=8, shard_size=2)
        assert list(tokens.captions) == [text for _, _, text in entries], source
        found.append(tokens.gather(np.arange(5), np.zeros(5, int)))
    assert all(np.array_equal(ids, found[0]) for ids in found[1:])


def test_bad_tars_are_one_line(tmp_path):
    image = noise(8, 8)
    with pytest.raises(InputError, match="1 of its images have none"):
        open_images(write_tar(tmp_path / "a.tar", [("0", image, "x"), ("1", image, None)]))
    assert open_images(write_tar(tmp_path / "b.tar", [("0", image, None)])).captions is None
    (tmp_path / "c.tar").write_bytes(b"no tar at all" * 100)
    with pytest.raises(InputError, match="not a whole, uncompressed tar"):
        open_images(tmp_path / "c.tar")
    with tarfile.open(tmp_path / "d.tar", "w") as archive:
        add_member(archive, "0.png", png(image))
        add_member(archive, "0.json", b"{}")
    with pytest.raises(InputError, match='has no "caption"'):
        open_images(tmp_path / "d.tar")
    with tarfile.open(tmp_path / "e.tar", "w") as archive:
        add_member(archive, "0.png", b"broken")
    with pytest.raises(InputError, match=r"0\.png cannot be read as an image"):
        open_images(tmp_path / "e.tar").read(0)


# Text states


def test_states_by_index_against_the_encoder(tmp_path):
    write_tokens(tmp_path, CAPTIONS)
    tokens, encoder = open_tokens(tmp_path), FakeEncoder()
    states = write_text_states(tokens, TEXT, encoder, shard_size=3)
    index = np.array([6, 0, 4, 4, 1, 5])
    found, lengths = states.gather(index)
    assert found.shape == (6, 7, 12)
    for row, length, i in zip(found, lengths, index, strict=True):
        expected = encoder.states([CAPTIONS[i]])[0].numpy()
        assert length == len(expected)
        np.testing.assert_allclose(row[:length], expected, atol=2e-3)
        assert not row[length:].any()


def test_embedding_is_continued_and_not_mixed(tmp_path):
    write_tokens(tmp_path, CAPTIONS)
    tokens = open_tokens(tmp_path)
    with pytest.raises(InputError, match="run `arpg embed"):
        open_text_states(tokens)
    write_text_states(tokens, TEXT, FakeEncoder(), shard_size=3)
    (tmp_path / "text.json").unlink()
    (tmp_path / "text-lengths-00002.npy").unlink()
    encoder = FakeEncoder()
    write_text_states(tokens, TEXT, encoder, shard_size=3)
    assert encoder.asked == 1
    assert write_text_states(tokens, TEXT, None).config == TEXT
    with pytest.raises(InputError, match="has text states of fake"):
        write_text_states(tokens, TextConfig("other", 12, 7), None)
    write_tokens(tmp_path / "b", CAPTIONS)
    begun, interrupted = open_tokens(tmp_path / "b"), FakeEncoder()
    encode, interrupted.states = interrupted.states, lambda texts, **_: encode(texts) if len(texts) == 3 else 1 / 0
    with pytest.raises(ZeroDivisionError):
        write_text_states(begun, TEXT, interrupted, shard_size=3)
    assert (tmp_path / "b" / "text-lengths-00001.npy").exists()
    with pytest.raises(InputError, match=r"7 tokens.*, not of .* 9 tokens.*; delete text-unfinished.json and text-"):
        write_text_states(begun, TextConfig("fake", 12, 9), FakeEncoder(), shard_size=3)
    assert write_text_states(begun, TEXT, FakeEncoder(), shard_size=3).config == TEXT
    assert not (tmp_path / "b" / "text-unfinished.json").exists()
    (tmp_path / "text-00001.npy").write_bytes(b"no")
    with pytest.raises(InputError, match=r"not a whole .npy file"):
        open_text_states(tokens)


# Composed scenes


def test_composed_tokens_are_those_of_the_scenes(tmp_path):
    sets = tuple(str(path) for path in write_sets(tmp_path / "sets"))
    tokenizer, composer = small_tokenizer(), Composer(*sets)
    tokens = compose_tokens(tokenizer, sets, tmp_path / "a", num=5, seed=40, shard_size=2)
    other = compose_tokens(tokenizer, sets, tmp_path / "b", num=5, seed=40, processes=1)
    scenes = [composer.scene(40 + i) for i in range(5)]
    assert list(tokens.captions) == list(other.captions) == [scene.caption for scene in scenes]
    pixels = torch.from_numpy(np.stack([s.pixels_HW3 for s in scenes])).permute(0, 3, 1, 2)
    with torch.no_grad():
        expected = tokenizer.encode(pixels / 127.5 - 1).numpy()
    for found in (tokens, other):
        assert np.array_equal(found.gather(np.arange(5), np.zeros(5, int)), expected)
    with pytest.raises(InputError, match="other sets or settings"):
        compose_tokens(tokenizer, sets, tmp_path / "a", num=5, seed=41)


# Training

RECIPE = """
label_drop = 0.1
tokenizer = "{tokenizer}"
[model]
width = 32
num_heads = 2
pass1_layers = 1
pass2_layers = 2
vocab_size = 24
num_classes = 0
grid = [4, 4]
dropout = 0.0
[model.text]
encoder = "fake"
width = 12
max_tokens = 7
[data]
train = "{tokens}"
validation = "{tokens}"
[optim]
lr = 1e-2
warmup = 0.05
ema = 0.8
[run]
steps = 120
batch_size = 16
precision = "float32"
log_every = 10
validate_every = 120
sample_every = 120
save_every = 60
[sampling]
steps = 4
guidance_by_steps = [[4, 2.0]]
"""
WORDS = ["apple", "two pears", "a red star on a blue background", "key"]


@pytest.fixture
def recipe(tmp_path):
    """Captions each of which stands for one code; of different lengths."""
    captions = [WORDS[i % 4] for i in range(32)]
    ids = np.array([3 + 5 * (i % 4) for i in range(32)])[:, None, None].repeat(16, 2)
    write_tokens(tmp_path / "tokens", captions, ids=ids, shard_size=10)
    write_text_states(open_tokens(tmp_path / "tokens"), TEXT, FakeEncoder(), shard_size=9)
    tokenizer = small_tokenizer()
    write_folder(tmp_path / "vq", FolderConfig(tokenizer=tokenizer.config), tokenizer=tokenizer.state_dict())
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.format(tokens=tmp_path / "tokens", tokenizer=tmp_path / "vq"))
    return path


def test_a_model_learns_what_captions_mean(recipe, tmp_path, monkeypatch):
    """From stored text states: a machine that trains needs no text encoder."""
    for name in ("transformers", "tokenizers"):
        monkeypatch.setitem(sys.modules, name, None)  # as if it was not installed
    folder = train_model(read_recipe(recipe, ModelRecipe), tmp_path / "run", device="cpu")
    model = load_model(folder)
    assert model.config.text == TEXT
    settings = SamplingSettings(steps=4, guidance=2.0, temperature=0.0)
    condition = text_condition(model, FakeEncoder().states(WORDS))
    request = Request.from_nothing(condition, (4, 4), (0, 1, 2, 3))
    *_, last = decode(model, request, make_plan((4, 4), request.known_BN, request.seeds, settings), settings)
    assert (last.ids_BN == torch.tensor([3, 8, 13, 18])[:, None]).float().mean() > 0.95
    assert Pipeline.from_pretrained(folder, device="cpu").model.config.num_classes == 0
    with Image.open(next((tmp_path / "run").glob("samples-*.png"))) as sheet:
        assert sheet.width > 4 * 100  # with captions below
    assert not (folder / "classes.txt").exists()


def test_a_batch_is_a_function_of_the_step(recipe, tmp_path):
    """The same captions and drops however a batch is cut; one in ten is dropped."""
    recipes = [read_recipe(recipe, ModelRecipe, [f"run.accumulate={n}"]) for n in (1, 4)]
    from arpg.train.distributed import init_distributed, shutdown_distributed

    world = init_distributed("cpu")
    try:
        one, four = (ModelTraining(r, tmp_path / f"run{i}", world) for i, r in enumerate(recipes))
        whole = [one.batches.batch(step, 0) for step in range(40)]
        parts = [four.batches.batch(3, part) for part in range(4)]
        assert torch.equal(torch.cat([p.states_BTE for p in parts]), whole[3].states_BTE)
        assert torch.equal(torch.cat([p.length_B for p in parts]), whole[3].length_B)
        dropped = float(torch.cat([b.length_B == 0 for b in whole]).float().mean())
        assert 0.05 < dropped < 0.16
        assert torch.allclose(one.loss(whole[3]), sum(four.loss(p) for p in parts) / 4, atol=1e-5)
    finally:
        shutdown_distributed()


def test_wrong_text_settings_are_said(recipe, tmp_path):
    with pytest.raises(InputError, match=r"has states of .*fake"):
        train_model(read_recipe(recipe, ModelRecipe, ["model.text.max_tokens=9"]), tmp_path / "run", device="cpu")
    (tmp_path / "tokens" / "text.json").unlink()
    with pytest.raises(InputError, match="run `arpg embed"):
        train_model(read_recipe(recipe, ModelRecipe), tmp_path / "run", device="cpu")
