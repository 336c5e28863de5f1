"""A training run and its loop: steps, logs, validation, early stop, sample sheets, snapshots, stop on a signal
or at a time limit; and what a step needs: AdamW, learning rates, gradient clipping, the moving average of the weights.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property
from types import FrameType
from typing import Any

import torch
import torch.distributed
from PIL import Image
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from arpg.device import gpu_spec, training_precision
from arpg.errors import InputError, require
from arpg.files import State, read_metadata, read_tensors, write_tensors, write_whole
from arpg.storage import AnyPath, Lease
from arpg.train.distributed import World, init_distributed, mean_over_ranks, shutdown_distributed
from arpg.train.recipe import ModelRecipe, OptimRecipe, TokenizerRecipe
from arpg.train.report import Report
from arpg.train.snapshot import Snapshots

_NEVER = 2**62
_LOSS = "validation loss"  # the metric that ends a run early


class TrainingStoppedError(InputError):
    """A run was stopped before its last step; its snapshot and its model are written."""


class Training(ABC):
    """One run of a recipe: its parts, its state, and how they are saved and restored.

    A subclass sets `objective` (the trained module), `optimizer` and `ema`.
    """

    recipe: ModelRecipe | TokenizerRecipe
    objective: nn.Module
    optimizer: torch.optim.AdamW
    ema: EMA
    resume_with = "continue with --resume"  # what to do after an interruption, for messages

    def __init__(self, folder: AnyPath, world: World) -> None:
        self.folder, self.world, self.began = folder, world, time.monotonic()
        self.can_interrupt = False

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let a signal abandon the work inside, which must not change weights or the state of the optimizer.

        Not with several processes: the others would wait for this one.
        """
        self.can_interrupt = self.world.size == 1
        try:
            yield
        finally:
            self.can_interrupt = False

    @cached_property
    def snapshots(self) -> Snapshots:
        """The snapshots of this run; the first access is a collective call."""
        return Snapshots(self.folder / "snapshots", self.world, keep=self.recipe.run.keep)

    @abstractmethod
    def step(self, step: int) -> dict[str, Tensor]:
        """Take one optimizer step; return this process's losses, on the device. "loss" is checked to be finite."""

    @abstractmethod
    def validate(self) -> dict[str, float]:
        """Return the validation metrics; none without validation data. `run.patience` follows "validation loss"."""

    @abstractmethod
    def averaged_weights(self) -> State:
        """Return the averaged weights by name, whole, on the CPU (on every rank)."""

    @abstractmethod
    def sheet(self) -> Image.Image | None:
        """Return a sheet of samples, or None."""

    @abstractmethod
    def export(self) -> AnyPath:
        """Write the result as a model folder."""

    @abstractmethod
    def describe_batch(self, step: int) -> str:
        """Name the images of a step's batch, for an error message."""

    def flops_per_step(self) -> float:
        """Return the floating-point operations of a step; 0 (unknown) leaves the utilisation out."""
        return 0.0

    def autocast(self) -> torch.autocast:
        """Return the autocast context of the forward pass."""
        precision = training_precision(self.recipe.run.precision, self.world.device)
        return torch.autocast(self.world.device.type, torch.bfloat16, enabled=precision == "bf16")

    def state(self) -> dict[str, Any]:
        """Return the state that a snapshot holds."""
        return {
            "model": get_model_state_dict(self.objective),
            "optimizer": get_optimizer_state_dict(self.objective, self.optimizer),
            "ema": self.ema.state_dict(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Load what `state` returned; tensors that a snapshot was read into in place need no copy."""
        # Not strict: the frozen weights under an adapter are not saved. The snapshot was read into these very tensors.
        set_model_state_dict(self.objective, state["model"], options=StateDictOptions(strict=False))
        set_optimizer_state_dict(self.objective, self.optimizer, state["optimizer"])

    def restore(self) -> int:
        """Load the newest intact snapshot; return the step to continue with (0 without a snapshot)."""
        if not self.snapshots.exist():  # to ask the optimizer for its state would count as a step of it
            return 0
        state = self.state()
        step = self.snapshots.load(state)
        if step is None:
            return 0
        self.load_state(state)
        return step


def train(start: Callable[[World], Training], *, resume: bool, device: str) -> AnyPath:
    """Join the process group, run the training that `start` returns to its end, and return the exported folder."""
    world = init_distributed(device)
    try:
        training = start(world)
        with Lease(training.folder) if world.main else nullcontext():
            return run_training(training, resume=resume)
    finally:
        shutdown_distributed()


def run_training(training: Training, *, resume: bool) -> AnyPath:
    """Train to the last step of the recipe; return the folder of the exported model.

    A signal, or `run.max_minutes` since the training was set up, ends the run: its snapshot and its model are written,
    then `TrainingStoppedError` is raised.
    """
    run, world, folder = training.recipe.run, training.world, training.folder
    done = training.snapshots.steps()
    require(
        resume or not done,
        f"{folder} holds a run that reached step {done[-1] if done else 0}; continue it with --resume, or choose "
        "another --output",
    )
    first = training.restore() if resume else 0
    report = Report(folder, num_steps=run.steps, start=first, active=world.main)
    losses, best = RunningLosses(world), BestWeights(training, resume=first > 0)
    now, last = first, first == run.steps or best.over(first)
    try:
        with Interrupt(training) as interrupt:
            if first == 0 and run.patience:
                validate(training, report, best, 0)
            while not last:
                losses.add(now, training.step(now))
                now += 1
                last, stopping = now == run.steps, interrupt.requested()
                if now % run.log_every == 0 or last or stopping:
                    losses.check_finite(training)
                    report.add(now, _metrics(training, report.rate(now), losses, now - 1))
                elif report.silent(run.progress_s):
                    report.progress(now, float(losses.sums["loss"] / losses.count))
                with report.paused():
                    if now % run.validate_every == 0 or last:
                        validate(training, report, best, now)
                        last = last or best.over(now)
                    if now % run.sample_every == 0 or last:
                        if (image := training.sheet()) is not None:
                            report.save_image(f"samples-{now:07d}", image)
                        report.plot()
                    if now % run.save_every == 0 or last or stopping:
                        losses.check_finite(training)
                        report.upload()  # before the snapshot: a run that continues from it has these metrics
                        training.snapshots.save(now, training.state(), wait=last or bool(stopping))
                if stopping and not last:
                    raise _stopped(training, now, stopping)
    except Interrupted:
        if now and now not in training.snapshots.steps():
            losses.check_finite(training)
            training.snapshots.save(now, training.state(), wait=True)
        raise _stopped(training, now, "signal") from None
    finally:
        # Also after an error: all processes come here together, and a snapshot in flight must not be lost.
        training.snapshots.finish()
        report.close()
    return training.export()


def validate(training: Training, report: Report, best: BestWeights, step: int) -> None:
    """Report the validation metrics, and keep the weights if their loss is the lowest so far."""
    if metrics := training.validate():
        report.add(step, metrics)
        best.add(step, metrics)


def _stopped(training: Training, step: int, reason: str) -> InputError:
    """Write the model so far, and return the error that says why the run ended."""
    if step == 0:
        return InputError("stopped by a signal before the first step was finished; there is nothing to save")
    training.export()
    why = "by a signal" if reason == "signal" else f"after run.max_minutes = {training.recipe.run.max_minutes:g}"
    return TrainingStoppedError(f"stopped {why} at step {step}; everything is saved, {training.resume_with}")


class BestWeights:
    """The averaged weights with the lowest validation loss, in `best.safetensors`, where `run.patience` is set."""

    def __init__(self, training: Training, *, resume: bool) -> None:
        self.training, self.run = training, training.recipe.run
        self.path = training.folder / "best.safetensors"
        self.step, self.loss = 0, float("inf")
        if self.run.patience and resume and self.path.exists():
            kept = read_metadata(self.path)
            self.step, self.loss = int(kept["step"]), float(kept["loss"])

    def add(self, step: int, metrics: dict[str, float]) -> None:
        """Write the weights if the loss is the lowest so far."""
        if self.run.patience == 0 or not metrics[_LOSS] < self.loss:  # also not a number
            return
        self.step, self.loss = step, metrics[_LOSS]
        weights, kept = self.training.averaged_weights(), {"step": str(step), "loss": str(self.loss)}
        if self.training.world.main:
            write_whole(self.path, lambda path: write_tensors(weights, path, metadata=kept))

    def over(self, step: int) -> bool:
        """Return whether so many validations as `run.patience` have passed since the lowest loss."""
        since = step // self.run.validate_every - self.step // self.run.validate_every
        return 0 < self.run.patience <= since

    @staticmethod
    def read(training: Training) -> State | None:
        """Return the weights that were kept; None without `run.patience`."""
        path = training.folder / "best.safetensors"
        return read_tensors(path) if training.recipe.run.patience and path.exists() else None


def _metrics(training: Training, rate: float, losses: RunningLosses, step: int) -> dict[str, float]:
    recipe, metrics = training.recipe, losses.means()
    metrics["lr"] = learning_rate(recipe.optim, step, recipe.run.steps)
    metrics["steps/s"] = rate
    metrics["images/s"] = rate * recipe.run.batch_size
    device, flops = training.world.device, training.flops_per_step()
    if device.type == "cuda" and flops and (spec := gpu_spec(torch.cuda.get_device_name(device))):
        metrics["mfu"] = rate * flops / (spec.bf16_flops * training.world.size)
    return metrics


class RunningLosses:
    """Sums of losses on the device, and the first step whose loss was not finite; `add` does not synchronise."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.sums: dict[str, Tensor] = {}
        self.count = 0
        self.first_bad = torch.full((), _NEVER, dtype=torch.long, device=world.device)

    def add(self, step: int, losses: dict[str, Tensor]) -> None:
        """Add the losses of a step."""
        for name, value in losses.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value.clone()
        self.count += 1
        bad = (self.first_bad == _NEVER) & ~torch.isfinite(losses["loss"])
        self.first_bad = torch.where(bad, step, self.first_bad)

    def means(self) -> dict[str, float]:
        """Return the means over steps and processes since the last call."""
        result = {name: float(mean_over_ranks(total / self.count, self.world)) for name, total in self.sums.items()}
        self.sums, self.count = {}, 0
        return result

    def check_finite(self, training: Training) -> None:
        """Stop all processes if the loss of one of them was not finite, and name the first such step."""
        torch.distributed.all_reduce(self.first_bad, torch.distributed.ReduceOp.MIN)
        step = int(self.first_bad)
        if step != _NEVER:
            raise InputError(
                f"the loss of step {step} is not finite; its batch is {training.describe_batch(step)}; "
                f"lower optim.lr or check those images, and {training.resume_with}"
            )


class Interrupted(BaseException):
    """A signal came while the training could be interrupted. Not an `Exception`: no handler on the way may take it."""


class Interrupt:
    """Acts on the first SIGTERM or SIGINT: interrupts the training where it allows that, else ends it after the step.

    A second signal acts as usual. `run.max_minutes` ends the training after the step in which they are over.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self, training: Training) -> None:
        self.training, self.world = training, training.world
        minutes = training.recipe.run.max_minutes
        self.limit = training.began + 60 * minutes if minutes else math.inf
        self.signalled = False
        self._old: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            for number in self.SIGNALS:
                self._old[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.signalled = True
        self._restore()
        if self.training.can_interrupt:
            raise Interrupted

    def requested(self) -> str:
        """Return why to stop, "signal" or "limit", or nothing; all processes learn it at the same step."""
        reason = 2 if self.signalled else int(time.monotonic() > self.limit)
        if self.world.size > 1:
            flag = torch.tensor(reason)
            torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
            reason = int(flag)
        return ("", "limit", "signal")[reason]

    def _restore(self) -> None:
        for number, old in self._old.items():
            signal.signal(number, old)
        self._old = {}


def make_adamw(module: nn.Module, recipe: OptimRecipe) -> torch.optim.AdamW:
    """Make an AdamW with weight decay on tensors of two or more dimensions (embeddings too) only."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": recipe.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=recipe.lr, betas=recipe.betas, fused=True)


def learning_rate(recipe: OptimRecipe, step: int, num_steps: int) -> float:
    """Return the learning rate of a step: linear warm-up to `lr`, then cosine or linear to `min_lr`, or constant."""
    warmup = round(recipe.warmup * num_steps)
    if step < warmup:
        return recipe.lr * (step + 1) / warmup
    if recipe.schedule == "constant" or num_steps <= warmup + 1:
        return recipe.lr
    done = (step - warmup) / (num_steps - 1 - warmup)
    share = 0.5 * (1 + math.cos(math.pi * done)) if recipe.schedule == "cosine" else 1.0 - done
    return recipe.min_lr + (recipe.lr - recipe.min_lr) * share


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def clip_gradients(optimizer: torch.optim.AdamW, max_norm: float) -> None:
    """Clip the norm of all gradients; where no parameter is sharded, the fused AdamW scales them in its own pass."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if any(isinstance(p, DTensor) for p in parameters):
        nn.utils.clip_grad_norm_(parameters, max_norm)
        return
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    optimizer.grad_scale = ((norm + 1e-6) / max_norm).clamp(min=1.0)  # type: ignore[attr-defined]


class EMA:
    """An exponential moving average of a module's trained parameters, sharded or not.

    With decay 0 there is no average: nothing is kept, and `swapped_in` leaves the weights as they are.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        followed = {name: p for name, p in module.named_parameters() if p.requires_grad and decay > 0}
        self.names, self.live = list(followed), list(followed.values())
        self.average = [p.detach().clone() for p in self.live]

    def weight(self, step: int) -> float:
        """Return the weight of new parameters in the average: larger at first, so that the initial weights fade."""
        return 1.0 - min(self.decay, (1 + step) / (10 + step))

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move the average towards the module's parameters."""
        if self.live:
            torch._foreach_lerp_(self.average, [p.detach() for p in self.live], self.weight(step))

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Swap the averaged weights into the module, inside a `with`."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for average, live in zip(self.average, self.live, strict=True):
            kept = live.detach().clone()
            live.copy_(average)
            average.copy_(kept)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the averages by name, without copies, so that they can be loaded in place."""
        return dict(zip(self.names, self.average, strict=True))
