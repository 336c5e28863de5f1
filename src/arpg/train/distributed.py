"""Distributed training: the process group (also of a single process), and data or sharded parallelism."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from arpg.device import choose_device
from arpg.errors import require
from arpg.train.recipe import PARALLEL

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")


@dataclass(frozen=True)
class World:
    """This process in the process group."""

    rank: int
    size: int
    device: torch.device

    @property
    def main(self) -> bool:
        """Whether this process is rank 0, the only one that writes files."""
        return self.rank == 0


def training_device(name: str) -> torch.device:
    """Return the device of this process: of several GPUs, that of its rank on the machine."""
    device = choose_device(name)
    require(device.type != "mps", f"device is {name!r}, which cannot train; expected auto, cpu or cuda")
    if device.type == "cpu" or device.index is not None:
        return device
    local_rank, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    require(
        local_rank < count,
        f"device cuda:{local_rank} does not exist: there are {count}; start fewer processes per machine",
    )
    return torch.device("cuda", local_rank)


def init_distributed(device: str = "auto") -> World:
    """Join the process group that torchrun started, or make a group of one, so that later code is the same for both."""
    chosen = training_device(device)
    # The gloo half on CUDA carries snapshots and barriers, which must not wait behind the device's queue.
    backend = "gloo"
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
        backend = "cpu:gloo,cuda:nccl"
    if all(name in os.environ for name in TORCHRUN):
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    return World(dist.get_rank(), dist.get_world_size(), chosen)


def shutdown_distributed() -> None:
    """Destroy the process group, if there is one. A snapshot in flight has to be finished before."""
    if not dist.is_initialized():
        return
    several = dist.get_world_size() > 1
    dist.destroy_process_group()
    if several:
        # Gloo's threads drop their last tensors a little later and need the interpreter for it. Without a pause a
        # sharded CPU run now and then ends in an abort ("terminate called without an active exception").
        time.sleep(0.1)


def parallelize(model: nn.Module, strategy: str, world: World, blocks: Sequence[nn.Module]) -> nn.Module:
    """Move `model` to the world's device, and replicate it (ddp) or shard its parameters (fsdp, hsdp).

    "fsdp" shards over all processes; "hsdp" over those of a machine, and replicates over machines, so that parameters
    are gathered on fast links only.

    Call only `forward` of the returned module: under "ddp" it starts the averaging of gradients, under "fsdp" it
    gathers the parameters. Under "fsdp" every rank must have the same initial weights; "ddp" copies those of rank 0.
    """
    require(strategy in PARALLEL, f"strategy {strategy!r} does not exist; expected one of {', '.join(PARALLEL)}")
    model.to(world.device)
    if strategy == "none":
        require(world.size == 1, f"strategy 'none' trains in one process, not {world.size}; use 'ddp' or 'fsdp'")
        return model
    if strategy == "ddp":
        # No static_graph: it forbids gradient accumulation with no_sync() in the first step.
        return DistributedDataParallel(
            model,
            device_ids=[world.device] if world.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
        )
    mesh = init_device_mesh(world.device.type, (world.size,))
    if strategy == "hsdp":
        local = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
        require(
            world.size % local == 0,
            f"strategy 'hsdp' needs as many processes on every machine; there are {world.size}, here {local}",
        )
        names = ("replicate", "shard")
        mesh = init_device_mesh(world.device.type, (world.size // local, local), mesh_dim_names=names)
    for block in blocks:
        fully_shard(block, mesh=mesh)
    # What is outside the blocks: embedding, memory, head. Resharded after every forward: by default the root stays
    # gathered until a backward, so after a forward without gradients the next one would see outdated weights.
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    return model


def mean_over_ranks(value: Tensor, world: World) -> Tensor:
    """Return the mean over all processes, for logs: without gradient; `value` is not changed."""
    total = value.detach().clone()
    dist.all_reduce(total)
    return total / world.size
