"""Training on condition images: what is stored, how sets are joined, what a batch holds, and that a run learns it."""

import dataclasses
import json
import sys

import numpy as np
import pytest
import torch
import torch._dynamo
from torch import nn

from arpg import InputError, Pipeline
from arpg.checkpoint import FolderConfig, write_folder
from arpg.data.dataset import ControlMaps, Dataset, TokenBatches, join_tokens
from arpg.data.images import open_images
from arpg.data.tokenize import tokenize
from arpg.data.tokens import NO_CLASS, TokenWriter, max_shard_images, open_tokens, pack_maps, unpack_maps
from arpg.image import adm_crop, ten_crop
from arpg.model.condition import class_condition, training_control
from arpg.train.model import ModelTraining, train_model
from arpg.train.recipe import ModelRecipe, read_recipe
from experiments.garden.scene_sets import compose_tokens
from support.scene_sets import write_sets
from support.small import CONTROL, SMALL, controlled_model, small_model, small_tokenizer

CPU = torch.device("cpu")


def bright(kind, image, **_):
    return image.convert("L").point(lambda v: 255 * (v > 127))


@pytest.fixture
def extractor(monkeypatch):
    monkeypatch.setattr(sys.modules["arpg.data.tokenize"], "extract", bright)


def write(folder, *, kind, number, views, classes=(), seed=0, shard_size=7, fraction=None):
    """Tokens that follow their condition image: code 1 where a patch is white, 0 where it is black."""
    rng = np.random.default_rng(seed)
    patches = rng.random((number, views, 4, 4)) < 0.5
    maps = patches.repeat(2, 2).repeat(2, 3).astype(np.uint8) * 255
    writer = TokenWriter(
        folder,
        grid=(4, 4),
        vocab_size=24,
        classes=classes,
        views=views,
        shard_size=shard_size,
        control=kind,
        control_size=(8, 8),
    )
    labels = rng.integers(max(1, len(classes)), size=number)
    half = number // 2 if fraction is None else fraction
    for part in (slice(None, half), slice(half, None)):
        writer.add(patches[part].reshape(-1, views, 16).astype(np.uint16), labels[part], maps=maps[part])
    writer.close()
    return patches.reshape(number, views, 16), maps, labels


@pytest.mark.parametrize("kind", ["canny", "depth"])
def test_maps_are_kept_as_they_are(kind):
    maps = np.random.default_rng(0).integers(0, 256, (3, 2, 8, 16), np.uint8)
    stored = pack_maps(maps, kind)
    again = unpack_maps(torch.from_numpy(stored), kind).numpy()
    expected = np.where(maps >= 128, 255, 0) if kind == "canny" else maps
    assert np.array_equal(again, expected)
    assert stored.nbytes == maps.nbytes // (8 if kind == "canny" else 1)


def test_shards_fit_into_memory(tmp_path):
    assert max_shard_images("canny", (256, 256), 10) * 10 * 256 * 32 <= 1 << 30
    assert max_shard_images("depth", (256, 256), 10) == 1638
    settings = {"grid": (4, 4), "vocab_size": 24, "classes": (), "views": 10}
    assert TokenWriter(tmp_path, **settings, control="depth", control_size=(256, 256)).shard_size == 1638


def test_gathering_over_shards_and_sets(tmp_path):
    first = write(tmp_path / "a", kind="canny", number=20, views=3, classes=tuple("abcde"))
    second = write(tmp_path / "b", kind="depth", number=9, views=1, seed=1)
    tokens = join_tokens([open_tokens(tmp_path / name) for name in "ab"])
    assert (len(tokens), tokens.classes, tokens.views) == (29, tuple("abcde"), 3)
    assert tokens.labels[:20].tolist() == first[2].tolist()
    assert set(tokens.labels[20:].tolist()) == {NO_CLASS}
    maps = ControlMaps(tokens.controls, ("depth", "canny"), CPU)
    index, view = np.array([28, 3, 19, 20, 0, 7]), np.array([0, 2, 1, 0, 0, 1])
    pixels, kind = maps.gather(index, view)
    expected = [second[1][8, 0], first[1][3, 2], first[1][19, 1], second[1][0, 0], first[1][0, 0], first[1][7, 1]]
    assert np.array_equal(pixels.numpy(), np.stack(expected))
    assert kind.tolist() == [0, 1, 1, 0, 1, 1]
    ids = tokens.gather(index, view)
    assert np.array_equal(ids[0], second[0][8, 0])
    with pytest.raises(IndexError):
        tokens.gather(np.array([20]), np.array([1]))  # it has one view
    with pytest.raises(InputError, match="of kind 'depth'; the model takes"):
        ControlMaps(tokens.controls, ("canny",), CPU)


def test_sets_that_do_not_belong_together(tmp_path):
    write(tmp_path / "a", kind="canny", number=4, views=1, classes=("x", "y"))
    write(tmp_path / "b", kind="canny", number=4, views=1, classes=("x", "z"))
    writer = TokenWriter(tmp_path / "c", grid=(4, 4), vocab_size=24, classes=(), views=1)
    writer.add(np.zeros((2, 1, 16), np.uint16), np.zeros(2))
    writer.close()
    opened = {name: open_tokens(tmp_path / name) for name in "abc"}
    for other, message in (("b", "other classes"), ("c", "condition images")):
        with pytest.raises(InputError, match=message):
            join_tokens([opened["a"], opened[other]])


def test_an_unfinished_set_goes_on(tmp_path):
    """After the shards that are whole; a shard without its condition images is not."""
    write(tmp_path / "whole", kind="depth", number=20, views=2)
    write(tmp_path / "part", kind="depth", number=20, views=2)
    (tmp_path / "part" / "tokens.json").unlink()
    (tmp_path / "part" / "control-00001.npy").unlink()
    settings = {"grid": (4, 4), "vocab_size": 24, "classes": (), "views": 2, "shard_size": 7}
    writer = TokenWriter(tmp_path / "part", **settings, control="depth", control_size=(8, 8))
    assert writer.num_done == 7
    with pytest.raises(ValueError, match="maps"):
        writer.add(np.zeros((1, 2, 16), np.uint16), np.zeros(1))
    with pytest.raises(ValueError, match="maps are"):
        writer.add(np.zeros((1, 2, 16), np.uint16), np.zeros(1), maps=np.zeros((1, 2, 8, 9), np.uint8))
    (tmp_path / "whole" / "control-00002.npy").write_bytes(b"no")
    with pytest.raises(InputError, match=r"control-00002\.npy is not a whole"):
        open_tokens(tmp_path / "whole")


@pytest.mark.parametrize("ten_crops", [False, True])
def test_tokenizing_with_a_condition(photos, tmp_path, extractor, ten_crops):
    images = open_images(photos)
    options = {"size": 16, "ten_crops": ten_crops, "batch_size": 20, "shard_size": 4}
    tokens = tokenize(small_tokenizer(), images, tmp_path / "tokens", **options, control="canny")
    plain = tokenize(small_tokenizer(), images, tmp_path / "plain", **options)
    assert tokens.info.fingerprint != plain.info.fingerprint
    assert not plain.controls
    maps = ControlMaps(tokens.controls, ("canny",), CPU)
    for i in range(len(images)):
        crops = ten_crop(images.read(i), 16) if ten_crops else [adm_crop(images.read(i), 16)]
        view = np.arange(len(crops))
        pixels, _ = maps.gather(np.full(len(crops), i), view)
        assert np.array_equal(pixels.numpy(), np.stack([np.asarray(bright("", crop)) for crop in crops]))
        assert np.array_equal(tokens.gather(np.full(len(crops), i), view), plain.gather(np.full(len(crops), i), view))


def _sets(folder):
    fruits, emoji = write_sets(folder)
    return str(fruits), str(emoji)


def test_composed_scenes_bring_their_depth(tmp_path):
    sets = _sets(tmp_path)
    tokens = compose_tokens(small_tokenizer(), sets, tmp_path / "scenes", num=5, seed=3, size=64, depth=True)
    from experiments.garden.composer import Composer

    maps = ControlMaps(tokens.controls, ("canny", "depth"), CPU)
    pixels, kind = maps.gather(np.arange(5), np.zeros(5, np.int64))
    scene = Composer(*sets, size=64).scene(5)
    assert kind.tolist() == [1] * 5
    near = np.unravel_index(scene.depth_HW.argmin(), scene.depth_HW.shape)
    assert pixels[2].numpy().max() == pixels[2].numpy()[near] > 0
    assert (pixels[2].numpy()[scene.depth_HW == 1] == 0).all()


def test_class_and_image_are_dropped_together(tmp_path):
    write(tmp_path / "a", kind="canny", number=20, views=3, classes=tuple("abcde"))
    write(tmp_path / "b", kind="depth", number=12, views=1, seed=1)
    tokens = join_tokens([open_tokens(tmp_path / name) for name in "ab"])
    control = ControlMaps(tokens.controls, ("canny", "depth"), CPU)
    settings = {"batch_size": 64, "num_classes": 5, "label_drop": 0.3, "seed": 0, "device": CPU}
    batches = TokenBatches(Dataset(tokens, control=control), parts=1, **settings)
    batch, index = batches.batch(3, 0), batches.indices(3, 0)
    classless = torch.from_numpy(index >= 20)
    assert 5 < int(batch.dropped_B.sum()) < 35
    assert torch.equal(batch.labels_B == 5, batch.dropped_B | classless)
    assert torch.equal(batch.kind_B == 1, classless)
    white = batch.pixels_BHW.reshape(64, 4, 2, 4, 2)[:, :, 0, :, 0].flatten(1) > 0  # the right view of the right image
    assert torch.equal(batch.ids_BN.bool(), white)
    halves = TokenBatches(Dataset(tokens, control=control), parts=2, **settings)
    assert torch.equal(torch.cat([halves.batch(3, part).pixels_BHW for part in (0, 1)]), batch.pixels_BHW)


def test_images_can_be_dropped_alone(tmp_path):
    """Half of the samples that keep their class lose their condition image; nothing else changes."""
    write(tmp_path / "a", kind="canny", number=20, views=3, classes=tuple("abcde"))
    tokens = open_tokens(tmp_path / "a")
    dataset = Dataset(tokens, control=ControlMaps(tokens.controls, ("canny",), CPU))
    settings = {"batch_size": 2000, "parts": 1, "num_classes": 5, "label_drop": 0.2, "seed": 0, "device": CPU}
    together, alone = (TokenBatches(dataset, control_drop=drop, **settings).batch(3, 0) for drop in (0.0, 0.5))
    for name in ("ids_BN", "labels_B", "order_BN", "dropout_key_B", "pixels_BHW"):
        assert torch.equal(getattr(together, name), getattr(alone, name))
    classless = alone.labels_B == 5
    assert torch.equal(together.dropped_B, classless)
    assert alone.dropped_B[classless].all()
    assert 0.45 < alone.dropped_B[~classless].double().mean() < 0.55


RECIPE = """
init_from = "{base}"
tokenizer = "{tok}"
seed = 3
[model]
width = 32
num_heads = 2
pass1_layers = 2
pass2_layers = 2
vocab_size = 24
num_classes = 5
grid = [4, 4]
dropout = 0.0
[model.control]
patch = 2
width = 16
num_heads = 2
layers = 1
[data]
train = ["{data}/a", "{data}/b"]
validation = ["{data}/a", "{data}/b"]
[optim]
lr = 5e-3
schedule = "constant"
warmup = 0.0
ema = 0.9
[run]
steps = 80
batch_size = 16
precision = "float32"
log_every = 1
validate_every = 80
sample_every = 80
save_every = 80
[sampling]
steps = 4
"""


@pytest.fixture
def recipe(tmp_path):
    write(tmp_path / "a", kind="canny", number=60, views=2, classes=tuple("abcde"), shard_size=100)
    write(tmp_path / "b", kind="depth", number=40, views=1, seed=1, shard_size=100)
    write_folder(tmp_path / "base", FolderConfig(model=SMALL), model=small_model().state_dict())
    tokenizer = small_tokenizer()
    write_folder(tmp_path / "tok", FolderConfig(tokenizer=tokenizer.config), tokenizer=tokenizer.state_dict())
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.format(base=tmp_path / "base", tok=tmp_path / "tok", data=tmp_path))
    return path


def test_a_fine_tune_starts_from_the_base_and_learns_to_follow(recipe, tmp_path):
    """Tokens are a function of the condition image alone, so whoever looks at it loses almost nothing."""
    from arpg.train.distributed import init_distributed, shutdown_distributed

    read = read_recipe(recipe, ModelRecipe)
    try:
        training = ModelTraining(read, tmp_path / "start", init_distributed("cpu"))
        base = small_model().state_dict()
        ours = training.objective.model.state_dict()
        assert all(torch.equal(t, ours[k]) for k, t in base.items())
        assert any(k.startswith("control.encoder") for k in ours)
        assert not ours["control.down.weight"].any()
    finally:
        shutdown_distributed()
    folder = train_model(read, tmp_path / "run", device="cpu")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[0] > 3
    assert np.mean(losses[-10:]) < 0.55  # a tenth of it is dropped, where a coin is thrown for each token
    assert (tmp_path / "run" / "samples-0000080.png").exists()
    pipe = Pipeline.from_pretrained(folder, device="cpu")
    assert pipe.classes.lines == tuple("abcde")
    maps = np.random.default_rng(9).random((4, 4)) < 0.5
    drawing = pipe.generate_task(2, control=_control(maps), num_images=4, steps=16, guidance=1.0)
    step = list(drawing.steps())[-1]
    assert (step.ids_BN.cpu().numpy() == maps.ravel()).mean() > 0.9
    plain = list(pipe.generate_task(2, num_images=4, steps=16, guidance=1.0).steps())[-1]
    assert (plain.ids_BN.cpu().numpy() == maps.ravel()).mean() < 0.8


def _control(maps):
    from PIL import Image

    from arpg import ControlInput

    return ControlInput(Image.fromarray(maps.repeat(2, 0).repeat(2, 1).astype(np.uint8) * 255), "canny")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.control.patch=4", "8x8 pixels; model.control.patch 4 and the grid need 16x16"),
        ('model.control.kinds=["canny"]', "of kind 'depth'"),
        ("data.train=[]", "names no token folder"),
    ],
)
def test_bad_recipes(recipe, tmp_path, override, message):
    with pytest.raises(InputError, match=message):
        train_model(read_recipe(recipe, ModelRecipe, [override]), tmp_path / "run", device="cpu")


def test_tokens_without_condition_images(recipe, tmp_path):
    writer = TokenWriter(tmp_path / "plain", grid=(4, 4), vocab_size=24, classes=tuple("abcde"), views=1)
    writer.add(np.zeros((2, 1, 16), np.uint16), np.zeros(2))
    writer.close()
    changed = read_recipe(recipe, ModelRecipe, [f"data.train={tmp_path / 'plain'}"])
    with pytest.raises(InputError, match="has no condition images"):
        train_model(changed, tmp_path / "run", device="cpu")


def test_a_folder_named_twice_is_sampled_twice_as_often(recipe, tmp_path):
    from arpg.train.distributed import init_distributed, shutdown_distributed

    twice = read_recipe(recipe, ModelRecipe, [f'data.train=["{tmp_path}/a", "{tmp_path}/a", "{tmp_path}/b"]'])
    try:
        training = ModelTraining(twice, tmp_path / "run", init_distributed("cpu"))
    finally:
        shutdown_distributed()
    assert len(training.dataset.tokens) == 160
    one, two = (training.dataset.control.gather(np.array([i]), np.array([1]))[0] for i in (7, 67))
    assert torch.equal(one, two)
    shards = training.dataset.control.shards
    assert shards[0] is shards[len(shards) // 3]  # but it is open once


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_maps_that_stay_on_the_device(tmp_path):
    write(tmp_path / "a", kind="canny", number=20, views=3, classes=tuple("abcde"))
    write(tmp_path / "b", kind="depth", number=9, views=1, seed=1)
    first, second = (open_tokens(tmp_path / name) for name in "ab")
    tokens = join_tokens([first, second, first])
    index, view = np.array([28, 3, 19, 20, 0, 48]), np.array([0, 2, 1, 0, 0, 1])
    here, there = (ControlMaps(tokens.controls, ("canny", "depth"), torch.device(d)) for d in ("cpu", "cuda"))
    for one, other in zip(here.gather(index, view), there.gather(index, view), strict=True):
        assert other.is_cuda
        assert torch.equal(one, other.cpu())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_compiler_keeps_a_version_for_every_use(monkeypatch):
    """Both passes and the encoder, learning and judged, of several batches: more than the compiler's own 8."""
    compile_ = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda part, **options: compile_(part, backend="eager", **options))
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=True):
        encoder = dataclasses.replace(CONTROL, layers=1)
        model = controlled_model(dataclasses.replace(SMALL, pass1_layers=1, pass2_layers=1, control=encoder))
        model.compile_blocks()
        for learning, batch in ((True, 2), (True, 3), (False, 3)):
            model.train(learning)
            labels, pixels = torch.zeros(batch, dtype=torch.long), torch.zeros(batch, 8, 8, dtype=torch.uint8)
            ids, order = torch.zeros(batch, 16, dtype=torch.long), torch.arange(16).expand(batch, 16)
            with torch.set_grad_enabled(learning):
                condition = training_control(
                    model, class_condition(model, labels), pixels, labels, torch.zeros(batch, dtype=torch.bool)
                )
                assert model(ids, order, condition).isfinite().all()
    torch._dynamo.reset()
