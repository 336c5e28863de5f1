"""Python habits: `pipe(...)` as in diffusers, typed options, images of any form, moving, copying, the hub."""

import copy
import inspect
import pickle
from typing import get_args, get_type_hints

import numpy as np
import pytest
import torch
from PIL import Image

from arpg import ControlInput, InputError, Pipeline
from arpg.image import to_mask
from arpg.settings import ALIASES, SETTINGS, TASK_SETTINGS
from arpg.tasks import options as task_options
from arpg.text_encoder import PromptCache
from support.small import TEXT, FakeEncoder, noise, small_tokenizer


def same(a, b):
    return len(a) == len(b) and all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in zip(a, b, strict=True))


@pytest.fixture
def text_pipe(text_model):
    return Pipeline(text_model, small_tokenizer(), prompts=PromptCache(TEXT.text, load=FakeEncoder))


STEPS = {"num_inference_steps": 3, "guidance_scale": 2.0}
OURS = {"steps": 3, "guidance": 2.0}
MASK = Image.new("L", (8, 8))
MASK.paste(255, (0, 0, 4, 8))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"prompt": "class 3"}, lambda p: p.generate("class 3", **OURS)),
        ({"prompt": [1, "class 2"], "num_images_per_prompt": 2}, lambda p: p.generate([1, 2], num_images=2, **OURS)),
        ({}, lambda p: p.generate(**OURS)),
        ({"prompt": 3, "height": 8, "width": 8}, lambda p: p.generate(3, **OURS)),
        ({"prompt": 3, "height": 16}, lambda p: p.expand(None, 3, size=(16, 16), **OURS)),
        ({"prompt": 2, "image": noise(8, 8), "mask_image": MASK}, lambda p: p.inpaint(noise(8, 8), MASK, 2, **OURS)),
        (
            {"prompt": 2, "image": noise(8, 8), "mask_image": MASK, "feather": 2},
            lambda p: p.inpaint(noise(8, 8), MASK, 2, feather=2, **OURS),
        ),
        (
            {"prompt": 2, "image": noise(12, 10), "box": (2, 2, 9, 7)},
            lambda p: p.edit(noise(12, 10), (2, 2, 9, 7), 2, **OURS),
        ),
        ({"image": noise(8, 8), "right": 4}, lambda p: p.outpaint(noise(8, 8), right=4, **OURS)),
        (
            {"image": noise(8, 8), "width": 16, "method": "windows"},
            lambda p: p.expand(noise(8, 8), size=(16, 16), method="windows", **OURS),
        ),
    ],
)
def test_a_call_is_the_task_that_its_arguments_describe(pipeline, arguments, expected):
    output = pipeline(**arguments, **STEPS)
    assert same(output.images, expected(pipeline))
    assert output[0] is output.images


def test_a_call_with_prompts(text_pipe):
    ours = text_pipe.generate(prompt=["apple", "pear"], negative="blur", seed=5, **OURS)
    called = text_pipe(["apple", "pear"], negative_prompt="blur", generator=torch.Generator().manual_seed(5), **STEPS)
    assert same(called.images, ours)
    assert same(text_pipe(**STEPS).images, text_pipe.generate(**OURS))
    assert not same(text_pipe("apple", **STEPS).images, text_pipe(**STEPS).images)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"image": noise(8, 8)}, "image is given with nothing else; expected one of mask_image"),
        ({"image": noise(8, 8), "mask_image": MASK, "width": 16}, "mask_image and height or width"),
        ({"mask_image": MASK}, "mask_image is given without an image"),
        ({"left": 4}, "left is given without an image"),
        ({"prompt": 1, "feather": 2}, "generate_task has no option 'feather'"),
        ({"prompt": 1, "mask": MASK}, "__call__ has no option 'mask'; did you mean mask_image"),
        ({"prompt": 1, "negative": "a", "negative_prompt": "b"}, "negative_prompt and negative are both given"),
        ({"prompt": 1, "output_type": "tensor"}, "output_type is 'tensor'; expected one of pil, np, pt, latent"),
        ({"prompt": 1, "height": 12, "width": 16}, "keeps its shape"),
        ({"prompt": 1, "control_image": noise(8, 8)}, "takes no condition images"),
        ({"prompt": 1, "kind": "depth", "strength": 1.0}, "kind and strength is given without control_image"),
        ({"prompt": 1, "num_images": 2.0}, "num_images is 2.0; expected a whole number of 1 or more"),
        ({"prompt": 1, "best_of": "2"}, "best_of is '2'; expected a whole number of 1 or more"),
    ],
)
def test_a_call_that_describes_no_task(pipeline, arguments, says):
    with pytest.raises(InputError, match=says):
        pipeline(**arguments)


def test_output_types(pipeline):
    images = pipeline([1, 2], **STEPS).images
    stacked = np.stack([np.asarray(image) for image in images])
    array = pipeline([1, 2], output_type="np", **STEPS).images
    assert array.dtype == np.float32
    assert np.array_equal(np.round(array * 255), stacked)
    tensor = pipeline([1, 2], output_type="pt", **STEPS).images
    assert torch.equal(tensor, torch.from_numpy(array).permute(0, 3, 1, 2))
    ids = pipeline([1, 2], output_type="latent", **STEPS).images
    assert ids.shape == (2, 4, 4)
    decoded = pipeline.tokenizer.decode(ids.flatten(1), (4, 4))
    assert np.array_equal((127.5 * decoded + 128).clamp(0, 255).byte().permute(0, 2, 3, 1).numpy(), stacked)
    best = pipeline(1, best_of=3, output_type="latent", **STEPS).images
    task = pipeline.generate_task(1, best_of=3, **OURS)
    assert same([pipeline.generate(1, seed=0, best_of=3, **OURS)[0]], task.run())
    assert torch.equal(best, task.ids())


def test_the_callback_sees_every_step(pipeline):
    seen = []

    def callback(pipe, step, timestep, kwargs):
        assert pipe is pipeline
        assert step == timestep
        seen.append((step, kwargs["latents"].clone()))
        return kwargs

    pipeline([1, 2], callback_on_step_end=callback, batch_size=1, **STEPS)
    assert [step for step, _ in seen] == list(range(6))
    assert torch.equal(seen[-1][1], pipeline(2, seed=1, output_type="latent", **STEPS).images.flatten(1))
    with pytest.raises(InputError, match="tokens cannot be replaced"):
        pipeline(1, callback_on_step_end=lambda *_: {"latents": torch.zeros(1, 16)}, **STEPS)


VERBS = ("__call__", "generate", "inpaint", "edit", "outpaint", "expand", "control", "stream")
TASKS = ("generate_task", "inpaint_task", "edit_task", "outpaint_task", "expand_task")
OWN = {"feather": ("inpaint", "edit"), "method": ("expand",), "way": ("expand",)}


@pytest.mark.parametrize("verb", [*VERBS, *TASKS])
def test_help_shows_every_setting_and_alias(verb):
    parameters = inspect.signature(getattr(Pipeline, verb)).parameters
    assert not any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    shared = [*SETTINGS, "num_images", "seed", "best_of", "batch_size"]
    aliases = [alias for alias, name in ALIASES.items() if name in shared]
    assert set(shared) | set(aliases) <= set(parameters)
    for name in ("num_images", "seed", "best_of", "batch_size"):
        assert parameters[name].default == TASK_SETTINGS[name].default
    for name, verbs in OWN.items():
        assert (name in parameters) == (verb.removesuffix("_task") in verbs or (verb == "__call__" and name != "way"))


def test_types_of_options_are_those_of_the_table():
    hints = get_type_hints(task_options.SharedOptions)
    tables = {**SETTINGS, **TASK_SETTINGS}
    for name, hint in hints.items():
        kind = tables[ALIASES.get(name, name)].kind
        assert name in ("seed", "generator") or kind in get_args(hint), name
    for group in (task_options.TaskOptions, task_options.GenerateOptions, task_options.CallOptions):
        assert set(hints) < set(get_type_hints(group))


def test_images_of_any_form(pipeline, tmp_path):
    image = noise(8, 8)
    image.save(tmp_path / "image.png")
    MASK.save(tmp_path / "mask.png")
    expected = pipeline.inpaint(image, MASK, 2, **OURS)
    pixels, mask = np.asarray(image), np.asarray(MASK)
    images = (
        pixels,
        pixels.astype(np.float32) / 255,
        pixels[None],
        torch.from_numpy(pixels.copy()).permute(2, 0, 1),
        torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None].to(torch.bfloat16) / 255,
        tmp_path / "image.png",
        str(tmp_path / "image.png"),
    )
    masks = (
        mask,
        mask > 0,
        mask / 255,
        torch.from_numpy(mask > 0),
        torch.from_numpy(mask / 255)[None],
        tmp_path / "mask.png",
        str(tmp_path / "mask.png"),
    )
    for given, hole in zip(images, masks, strict=True):
        found = pipeline.inpaint(given, hole, 2, **OURS)
        if isinstance(given, torch.Tensor) and given.dtype == torch.bfloat16:  # has 8 bits, but not of the same values
            found = [np.abs(np.asarray(found[0]).astype(int)[:, 4:] - pixels[:, 4:]).max() <= 1]
            assert found == [True]
        else:
            assert same(found, expected)
    grey = ControlInput(np.eye(8) > 0)
    assert np.array_equal(np.asarray(grey.image) > 0, np.eye(8) > 0)
    assert np.array_equal(pipeline.score(pixels, 1), pipeline.score(image, 1))


def test_images_and_masks_are_turned_upright(pipeline, tmp_path):
    exif = Image.Exif()
    exif[0x112] = 6  # a quarter turn to the right
    sideways = {"image.png": noise(16, 8), "mask.png": MASK.resize((16, 8))}
    for name, image in sideways.items():
        image.save(tmp_path / name, exif=exif)
    paths = [tmp_path / name for name in sideways]
    opened = [Image.open(path) for path in paths]
    assert same(pipeline.inpaint(*opened, 2, **OURS), pipeline.inpaint(*paths, 2, **OURS))
    assert pipeline(2, image=opened[0], width=16, **STEPS).images[0].size == (16, 32)


def test_a_mask_of_16_bits_is_scaled():
    levels = np.array([[0, 300, 32000], [33500, 40000, 65535]], np.uint16)
    assert to_mask(Image.fromarray(levels)).tolist() == [[False] * 3, [True] * 3]


def test_transparent_parts_of_a_mask_are_filled(tmp_path):
    """As in a file, whose transparent parts are read as white."""
    mask = Image.new("RGBA", (2, 1), (0, 0, 0, 255))
    mask.putpixel((1, 0), (0, 0, 0, 0))
    mask.save(tmp_path / "mask.png")
    for given in (mask, np.asarray(mask), tmp_path / "mask.png"):
        assert to_mask(given).tolist() == [[False, True]]


@pytest.mark.parametrize(
    ("image", "says"),
    [
        (np.zeros((8, 8, 2), np.uint8), r"image is uint8 \[8, 8, 2\]; expected \[H, W, C\]"),
        (torch.zeros(8, 8, 3), r"image is float32 \[8, 8, 3\]; expected \[C, H, W\]"),
        (np.full((8, 8, 3), -1.0), "image has pixels from -1 to -1; expected 0 to 1"),
        (np.full((8, 8, 3), np.nan), "image has pixels from nan"),
        (np.zeros((8, 8, 3), np.int64), "expected uint8, bool, or floating point"),
        ("nowhere.png", "nowhere.png does not exist"),
    ],
)
def test_images_of_no_known_form(pipeline, image, says):
    with pytest.raises(InputError, match=says):
        pipeline.outpaint(image, right=2)


def test_a_mask_of_ones_is_refused(pipeline):
    with pytest.raises(InputError, match="mask has numbers from 0 to 1 of 255"):
        pipeline.inpaint(noise(8, 8), (np.asarray(MASK) > 0).astype(np.uint8), 2)


def test_classes_may_be_numpy_or_torch_integers(pipeline):
    expected = pipeline.generate([1, 3], **OURS)
    for classes in (np.array([1, 3]), torch.tensor([1, 3]), (np.int64(1), np.int32(3)), ("class 1", np.uint8(3))):
        assert same(pipeline.generate(classes, **OURS), expected)
    assert same(pipeline.generate(np.int64(3), seed=np.int64(1), **OURS), expected[1:])
    assert same(
        pipeline.inpaint(noise(8, 8), MASK, np.int64(3), **OURS), pipeline.inpaint(noise(8, 8), MASK, 3, **OURS)
    )
    for arguments, says in (
        ({"classes": np.int64(9)}, "class 9 does not exist"),
        ({"classes": 1.5}, "class is 1.5; expected a name or an id from 0 to 4"),
        ({"classes": 1, "seed": 1.5}, "seed is 1.5; expected a whole number"),
        ({"classes": 1, "seed": [None]}, "seed is None; expected a whole number"),
    ):
        with pytest.raises(InputError, match=says):
            pipeline.generate(**arguments)


def test_no_seed_is_a_random_seed(pipeline):
    tasks = [pipeline.generate_task(1, **{name: None}) for name in ("seed", "seed", "generator")]
    assert len({task.spec.seed for task in tasks}) == 3
    images = tasks[0].run()
    assert same(images, pipeline.generate(1, seed=tasks[0].seeds[0]))


def test_without_a_class_the_null_class_is_sampled(pipeline):
    task = pipeline.generate_task(num_images=2)
    assert task.spec.labels == (pipeline.model.config.num_classes,) * 2
    assert not same(task.run(), pipeline.generate(1, num_images=2))


def test_classes_are_a_collection(pipeline):
    assert list(pipeline.classes) == [f"class {i}" for i in range(5)]
    assert pipeline.classes[2] == "class 2"
    assert pipeline.classes[-1] == "class 4"
    assert "Class_3" in pipeline.classes
    assert "kiwi" not in pipeline.classes
    assert 3 not in pipeline.classes
    with pytest.raises(IndexError):
        pipeline.classes[5]


def test_a_description(pipeline, text_pipe):
    assert repr(pipeline).startswith(
        "Pipeline(0.1M parameters in float32 on cpu, engine eager: 5 classes to images of 8x8"
    )
    assert "prompts" in repr(text_pipe)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe))])
def test_copies_make_the_same_images(folder, text_pipe, copied):
    pipe = Pipeline.from_pretrained(folder, device="cpu")
    again = copied(pipe)
    assert again.engine.model is again.model
    assert again.model is not pipe.model
    assert same(again.generate(1, **OURS), pipe.generate(1, **OURS))
    text = copied(text_pipe)
    assert same(text.generate(prompt="apple", **OURS), text_pipe.generate(prompt="apple", **OURS))


def test_moving_to_another_precision_and_back(folder):
    pipe = Pipeline.from_pretrained(folder, device="cpu")
    expected = pipe.generate(1, **OURS)
    assert (pipe.device, pipe.dtype) == (torch.device("cpu"), torch.float32)
    fresh = Pipeline.from_pretrained(folder, device="cpu", torch_dtype=torch.bfloat16)
    assert pipe.to("cpu", torch.bfloat16) is pipe
    assert pipe.dtype == fresh.dtype == torch.bfloat16
    assert pipe.tokenizer.pixel_dtype == torch.bfloat16
    assert same(pipe.generate(1, **OURS), fresh.generate(1, **OURS))
    whole = Pipeline.from_pretrained(folder, device="cpu").to("float32").to(device="cpu:0")
    assert same(whole.generate(1, **OURS), expected)
    small = whole.to(dtype="int8").to("cpu")
    assert "in int8" in repr(small)
    fresh = Pipeline.from_pretrained(folder, device="cpu", precision="int8")
    assert small.dtype == fresh.dtype
    assert same(small.generate(1, **OURS), fresh.generate(1, **OURS))
    with pytest.raises(InputError, match="devices cpu and cuda"):
        pipe.to("cpu", "cuda")
    with pytest.raises(InputError, match="the same, leave the others out"):
        Pipeline.from_pretrained(folder, torch_dtype=torch.float32, precision="float32")


def test_a_move_that_the_engine_refuses_changes_nothing(folder):
    pipe = Pipeline.from_pretrained(folder, device="cpu")
    pipe.engine._arguments = ("graph", None)  # as it was opened on a GPU
    with pytest.raises(InputError, match="CUDA graphs need a GPU"):
        pipe.to("cpu", torch.bfloat16)
    assert pipe.dtype == torch.float32


def test_the_progress_bar_can_be_turned_on_and_off(folder, capsys):
    pipe = Pipeline.from_pretrained(folder, device="cpu")
    pipe.generate(1, **OURS)
    assert not capsys.readouterr().err, "no terminal"
    pipe.set_progress_bar_config(disable=False, leave=True, desc="kiwi")
    pipe([1, 2], batch_size=1, **STEPS)
    shown = capsys.readouterr().err
    assert "kiwi" in shown
    assert "6/6" in shown
    pipe.set_progress_bar_config(disable=True)
    pipe.generate(1, **OURS)
    assert not capsys.readouterr().err


def test_uploading_to_the_hub(pipeline, folder, monkeypatch):
    calls = []

    class Api:
        def __init__(self, endpoint=None, token=None):
            calls.append(token)

        def create_repo(self, repo_id, *, private, exist_ok):
            calls.append((repo_id, private, exist_ok))
            return type("Address", (), {"repo_id": f"user/{repo_id}"})

        def file_exists(self, repo_id, name):
            return False

        def upload_folder(self, *, repo_id, folder_path, commit_message, create_pr):
            again = Pipeline.from_pretrained(folder_path, device="cpu")
            assert same(again.generate(1, **OURS), pipeline.generate(1, **OURS))
            card = (folder_path / "README.md").read_text()
            assert card.startswith("---\nlicense: mit\n")
            assert f'from_pretrained("{repo_id}")' in card
            calls.append((repo_id, commit_message, create_pr))
            return "https://hub/user/mine/commit/1"

    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    assert pipeline.push_to_hub("mine", private=True, token="secret").endswith("commit/1")
    assert calls == ["secret", ("mine", True, True), ("user/mine", "Upload an ARPG model", None)]

    def refuse(*_, **__):
        raise OSError("401 Client Error")

    monkeypatch.setattr(Api, "create_repo", refuse)
    with pytest.raises(InputError, match=r"the hub did not take 'mine' \(401 Client Error\)"):
        pipeline.push_to_hub("mine")
