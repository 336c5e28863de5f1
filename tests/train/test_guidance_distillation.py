"""The guidance scale as an input: decoding without unconditional rows, and a student that matches a guided teacher."""

import dataclasses

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from arpg import InputError, SamplingSettings, tasks
from arpg.checkpoint import FolderConfig, load_model, write_folder
from arpg.config import ModelConfig
from arpg.data.dataset import Batch
from arpg.data.tokens import TokenWriter
from arpg.decode import decode, make_plan
from arpg.decode.continuous import ContinuousBatch
from arpg.decode.sampling import sample
from arpg.decode.state import to_device
from arpg.model import class_condition
from arpg.noise import seed_keys
from arpg.train.model import train_model
from arpg.train.objective import GuidanceDistillation, linear_divergence
from arpg.train.recipe import ModelRecipe, OptimRecipe, RunRecipe, TokenData
from support.small import SMALL, small_model

TAKES = dataclasses.replace(SMALL, guidance_input=True)
LABELS, SEEDS = [0, 3, 4], [5, 6, 7]


def student(seed=0):
    model = small_model(TAKES, seed)
    with torch.no_grad():
        model.guidance.down.weight.normal_(std=0.3, generator=torch.Generator().manual_seed(seed + 3))
    return model


def run(model, settings, seeds=SEEDS):
    request = tasks.generate(model, LABELS[: len(seeds)], seeds)
    plan = make_plan(request.grid, request.known_BN, request.seeds, settings)
    *_, last = decode(model, request, plan, settings)
    return request, plan, last.ids_BN


@torch.no_grad()
@pytest.mark.parametrize("shape", ["linear", "constant"])
def test_the_scale_of_each_step_is_an_input_and_there_are_no_unconditional_rows(shape):
    """The loop against teacher forcing with the plan's scales."""
    model = student()
    settings = SamplingSettings(steps=16, guidance=4.0, guidance_schedule=shape, attention="causal")
    request, plan, ids = run(model, settings)
    assert plan.guided
    assert to_device(model, request, guided=True, ragged=False).copies == 1
    order = torch.tensor([row.order for row in plan.samples])
    scale = torch.tensor([row.scales for row in plan.samples])
    logits = model.head(model.hidden(ids, order, class_condition(model, torch.tensor(LABELS)), scale_BN=scale))
    again = sample(logits, settings, seed_keys(SEEDS), order)
    assert torch.equal(torch.zeros_like(ids).scatter(1, order, again), ids)
    assert not torch.equal(run(model, dataclasses.replace(settings, guidance=1.0))[2], ids)


@torch.no_grad()
def test_exact_and_continuous_decoding_take_the_scale_too():
    model = student()
    one_by_one = SamplingSettings(steps=16, guidance=4.0, attention="causal")
    expected = run(model, one_by_one)[2]
    assert torch.equal(run(model, SamplingSettings(guidance=4.0, attention="causal", decode="exact"))[2], expected)
    request, plan, _ = run(model, one_by_one, SEEDS[:2])
    batch = ContinuousBatch(model, request, plan, one_by_one)
    batch.step()
    late = tasks.generate(model, LABELS[2:], SEEDS[2:])
    batch.add(late, make_plan(late.grid, late.known_BN, late.seeds, one_by_one))
    while not all(row.finished for row in batch.rows):
        batch.step()
    assert torch.equal(batch.fetch(range(3)).wait()[0], expected)


def test_a_new_input_changes_nothing():
    """Its last layer starts at zero, whatever the scale."""
    plain, model = small_model(), small_model(TAKES)
    model.load_state_dict(plain.state_dict(), strict=False)
    model.guidance.init_weights()
    unguided = run(plain, SamplingSettings(steps=5))[2]
    assert torch.equal(run(model, SamplingSettings(steps=5, guidance=3.0))[2], unguided)


@pytest.mark.parametrize("chunk", [3, 100])
def test_the_divergence_and_its_gradients(chunk):
    generator = torch.Generator().manual_seed(0)
    x, cond, null = (torch.randn(10, 4, generator=generator, dtype=torch.double) for _ in range(3))
    weight, teacher = (torch.randn(7, 4, generator=generator, dtype=torch.double) for _ in range(2))
    scale = torch.linspace(0, 5, 10, dtype=torch.double)
    x.requires_grad_()
    weight.requires_grad_()
    guided = null @ teacher.T + scale[:, None] * ((cond - null) @ teacher.T)
    student_log, teacher_log = (x @ weight.T).log_softmax(-1), guided.log_softmax(-1)
    expected = F.kl_div(student_log, teacher_log, reduction="batchmean", log_target=True)
    grads = torch.autograd.grad(expected, (x, weight))
    loss = linear_divergence(x, weight, [cond, null], teacher, scale, chunk=chunk)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for found, wanted in zip(torch.autograd.grad(loss, (x, weight)), grads, strict=True):
        assert torch.allclose(found, wanted, atol=1e-6)


def test_scales_fill_their_range_and_belong_to_sample_and_place():
    objective = GuidanceDistillation(student(), (4, 4), small_model(), (1.0, 9.0))
    ids = torch.zeros(64, 16, dtype=torch.long)
    keys = torch.randint(2**31, (64,), generator=torch.Generator().manual_seed(0)).int()
    batch = Batch(ids, ids[:, 0], torch.arange(16).expand(64, -1), keys)
    scale = objective.scale(batch)
    assert scale.min() >= 1
    assert scale.max() < 9
    assert scale.mean().item() == pytest.approx(5.0, abs=0.2)
    assert len(scale.unique()) > 1000
    assert torch.equal(objective.scale(dataclasses.replace(batch, ids_BN=ids + 1)), scale)


@pytest.fixture
def teacher(tmp_path):
    """A teacher, and random tokens."""
    config = ModelConfig(32, 2, 1, 2, vocab_size=6, num_classes=3, grid=(2, 2), dropout=0.0)
    write_folder(tmp_path / "teacher", FolderConfig(model=config), model=small_model(config).state_dict())
    writer = TokenWriter(tmp_path / "tokens", grid=(2, 2), vocab_size=6, classes=("a", "b", "c"), views=1)
    writer.add(np.random.default_rng(0).integers(6, size=(600, 1, 4)).astype(np.uint16), np.arange(600) % 3)
    writer.close()
    return tmp_path / "teacher"


def recipe_of(teacher, **changes):
    tokens = str(teacher.parent / "tokens")
    recipe = ModelRecipe(
        model=dataclasses.replace(load_model(teacher).config, guidance_input=True),
        data=TokenData(tokens, tokens),
        optim=OptimRecipe(5e-3, warmup=0.1, ema=0.0, weight_decay=0.0),
        run=RunRecipe(steps=120, batch_size=64, precision="float32", log_every=60, validate_every=120, save_every=120),
        init_from=str(teacher),
        label_drop=0.0,
        guidance_scales=(1.0, 5.0),
    )
    return dataclasses.replace(recipe, **changes)


def test_a_student_learns_what_its_teacher_guides_to(teacher, tmp_path):
    """Its logits at a scale come closer to the guided ones than the teacher's own are."""
    folder = train_model(recipe_of(teacher), tmp_path / "run", device="cpu")
    model, guide = load_model(folder), load_model(teacher)
    assert model.takes_guidance
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(6, (12, 4), generator=generator)
    order = torch.stack([torch.randperm(4, generator=generator) for _ in range(12)])
    labels, scale = torch.arange(12) % 3, torch.full((12, 4), 4.0)
    cond, null = (guide(ids, order, class_condition(guide, each)) for each in (labels, torch.full_like(labels, 3)))
    target = (null + 4.0 * (cond - null)).log_softmax(-1)

    def divergence(logits):
        return F.kl_div(logits.log_softmax(-1), target, reduction="batchmean", log_target=True).item()

    learned = model.head(model.hidden(ids, order, class_condition(model, labels), scale_BN=scale))
    assert divergence(learned) < 0.5 * divergence(cond)
    assert divergence(learned) < divergence(model(ids, order, class_condition(model, labels)))  # at scale 1


def test_recipes_name_what_is_missing(teacher):
    plain = load_model(teacher).config
    for changes, message in (
        ({"guidance_scales": None}, "guidance_input is True; expected both"),
        ({"model": plain}, "guidance_input is False; expected both"),
        ({"guidance_scales": (5.0, 1.0)}, "expected 0 <= low < high"),
        ({"init_from": None}, "expected init_from, the model whose guidance is distilled"),
    ):
        with pytest.raises(InputError, match=message):
            recipe_of(teacher, **changes)
