"""AdamW and the moving average in one kernel: the weights and the state that torch's own give."""

import copy

import pytest
import torch
from torch import nn

pytest.importorskip("triton", reason="Triton is not installed")

from arpg.kernels import adamw
from arpg.train import update as updates
from arpg.train.optim import EMA, clip_gradients, make_adamw, set_learning_rate
from arpg.train.recipe import OptimRecipe
from arpg.train.update import Update

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(5,), (1,), (64,), (3, 43), (2, 64), (64, 1), (300, 3)]  # less than a block, whole blocks, and a rest


class Run:
    """Parameters with their optimizer and average, by the kernel or by torch."""

    def __init__(self, recipe):
        generator = torch.Generator().manual_seed(0)
        self.recipe, self.module = recipe, nn.Module()
        for i, shape in enumerate(SHAPES):
            weight = nn.Parameter(torch.randn(shape, generator=generator).to(DEVICE))
            self.module.register_parameter(f"p{i}", weight)
        self.optimizer, self.ema = make_adamw(self.module, recipe), EMA(self.module, recipe.ema)
        self.update = Update(self.optimizer, self.ema, one_pass=True)

    def step(self, step, change=lambda gradients: gradients):
        generator = torch.Generator().manual_seed(100 + step)
        gradients = [(torch.randn(shape, generator=generator) * 3.0 ** (step % 4)).to(DEVICE) for shape in SHAPES]
        for parameter, gradient in zip(self.module.parameters(), change(gradients), strict=True):
            parameter.grad = gradient
        set_learning_rate(self.optimizer, self.recipe.lr / (1 + step))
        if self.recipe.clip > 0:
            clip_gradients(self.optimizer, self.recipe.clip)
        self.update(step)
        self.optimizer.zero_grad(set_to_none=True)

    def everything(self):
        state = [self.optimizer.state[p] for p in self.module.parameters()]
        moments = [of[name] for of in state for name in ("step", "exp_avg", "exp_avg_sq")]
        return [*self.module.parameters(), *moments, *self.ema.average]


@pytest.fixture
def kernel(monkeypatch):
    """Switches the kernel on or off, and counts its launches."""
    launches = []
    monkeypatch.setattr(adamw, "_BLOCK", 64)
    look_up = adamw.Tensors._look_up
    monkeypatch.setattr(adamw.Tensors, "_look_up", lambda *a: launches.append(0) or look_up(*a))

    def switch(on):
        launches.clear()
        monkeypatch.setattr(updates, "can_fuse", lambda x: on)
        return launches

    return switch


@pytest.mark.parametrize("ema", [0.0, 0.9])
@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_the_kernel_is_torchs_step(kernel, ema, clip, weight_decay):
    recipe = OptimRecipe(lr=0.1, weight_decay=weight_decay, clip=clip, ema=ema)
    runs = []
    for on in (False, True):
        launches, run = kernel(on), Run(recipe)
        for step in range(5):
            run.step(step)
        assert len(launches) == (2 * 4 if on else 0)  # both groups; the first step makes the state
        runs.append(run)
    torch.testing.assert_close(*(run.everything() for run in runs), atol=1e-6, rtol=1e-5)
    assert len(runs[0].ema.average) == (len(SHAPES) if ema else 0)


def test_gradients_may_stay_or_move(kernel):
    """Their addresses are looked up again where they have changed, and the values wherever they are."""
    recipe = OptimRecipe(lr=0.1)
    kernel(False)
    plain = Run(recipe)
    kernel(True)
    kept, moved, alive = Run(recipe), Run(recipe), []
    place = [torch.empty(shape, device=DEVICE) for shape in SHAPES]
    tables = set()
    for step in range(4):
        kept.step(step, lambda gradients: [ours.copy_(given) for ours, given in zip(place, gradients, strict=True)])
        moved.step(step, lambda gradients: alive.append(gradients) or gradients)
        if step:
            tables.add(id(kept.update._tensors[0]._table))
    kernel(False)
    for step in range(4):
        plain.step(step)
    assert len(tables) == 1
    torch.testing.assert_close(kept.everything(), moved.everything(), atol=0, rtol=0)
    torch.testing.assert_close(kept.everything(), plain.everything(), atol=1e-6, rtol=1e-5)


# On a GPU torch's own AdamW does not take strides that differ.
@pytest.mark.parametrize("odd", ["none", "alignment"] + ["strides"] * (DEVICE == "cpu"))
def test_what_the_kernel_cannot_take_is_torchs(kernel, odd):
    def change(gradients):
        if odd == "none":
            gradients[3] = None
        elif odd == "strides":
            gradients[3] = gradients[3].T.contiguous().T
        else:
            gradients[3] = torch.empty(3 * 43 + 1, device=DEVICE)[1:].view(3, 43).copy_(gradients[3])
        return gradients

    runs = []
    for on in (False, True):
        launches, run = kernel(on), Run(OptimRecipe(lr=0.1))
        for step in range(6):
            run.step(step, change if step == 3 else lambda gradients: gradients)
        assert len(launches) == (2 * 4 if on else 0)
        runs.append(run)
    torch.testing.assert_close(*(run.everything() for run in runs), atol=1e-6, rtol=1e-5)


def test_a_loaded_state_goes_on(kernel):
    kernel(True)
    through, first, second = (Run(OptimRecipe(lr=0.1, ema=0.0)) for _ in range(3))
    for step in range(6):
        through.step(step)
    for step in range(3):
        first.step(step)
    second.step(9)  # has a state and a table of its own
    second.step(10)
    second.module.load_state_dict(first.module.state_dict())
    second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    for step in range(3, 6):
        second.step(step)
    torch.testing.assert_close(second.everything(), through.everything(), atol=0, rtol=0)
