"""Prompts through the pipeline and the command line: every image task, seeds, files, clear errors."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from arpg import InputError, Pipeline
from arpg.cli.generate import PromptLine, read_prompts
from arpg.config import DEFAULT_MODEL, DEFAULT_TEXT_MODEL
from arpg.text_encoder import PromptCache
from support.command import check_error
from support.distribution import require_model
from support.small import TEXT, FakeEncoder, noise, small_tokenizer


@pytest.fixture(scope="module")
def pipe(text_model):
    return Pipeline(text_model, small_tokenizer(), license="MIT", prompts=PromptCache(TEXT.text, load=FakeEncoder))


@pytest.fixture
def text_folder(pipe, tmp_path, monkeypatch):
    pipe.save_pretrained(tmp_path / "text-model")
    monkeypatch.setenv("ARPG_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("arpg.text_encoder.open_encoder", lambda config, device: FakeEncoder())
    return tmp_path / "text-model"


def pixels(images):
    return [image.tobytes() for image in images]


PROMPTS = ["apple", "a red star on a blue", "two pears"]


def test_prompts_in_a_batch_are_prompts_alone(pipe):
    together = pipe.generate(prompt=PROMPTS, num_images=2, seed=5, steps=3, guidance=2.0)
    alone = [
        pipe.generate(prompt=text, num_images=2, seed=5 + 2 * i, steps=3, guidance=2.0)
        for i, text in enumerate(PROMPTS)
    ]
    assert pixels(together) == pixels([image for images in alone for image in images])
    assert len(set(pixels(together))) == 6


def test_prompts_and_negative_prompts_matter(pipe):
    options = {"steps": 3, "guidance": 4.0, "seed": 1}
    images = [
        pipe.generate(prompt="apple", **options)[0],
        pipe.generate(prompt="pear", **options)[0],
        pipe.generate(prompt="apple", negative="star", **options)[0],
        pipe.generate(prompt="apple", negative="", **options)[0],
    ]
    assert len(set(pixels(images))) == 4
    both = pipe.generate(prompt=["apple", "apple"], negative=[None, "star"], seed=[1, 1], steps=3, guidance=4.0)
    assert pixels(both) == pixels([images[0], images[2]])


def test_each_image_may_have_its_own_seed(pipe):
    task = pipe.generate_task(prompt=["apple", "pear"], seed=[70, 3], steps=3, best_of=2)
    images = task.run()
    assert task.seeds[0] in (70, 71)
    assert task.seeds[1] in (3, 4)
    again = pipe.generate(prompt="pear", seed=task.seeds[1], steps=3)
    assert again[0].tobytes() == images[1].tobytes()
    with pytest.raises(InputError, match="2 seeds for 1 images"):
        pipe.generate(prompt="apple", seed=[1, 2], steps=3)


def test_every_image_task_takes_prompts(pipe):
    """What is outside the mask stays; inside, another prompt gives another image."""
    picture = noise(8, 8, seed=2)
    mask = Image.fromarray(np.pad(np.full((4, 4), 255, np.uint8), 2))
    calls = {
        "inpaint": lambda text: pipe.inpaint(picture, mask, prompt=text, steps=2, guidance=3.0)[0],
        "edit": lambda text: pipe.edit(picture, (2, 2, 6, 6), prompt=text, steps=2, guidance=3.0)[0],
        "outpaint": lambda text: pipe.outpaint(picture, prompt=text, right=6, steps=2, guidance=3.0)[0],
        "expand": lambda text: pipe.expand(picture, prompt=text, size=(16, 16), steps=2, guidance=3.0)[0],
        "expand from nothing": lambda text: pipe.expand(prompt=text, size=(16, 16), steps=2, guidance=3.0)[0],
    }
    for name, call in calls.items():
        assert call("apple").tobytes() != call("a red star").tobytes(), name
    for name in ("inpaint", "edit"):
        made = np.asarray(calls[name]("apple")).copy()
        made[2:6, 2:6] = np.asarray(picture)[2:6, 2:6]
        assert np.array_equal(made, picture)
    assert pipe.inpaint(picture, mask, steps=2)[0].size == (8, 8)  # no prompt: what fits
    streamed = list(pipe.stream(prompt=["apple", "pear"], steps=2))
    assert len(streamed[-1]) == 2


def test_scores_take_prompts(pipe):
    picture = noise(8, 8, seed=2)
    bits = [pipe.score(picture, prompt=text, orders=2) for text in ("apple", "pear", None)]
    assert all(b.shape == (2, 4, 4) for b in bits)
    assert not np.allclose(bits[0], bits[1])
    assert not np.allclose(bits[0], bits[2])


def test_the_other_kind_of_model_is_named(pipe, pipeline):
    picture = noise(8, 8)
    for call, message in (
        (lambda: pipe.generate("class 1"), "class is 'class 1', but the model takes prompts"),
        (lambda: pipe.edit(picture, (0, 0, 4, 4), 3), "class is 3, but the model takes prompts"),
        (lambda: pipe.generate(3, prompt="apple"), "the model takes prompts"),
        (lambda: pipe.generate(prompt=[]), "no prompt is given"),
        (lambda: pipe.edit(picture, (0, 0, 4, 4)), "give a prompt"),
        (lambda: pipe.expand(size=(16, 16)), "neither an image nor a prompt"),
        (lambda: pipe.classify(picture), "takes prompts, so it has no classes"),
        (lambda: pipe.generate(prompt=["a", "b"], negative=["c"]), "1 negative prompts for 2"),
        (lambda: pipeline.generate(prompt="apple"), "prompt is 'apple', but the model takes classes"),
        (lambda: pipeline.generate(1, negative="apple"), "negative is 'apple', but the model takes classes"),
        (lambda: pipeline.inpaint(picture, picture, prompt="apple"), "takes classes"),
        (lambda: pipeline.generate([]), "no class is given"),
    ):
        with pytest.raises(InputError, match=message):
            call()


def test_a_folder_keeps_everything(pipe, text_folder):
    again = Pipeline.from_pretrained(text_folder, device="cpu")
    assert again.model.config == TEXT
    assert torch.equal(again.model.text.null_TE, pipe.model.text.null_TE)
    one, two = (p.generate(prompt="apple", steps=3, guidance=2.0) for p in (pipe, again))
    assert pixels(one) == pixels(two)
    assert not (text_folder / "classes.txt").exists()


# The command line


def opened(path):
    with Image.open(path) as image:
        image.load()
        return image


def about(path):
    return json.loads(opened(path).text["arpg"])


def test_generate_with_prompts(run, pipe, text_folder, tmp_path):
    target = tmp_path / "out"
    prompt = ["--prompt", "a red star", "--prompt", "pear", "--negative", "apple"]
    settings = ["--steps", 3, "--guidance", 2.5, "-n", 2, "--seed", 4]
    code, _, err = run("generate", "--model", text_folder, *prompt, *settings, "-o", target)
    assert code == 0, err
    files = sorted(target.iterdir())
    assert [f.name for f in files] == [
        "00000-a-red-star-seed4.png",
        "00001-a-red-star-seed5.png",
        "00002-pear-seed6.png",
        "00003-pear-seed7.png",
    ]
    expected = pipe.generate(
        prompt=["a red star", "pear"], negative="apple", num_images=2, seed=4, steps=3, guidance=2.5
    )
    assert [opened(f).tobytes() for f in files] == pixels(expected)
    found = about(files[2])
    assert (found["prompt"], found["negative"], found["seed"]) == ("pear", "apple", 6)
    assert "class" not in found


def test_generate_from_a_file(run, pipe, text_folder, tmp_path):
    file = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "apple", "seed": 90}, {"prompt": "🍓 на столе", "negative": "star", "tag": "colors"}]
    file.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    target = tmp_path / "out"
    code, _, err = run("generate", "--model", text_folder, "--prompts", file, "-n", 1, "--steps", 3, "-o", target)
    assert code == 0, err
    assert [(about(f)["prompt"], about(f)["seed"]) for f in sorted(target.iterdir())] == [
        ("apple", 90),
        ("🍓 на столе", 1),
    ]


def test_candidates_of_a_prompt_with_a_seed_are_all_different(run, text_folder, tmp_path):
    file, target = tmp_path / "prompts.jsonl", tmp_path / "out"
    file.write_text('{"prompt": "apple", "seed": 90}\n{"prompt": "pear"}\n')
    options = ("-n", 2, "--best-of", 3, "--steps", 1, "-o", target)
    assert run("generate", "--model", text_folder, "--prompts", file, *options)[0] == 0
    seeds = [about(f)["seed"] for f in sorted(target.iterdir())]
    for seed, first in zip(seeds, (90, 93, 6, 9), strict=True):
        assert first <= seed < first + 3


def test_prompt_files(tmp_path):
    plain = tmp_path / "p.txt"
    plain.write_text("\ufeffa red apple\n\n# a comment\n  two pears \n", encoding="utf-8")
    assert read_prompts(plain, "blur") == [PromptLine("a red apple", "blur"), PromptLine("two pears", "blur")]
    lines = tmp_path / "p.jsonl"
    for text, message in (
        ('{"prompt": 3}', 'line 1 has no "prompt"'),
        ('\n{"prompt": "a", "seed": -1}', "line 2: seed is -1"),
        ('{"prompt": "a", "negative": 2}', "negative is 2"),
        ("{", "not valid JSON"),
        ("", "has no prompts"),
    ):
        lines.write_text(text)
        with pytest.raises(InputError, match=message):
            read_prompts(lines)
    with pytest.raises(InputError, match="does not exist"):
        read_prompts(tmp_path / "none.txt")
    plain.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not UTF-8"):
        read_prompts(plain)


def test_editing_verbs_take_prompts(run, text_folder, tmp_path):
    picture = tmp_path / "p.png"
    noise(8, 8).save(picture)
    out = tmp_path / "e.png"
    code, _, err = run(
        "edit", picture, "--model", text_folder, "--box", "2,2,6,6", "--prompt", "apple", "--steps", 2, "-o", out
    )
    assert code == 0, err
    assert about(out)["prompt"] == "apple"
    code, _, err = run("expand", "--model", text_folder, "--size", "16x16", "-p", "pear", "--steps", 2, "-o", out)
    assert code == 0, err
    assert opened(out).size == (16, 16)


def test_a_prompt_goes_to_the_model_that_takes_it(run, tmp_path):
    require_model(DEFAULT_TEXT_MODEL)
    out = tmp_path / "banana.png"
    for what, model in ((("--prompt", "a banana"), DEFAULT_TEXT_MODEL), (("--class", "0"), DEFAULT_MODEL)):
        code, _, err = run("generate", *what, "--steps", 1, "-n", 1, "--device", "cpu", "-o", out)
        assert code == 0, err
        assert about(out)["model"] == model
    code, text, err = run("score", out, "--prompt", "a banana", "--orders", 1, "--device", "cpu")
    assert code == 0, err
    assert "bits per token" in text


def test_score_takes_a_prompt(run, pipe, text_folder, tmp_path):
    picture = noise(8, 8, seed=2)
    picture.save(tmp_path / "p.png")
    command = ["score", tmp_path / "p.png", "--model", text_folder, "--prompt", "apple", "--orders", 2]
    code, text, err = run(*command, "--device", "cpu")
    assert code == 0, err
    assert f"{pipe.score(picture, prompt='apple', orders=2).mean():.3f} bits per token" in text


def test_bad_commands(run, text_folder, folder, tmp_path):
    for arguments, message in (
        (["generate", "--model", text_folder, "--class", "1"], "the model takes prompts"),
        (["generate", "--model", folder, "--prompt", "apple"], "the model takes classes"),
        (["generate", "--model", folder], "--class, --prompt or --prompts"),
        (["generate", "--model", folder, "--class", "1", "--prompt", "apple"], "one of them"),
        (["generate", "--model", text_folder, "--prompts", tmp_path / "no.txt"], "does not exist"),
        (["classes", "--model", text_folder], "takes prompts"),
        (["sample", "-n", 4, "--model", text_folder, "--out", tmp_path / "s.npz"], "has no classes"),
    ):
        check_error(run(*arguments), message)
