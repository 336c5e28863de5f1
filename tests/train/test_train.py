"""Training runs: they learn, continue exactly where they were stopped, and do not depend on the number of processes."""

import gc
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from arpg import InputError, Pipeline, load_model
from arpg.checkpoint import FolderConfig, load_tokenizer, write_folder
from arpg.data.tokens import TokenWriter
from arpg.storage import as_path, list_files
from arpg.train import loop, report
from arpg.train.distributed import World, init_distributed, shutdown_distributed
from arpg.train.loop import TrainingStoppedError, run_training
from arpg.train.model import ModelTraining, train_model
from arpg.train.recipe import ModelRecipe, TokenizerRecipe, read_recipe
from arpg.train.tokenizer import TokenizerTraining, train_tokenizer
from support.paths import ROOT
from support.small import small_tokenizer

RECIPE = """
label_drop = 0.2
seed = 3
[model]
width = 32
num_heads = 2
pass1_layers = 2
pass2_layers = 2
vocab_size = 24
num_classes = 5
grid = [4, 4]
dropout = 0.1
[data]
train = "{tokens}"
validation = "{tokens}"
[optim]
lr = 1e-2
warmup = 0.1
ema = 0.9
[run]
steps = 12
batch_size = 8
precision = "float32"
log_every = 1
validate_every = 6
sample_every = 12
save_every = 4
[sampling]
steps = 4
"""


@pytest.fixture(autouse=True)
def no_plots(request, monkeypatch):
    """Plots and TensorBoard files are slow to write, and two tests need them."""
    if request.node.name not in ("test_it_learns_and_leaves_a_model", "test_a_signal_in_the_first_step"):
        monkeypatch.setattr(report, "plot_losses", lambda folder: None)
        monkeypatch.setattr(report, "_tensorboard", lambda folder: None)


@pytest.fixture
def recipe(tmp_path):
    """A recipe file, and tokens in which each class repeats one code."""
    rng = np.random.default_rng(0)
    labels = np.arange(20) % 5
    ids = np.where(rng.random((20, 2, 16)) < 0.9, labels[:, None, None], rng.integers(24, size=(20, 2, 16)))
    writer = TokenWriter(tmp_path / "tokens", grid=(4, 4), vocab_size=24, classes=tuple("abcde"), views=2)
    writer.add(ids.astype(np.uint16), labels)
    writer.close()
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.format(tokens=tmp_path / "tokens"))
    return path


def metrics(folder, key="loss"):
    lines = [json.loads(line) for line in (as_path(folder) / "metrics.jsonl").read_text().splitlines()]
    return {entry["step"]: entry[key] for entry in lines if key in entry}


def train(recipe, folder, *overrides, resume=False):
    return train_model(read_recipe(recipe, ModelRecipe, overrides), as_path(folder), resume=resume, device="cpu")


def torchrun(count):
    """The command that starts so many processes of what follows it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={count}", f"--master-port={port}"]


def popen(command):
    """Start a command on one thread, with the path of these tests."""
    path = os.pathsep.join([str(ROOT / "tests"), *sys.path])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def process(recipe, folder, *overrides, count=1):
    """`arpg train` in processes of its own; under torchrun when there are several."""
    command = torchrun(count) if count > 1 else [sys.executable]
    command += ["-m", "arpg", "train", str(recipe), "-o", str(folder), "--device", "cpu"]
    return popen(command + [part for override in overrides for part in ("--set", override)])


def finish(started, code=0):
    out, _ = started.communicate(timeout=170)
    assert started.returncode == code, out
    return out


def test_it_learns_and_leaves_a_model(recipe, tmp_path):
    tokenizer = small_tokenizer()
    write_folder(tmp_path / "tok", FolderConfig(tokenizer=tokenizer.config), tokenizer=tokenizer.state_dict())
    folder = train(recipe, tmp_path / "run", "run.steps=120", f"tokenizer={tmp_path / 'tok'}", "run.sample_every=120")
    losses = metrics(tmp_path / "run")
    assert losses[1] == pytest.approx(np.log(24), abs=0.01)  # a head of zeros
    assert losses[120] < 1.5
    validation = metrics(tmp_path / "run", "validation loss")
    assert validation[120] < validation[6] < np.log(24)
    pipe = Pipeline.from_pretrained(folder, device="cpu")
    assert pipe.classes.lines == ("a", "b", "c", "d", "e")
    assert pipe.generate("c", steps=4)[0].size == (8, 8)
    for made in ("loss.png", "samples-0000120.png", "tensorboard"):
        assert (tmp_path / "run" / made).exists(), made
    # It generates what it was trained on: class c is code 2 almost everywhere.
    step = list(pipe.generate_task("c", num_images=8, steps=16, guidance=1.0).steps())[-1]
    assert (step.ids_BN == 2).float().mean() > 0.4


def test_the_average_is_what_is_exported_and_validated(recipe, tmp_path):
    world = init_distributed("cpu")
    training = ModelTraining(read_recipe(recipe, ModelRecipe), tmp_path / "run", world)
    for step in range(6):
        training.step(step)
    averages = {name.removeprefix("model."): t.clone() for name, t in training.ema.state_dict().items()}
    live = {name: t.clone() for name, t in training.objective.model.state_dict().items()}
    exported = load_model(training.export()).state_dict()
    with_average = training.validate()["validation loss"]
    with training.ema.swapped_in():  # swaps the live weights into the average's place
        with_live = training.validate()["validation loss"]
    training.snapshots.finish()
    shutdown_distributed()
    assert all(torch.equal(exported[key], averages[key]) for key in exported)
    assert not torch.equal(exported["head.weight"], live["head.weight"])
    assert with_average != pytest.approx(with_live, abs=1e-4)


def test_without_an_average_the_weights_themselves_are_exported(recipe, tmp_path):
    """`optim.ema = 0`: no copy is kept, none is saved, and an interrupted run continues."""
    options = ("optim.ema=0", "optim.schedule=constant", "optim.warmup=0")
    train(recipe, tmp_path / "run", *options, "run.steps=4")
    train(recipe, tmp_path / "run", *options, resume=True)
    train(recipe, tmp_path / "through", *options)
    assert metrics(tmp_path / "run") == metrics(tmp_path / "through")
    world = init_distributed("cpu")
    training = ModelTraining(read_recipe(recipe, ModelRecipe, options), tmp_path / "run", world)
    assert training.restore() == 12
    shutdown_distributed()
    assert training.state()["ema"] == {}
    exported, live = load_model(tmp_path / "run" / "model").state_dict(), training.objective.model.state_dict()
    assert all(torch.equal(exported[key], live[key]) for key in exported)


def test_validation_is_causal_and_without_dropout(recipe, tmp_path):
    """The same number twice, and the plain teacher-forced loss of the averaged model in eval mode."""
    from arpg.model import class_condition

    world = init_distributed("cpu")
    training = ModelTraining(read_recipe(recipe, ModelRecipe), tmp_path / "run", world)
    for step in range(3):
        training.step(step)
    first, second = training.validate(), training.validate()
    model = load_model(training.export())
    batches = training._batches(training.validation, label_drop=0.0)
    expected = []
    with torch.no_grad():
        for step in range(2):
            batch = batches.batch(step, 0)
            logits = model(batch.ids_BN, batch.order_BN, class_condition(model, batch.labels_B))
            targets = batch.ids_BN.gather(1, batch.order_BN)
            expected.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()))
    shutdown_distributed()
    assert first == second
    assert first["validation loss"] == pytest.approx(float(torch.stack(expected).mean()), abs=1e-5)


def test_accumulation_changes_nothing(recipe, tmp_path):
    train(recipe, tmp_path / "one")
    train(recipe, tmp_path / "four", "run.accumulate=4")
    a, b = metrics(tmp_path / "one"), metrics(tmp_path / "four")
    assert list(a.values()) == pytest.approx(list(b.values()), abs=1e-4)


@pytest.fixture
def scratch(tmp_path, monkeypatch):
    """The folder of temporary files of this process and of those it starts."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


@pytest.mark.parametrize("place", ["disk", "object store"])
def test_an_interrupted_run_continues_exactly(recipe, tmp_path, monkeypatch, place, scratch, request):
    """Killed between two saves (nothing is flushed, no handler runs), then resumed: loss for loss the same."""
    train(recipe, tmp_path / "whole")
    run = tmp_path / "run" if place == "disk" else as_path(f"{request.getfixturevalue('bucket')}/run")

    class Killed(BaseException):
        pass

    step = ModelTraining.step

    def dies(self, number):
        if number == 6:  # after the snapshot of step 4
            self.snapshots.finish()
            raise Killed
        return step(self, number)

    with monkeypatch.context() as patch:
        patch.setattr(ModelTraining, "step", dies)
        with pytest.raises(Killed):
            train(recipe, run)
    with pytest.raises(InputError, match="continue it with --resume"):
        train(recipe, run)
    train(recipe, run, resume=True)
    assert metrics(run) == metrics(tmp_path / "whole")
    assert metrics(run, "validation loss") == metrics(tmp_path / "whole", "validation loss")
    a, b = (load_model(folder / "model").state_dict() for folder in (run, tmp_path / "whole"))
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert sorted(list_files(run)) == sorted(list_files(tmp_path / "whole"))
    gc.collect()  # the run that was killed; its folder goes with it
    assert not list(scratch.glob("arpg-*"))


@pytest.mark.slow
def test_two_processes_save_to_an_object_store_and_one_goes_on(recipe, tmp_path, bucket, scratch, faults):
    """Each process uploads its own shards, some of them more than once; all are fetched by the one that continues."""
    options = ("run.validate_every=12", "optim.lr=3e-4")
    faults.errors, faults.truncated_uploads = 2, 2
    finish(process(recipe, f"{bucket}/run", *options, "run.parallel=fsdp", "run.steps=8", count=2))
    shards = [name for name in list_files(as_path(f"{bucket}/run")) if name.startswith("snapshots/step-00000008/__")]
    assert [name.rpartition("/")[2] for name in sorted(shards)] == ["__0_0.distcp", "__1_0.distcp"]
    train(recipe, f"{bucket}/run", *options, resume=True)
    train(recipe, tmp_path / "whole", *options)
    a, b = metrics(f"{bucket}/run"), metrics(tmp_path / "whole")
    assert list(a) == list(b)
    assert [a[step] for step in range(9, 13)] == pytest.approx([b[step] for step in range(9, 13)], abs=5e-2)
    assert not list(scratch.glob("arpg-*"))


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_signals(recipe, tmp_path, number):
    """A real process, signalled in the middle of the run; resumed, it ends as if nothing had happened."""
    options = ("run.steps=150", "run.save_every=10", "run.validate_every=150", "run.sample_every=150")
    started = process(recipe, tmp_path / "run", *options)
    deadline = time.monotonic() + 120
    while not list((tmp_path / "run").glob("snapshots/step-*0")) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(started.pid, number)
    out, _ = started.communicate(timeout=100)
    if number == signal.SIGTERM:
        assert started.returncode == 2
        assert "everything is saved, continue with --resume" in out
        assert load_model(tmp_path / "run" / "model").config.width == 32  # the weights so far
    else:
        assert started.returncode == -signal.SIGKILL
    assert max(metrics(tmp_path / "run")) < 150
    train(recipe, tmp_path / "run", *options, resume=True)
    train(recipe, tmp_path / "whole", *options)
    a, b = metrics(tmp_path / "run"), metrics(tmp_path / "whole")
    assert a.keys() == b.keys()
    assert list(a.values()) == pytest.approx(list(b.values()), abs=2e-3)  # the first process ran on one thread
    assert a[150] == pytest.approx(b[150], abs=2e-3)


def test_a_signal_ends_a_long_step_at_once(recipe, tmp_path, monkeypatch):
    """While gradients are computed (or compiled) nothing has changed yet, so the step is abandoned."""
    loss = ModelTraining.loss
    calls = []

    def signalled(self, batch):
        calls.append(1)
        if len(calls) == 6:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)  # the handler runs here
        return loss(self, batch)

    monkeypatch.setattr(ModelTraining, "loss", signalled)
    began = time.monotonic()
    with pytest.raises(InputError, match="stopped by a signal at step 5; everything is saved, continue with --resume"):
        train(recipe, tmp_path / "run")
    assert time.monotonic() - began < 50
    calls.extend([1] * 10)
    train(recipe, tmp_path / "run", resume=True)
    monkeypatch.undo()
    train(recipe, tmp_path / "whole")
    found, expected = metrics(tmp_path / "run"), metrics(tmp_path / "whole")
    assert {step: found[step] for step in (11, 12)} == {step: expected[step] for step in (11, 12)}


def test_a_signal_in_the_first_step(recipe, tmp_path, monkeypatch):
    """There are no metrics to plot yet; the error is still the one about the signal."""
    monkeypatch.setattr(ModelTraining, "loss", lambda self, batch: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(InputError, match="before the first step was finished; there is nothing to save"):
        train(recipe, tmp_path / "run")
    assert not list((tmp_path / "run").glob("snapshots/step-*"))


def test_a_run_is_never_silent(recipe, tmp_path, caplog):
    """`log_every` may be longer than the run: lines come by the clock as well, with the mean loss so far."""
    caplog.set_level("INFO")
    train(recipe, tmp_path / "run", "run.log_every=1000", "run.steps=3", "run.progress_s=0")
    lines = [line for line in caplog.messages if line.startswith("step")]
    assert [line.split()[1] for line in lines] == ["1/3", "2/3", "3/3", "3/3"]  # the last: validation
    assert all("loss" in line for line in lines)
    assert list(metrics(tmp_path / "run")) == [3]


def test_early_stop_exports_the_best(recipe, tmp_path, monkeypatch):
    """The loss on the validation set falls, then rises: the run ends, and the weights of the minimum are exported."""
    options = ("run.patience=2", "run.validate_every=2", "run.steps=40", "run.save_every=2")
    measured, kept = iter([5.0, 4.0, 3.0, 3.5, 3.2, 9.0]), {}

    def validate(self):
        loss = next(measured)
        kept[loss] = self.averaged_weights()
        return {"validation loss": loss}

    monkeypatch.setattr(ModelTraining, "validate", validate)
    folder = train(recipe, tmp_path / "run", *options)
    assert metrics(tmp_path / "run", "validation loss") == {0: 5.0, 2: 4.0, 4: 3.0, 6: 3.5, 8: 3.2}
    exported = load_model(folder).state_dict()
    assert all(torch.equal(exported[key], kept[3.0][key]) for key in exported)
    # A run that has ended early does not go on.
    train(recipe, tmp_path / "run", *options, resume=True)
    assert max(metrics(tmp_path / "run")) == 8
    # A loss that is not a number is no minimum.
    measured = iter([5.0, float("nan"), 6.0])
    folder = train(recipe, tmp_path / "nan", *options)
    exported = load_model(folder).state_dict()
    assert all(torch.equal(exported[key], kept[5.0][key]) for key in exported)


def test_a_time_limit_ends_a_run_with_its_model(recipe, tmp_path, monkeypatch):
    """The clock moves a second per step: after half a minute, 31 steps of 60 are done, saved and exported."""
    seconds = itertools.count(1)
    step = ModelTraining.step
    clock = types.SimpleNamespace(monotonic=lambda: clock.now, now=0.0)
    monkeypatch.setattr(loop, "time", clock)

    def counted(self, index):
        clock.now = float(next(seconds))
        return step(self, index)

    monkeypatch.setattr(ModelTraining, "step", counted)
    options = ("run.steps=60", "run.save_every=60", "run.validate_every=60", "run.sample_every=60", "optim.ema=0")
    with pytest.raises(TrainingStoppedError, match=r"stopped after run.max_minutes = 0.5 at step 31; every"):
        train(recipe, tmp_path / "run", *options, "run.max_minutes=0.5")
    assert max(metrics(tmp_path / "run")) == 31
    (snapshot,) = (tmp_path / "run" / "snapshots").glob("step-*")
    assert snapshot.name.endswith("31")
    stopped = load_model(tmp_path / "run" / "model").state_dict()
    train(recipe, tmp_path / "whole", *options)
    train(recipe, tmp_path / "run", *options, resume=True)
    ended, whole = (load_model(tmp_path / name / "model").state_dict() for name in ("run", "whole"))
    assert all(torch.equal(ended[key], whole[key]) for key in whole)
    assert not torch.equal(stopped["head.weight"], whole["head.weight"])
    with pytest.raises(InputError, match="max_minutes is -1"):
        train(recipe, tmp_path / "no", "run.max_minutes=-1")


def two_processes(recipe, folder):
    """What the next test runs under torchrun: both ways to distribute, in the same processes."""
    world = init_distributed("cpu")
    for strategy in ("ddp", "fsdp"):
        read = read_recipe(Path(recipe), ModelRecipe, [f"run.parallel={strategy}", "run.accumulate=2"])
        run_training(ModelTraining(read, Path(folder) / strategy, world), resume=False)
    shutdown_distributed()


def test_two_processes_give_the_losses_of_one(recipe, tmp_path):
    """Permutations, label drop and dropout belong to the sample, so splitting the batch changes nothing."""
    two = popen([*torchrun(2), __file__, str(recipe), str(tmp_path)])
    train(recipe, tmp_path / "one")
    finish(two)
    expected = load_model(tmp_path / "one" / "model").state_dict()
    for strategy in ("ddp", "fsdp"):
        for key in ("loss", "validation loss"):
            a, b = metrics(tmp_path / "one", key), metrics(tmp_path / strategy, key)
            assert a.keys() == b.keys()
            assert list(a.values()) == pytest.approx(list(b.values()), abs=1e-4)
        found = load_model(tmp_path / strategy / "model").state_dict()
        assert all(torch.allclose(found[key], expected[key], atol=1e-3) for key in expected)


def test_resuming_from_nothing_is_starting(recipe, tmp_path):
    train(recipe, tmp_path / "new")
    train(recipe, tmp_path / "resumed", resume=True)
    assert metrics(tmp_path / "resumed") == metrics(tmp_path / "new")


def workers_of(agent):
    """The processes that a torchrun agent has started."""
    return [int(pid) for pid in Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()]


@pytest.mark.slow
def test_a_killed_worker_brings_the_job_back(recipe, tmp_path, monkeypatch):
    """Two agents as two machines, two processes each, sharded within a machine; one process is killed."""
    options = ["run.steps=40", "run.save_every=5", "run.log_every=1", "run.validate_every=40", "run.sample_every=40"]
    options.append("optim.lr=3e-4")  # large steps would blow up the rounding of sums over processes
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", "--max-restarts=3"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=job", "-m", "arpg", "train"]
    command += [str(recipe), "-o", str(tmp_path / "run"), "--device", "cpu", "--resume"]
    overrides = [part for option in [*options, "run.parallel=hsdp"] for part in ("--set", option)]
    # With a shared store the workers of the other agent wait under the keys of the first attempt.
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    agents = [popen(command + overrides) for _ in range(2)]
    deadline = time.monotonic() + 300
    while not list((tmp_path / "run").glob("snapshots/step-*5")) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(workers_of(agents[1])[0], signal.SIGKILL)
    for agent in agents:
        out, _ = agent.communicate(timeout=500)
        assert agent.returncode == 0, out
    train(recipe, tmp_path / "one", *options)
    expected, found = (metrics(tmp_path / name) for name in ("one", "run"))
    assert list(found) == list(expected)
    assert list(found.values()) == pytest.approx(list(expected.values()), abs=1e-4)


@pytest.mark.slow
def test_two_processes_stop_together_and_one_goes_on(recipe, tmp_path):
    """Sharded snapshots of two processes are continued by one."""
    options = ("run.steps=120", "run.save_every=10", "run.validate_every=120", "run.sample_every=120", "optim.lr=3e-4")
    started = process(recipe, tmp_path / "run", *options, "run.parallel=fsdp", count=2)
    deadline = time.monotonic() + 120
    while not list((tmp_path / "run").glob("snapshots/step-*0")) and time.monotonic() < deadline:
        time.sleep(0.05)
    started.send_signal(signal.SIGTERM)
    started.communicate(timeout=100)
    reached = max(metrics(tmp_path / "run"))
    assert 10 <= reached < 120
    train(recipe, tmp_path / "run", *options, resume=True)
    train(recipe, tmp_path / "whole", *options)
    a, b = metrics(tmp_path / "run"), metrics(tmp_path / "whole")
    assert a.keys() == b.keys()
    assert list(a.values()) == pytest.approx(list(b.values()), abs=5e-3)


def test_a_loss_that_is_not_finite_stops_the_run(recipe, tmp_path, monkeypatch):
    loss = ModelTraining.loss

    def poisoned(self, batch):
        value = loss(self, batch)
        self.count = getattr(self, "count", 0) + 1
        return value * float("nan") if self.count == 6 else value

    monkeypatch.setattr(ModelTraining, "loss", poisoned)
    with pytest.raises(
        InputError, match=r"the loss of step 5 is not finite; its batch is the images \d+, .* of .*tokens"
    ):
        train(recipe, tmp_path / "run", "run.log_every=4", "run.validate_every=12")
    monkeypatch.undo()
    # The snapshot of step 4 is good, so the run can go on.
    train(recipe, tmp_path / "run", resume=True)
    assert np.isfinite(list(metrics(tmp_path / "run").values())).all()


def test_a_truncated_snapshot_is_reported_and_the_one_before_it_used(recipe, tmp_path, caplog):
    train(recipe, tmp_path / "run")
    newest = sorted((tmp_path / "run" / "snapshots").glob("step-*"))[-1]
    largest = max(newest.glob("*.distcp"), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:100])
    before = metrics(tmp_path / "run")
    train(recipe, tmp_path / "run", resume=True)
    assert largest.name in caplog.text
    assert metrics(tmp_path / "run") == before


def test_data_that_does_not_fit_is_named(recipe, tmp_path):
    for override, message in (
        ("model.num_classes=4", "5 classes; model.num_classes is 4"),
        ("model.num_classes=9", "5 classes; model.num_classes is 9; set it to 5"),  # rows that nothing trains
        ("model.grid=[4, 5]", "4x4 grid; model.grid is 4x5"),
        ("model.vocab_size=30", "vocab|codes"),
        ("data.train=nowhere", "nowhere"),
        ("run.parallel=ddp", None),
    ):
        if message is None:
            train(recipe, tmp_path / "run", override)  # ddp with one process is fine
            continue
        with pytest.raises(InputError, match=message):
            train(recipe, tmp_path / "bad", override)


TOKENIZER = """
[tokenizer]
channels = 32
multipliers = [1, 1]
res_blocks = 1
z_channels = 8
codebook_size = 32
codebook_dim = 4
[data]
size = 24
sources = [{{ path = "{images}" }}]
validation = [{{ path = "{images}" }}]
[loss]
lpips_weights = "{lpips}"
adversarial = 0.1
adversarial_start = 0.5
restart_every = 3
[optim]
lr = 2e-3
warmup = 0.1
ema = 0.9
[run]
steps = 8
batch_size = 4
precision = "float32"
log_every = 1
validate_every = 4
sample_every = 8
save_every = 4
"""


@pytest.fixture
def tokenizer_recipe(tmp_path):
    from PIL import Image
    from safetensors.torch import save_file

    from arpg.tokenizer.losses import LPIPS

    torch.manual_seed(0)
    save_file(LPIPS((4, 4, 4, 4, 8, 8, 8, 8, 8, 8, 8, 8, 8)).state_dict(), tmp_path / "lpips.safetensors")
    rng = np.random.default_rng(0)
    for name in "ab":
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(4):
            flat = np.full((40, 40, 3), rng.integers(255, size=3), np.uint8)
            Image.fromarray(flat).save(tmp_path / "images" / name / f"{i}.png")
    path = tmp_path / "tokenizer.toml"
    path.write_text(TOKENIZER.format(images=tmp_path / "images", lpips=tmp_path / "lpips.safetensors"))
    return path


@pytest.mark.slow
def test_tokenizer_learns_with_all_its_terms(tokenizer_recipe, tmp_path):
    recipe = read_recipe(tokenizer_recipe, TokenizerRecipe, ["run.steps=40", "run.validate_every=10"])
    folder = train_tokenizer(recipe, tmp_path / "run", device="cpu")
    mse = metrics(tmp_path / "run", "mse")
    assert mse[40] < 0.75 * mse[1]
    assert metrics(tmp_path / "run", "images psnr")[20] > metrics(tmp_path / "run", "images psnr")[10]
    assert min(metrics(tmp_path / "run", "discriminator")) == 21
    assert (tmp_path / "run" / "samples-0000040.png").exists()
    assert (folder / "tokenizer.safetensors").is_file()


def test_decoder_only_training_keeps_every_token(tokenizer_recipe, tmp_path):
    """An adversarial phase with an adaptive weight: encoder and codebook are untouched, the decoder is not."""
    start = train_tokenizer(read_recipe(tokenizer_recipe, TokenizerRecipe), tmp_path / "start", device="cpu")
    phase = [
        f"init_from={start}",
        "decoder_only=true",
        "loss.adaptive=true",
        "loss.adversarial=0.8",
        "loss.adversarial_start=0.0",
        "loss.restart_every=0",
        "optim.weight_decay=0.5",
    ]
    recipe = read_recipe(tokenizer_recipe, TokenizerRecipe, phase)
    end = train_tokenizer(recipe, tmp_path / "end", device="cpu")
    before, after = (load_tokenizer(folder).state_dict() for folder in (start, end))
    frozen = ("encoder.", "quant_conv.", "quantize.")
    for key, tensor in before.items():
        assert torch.equal(after[key], tensor) == key.startswith(frozen), key
    weights = metrics(tmp_path / "end", "adversarial weight")
    assert len(weights) == 8
    assert min(weights.values()) > 0
    assert len(set(weights.values())) > 4  # it follows the gradients
    for change, message in (("init_from=", "name it in init_from"), ("loss.restart_every=5", "it must be 0")):
        changed = [each for each in phase if not each.startswith(change.split("=")[0])]
        with pytest.raises(InputError, match=message):
            read_recipe(tokenizer_recipe, TokenizerRecipe, changed + ([] if change.endswith("=") else [change]))


@pytest.mark.parametrize("adaptive", [False, True])
def test_the_losses_of_a_tokenizer_reach_its_weights_as_one_sum(tokenizer_recipe, tmp_path, monkeypatch, adaptive):
    """Gradients that are summed at the pixels equal those of one backward pass from the sum of all losses."""
    settings = ["optim.clip=0", "loss.adversarial_start=0", f"loss.adaptive={str(adaptive).lower()}"]
    recipe = read_recipe(tokenizer_recipe, TokenizerRecipe, [*settings, "loss.restart_every=0"])
    training = TokenizerTraining(recipe, tmp_path / "run", World(0, 1, torch.device("cpu")))
    image = training.stream.images(0, torch.device("cpu"))
    out = training.objective(image)
    mse, lpips = training.reconstruction_loss(out.image_B3HW, image)
    generator = -training.discriminator(out.image_B3HW).mean()
    losses = mse + lpips, generator
    at_pixels = [torch.autograd.grad(loss, out.image_B3HW, retain_graph=True)[0].norm() for loss in losses]
    weight = 0.1 * (at_pixels[0] / at_pixels[1] if adaptive else 1.0)
    weights = list(training.tokenizer.parameters())
    total = losses[0] + weight * generator + out.codebook + 0.25 * out.commitment
    expected = torch.autograd.grad(total, weights)
    found = []
    monkeypatch.setattr(training.optimizer, "step", lambda: found.extend(w.grad.clone() for w in weights))
    logged = training.step(0)
    torch.testing.assert_close(found, list(expected), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(logged["loss"], total.detach())


def test_tokenizer_runs_continue_exactly(tokenizer_recipe, tmp_path, monkeypatch):
    recipe = read_recipe(tokenizer_recipe, TokenizerRecipe)
    train_tokenizer(recipe, tmp_path / "whole", device="cpu")

    class Killed(BaseException):
        pass

    step = TokenizerTraining.step

    def dies(self, number):
        if number == 5:
            self.snapshots.finish()
            raise Killed
        return step(self, number)

    monkeypatch.setattr(TokenizerTraining, "step", dies)
    with pytest.raises(Killed):
        train_tokenizer(recipe, tmp_path / "run", device="cpu")
    monkeypatch.undo()
    train_tokenizer(recipe, tmp_path / "run", resume=True, device="cpu")
    for key in ("loss", "mse", "discriminator", "images psnr"):
        assert metrics(tmp_path / "run", key) == pytest.approx(metrics(tmp_path / "whole", key), abs=1e-5), key


def test_used_codes_are_counted_over_all_processes(tokenizer_recipe, tmp_path, monkeypatch):
    """Also between two restarts: a snapshot there is written by one process and read by all."""
    recipe = read_recipe(tokenizer_recipe, TokenizerRecipe)
    training = TokenizerTraining(recipe, tmp_path / "run", World(0, 1, torch.device("cpu")))
    training.world = World(0, 2, torch.device("cpu"))
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda counts: counts.add_(torch.arange(32) == 7))
    out = training.objective(training.stream.images(0, torch.device("cpu")))
    training._restart_codes(0, out)
    expected = torch.bincount(torch.cat((out.ids_BN.flatten(), torch.tensor([7]))), minlength=32)
    torch.testing.assert_close(training.state()["counts"], expected.float())


if __name__ == "__main__":
    two_processes(*sys.argv[1:])
