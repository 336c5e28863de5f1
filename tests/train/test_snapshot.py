"""Snapshots survive crashes, damage and full disks; a run gives the same numbers on one process and on two."""

import dataclasses
import errno
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)

from arpg.errors import InputError
from arpg.model.condition import class_condition
from arpg.storage import RemotePath, as_path, fetch, list_files
from arpg.train.distributed import World, init_distributed, mean_over_ranks, parallelize, shutdown_distributed
from arpg.train.snapshot import MANIFEST, Snapshots
from support.paths import ROOT
from support.small import SMALL, small_model

# Two processes add in another order than one. A rounding error of a gradient near 0 is a large share of it, and AdamW
# divides gradients by their size, so losses drift apart by tens of roundings in five steps (measured: 21 with AVX2,
# 10 with AVX-512). Gradients that are not averaged differ in the second digit.
ROUNDING = 256 * torch.finfo(torch.float32).eps


class Objective(nn.Module):
    """The network with its loss, so that everything that touches a parameter is inside one forward."""

    def __init__(self):
        super().__init__()
        self.model = small_model(dataclasses.replace(SMALL, dropout=0.0)).train()

    def forward(self, ids_BN, labels_B, order_BN):
        logits = self.model(ids_BN, order_BN, class_condition(self.model, labels_B))
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids_BN.gather(1, order_BN).flatten())


class Run:
    """A tiny training run: the batch of a step is the same for every number of processes."""

    def __init__(self, strategy, world):
        self.world = world
        self.objective = Objective()
        blocks = [*self.objective.model.pass1, *self.objective.model.pass2]
        self.parallel = parallelize(self.objective, strategy, world, blocks)
        self.optimizer = torch.optim.AdamW(self.objective.parameters(), lr=0.01)

    def loss(self, step):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(24, (4, 16), generator=generator)
        labels = torch.randint(6, (4,), generator=generator)
        order = torch.stack([torch.randperm(16, generator=generator) for _ in range(4)])
        mine = slice(self.world.rank, None, self.world.size)
        return self.parallel(ids[mine], labels[mine], order[mine])

    def steps(self, first, last):
        losses = []
        for step in range(first, last):
            loss = self.loss(step)
            loss.backward()
            nn.utils.clip_grad_norm_(self.objective.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(mean_over_ranks(loss, self.world).item())
            self.look_with_other_weights(step)
        return losses

    @torch.no_grad()
    def look_with_other_weights(self, step):
        """As a validation of averaged weights does; it must leave no trace in the steps that follow."""
        kept = [parameter.clone() for parameter in self.objective.parameters()]
        for parameter in self.objective.parameters():
            parameter.mul_(0.5)
        self.loss(step)
        for parameter, value in zip(self.objective.parameters(), kept, strict=True):
            parameter.copy_(value)

    def state(self):
        model, optimizer = get_state_dict(self.objective, self.optimizer)
        return {"model": model, "optimizer": optimizer, "tokens": {"seen": 0}}

    def restore(self, state):
        set_state_dict(
            self.objective, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )


def two_processes(out):
    """What the fixture `pair` runs under torchrun: losses of both strategies, and a snapshot of the sharded one."""
    world = init_distributed("cpu")
    losses = {"size": world.size}
    for strategy in ("ddp", "fsdp"):
        run = Run(strategy, world)
        losses[strategy] = run.steps(0, 5)
    full = get_model_state_dict(run.objective, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    Snapshots(out / "snapshots", world).save(5, run.state() | {"tokens": {"seen": 320}}, wait=True)
    if world.main:
        torch.save(full, out / "full.pt")
        (out / "losses.json").write_text(json.dumps(losses))
    shutdown_distributed()


@pytest.fixture
def world():
    yield init_distributed("cpu")
    shutdown_distributed()


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    out = tmp_path_factory.mktemp("pair")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-port", str(port), __file__, str(out)]
    done = subprocess.run(
        command,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), *sys.path])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return out


def example(value=1.0):
    return {"model": {"w": torch.full((40, 50), value)}, "list": [1, 2], "seen": int(value), "name": "a", "none": None}


def same(state, value):
    return bool((state["model"]["w"] == value).all()) and state["seen"] == int(value)


def test_a_state_comes_back_whole(world, tmp_path):
    saved = Snapshots(tmp_path, world)
    assert saved.load(example()) is None
    saved.save(7, example(3.0) | {"list": [4, 5], "name": "b", "none": "something"}, wait=True)
    state = example()
    weights = state["model"]["w"]
    assert Snapshots(tmp_path, world).load(state) == 7
    assert same(state, 3.0)
    assert state["model"]["w"] is weights, "tensors are filled in place"
    assert (state["list"], state["name"], state["none"]) == ([4, 5], "b", "something")


def test_training_goes_on_while_it_is_written(world, tmp_path, monkeypatch):
    """The write starts only after the state has changed, so anything not copied before would show."""
    changed = []
    write = filesystem.FileSystemWriter.write_data

    def late(*args):
        while not changed:
            pass
        return write(*args)

    monkeypatch.setattr(filesystem.FileSystemWriter, "write_data", late)
    saved, state = Snapshots(tmp_path, world), example(2.0)
    saved.save(1, state)
    assert saved.steps() == [], "not published before it is complete"
    state["model"]["w"].fill_(9.0)
    state["list"].append(3)
    changed.append(True)
    loaded = example()
    assert saved.load(loaded) == 1
    assert same(loaded, 2.0)
    assert loaded["list"] == [1, 2]


def test_published_without_another_call(world, tmp_path):
    saved = Snapshots(tmp_path, world)
    saved.save(1, example())
    saved._flight.result()
    assert Snapshots(tmp_path, world).steps() == [1]
    saved.finish()


def test_keeps_the_newest(world, tmp_path):
    saved = Snapshots(tmp_path, world, keep=2)
    for step in (1, 2, 3, 20):
        saved.save(step, example(step))
    saved.finish()
    assert saved.steps() == [3, 20]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000020"]


def damage(folder, how):
    path = folder / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
    elif how == "truncated":
        path.write_bytes(bytes(content[:-1]))
    elif how == "changed":
        content[len(content) // 2] ^= 1
        path.write_bytes(bytes(content))
    elif how == "manifest":
        (folder / "manifest.json").write_bytes(b"[]")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("missing", "__0_0.distcp is missing"),
        ("truncated", "__0_0.distcp has"),
        ("changed", "__0_0.distcp has changed"),
        ("manifest", "manifest.json is not a manifest"),
    ],
)
def test_a_damaged_snapshot_is_passed_over(world, tmp_path, caplog, how, said):
    saved = Snapshots(tmp_path, world)
    for step in (1, 2):
        saved.save(step, example(step), wait=True)
    damage(tmp_path / "step-00000002", how)
    state, again = example(), Snapshots(tmp_path, world, keep=1)
    with caplog.at_level(logging.WARNING, logger="arpg"):
        assert again.load(state) == 1
    assert same(state, 1)
    assert "step 2 is not used" in caplog.text
    assert said in caplog.text
    # The run goes on from 1 and comes by 2 again; a bad snapshot never pushes a good one out.
    again.save(2 if how == "changed" else 1, example(5), wait=True)
    assert again.steps() == [2 if how == "changed" else 1]
    assert again.load(state) is not None
    assert same(state, 5)


def test_all_damaged(world, tmp_path):
    saved = Snapshots(tmp_path, world)
    for step in (1, 2):
        saved.save(step, example(step), wait=True)
        damage(tmp_path / f"step-{step:08d}", "truncated")
    with pytest.raises(InputError, match=f"{tmp_path}: none of its 2 snapshots is intact"):
        saved.load(example())


@pytest.mark.parametrize(
    ("how", "said"),
    [("missing", "is missing"), ("truncated", "has"), ("changed", "has changed"), ("manifest", "is not a manifest")],
)
def test_a_damaged_remote_snapshot_is_passed_over(world, bucket, caplog, how, said):
    store = as_path(f"{bucket}/snapshots")
    saved = Snapshots(store, world, keep=2)
    for step in (1, 2):
        saved.save(step, example(step), wait=True)
    damage(store / "step-00000002", how)
    state, again = example(), Snapshots(store, world, keep=1)
    with caplog.at_level(logging.WARNING, logger="arpg"):
        assert again.load(state) == 1
    assert same(state, 1)
    assert "step 2 is not used" in caplog.text
    assert said in caplog.text
    again.save(2, example(5), wait=True)
    assert again.steps() == [2]
    assert sorted(list_files(store)) == [f"step-00000002/{name}" for name in (".metadata", "__0_0.distcp", MANIFEST)]
    assert again.load(state) == 2
    assert same(state, 5)


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", MANIFEST])
def test_a_store_that_fails_during_an_upload(world, bucket, monkeypatch, faults, file):
    """The last good snapshot stays the newest, and what was uploaded of the other is removed later."""
    store = as_path(f"{bucket}/snapshots")
    saved = Snapshots(store, world)
    saved.save(1, example(1), wait=True)
    upload = RemotePath.upload

    def fails(self, source):
        if self.name == file:
            faults.errors = 10**6
        return upload(self, source)

    with monkeypatch.context() as patch:
        patch.setattr(RemotePath, "upload", fails)
        saved.save(2, example(2))
        with pytest.raises(InputError, match=r"step 2 could not be written: .* cannot be reached .* continue with"):
            saved._on_main(saved._flight.result)
    faults.errors = 0
    saved._flight = None
    assert saved.steps() == [1]
    again, state = Snapshots(store, world), example()
    assert {name.partition("/")[0] for name in list_files(store)} == {"step-00000001"}
    assert again.load(state) == 1
    assert same(state, 1)
    faults.errors, faults.truncated_uploads, faults.truncated_downloads = 2, 2, 1  # of the kind that passes
    again.save(2, example(2), wait=True)
    assert again.load(state) == 2
    assert same(state, 2)


def test_a_store_that_fails_during_a_download(world, bucket, monkeypatch, faults):
    """A snapshot that cannot be reached is not a damaged one: an older one must not take its place."""
    store = as_path(f"{bucket}/snapshots")
    saved = Snapshots(store, world)
    for step in (1, 2):
        saved.save(step, example(step), wait=True)

    def fails(path):
        if path.suffix == ".distcp":
            faults.errors = 10**6
        return fetch(path)

    again, state = Snapshots(store, world), example()
    with monkeypatch.context() as patch:
        patch.setattr("arpg.train.snapshot.fetch", fails)
        with pytest.raises(InputError, match=r"step-00000002/__0_0\.distcp cannot be reached"):
            again.load(state)
    faults.errors = 0
    assert again.load(state) == 2
    assert same(state, 2)


def test_what_a_crash_leaves(world, tmp_path):
    Snapshots(tmp_path, world).save(1, example(1), wait=True)
    saved = tmp_path / "step-00000001"
    for step, left in ((2, ("__0_0.distcp",)), (3, ("__0_0.distcp", ".metadata"))):  # killed before the manifest
        (tmp_path / f"step-{step:08d}").mkdir()
        for name in left:
            shutil.copyfile(saved / name, tmp_path / f"step-{step:08d}" / name)
    again, state = Snapshots(tmp_path, world), example()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert again.load(state) == 1
    assert same(state, 1)


def test_a_state_of_another_shape(world, tmp_path):
    saved = Snapshots(tmp_path, world)
    saved.save(1, example(), wait=True)
    for other in ({"model": {"w": torch.zeros(3)}}, {"model": {"v": torch.zeros(40, 50)}}):
        with pytest.raises(InputError, match=r"step-00000001 does not fit this run: .*model\.[wv]"):
            saved.load(other)


@pytest.mark.parametrize("hidden", [False, True], ids=["plain", "hidden by torch.save"])
def test_a_full_disk(world, tmp_path, monkeypatch, hidden):
    saved = Snapshots(tmp_path, world)
    saved.save(1, example(1), wait=True)
    write, open_file = filesystem.FileSystemWriter.write_data, Path.open

    def full(path, *args, **kwargs):
        if path.name == ("probe" if hidden else "__0_0.distcp"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return open_file(path, *args, **kwargs)

    def half(*args):
        write(*args)
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", full)
        if hidden:
            patch.setattr(filesystem.FileSystemWriter, "write_data", half)
        saved.save(2, example(2))
        with pytest.raises(InputError) as caught:
            saved.save(3, example(3))
    assert str(caught.value) == (
        f"{tmp_path}: the snapshot of step 2 could not be written: No space left on device; "
        "free some space and continue with --resume"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    saved.save(3, example(3), wait=True)
    state = example()
    assert saved.load(state) == 3
    assert same(state, 3)


def test_other_failures_keep_their_words(world, tmp_path, monkeypatch):
    def broken(*args):
        raise TypeError("a bug of ours")

    monkeypatch.setattr(filesystem.FileSystemWriter, "write_data", broken)
    with pytest.raises(RuntimeError, match="step 1 could not be written: a bug of ours"):
        Snapshots(tmp_path, world).save(1, example(), wait=True)
    assert not list(tmp_path.iterdir())


def test_two_processes_train_as_one(world, pair):
    losses = json.loads((pair / "losses.json").read_text())
    assert losses["size"] == 2
    expected = pytest.approx(Run("none", world).steps(0, 5), rel=ROUNDING)
    assert losses["ddp"] == expected
    assert losses["fsdp"] == expected
    assert Run("fsdp", world).steps(0, 5) == expected


def test_shards_of_two_processes_load_in_one(world, pair):
    run = Run("none", world)
    state = run.state()
    assert Snapshots(pair / "snapshots", world).load(state) == 5
    assert state["tokens"]["seen"] == 320
    run.restore(state)
    full = torch.load(pair / "full.pt", weights_only=True)
    weights = run.objective.state_dict()
    assert weights.keys() == full.keys()
    assert all(torch.equal(weights[key], full[key]) for key in full)
    # The optimizer came along: the run goes on as one that never stopped.
    assert run.steps(5, 7) == pytest.approx(Run("none", world).steps(0, 7)[5:], rel=ROUNDING)


def test_strategies_and_devices_are_checked(world):
    with pytest.raises(InputError, match="strategy 'zero' does not exist"):
        Run("zero", world)
    with pytest.raises(InputError, match="one process, not 2"):
        Run("none", World(0, 2, torch.device("cpu")))
    shutdown_distributed()
    for name in ("tpu9", "meta"):
        with pytest.raises(InputError, match=f"device is '{name}'"):
            init_distributed(name)
    shutdown_distributed()


if __name__ == "__main__":
    two_processes(Path(sys.argv[1]))
