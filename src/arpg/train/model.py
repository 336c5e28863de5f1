"""`arpg train`: the network learns from tokens.

Shapes: B local batch, N grid tokens, D width, T tokens of a caption, E width of the text states, H W pixels.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

from arpg.checkpoint import FolderConfig, load_tokenizer, write_folder
from arpg.classes import ClassNames, numbered_classes
from arpg.config import ModelConfig
from arpg.data.control_maps import ControlMaps
from arpg.data.join import join_tokens
from arpg.data.text_states import TextStates, open_text_states
from arpg.data.tokens import TokenSet, open_tokens
from arpg.decode import decode, make_plan
from arpg.errors import require
from arpg.hub import resolve
from arpg.image import to_pil
from arpg.model import ARPG, class_condition
from arpg.model.condition import training_condition, training_control
from arpg.train.batches import Batch, TokenBatches
from arpg.train.cross_entropy import linear_cross_entropy
from arpg.train.distributed import World, mean_over_ranks, parallelize, start, stop
from arpg.train.graphed import GraphedGradients
from arpg.train.loop import run_training
from arpg.train.optim import EMA, clip_gradients, learning_rate, make_adamw, set_learning_rate
from arpg.train.recipe import ModelRecipe, OptimRecipe, RunRecipe
from arpg.train.samples import Samples, of_captions, of_classes, of_conditions
from arpg.train.snapshot import Snapshots
from arpg.train.update import Update
from arpg.train.warm_start import warm_start

log = logging.getLogger(__name__)


class Objective(nn.Module):
    """The network with its loss: one module, so that distribution wraps all that touches a parameter."""

    def __init__(self, model: ARPG, grid: tuple[int, int]) -> None:
        super().__init__()
        self.model = model
        self.grid = grid

    def forward(self, batch: Batch) -> Tensor:
        """Of classes, or of captions where their states are given; steered where there are condition images."""
        ids_BN, order_BN = batch.ids_BN, batch.order_BN
        if batch.states_BTE is None or batch.length_B is None:
            condition = class_condition(self.model, batch.labels_B)
        else:
            condition = training_condition(self.model, batch.states_BTE, batch.length_B)
        if batch.pixels_BHW is not None and batch.kind_B is not None and batch.dropped_B is not None:
            condition = training_control(self.model, condition, batch.pixels_BHW, batch.kind_B, batch.dropped_B)
        x_BND = self.model.hidden(ids_BN, order_BN, condition, grid=self.grid, dropout_key_B=batch.dropout_key_B)
        targets = ids_BN.gather(1, order_BN)
        return linear_cross_entropy(x_BND.flatten(0, 1), self.model.head.weight, targets.flatten())


class ModelTraining:
    """One run: its parts, its state, and how they are saved and restored."""

    def __init__(self, recipe: ModelRecipe, folder: Path, world: World) -> None:
        self.recipe, self.folder, self.world = recipe, folder, world
        run = recipe.run
        self.tokens = _open(recipe.data.train, recipe.model)
        self.validation = None
        if recipe.data.validation is not None:
            self.validation = _open(recipe.data.validation, recipe.model)
        both = (self.tokens, self.validation)
        self.text, self.validation_text = (_text(recipe.model, tokens) for tokens in both)
        self.control, self.validation_control = (_control(recipe.model, tokens, world.device) for tokens in both)

        model = ARPG(recipe.model).init_weights(seed=recipe.seed)
        if recipe.init_from is not None:
            for line in warm_start(model, recipe.init_from):
                log.info("%s", line)
        model.to(world.device).train()
        self.objective = Objective(model, self.tokens.grid)
        if run.compile and world.device.type == "cuda":
            model.compile_blocks()
        blocks = [*model.pass1, *model.pass2]
        self.parallel = parallelize(self.objective, run.parallel, world, blocks)
        self.graphed: GraphedGradients | None = None
        if run.graph and run.parallel == "none" and run.accumulate == 1 and world.device.type == "cuda":
            self.graphed = GraphedGradients(self.loss, self.objective.parameters())
        self.optimizer = make_adamw(self.objective, recipe.optim)
        self.ema = EMA(self.objective, recipe.optim.ema)
        self.update = Update(self.optimizer, self.ema, one_pass=recipe.optim.one_pass)
        self.batches = self._batches(self.tokens, recipe.label_drop, self.text, self.control)
        self.snapshots = Snapshots(folder / "snapshots", world, keep=run.keep)

    def _batches(
        self,
        tokens: TokenSet,
        label_drop: float,
        text: TextStates | None = None,
        control: ControlMaps | None = None,
    ) -> TokenBatches:
        recipe = self.recipe
        return TokenBatches(
            tokens,
            batch_size=recipe.run.batch_size,
            parts=self.world.size * recipe.run.accumulate,
            num_classes=recipe.model.num_classes,
            label_drop=label_drop,
            seed=recipe.seed,
            device=self.world.device,
            text=text,
            control=control,
        )

    def loss(self, batch: Batch) -> Tensor:
        with torch.autocast(self.world.device.type, torch.bfloat16, enabled=self.run.precision == "bf16"):
            loss: Tensor = self.parallel(batch)
        return loss

    @property
    def run(self) -> RunRecipe:
        return self.recipe.run

    @property
    def optim(self) -> OptimRecipe:
        return self.recipe.optim

    def step(self, step: int) -> dict[str, Tensor]:
        """Gradients of all parts, clipped; AdamW; the moving average."""
        recipe, accumulate = self.recipe, self.recipe.run.accumulate
        set_learning_rate(self.optimizer, learning_rate(recipe.optim, step, recipe.run.steps))
        total = torch.zeros((), device=self.world.device)
        for micro in range(accumulate):
            part = self.world.rank * accumulate + micro
            # Copies need to average their gradients once, after the last part.
            parallel, last = self.parallel, micro == accumulate - 1
            batch = self.batches.batch(step, part)
            if self.graphed is not None:
                total += self.graphed(batch)
                continue
            with parallel.no_sync() if isinstance(parallel, DistributedDataParallel) and not last else nullcontext():
                loss = self.loss(batch) / accumulate
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        if recipe.optim.clip > 0:
            clip_gradients(self.optimizer, recipe.optim.clip)
        self.update(step)
        self.optimizer.zero_grad(set_to_none=True)
        return {"loss": total}

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """The teacher-forced, causal loss of the averaged weights over the validation tokens; no dropout."""
        if self.validation is None:
            return {}
        batches = self._batches(self.validation, 0.0, self.validation_text, self.validation_control)
        # As many whole batches as there are, at least one; an order and a view per image, the same every time.
        count = max(1, self.validation.num_images // self.recipe.run.batch_size)
        accumulate = self.recipe.run.accumulate
        total = torch.zeros((), device=self.world.device)
        self.objective.eval()
        with self.ema.swapped_in():
            for step in range(count):
                for micro in range(accumulate):
                    total += self.loss(batches.batch(step, self.world.rank * accumulate + micro))
        self.objective.train()
        return {"validation loss": float(mean_over_ranks(total / (count * accumulate), self.world))}

    def state(self) -> dict[str, Any]:
        return {
            "model": get_model_state_dict(self.objective),
            "optimizer": get_optimizer_state_dict(self.objective, self.optimizer),
            "ema": self.ema.state_dict(),
        }

    def restore(self) -> int:
        state = self.state()
        step = self.snapshots.load(state)
        if step is None:
            return 0
        set_model_state_dict(self.objective, state["model"])
        set_optimizer_state_dict(self.objective, self.optimizer, state["optimizer"])
        return step

    def averaged_weights(self) -> dict[str, Tensor]:
        """The averaged weights, whole, on the CPU, in the network's own names (on every rank)."""
        with self.ema.swapped_in():
            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            state = get_model_state_dict(self.objective, options=options)
            # Copies, and before the swap back: on a CPU these are the live parameters themselves.
            return {key.removeprefix("model."): t.clone() for key, t in state.items() if isinstance(t, Tensor)}

    def export(self) -> Path:
        """`folder/model`: the averaged weights as a model folder, with the tokenizer where one is named."""
        recipe, target = self.recipe, self.folder / "model"
        weights = self.averaged_weights()
        if not self.world.main:
            return target
        names = None
        if recipe.model.text is None:
            given, all_ = tuple(self.tokens.classes), numbered_classes(recipe.model.num_classes).lines
            names = ClassNames(given + all_[len(given) :])
        config = FolderConfig(model=recipe.model, sampling=recipe.sampling, classes=names, license=recipe.license)
        write_folder(target, config, model=weights)
        if recipe.tokenizer is not None:
            tokenizer = load_tokenizer(resolve(recipe.tokenizer))
            write_folder(target, FolderConfig(tokenizer=tokenizer.config), tokenizer=tokenizer.state_dict())
        return target

    @torch.no_grad()
    def sheet(self, num_images: int = 16) -> Any:
        """A sheet of the averaged model's images, one class each; None without a tokenizer, or off the main rank."""
        if self.recipe.tokenizer is None:
            return None
        weights = self.averaged_weights()
        if not self.world.main:
            return None
        config = self.recipe.model
        model = ARPG(config)
        model.load_state_dict(weights)
        model.to(self.world.device).eval()
        samples = self._samples(model, num_images)
        settings = self.recipe.sampling.settings()
        request = samples.request
        plan = make_plan(request.grid, request.known_BN, request.seeds, settings)
        *_, last = decode(model, request, plan, settings)
        tokenizer = load_tokenizer(resolve(self.recipe.tokenizer), device=self.world.device, dtype=torch.float32)
        return samples.sheet(to_pil(tokenizer.decode(last.ids_BN, request.grid)))

    def _samples(self, model: ARPG, num_images: int) -> Samples:
        """Of what is not trained on, where there is some."""
        if self.control is not None:
            if self.validation is not None and self.validation_control is not None:
                return of_conditions(model, self.validation, self.validation_control, num_images)
            return of_conditions(model, self.tokens, self.control, num_images)
        if self.text is not None:
            if self.validation is not None and self.validation_text is not None:
                return of_captions(model, self.validation, self.validation_text, num_images)
            return of_captions(model, self.tokens, self.text, num_images)
        return of_classes(model, self.tokens.grid, num_images)

    def describe_batch(self, step: int) -> str:
        first = self.batches.indices(step, self.world.rank * self.run.accumulate)[:8].tolist()
        return f"the images {', '.join(map(str, first))}, ... of {self.recipe.data.train}"

    def flops_per_step(self) -> float:
        """Forward and backward: three times the forward pass."""
        return 3 * forward_flops(self.recipe.model, self.tokens.grid) * self.run.batch_size


def train_model(recipe: ModelRecipe, folder: Path, *, resume: bool = False, device: str = "auto") -> Path:
    """Run a recipe to its end; returns the folder of the finished model."""
    world = start(device)
    try:
        return run_training(ModelTraining(recipe, folder, world), resume=resume)
    finally:
        stop()


def forward_flops(config: ModelConfig, grid: tuple[int, int]) -> float:
    """Of one image in one teacher-forced pass: matrix products, and attention as if it were not causal.

    Prompts and condition images are not counted.
    """
    tokens, width = grid[0] * grid[1], config.width
    ffn = 3 * width * config.ffn_width
    pass1 = config.pass1_layers * (4 * width**2 + ffn)
    pass2 = config.pass2_layers * (2 * width**2 + ffn)
    memory = 2 * width**2 * (1 if config.shared_kv else config.pass2_layers)
    attention = 2 * tokens * width * (config.pass1_layers + config.pass2_layers)
    return 2.0 * tokens * (pass1 + pass2 + memory + attention + width * config.vocab_size)


def _open(names: str | tuple[str, ...], config: ModelConfig) -> TokenSet:
    folders = (names,) if isinstance(names, str) else names
    require(bool(folders), "data names no token folder; expected one or more")
    opened = {folder: open_tokens(folder, vocab_size=config.vocab_size) for folder in dict.fromkeys(folders)}
    tokens = join_tokens([opened[folder] for folder in folders])
    _check(config, tokens)
    return tokens


def _control(config: ModelConfig, tokens: TokenSet | None, device: torch.device) -> ControlMaps | None:
    """The condition images, where the model takes them and there are tokens."""
    if config.control is None or tokens is None:
        return None
    require(bool(tokens.controls), f"{tokens.folder} has no condition images; make it with `arpg tokenize --control`")
    maps = ControlMaps(tokens.controls, config.control.kinds, device)
    high, wide = (side * config.control.patch for side in tokens.grid)
    require(
        maps.size == (high, wide),
        f"the condition images are {maps.size[1]}x{maps.size[0]} pixels; model.control.patch {config.control.patch} "
        f"and the grid need {wide}x{high}",
    )
    return maps


def _text(config: ModelConfig, tokens: TokenSet | None) -> TextStates | None:
    """The states of the captions, where the model takes prompts and there are tokens."""
    if config.text is None or tokens is None:
        return None
    text, ours = open_text_states(tokens), config.text
    require(
        text.config == ours,
        f"{tokens.folder} has states of {text.config}; model.text is {ours}",
    )
    return text


def _check(config: ModelConfig, tokens: TokenSet) -> None:
    require(
        config.text is not None or tokens.num_classes <= config.num_classes,
        f"the tokens have {tokens.num_classes} classes; model.num_classes is {config.num_classes}",
    )
    require(
        tuple(tokens.grid) == config.grid,
        f"the tokens are on a {tokens.grid[0]}x{tokens.grid[1]} grid; model.grid is {config.grid[0]}x{config.grid[1]}",
    )
