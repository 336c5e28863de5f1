"""The processes that train together: one group, also around a single process, and how a model is spread over it."""

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

from arpg.errors import InputError, require

STRATEGIES = ("none", "ddp", "fsdp")
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")


@dataclass(frozen=True)
class World:
    """This process among all that train."""

    rank: int
    size: int
    device: torch.device

    @property
    def main(self) -> bool:
        return self.rank == 0


def start(device: str = "auto") -> World:
    """Join the processes that torchrun started, or be a group of one, so that nothing after this needs to ask."""
    chosen = _device(device, local_rank=int(os.environ.get("LOCAL_RANK", "0")))
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


def stop() -> None:
    """Leave the process group, if there is one. A snapshot in flight has to be finished before."""
    if not dist.is_initialized():
        return
    several = dist.get_world_size() > 1
    dist.destroy_process_group()
    if several:
        # Gloo's threads drop their last tensors a little later and need the interpreter for it. Without a pause a
        # sharded CPU run now and then ends in an abort ("terminate called without an active exception").
        time.sleep(0.1)


def parallelize(model: nn.Module, strategy: str, world: World, blocks: Sequence[nn.Module]) -> nn.Module:
    """Move the model to the world's device and spread it: copies with averaged gradients, or shards of the parameters.

    Only `forward` of the returned module takes part: under "ddp" it starts the averaging, under "fsdp" it gathers the
    parameters. Under "fsdp" every rank must bring the same initial weights; "ddp" takes those of rank 0.
    """
    require(strategy in STRATEGIES, f"strategy {strategy!r} does not exist; expected one of {', '.join(STRATEGIES)}")
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
    for block in blocks:
        fully_shard(block, mesh=mesh)
    # What stands outside the blocks: embedding, memory, head. Sharded again after every forward: by default the root
    # stays gathered until a backward, and after one without gradients the next would still see the weights of then.
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    return model


def mean_over_ranks(value: Tensor, world: World) -> Tensor:
    """The mean over all processes, for logs: no gradient, and `value` stays as it is."""
    total = value.detach().clone()
    dist.all_reduce(total)
    return total / world.size


def barrier() -> None:
    """Wait for all processes, on the CPU: `dist.barrier` would go through NCCL and wait for the device too."""
    dist.all_reduce(torch.zeros(1))


def _device(name: str, *, local_rank: int) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"device {name!r} does not exist; expected auto, cpu or cuda") from None
    require(device.type in ("cpu", "cuda"), f"device {name!r} cannot train; expected auto, cpu or cuda")
    if device.type == "cpu":
        return device
    require(torch.cuda.is_available(), f"device {name!r}: no CUDA device is available; use cpu")
    index = local_rank if device.index is None else device.index
    count = torch.cuda.device_count()
    require(index < count, f"device cuda:{index} does not exist: there are {count}; start fewer processes per machine")
    return torch.device("cuda", index)
