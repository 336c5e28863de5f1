"""The command line: what it writes, and that every error is one clear line with exit code 2."""

import io
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from typer.main import get_command

from arpg import Pipeline, VQTokenizer, __version__, cli
from arpg.convert import read_published
from arpg.settings import SETTINGS, TASK_SETTINGS
from support.command import check_error
from support.paths import GOLDEN
from support.small import noise


def generate(run, folder, *more):
    return run("generate", "--model", folder, "--steps", 3, "--device", "cpu", *more)


@pytest.mark.parametrize("verb", ["generate", "inpaint", "edit", "outpaint", "expand", "control"])
def test_sampling_options_are_those_of_the_table(verb):
    options = {option.name: option for option in get_command(cli.app).commands[verb].params}
    for name, setting in SETTINGS.items():
        assert options[name].help.startswith(setting.help)
        assert options[name].default is None, "what is not given is the model's recommendation"
        assert all(choice in options[name].help for choice in setting.choices)
    for name in ("best_of", "batch_size", "kind", "strength", "seed"):
        assert options[name].help.startswith(TASK_SETTINGS[name].help)
        assert options[name].default == TASK_SETTINGS[name].default


def test_a_sheet(run, folder, tmp_path):
    code, out, _ = generate(run, folder, "--class", "class 3", "-n", 4, "--seed", 5, "-o", tmp_path / "out.png")
    assert code == 0
    assert "4 images" in out
    with Image.open(tmp_path / "out.png") as image:
        assert image.size == (18, 18)
        about = json.loads(image.text["arpg"])
    assert about["steps"] == 3
    assert about["images"] == [{"class": 3, "name": "class 3", "seed": 5 + i} for i in range(4)]


def test_the_metadata_of_a_sheet_names_every_image(run, folder, tmp_path):
    assert generate(run, folder, "-c", 1, "-c", "class 4", "-n", 1, "-o", tmp_path / "out.png")[0] == 0
    with Image.open(tmp_path / "out.png") as image:
        about = json.loads(image.text["arpg"])
    assert [(each["name"], each["seed"]) for each in about["images"]] == [("class 1", 0), ("class 4", 1)]
    assert "class" not in about, "it would be that of the first image"


def test_more_steps_than_tokens_are_clamped_with_a_note(run, folder, tmp_path):
    options = ("-c", 0, "-n", 1, "-m", folder, "-o")
    code, _, err = run("generate", *options, tmp_path / "a.png", "--steps", 10**9)
    assert (code, err) == (0, "note: steps is 1000000000, but there are 16 tokens; 16 steps are taken\n")
    assert run("generate", *options, tmp_path / "b.png", "--steps", 16, "--guidance", 4) == (
        0,
        f"1 image in {tmp_path / 'b.png'}\n",
        "",
    )
    assert np.array_equal(np.asarray(Image.open(tmp_path / "a.png")), np.asarray(Image.open(tmp_path / "b.png")))


def test_an_animation_renders_only_what_is_kept(run, folder, tmp_path, monkeypatch):
    decoded = []
    decode = VQTokenizer.decode

    def count(self, ids_BN, *arguments, **options):
        decoded.append(len(ids_BN))
        return decode(self, ids_BN, *arguments, **options)

    monkeypatch.setattr(VQTokenizer, "decode", count)
    options = ("-c", 2, "-n", 2, "--best-of", 4, "--batch-size", 4, "-o", tmp_path / "a.png")
    assert generate(run, folder, *options, "--gif", tmp_path / "a.gif")[0] == 0
    assert sum(decoded) == 2 + 3 * 2, "the images, and three steps of the two that are kept"
    with Image.open(tmp_path / "a.png") as image, Image.open(tmp_path / "a.gif") as gif:
        assert gif.n_frames == 3
        gif.seek(2)
        difference = np.asarray(image).astype(int) - np.asarray(gif.convert("RGB"))
    assert abs(difference).mean() < 8, "the last frame is the sheet, in 256 colours"


def test_a_part_to_fill_is_a_mask_or_a_box(run, folder, tmp_path):
    noise(20, 12).save(tmp_path / "in.png")
    mask = Image.new("L", (20, 12))
    mask.save(tmp_path / "black.png")
    mask.paste(255, (5, 2, 12, 9))
    mask.save(tmp_path / "mask.png")
    base = ("inpaint", tmp_path / "in.png", "-m", folder, "--steps", 3, "-c", 2)
    for name, part in (("a", ("--mask", tmp_path / "mask.png")), ("b", ("--box", "5,2,12,9"))):
        assert run(*base, *part, "-o", tmp_path / f"{name}.png")[0] == 0
    assert np.array_equal(np.asarray(Image.open(tmp_path / "a.png")), np.asarray(Image.open(tmp_path / "b.png")))
    with Image.open(tmp_path / "b.png") as image:
        assert json.loads(image.text["arpg"])["box"] == [5, 2, 12, 9]
    bad = (*base, "-o", tmp_path / "c.png")
    check_error(run(*bad), "--mask or --box")
    check_error(run(*bad, "--mask", tmp_path / "mask.png", "--box", "5,2,12,9"), "--mask or --box")
    check_error(run(*bad, "--mask", tmp_path / "black.png"), "black.png has no white part, so nothing was done")
    assert not (tmp_path / "c.png").exists()


def test_a_folder_and_the_api_give_the_same_images(run, folder, tmp_path):
    options = ["--guidance", 2.5, "--order", "halton", "--schedule", "cosine", "--top-k", 9, "--temperature", 0.9]
    target = tmp_path / "new" / "images"
    code, _, _ = generate(run, folder, "-c", 1, "-c", "class 4", "-n", 2, *options, "-o", target)
    assert code == 0
    files = sorted(path.name for path in target.iterdir())
    assert files == [
        "00000-class-1-seed0.png",
        "00001-class-1-seed1.png",
        "00002-class-4-seed2.png",
        "00003-class-4-seed3.png",
    ]
    images = Pipeline.from_pretrained(folder, device="cpu").generate(
        ["class 1", 4], num_images=2, steps=3, guidance=2.5, order="halton", schedule="cosine", top_k=9, temperature=0.9
    )
    for name, image in zip(files, images, strict=True):
        with Image.open(target / name) as written:
            assert np.array_equal(np.asarray(written), np.asarray(image))


def test_an_order_from_a_file(run, folder, tmp_path):
    file, target = tmp_path / "order.txt", tmp_path / "out.png"
    order = [*range(15, 7, -1), *range(8)]
    for text in (" ".join(map(str, order)), json.dumps(order), ",\n".join(map(str, order))):
        file.write_text(text)
        assert generate(run, folder, "-c", 1, "-n", 1, "--order", f"@{file}", "-o", target)[0] == 0
        expected = Pipeline.from_pretrained(folder, device="cpu").generate(1, steps=3, order=order)[0]
        with Image.open(target) as image:
            assert json.loads(image.text["arpg"])["order"] == order
            assert np.array_equal(np.asarray(image), np.asarray(expected))
    for text, says in (("0 1 2", "16 tokens"), ("0 1 x", "'x' in it"), ("0 0 1", "2 is not among them")):
        file.write_text(text)
        check_error(generate(run, folder, "-c", 1, "--order", f"@{file}", "-o", target), says)
    check_error(generate(run, folder, "-c", 1, "--order", "@nowhere.txt", "-o", target), "no file nowhere.txt")


def test_batches_do_not_change_images(run, folder, tmp_path):
    for name, size in (("a.png", 32), ("b.png", 3)):
        assert generate(run, folder, "-c", 0, "-n", 8, "--batch-size", size, "-o", tmp_path / name)[0] == 0
    with Image.open(tmp_path / "a.png") as a, Image.open(tmp_path / "b.png") as b:
        assert np.array_equal(np.asarray(a), np.asarray(b))


def test_explicit_steps_and_causal(run, folder, tmp_path):
    options = ["--schedule", "1,5,10", "--attention", "causal", "--guidance-schedule", "constant"]
    assert run("generate", "-m", folder, "-c", 0, *options, "-o", tmp_path / "a.png")[0] == 0
    check_error(run("generate", "-m", folder, "-c", 0, "--schedule", "1,5", "-o", tmp_path / "b.png"), "[1, 5]", "16")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--class", "clas 3"], ["'clas 3' is unknown", "did you mean", "class 3"]),
        (["--class", "5"], ["class 5", "0 to 4"]),
        (["--class", "0", "--steps", "0"], ["steps is 0", "1 or more"]),
        (["--class", "0", "--steps", "-2"], ["steps is -2"]),
        (["--class", "0", "--steps", "many"], ["many"]),
        (["--class", "0", "--guidance", "nan"], ["guidance is nan"]),
        (["--class", "0", "--top-p", "0"], ["top_p is 0"]),
        (["--class", "0", "--top-p", "1.2"], ["top_p is 1.2", "0 < top_p <= 1"]),
        (["--class", "0", "--top-k", "0"], ["top_k is 0"]),
        (["--class", "0", "--temperature", "-1"], ["temperature is -1"]),
        (["--class", "0", "--schedule", "wave"], ["schedule is 'wave'", "arccos"]),
        (["--class", "0", "--order", "hilbert"], ["hilbert", "halton"]),
        (["--class", "0", "--seed", "-1"], ["seed is -1"]),
        (["--class", "0", "-n", "0"], ["images is 0"]),
        (["--class", "0", "--batch-size", "0"], ["batch_size is 0"]),
        (["--class", "0", "--device", "tpu9"], ["device is 'tpu9'"]),
        (["--class", "0", "--device", "meta"], ["device is 'meta'", "cuda:0 or mps"]),
        (["--class", "0", "--dtype", "int3"], ["precision is 'int3'"]),
        (["--class", "0", "--frobnicate"], ["--frobnicate"]),
        (["--class", "0", "--negative", "blur"], ["negative is 'blur'", "the model takes classes"]),
        (["--class", "0", "--kind", "sketch"], ["kind is 'sketch'"]),
        (["--class", "0", "--strength", "-1"], ["strength is -1"]),
        ([], ["--class"]),
    ],
)
def test_bad_input(run, folder, tmp_path, arguments, parts):
    check_error(run("generate", "--model", folder, *arguments, "-o", tmp_path / "out.png"), *parts)
    assert not (tmp_path / "out.png").exists()


def test_bad_places_to_write(run, folder, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    check_error(generate(run, folder, "-c", 0, "-o", tmp_path / "file" / "a.png"), "cannot be written", "is a file")
    for name in ("a.xyz", "a.psd", "a.xbm", "a.h5", "a.blp"):  # unknown to Pillow, or not for writing RGB
        check_error(generate(run, folder, "-c", 0, "-o", tmp_path / name), name, "known image ending")
    monkeypatch.setattr(os, "access", lambda *_: False)
    check_error(generate(run, folder, "-c", 0, "-o", tmp_path / "out"), "cannot be written", "no permission")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "model"]


@pytest.mark.parametrize("name", ["im[final].png", "a:cat:b.png", "[", "[x]"])
def test_names_are_printed_as_they_are(run, folder, tmp_path, name):
    assert generate(run, folder, "-c", 0, "-n", 1, "-o", tmp_path / name)[1].rstrip("/\n").endswith(f"/{name}")


def test_a_disk_that_fills_up_leaves_nothing_half_written(run, folder, tmp_path, monkeypatch):
    def full(self, path, **_):
        if isinstance(path, io.BytesIO):  # not on the disk
            return
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", full)
    check_error(generate(run, folder, "-c", 0, "-o", tmp_path / "a.png"), "No space left on device")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_broken_models(run, folder, tmp_path):
    output = ["-c", 0, "-o", tmp_path / "out.png"]
    check_error(generate(run, tmp_path / "nothing", *output), "nothing", "neither installed")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:999])
    check_error(generate(run, folder, *output), "model.safetensors", "cut short or damaged")
    (folder / "config.json").unlink()
    check_error(generate(run, folder, *output), "no config.json")
    assert not (tmp_path / "out.png").exists()


def test_convert_there_and_back(run, tmp_path):
    folder = tmp_path / "converted"
    code, out, _ = run(
        "convert", "model", GOLDEN / "arpg_a.pt", folder, "--heads", 2, "--grid", "4x4", "--license", "MIT"
    )
    assert code == 0
    assert str(folder) in out.replace("\n", "")
    assert run("convert", "tokenizer", GOLDEN / "vq_a.pt", folder)[0] == 0
    assert run("convert", "model", folder, tmp_path / "model.pt")[0] == 0
    assert run("convert", "tokenizer", folder, tmp_path / "tokenizer.pt")[0] == 0
    for ours, theirs in (("model.pt", "arpg_a.pt"), ("tokenizer.pt", "vq_a.pt")):
        a, b = read_published(tmp_path / ours), read_published(GOLDEN / theirs)
        b.pop("quantize.codebook_used", None)
        assert a.keys() == b.keys()
        assert all(torch.equal(a[key], b[key]) for key in a)
    # The averaged weights of a training checkpoint are half of the others here.
    assert run("convert", "model", GOLDEN / "arpg_a_training.pt", tmp_path / "ema", "--ema", "--heads", 2)[0] == 0
    assert run("convert", "model", tmp_path / "ema", tmp_path / "ema.pt")[0] == 0
    half, whole = read_published(tmp_path / "ema.pt"), read_published(GOLDEN / "arpg_a.pt")
    assert all(torch.equal(half[key], whole[key] / 2) for key in whole)


def test_storing_small(run, folder, tmp_path):
    assert run("convert", "store", folder, tmp_path / "small", "--as", "int8")[0] == 0
    sizes = [(path / "model.safetensors").stat().st_size for path in (tmp_path / "small", folder)]
    assert sizes[0] < 0.5 * sizes[1]
    assert generate(run, tmp_path / "small", "-c", 0, "-o", tmp_path / "a.png")[0] == 0
    check_error(run("convert", "store", folder, tmp_path / "x", "--as", "int3"), "'int3'", "float16")
    assert not (tmp_path / "x").exists()
    check_error(run("convert", "store", folder, tmp_path / "a.png"), "a.png is a file; choose another place")


def test_convert_errors(run, tmp_path):
    target = tmp_path / "folder"
    check_error(run("convert", "model", GOLDEN / "arpg_a.pt", target), "give --heads")
    check_error(run("convert", "model", GOLDEN / "vq_a.pt", target, "--heads", 2), "is a VQ tokenizer")
    check_error(run("convert", "tokenizer", GOLDEN / "arpg_a.pt", target), "is an ARPG checkpoint")
    check_error(run("convert", "model", GOLDEN / "arpg_a.pt", target, "--ema", "--heads", 2), "without --ema")
    check_error(run("convert", "model", GOLDEN / "arpg_a.pt", target, "--heads", 3), "width 64", "3 heads")
    check_error(run("convert", "model", GOLDEN / "arpg_a.pt", target, "--heads", 2, "--grid", "4by4"), "'4by4'")
    check_error(run("convert", "model", tmp_path / "none.pt", target), "does not exist")
    short = tmp_path / "short.pt"
    short.write_bytes((GOLDEN / "arpg_a.pt").read_bytes()[:5000])
    check_error(run("convert", "model", short, target, "--heads", 2), "short.pt", "cut short or damaged")
    names = tmp_path / "names.txt"
    names.write_text("one\ntwo\n")
    check_error(
        run("convert", "model", GOLDEN / "arpg_a.pt", target, "--heads", 2, "--classes", names), "names 2 classes"
    )
    assert not target.exists()


def test_info_and_classes(run, folder):
    code, out, _ = run("info")
    assert code == 0
    assert __version__ in out
    assert "arpg-xxl" in out
    code, out, _ = run("info", folder)
    assert code == 0
    for part in ("width 32", "shared_kv true", "MIT", "model.safetensors", "guidance_by_steps", "M parameters"):
        assert part in out
    code, out, _ = run("classes", "--model", folder)
    assert out.splitlines() == [f"    {i}  class {i}" for i in range(5)]
    assert run("classes", "s 3", "--model", folder)[1].split() == ["3", "class", "3"]
    check_error(run("classes", "zebra", "--model", folder), "'zebra'")
    check_error(run("pull", "arpg-m"), "'arpg-m'", "arpg-xl")


def test_grid_image(run, tmp_path):
    assert run("plan", "--grid", "6x8", "--steps", 5, "-o", tmp_path / "plan.png")[0] == 0
    with Image.open(tmp_path / "plan.png") as image:
        assert image.width > image.height > 200
    check_error(run("plan", "--grid", "0x8", "-o", tmp_path / "b.png"), "grid is 0x8")


def test_bugs_are_one_line_too(run, folder, tmp_path, monkeypatch):
    def bug(*_, **__):
        raise KeyError("oops")

    monkeypatch.setattr(Pipeline, "from_pretrained", bug)
    code, _, err = generate(run, folder, "-c", 0, "-o", tmp_path / "a.png")
    assert code == 1
    assert err.count("\n") == 1
    assert "ARPG_DEBUG" in err


def test_as_a_process(tmp_path):
    """The installed entry point, once for real."""
    result = subprocess.run(
        [sys.executable, "-m", "arpg", "generate", "--model", tmp_path / "x", "--class", "1"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr


def test_engines(run, folder, tmp_path):
    """Every available engine makes the same image; the others are an error of one line."""
    for engine in ("auto", "eager"):
        assert generate(run, folder, "-c", 1, "-n", 1, "--engine", engine, "-o", tmp_path / f"{engine}.png")[0] == 0
    pixels = [np.asarray(Image.open(tmp_path / f"{engine}.png")) for engine in ("auto", "eager")]
    assert np.array_equal(*pixels)
    check_error(generate(run, folder, "-c", 1, "--engine", "graph"), "engine is 'graph'", "CUDA graphs need a GPU")
    check_error(generate(run, folder, "-c", 1, "--engine", "fast"), "engine is 'fast'", "auto, eager, compiled, graph")
    check_error(run("serve", "--model", folder, "--engine", "graph"), "engine is 'graph'", "CUDA graphs need a GPU")
    if not torch.cuda.is_available():
        assert "--engine auto is eager here" in run("info")[1]
