"""The training loop: steps, logs, validation, sheets, snapshots, an orderly stop. What is trained is an argument."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed
from torch import Tensor

from arpg.device import gpu_spec
from arpg.errors import InputError, require
from arpg.train.distributed import World, mean_over_ranks
from arpg.train.interrupt import Interrupt
from arpg.train.optim import learning_rate
from arpg.train.recipe import OptimRecipe, RunRecipe
from arpg.train.report import Report
from arpg.train.snapshot import Snapshots

_NEVER = 2**62


class Training(Protocol):
    """A run: its parts, its state, and how they are saved and restored."""

    folder: Path
    world: World
    snapshots: Snapshots

    @property
    def run(self) -> RunRecipe: ...
    @property
    def optim(self) -> OptimRecipe: ...
    def step(self, step: int) -> dict[str, Tensor]:
        """One optimizer step; this process's losses, still on the device. "loss" is the one that is watched."""

    def validate(self) -> dict[str, float]: ...
    def sheet(self) -> Any:
        """A picture of where things stand (a PIL image), or None."""

    def state(self) -> dict[str, Any]: ...
    def restore(self) -> int:
        """Continue from the newest good snapshot; the step to go on with (0: there is none)."""

    def export(self) -> Path:
        """Write the result as a model folder."""

    def describe_batch(self, step: int) -> str: ...
    def flops_per_step(self) -> float: ...


def run_training(training: Training, *, resume: bool) -> Path:
    run, world, folder = training.run, training.world, training.folder
    done = training.snapshots.steps()
    require(
        resume or not done,
        f"{folder} holds a run that reached step {done[-1] if done else 0}; continue it with --resume, or choose "
        "another --out",
    )
    first = training.restore() if resume else 0
    report = Report(folder, num_steps=run.steps, start=first, active=world.main)
    totals = _Totals(world)
    try:
        with Interrupt(world) as interrupt:
            for step in range(first, run.steps):
                totals.add(step, training.step(step))
                now, last, stopping = step + 1, step + 1 == run.steps, interrupt.requested()
                if now % run.log_every == 0 or last or stopping:
                    totals.stop_if_bad(training)
                    report.add(now, _metrics(training, report.rate(now), totals, step))
                with report.paused():
                    if (now % run.validate_every == 0 or last) and (metrics := training.validate()):
                        report.add(now, metrics)
                    if now % run.sample_every == 0 or last:
                        if (image := training.sheet()) is not None:
                            report.picture(f"samples-{now:07d}", image)
                        report.curve()
                    if now % run.save_every == 0 or last or stopping:
                        totals.stop_if_bad(training)
                        training.snapshots.save(now, training.state(), wait=last or stopping)
                if stopping and not last:
                    raise InputError(f"stopped by a signal at step {now}; everything is saved, continue with --resume")
    finally:
        # Also after an error: all processes come here together, and a snapshot in flight must not be lost.
        training.snapshots.finish()
        report.close()
    return training.export()


def _metrics(training: Training, rate: float, totals: _Totals, step: int) -> dict[str, float]:
    metrics = totals.means()
    metrics["lr"] = learning_rate(training.optim, step, training.run.steps)
    metrics["steps/s"] = rate
    metrics["images/s"] = rate * training.run.batch_size
    device, flops = training.world.device, training.flops_per_step()
    if device.type == "cuda" and flops and (spec := gpu_spec(torch.cuda.get_device_name(device))):
        metrics["mfu"] = rate * flops / (spec.bf16_flops * training.world.size)
    return metrics


class _Totals:
    """Sums of losses on the device, and the first step whose loss was not finite; nothing waits until asked."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.sums: dict[str, Tensor] = {}
        self.count = 0
        self.bad = torch.full((), _NEVER, dtype=torch.long, device=world.device)

    def add(self, step: int, losses: dict[str, Tensor]) -> None:
        for name, value in losses.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value.clone()
        self.count += 1
        self.bad = torch.where((self.bad == _NEVER) & ~torch.isfinite(losses["loss"]), step, self.bad)

    def means(self) -> dict[str, float]:
        result = {name: float(mean_over_ranks(total / self.count, self.world)) for name, total in self.sums.items()}
        self.sums, self.count = {}, 0
        return result

    def stop_if_bad(self, training: Training) -> None:
        """All processes stop if one of them met a loss that is not finite, and name the first such step."""
        torch.distributed.all_reduce(self.bad, torch.distributed.ReduceOp.MIN)
        step = int(self.bad)
        if step != _NEVER:
            raise InputError(
                f"the loss of step {step} is not finite; its batch is {training.describe_batch(step)}; "
                "lower optim.lr or look at those images, and continue with --resume"
            )
