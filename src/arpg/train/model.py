"""`arpg train`: train a model on tokens.

Shapes: B local batch, N grid tokens, T tokens of a caption, E width of the text states, H W pixels.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.nn.parallel import DistributedDataParallel

from arpg import tasks
from arpg.checkpoint import FolderConfig, load_model, load_tokenizer, read_folder, write_folder
from arpg.classes import ClassNames, numbered_classes
from arpg.config import ModelConfig
from arpg.data.dataset import Batch, Dataset, TokenBatches, open_dataset, read_orders
from arpg.data.tokens import NO_CLASS
from arpg.decode import Request, decode, make_plan
from arpg.device import training_precision
from arpg.errors import present, require
from arpg.files import State
from arpg.hub import resolve
from arpg.image import sheet, to_pil
from arpg.kernels.dispatch import can_compile
from arpg.lora import WEIGHTS, add_adapters, merged_weights, trained_weights, write_adapter
from arpg.model import ARPG, ControlMap, text_condition
from arpg.storage import AnyPath, as_path
from arpg.train.cost import fit_to_device, forward_flops
from arpg.train.distributed import World, mean_over_ranks, parallelize
from arpg.train.loop import (
    EMA,
    BestWeights,
    Training,
    clip_gradients,
    learning_rate,
    make_adamw,
    set_learning_rate,
    train,
)
from arpg.train.objective import GraphedGradients, GuidanceDistillation, Objective
from arpg.train.recipe import ModelRecipe

log = logging.getLogger(__name__)


class ModelTraining(Training):
    """One run of a model recipe."""

    recipe: ModelRecipe

    def __init__(self, recipe: ModelRecipe, folder: AnyPath, world: World) -> None:
        super().__init__(folder, world)
        self.dataset = open_dataset(recipe.data.train, recipe.model, world.device)
        self.validation: Dataset | None = None
        if recipe.data.validation is not None:
            self.validation = open_dataset(recipe.data.validation, recipe.model, world.device)
            require(
                recipe.model.text is not None or self.validation.tokens.classes == self.dataset.tokens.classes,
                f"{recipe.data.validation} has other classes than {recipe.data.train}; tokenize folders of the same "
                "classes",
            )
        model = self.build_model(recipe.model).init_weights(seed=recipe.seed)
        if recipe.init_from is not None:
            for line in warm_start(model, recipe.init_from, self.dataset.tokens.classes):
                log.info("%s", line)
        if recipe.lora is not None:
            classes = [self.dataset.tokens.classes.index(name) for name in recipe.lora.classes]
            add_adapters(model, recipe.lora, classes, seed=recipe.seed)
        model.to(world.device).train()
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        recipe = fit_to_device(recipe, world.device, trained=trained)
        self.recipe, run = recipe, recipe.run
        self.model, self.objective = model, self.build_objective(model)
        if run.compile and can_compile(model.embedding.weight):
            model.compile_blocks()
        blocks = [*model.pass1, *model.pass2]
        self.parallel = parallelize(self.objective, run.parallel, world, blocks)
        self.graphed: GraphedGradients | None = None
        if run.graph and run.parallel == "none" and run.accumulate == 1 and world.device.type == "cuda":
            self.graphed = GraphedGradients(self.loss, self.objective.parameters())
        self.optimizer = make_adamw(self.objective, recipe.optim)
        self.ema = EMA(self.objective, recipe.optim.ema)
        orders = None if recipe.data.orders is None else read_orders(as_path(recipe.data.orders), self.dataset.tokens)
        self.batches = self._batches(self.dataset, recipe.label_drop, recipe.control_drop, orders)
        log.info(
            "training %.1f M parameters on %s in %s: %d images, %d in each of %d steps",
            trained / 1e6,
            world.device,
            training_precision(run.precision, world.device),
            len(self.dataset.tokens),
            run.batch_size,
            run.steps,
        )

    def build_model(self, config: ModelConfig) -> ARPG:
        """Make the network that is trained; another one with the same interface can take its place."""
        return ARPG(config)

    def build_objective(self, model: ARPG) -> Objective:
        """Make the module that computes the loss."""
        recipe, grid = self.recipe, self.dataset.tokens.grid
        if recipe.guidance_scales is None:
            return Objective(model, grid)
        teacher = load_model(
            resolve(present(recipe.init_from, "no teacher")), device=self.world.device, dtype=torch.float32
        )
        require(
            not teacher.takes_guidance,
            f"{recipe.init_from} takes the guidance scale as an input; expected a model that is guided by two passes",
        )
        if recipe.run.compile and can_compile(teacher.embedding.weight):
            teacher.compile_blocks()
        return GuidanceDistillation(model, grid, teacher, recipe.guidance_scales)

    def _batches(
        self, dataset: Dataset, label_drop: float, control_drop: float = 0.0, orders: Any = None
    ) -> TokenBatches:
        recipe = self.recipe
        return TokenBatches(
            dataset,
            batch_size=recipe.run.batch_size,
            parts=self.world.size * recipe.run.accumulate,
            num_classes=recipe.model.num_classes,
            label_drop=label_drop,
            seed=recipe.seed,
            device=self.world.device,
            shuffle=recipe.data.shuffle,
            orders=orders,
            orders_share=recipe.data.orders_share,
            control_drop=control_drop,
        )

    def loss(self, batch: Batch) -> Tensor:
        """Return the mean loss of a part of a batch."""
        with self.autocast():
            loss: Tensor = self.parallel(batch)
        return loss

    def step(self, step: int) -> dict[str, Tensor]:
        """Compute and clip the gradients of all parts, then update the weights and their moving average."""
        recipe, accumulate = self.recipe, self.recipe.run.accumulate
        set_learning_rate(self.optimizer, learning_rate(recipe.optim, step, recipe.run.steps))
        total = torch.zeros((), device=self.world.device)
        with self.interruptible():
            for micro in range(accumulate):
                part = self.world.rank * accumulate + micro
                # Replicas average their gradients once, after the last part.
                parallel, last = self.parallel, micro == accumulate - 1
                batch = self.batches.batch(step, part)
                if self.graphed is not None:
                    total += self.graphed(batch)
                    continue
                waits = isinstance(parallel, DistributedDataParallel) and not last
                with parallel.no_sync() if waits else nullcontext():  # type: ignore[operator]
                    loss = self.loss(batch) / accumulate
                    loss.backward()  # type: ignore[no-untyped-call]
                total += loss.detach()
        if recipe.optim.clip > 0:
            clip_gradients(self.optimizer, recipe.optim.clip)
        self.optimizer.step()
        self.ema.update(step)
        self.optimizer.zero_grad(set_to_none=True)
        return {"loss": total}

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Return the teacher-forced, causal loss of the averaged weights on the validation tokens, without dropout."""
        if self.validation is None:
            return {}
        batches = self._batches(self.validation, 0.0)
        # All complete batches, at least one; an order and a view per image, the same every time.
        count = max(1, self.validation.tokens.num_images // self.recipe.run.batch_size)
        accumulate = self.recipe.run.accumulate
        total = torch.zeros((), device=self.world.device)
        self.objective.eval()
        with self.ema.swapped_in(), self.interruptible():
            for step in range(count):
                for micro in range(accumulate):
                    total += self.loss(batches.batch(step, self.world.rank * accumulate + micro))
        self.objective.train()
        return {"validation loss": float(mean_over_ranks(total / (count * accumulate), self.world))}

    def averaged_weights(self) -> State:
        """Return the averaged weights, unsharded, on the CPU, by the network's own names (on every rank).

        Of an adapter these are its own weights.
        """
        with self.ema.swapped_in():
            if self.recipe.lora is not None:
                return {name: t.cpu().clone() for name, t in trained_weights(self.model).items()}
            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            state = get_model_state_dict(self.objective, options=options)
            # Copies, and before the swap back: on a CPU these are the live parameters themselves.
            return {key.removeprefix("model."): t.clone() for key, t in state.items() if isinstance(t, Tensor)}

    def export(self) -> AnyPath:
        """Write `folder/model`: the averaged weights as a model folder, with the tokenizer where one is named.

        An adapter is a file, `folder/adapter_model.safetensors`.
        """
        recipe, target = self.recipe, self.folder / ("model" if self.recipe.lora is None else WEIGHTS)
        weights = BestWeights.read(self) or self.averaged_weights()
        if not self.world.main:
            return target
        if recipe.lora is not None:
            return write_adapter(self.folder, recipe.lora, weights)
        names = None
        if recipe.model.text is None:
            given = tuple(self.dataset.tokens.classes)
            names = ClassNames(given) if given else numbered_classes(recipe.model.num_classes)
        config = FolderConfig(model=recipe.model, sampling=recipe.sampling, classes=names, license=recipe.license)
        write_folder(target, config, model=weights)
        if recipe.tokenizer is not None:
            tokenizer = load_tokenizer(resolve(recipe.tokenizer))
            write_folder(target, FolderConfig(tokenizer=tokenizer.config), tokenizer=tokenizer.state_dict())
        return target

    @torch.no_grad()
    def sheet(self, num_images: int = 16) -> Image.Image | None:
        """Return a sheet of samples of the averaged model; None without a tokenizer, or off the main rank."""
        if self.recipe.tokenizer is None:
            return None
        weights = self.averaged_weights()
        if not self.world.main:
            return None
        if self.recipe.lora is not None:
            weights = merged_weights(self.model, weights)
        model = ARPG(self.recipe.model)
        model.load_state_dict(weights)
        model.to(self.world.device).eval()
        samples = make_samples(model, self.validation or self.dataset, num_images)
        settings, request = self.recipe.sampling.settings(), samples.request
        plan = make_plan(request.grid, request.known_BN, request.seeds, settings)
        with self.interruptible():
            *_, last = decode(model, request, plan, settings)
        tokenizer = load_tokenizer(resolve(self.recipe.tokenizer), device=self.world.device, dtype=torch.float32)
        return samples.sheet(to_pil(tokenizer.decode(last.ids_BN, request.grid)))

    def state(self) -> dict[str, Any]:
        """Return the state that a snapshot holds; the frozen weights under an adapter are not in it."""
        state = super().state()
        if self.recipe.lora is not None:
            trained = {f"model.{name}" for name in trained_weights(self.model)}
            state["model"] = {name: tensor for name, tensor in state["model"].items() if name in trained}
        return state

    def describe_batch(self, step: int) -> str:
        """Name the first images of this process's part of a step's batch."""
        first = self.batches.indices(step, self.world.rank * self.recipe.run.accumulate)[:8].tolist()
        return f"the images {', '.join(map(str, first))}, ... of {self.recipe.data.train}"

    def flops_per_step(self) -> float:
        """Return the operations of forward and backward: three times those of the forward pass; a teacher has two."""
        passes = 3 if self.recipe.guidance_scales is None else 5
        return passes * forward_flops(self.recipe.model, self.dataset.tokens.grid) * self.recipe.run.batch_size


def train_model(recipe: ModelRecipe, folder: AnyPath, *, resume: bool = False, device: str = "auto") -> AnyPath:
    """Run a recipe to its end; return the folder of the finished model."""
    return train(lambda world: ModelTraining(recipe, folder, world), resume=resume, device=device)


@dataclass(frozen=True)
class Samples:
    """A request for samples, and what the sheet shows with them."""

    request: Request
    captions: Sequence[str] | None = None
    conditions: Sequence[Image.Image] | None = None

    def sheet(self, images: Sequence[Image.Image]) -> Image.Image:
        """Arrange the generated images, each beside its condition image or above its caption."""
        if self.conditions is not None:
            pairs = zip(self.conditions, images, strict=True)
            images = [sheet([condition, image], columns=2) for condition, image in pairs]
        return sheet(images, captions=self.captions)


def make_samples(model: ARPG, dataset: Dataset, num_images: int) -> Samples:
    """Request samples: along condition maps, of captions, or of classes, whichever the model takes."""
    tokens, text, control = dataset.tokens, dataset.text, dataset.control
    if control is not None:  # of evenly spaced images, with their classes where they have some
        index = np.arange(num_images) * len(tokens) // num_images
        pixels_BHW, kind_B = control.gather(index, np.zeros_like(index))
        pairs = zip(pixels_BHW, kind_B.tolist(), strict=True)
        maps = [ControlMap(pixels, control.kinds[kind], 1.0) for pixels, kind in pairs]
        labels = None
        if model.text is None:
            labels = [model.config.num_classes if label == NO_CLASS else int(label) for label in tokens.labels[index]]
        ids_N = torch.zeros(tokens.grid[0] * tokens.grid[1], dtype=torch.long)
        request = tasks.fill(
            model, labels, range(num_images), ids_N=ids_N, known_N=ids_N.bool(), grid=tokens.grid, control=maps
        )
        return Samples(request, conditions=[Image.fromarray(pixels) for pixels in pixels_BHW.cpu().numpy()])
    if text is not None:  # of the first captions
        seeds = range(min(num_images, len(tokens)))
        states_BTE, length_B = text.gather(np.array(seeds))
        states = [torch.from_numpy(row[:length]).float() for row, length in zip(states_BTE, length_B, strict=True)]
        request = Request.from_nothing(text_condition(model, states), tokens.grid, tuple(seeds))
        return Samples(request, captions=present(tokens.captions, "no captions")[: len(seeds)])
    used = np.unique(tokens.labels[tokens.labels != NO_CLASS]).tolist()  # of classes that have images
    labels = [used[i * len(used) // num_images] for i in range(num_images)]
    return Samples(tasks.generate(model, labels, list(range(num_images)), grid=tokens.grid))


def warm_start(model: ARPG, name: str, classes: Sequence[str] = ()) -> list[str]:
    """Copy the weights of model `name` that fit into `model`; return lines that say what is new.

    The grid may differ, because positions are not learned. The embedding is copied by the meaning of its rows: codes
    (where there are as many), [MASK], the null class, and classes by their names. A class that `name` does not know
    starts as the null class. `classes` are the names of the model's classes; where one side has no names, classes of
    equal number are copied as they are.
    """
    folder = resolve(name)
    described = read_folder(folder)
    other = load_model(folder, config=described, dtype=torch.float32)
    state, source = model.state_dict(), other.state_dict()
    lines, num_copied = [], 0
    with torch.no_grad():
        for key, tensor in state.items():
            found = source.get(key)
            if key == "embedding.weight" and found is not None and found.shape[1] == tensor.shape[1]:
                num_copied += 1
                new = _copy_embedding(tensor, found, model.config, other.config, classes, described.classes)
                if new:
                    lines.append(f"new: {len(new)} of {model.config.num_classes} classes, like {new[0]}")
            elif found is not None and found.shape == tensor.shape:
                tensor.copy_(found)
                num_copied += 1
            else:
                lines.append(f"new: {key}" + (f" ({list(found.shape)} there)" if found is not None else ""))
    return [f"started from {name}: {num_copied} of {len(state)} tensors", *lines]


def _copy_embedding(
    to_ED: Tensor,
    from_ED: Tensor,
    to: ModelConfig,
    source: ModelConfig,
    classes: Sequence[str],
    known: ClassNames | None,
) -> list[str]:
    """Copy the rows with the same meaning; return the names of classes that `source` does not know."""
    if to.vocab_size == source.vocab_size:
        to_ED[: to.vocab_size] = from_ED[: to.vocab_size]
    to_ED[to.mask_id] = from_ED[source.mask_id]
    to_ED[to.null_class_id :] = from_ED[source.null_class_id :]  # the null class and the spare row
    if not classes or known is None or known == numbered_classes(source.num_classes):
        same = to.num_classes == source.num_classes
        ids: list[int | None] = [i if same else None for i in range(to.num_classes)]
    else:
        ids = [known.match(name) for name in classes]
    for row, found in enumerate(ids):
        from_row = source.null_class_id if found is None else source.first_class_id + found
        to_ED[to.first_class_id + row] = from_ED[from_row]
    names = classes or numbered_classes(to.num_classes).lines
    return [names[row] for row, found in enumerate(ids) if found is None]
