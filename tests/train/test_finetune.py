"""`arpg finetune`: a folder of images becomes a model or an adapter, resumes, and explains what it cannot use."""

import json
import sys

import pytest
import torch
from PIL import Image

from arpg import InputError, ModelConfig, Pipeline, TokenizerConfig
from arpg.checkpoint import FolderConfig, write_folder
from arpg.classes import ClassNames
from arpg.data.images import open_images
from arpg.model import ARPG
from arpg.tokenizer import VQTokenizer
from arpg.train import finetune as module
from arpg.train import report
from arpg.train.finetune import choose_batch, choose_steps, finetune, hold_out
from arpg.train.model import ModelTraining
from support.paths import ROOT
from support.small import FakeEncoder, controlled_model, small_tokenizer

sys.path.insert(0, str(ROOT / "examples"))
from shapes import write_shapes

TOKENIZER = TokenizerConfig(
    channels=32, multipliers=(1, 1, 1), res_blocks=1, z_channels=8, codebook_size=24, codebook_dim=4
)
CONFIG = ModelConfig(width=32, num_heads=2, pass1_layers=1, pass2_layers=1, vocab_size=24, num_classes=2, grid=(4, 4))
QUICK = ("run.steps=12", "run.validate_every=4", "run.sample_every=12", "optim.lr=1e-2", "run.precision=float32")


@pytest.fixture(autouse=True)
def no_plots(monkeypatch):
    """Plots and TensorBoard files are slow to write."""
    monkeypatch.setattr(report, "plot_losses", lambda folder: None)
    monkeypatch.setattr(report, "_tensorboard", lambda folder: None)


def write_base(folder, config=CONFIG, classes=("star, pentagram", "Banana")):
    """A base of random weights for images of 16 x 16 pixels."""
    torch.manual_seed(0)
    tokenizer, model = VQTokenizer(TOKENIZER), ARPG(config).init_weights(seed=0)
    torch.nn.init.normal_(model.head.weight, std=0.3)
    names = None if config.text is not None else ClassNames(classes)
    described = FolderConfig(model=config, tokenizer=TOKENIZER, classes=names, license="MIT")
    write_folder(folder, described, model=model.state_dict(), tokenizer=tokenizer.state_dict())
    return str(folder)


@pytest.fixture
def base(tmp_path):
    return write_base(tmp_path / "base")


@pytest.fixture
def images(tmp_path):
    write_shapes(tmp_path / "shapes", count=6)
    return tmp_path / "shapes"


def losses(folder, key="validation loss"):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {entry["step"]: entry[key] for entry in lines if key in entry}


def test_a_folder_becomes_a_model(base, images, tmp_path):
    done = finetune(images, tmp_path / "mine", base=base, overrides=QUICK, device="cpu")
    measured = losses(tmp_path / "mine")
    assert done.base_loss == measured[0]
    assert done.loss == measured[done.step] == min(measured.values()) < done.base_loss
    pipe = Pipeline.from_pretrained(done.path, device="cpu")
    assert pipe.classes.lines == ("disc", "star", "triangle")
    assert pipe.generate("disc", steps=4)[0].size == (16, 16)
    assert (pipe.license, pipe.model.config.num_classes) == ("MIT", 3)
    assert (tmp_path / "mine" / "samples-0000012.png").exists()
    assert done.command == f"arpg generate --model {done.path} --class disc -n 4 -o mine.png"
    # Called again, it has nothing left to do; with other settings it does not mix two runs.
    assert finetune(images, tmp_path / "mine", base=base, overrides=QUICK, device="cpu") == done
    with pytest.raises(InputError, match=r"holds a run with other lora, set; choose another --output"):
        finetune(images, tmp_path / "mine", base=base, lora=2, device="cpu")


def test_a_folder_becomes_an_adapter(base, images, tmp_path):
    done = finetune(images, tmp_path / "mine", base=base, lora=4, overrides=QUICK, device="cpu")
    assert done.loss < done.base_loss
    assert done.path == tmp_path / "mine" / "adapter_model.safetensors"
    assert "--lora" in done.command
    pipe = Pipeline.from_pretrained(base, device="cpu")
    before = {key: tensor.clone() for key, tensor in pipe.model.state_dict().items()}
    pipe.load_lora(done.path)
    # "star" is a class of the base by its name; the others come after those of the base.
    assert pipe.classes.lines == ("star, pentagram", "Banana", "disc", "triangle")
    after = pipe.model.state_dict()
    first = CONFIG.first_class_id
    assert not torch.equal(after["embedding.weight"][first], before["embedding.weight"][first])  # star
    assert torch.equal(after["embedding.weight"][:first], before["embedding.weight"][:first])  # codes and [MASK]
    assert torch.equal(after["embedding.weight"][first + 1], before["embedding.weight"][first + 1])  # Banana
    assert torch.equal(after["head.weight"], before["head.weight"])


def test_the_adapter_in_a_pipeline_has_the_loss_that_training_measured(base, images, tmp_path):
    """The oracle is the plain teacher-forced loss of the pipeline's model on the held-out tokens."""
    from arpg.data.dataset import TokenBatches, open_dataset
    from arpg.model import class_condition

    done = finetune(images, tmp_path / "mine", base=base, lora=4, overrides=QUICK, device="cpu")
    pipe = Pipeline.from_pretrained(base, device="cpu")
    pipe.load_lora(done.path)
    dataset = open_dataset(str(tmp_path / "mine" / "tokens" / "validation"), pipe.model.config, torch.device("cpu"))
    recipe = json.loads((tmp_path / "mine" / "finetune.json").read_text())["recipe"]
    batch = TokenBatches(
        dataset,
        batch_size=recipe["run"]["batch_size"],
        parts=1,
        num_classes=4,
        label_drop=0.0,
        seed=0,
        device=torch.device("cpu"),
    ).batch(0, 0)
    with torch.no_grad():
        logits = pipe.model(batch.ids_BN, batch.order_BN, class_condition(pipe.model, batch.labels_B))
    target = batch.ids_BN.gather(1, batch.order_BN)
    found = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
    assert float(found) == pytest.approx(done.loss, abs=1e-4)


@pytest.mark.parametrize("lora", [None, 2])
def test_an_interrupted_run_continues_by_the_same_command(base, images, tmp_path, monkeypatch, lora):
    def run(name):
        return finetune(images, tmp_path / name, base=base, lora=lora, overrides=QUICK, device="cpu")

    whole = run("whole")

    class Killed(BaseException):
        pass

    step = ModelTraining.step

    def dies(self, number):
        if number == 10:
            self.snapshots.finish()
            raise Killed
        return step(self, number)

    monkeypatch.setattr(ModelTraining, "step", dies)
    with pytest.raises(Killed):
        run("mine")
    monkeypatch.setattr(ModelTraining, "step", step)
    monkeypatch.setattr(module, "MAX_BATCH", {"cpu": 2})  # the settings that were chosen at first count
    again = run("mine")
    assert (again.loss, again.step) == (whole.loss, whole.step)
    assert losses(tmp_path / "mine") == losses(tmp_path / "whole")


def test_captions_are_trained_with_a_text_base(tmp_path, monkeypatch):
    from arpg.config import TextConfig

    text = TextConfig("minilm", width=12, max_tokens=7)
    base = write_base(tmp_path / "base", ModelConfig(**{**CONFIG.__dict__, "num_classes": 0, "text": text}))
    monkeypatch.setattr(module, "open_encoder", lambda config, device: FakeEncoder())
    write_shapes(tmp_path / "shapes", count=5, captions=True)
    done = finetune(tmp_path / "shapes", tmp_path / "mine", base=base, lora=2, overrides=QUICK, device="cpu")
    assert done.loss < done.base_loss
    assert "--prompt 'a disc'" in done.command
    assert (tmp_path / "mine" / "samples-0000012.png").exists()
    write_shapes(tmp_path / "classes", count=2)
    with pytest.raises(InputError, match=r"has no captions.*NAME.txt"):
        finetune(tmp_path / "classes", tmp_path / "other", base=base, device="cpu")


def test_captions_beside_images(tmp_path):
    for name in ("a", "b"):
        Image.new("RGB", (8, 8)).save(tmp_path / f"{name}.png")
    (tmp_path / "notes.txt").write_text("not a caption")
    assert open_images(tmp_path).captions is None
    (tmp_path / "a.txt").write_text(" a red\n square ")
    with pytest.raises(InputError, match=r"1 images have none, like b\.png"):
        open_images(tmp_path)
    (tmp_path / "b.txt").write_text("two")
    assert open_images(tmp_path).captions == ("a red square", "two")
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").unlink()
    rows = [{"file_name": f"{name}.png", "text": name} for name in ("b", "a")]
    (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert open_images(tmp_path).captions == ("a", "b")


def test_a_tenth_is_held_out_by_name(images, tmp_path):
    everything = open_images(images)
    train, validation = hold_out(everything)
    assert (len(train), len(validation)) == (16, 2)
    assert set(train.names) | set(validation.names) == set(everything.names)
    assert train.classes == validation.classes == everything.classes
    shuffled = everything.only(list(reversed(range(len(everything)))))
    assert set(hold_out(shuffled)[1].names) == set(validation.names)
    with pytest.raises(InputError, match="expected 2 or more"):
        hold_out(everything.only([0]))


def test_loose_images_are_one_class_named_by_the_folder(base, tmp_path):
    write_shapes(tmp_path / "kite", count=2, captions=True)
    for path in (tmp_path / "kite").glob("*.txt"):
        path.unlink()
    done = finetune(tmp_path / "kite", tmp_path / "mine", base=base, overrides=QUICK, device="cpu")
    assert Pipeline.from_pretrained(done.path, device="cpu").classes.lines == ("kite",)


def test_choices_follow_images_and_device(monkeypatch):
    cpu = torch.device("cpu")
    assert [choose_batch(CONFIG, n, cpu, adapter=True) for n in (1, 5, 54, 10_000)] == [1, 4, 8, 8]
    assert choose_steps(54, 8) == 108
    assert choose_steps(3, 2) == module.MIN_STEPS
    assert choose_steps(5000, 32) == (16 * 1000 + 4 * 4000) // 32
    monkeypatch.setattr(module, "budget_bytes", lambda device: module.training_bytes(CONFIG, 2, precision="float32"))
    monkeypatch.setattr(module, "training_precision", lambda precision, device: "float32")
    assert choose_batch(CONFIG, 54, cpu, adapter=False) == 2


def test_devices_that_cannot_train(base, images, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    with pytest.raises(InputError, match="device is 'mps', which cannot train; expected auto, cpu or cuda"):
        finetune(images, tmp_path / "run", base=base, device="mps")


def test_bases_that_cannot_be_used(images, tmp_path):
    Pipeline(controlled_model(), small_tokenizer()).save_pretrained(tmp_path / "controlled")
    with pytest.raises(InputError, match="takes condition images"):
        finetune(images, tmp_path / "mine", base=str(tmp_path / "controlled"), device="cpu")
    with pytest.raises(InputError, match="'nothing' is neither"):
        finetune(images, tmp_path / "mine", base="nothing", device="cpu")
    assert not (tmp_path / "mine").exists()
