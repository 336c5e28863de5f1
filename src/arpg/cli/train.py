"""`arpg finetune`, `train`, `train-tokenizer`, `train-cost`, `tokenize` and `embed`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from arpg.cli.options import (
    Command,
    DepthModelOption,
    DeviceOption,
    RayOption,
    WorkersOption,
    add_options,
    out,
    output_option,
    parse_values,
    progress_bar,
    ray_options,
)
from arpg.config import DEFAULT_MODEL, DEFAULT_TEXT_MODEL
from arpg.errors import present
from arpg.settings import CONTROL_KINDS
from arpg.storage import AnyPath, as_path

SetOption = Annotated[list[str] | None, typer.Option("--set", help="Override a value: --set optim.lr=3e-4.")]


@dataclass(frozen=True)
class TrainingOptions:
    """The arguments and options that both training verbs take."""

    recipe: Annotated[Path, typer.Argument(help="A TOML file, see recipes/.")]
    folder: Annotated[str, output_option("The run's folder: logs, sheets, snapshots, the model.")]
    set_: SetOption = None
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest good snapshot.")] = False
    device: DeviceOption = "auto"

    def run(self, train: Callable[..., AnyPath], recipe: type[Any]) -> None:
        """Read the recipe as the dataclass `recipe`, train with it, and print the folder of the result."""
        from arpg.train.recipe import read_recipe

        logging.getLogger("arpg").setLevel(logging.INFO)  # the reports of training
        read = read_recipe(self.recipe, recipe, self.set_ or [])
        out.print(f"wrote {train(read, as_path(self.folder), resume=self.resume, device=self.device)}")


def with_training_options(command: Command) -> Command:
    """Give a command the options of `TrainingOptions`, which its parameter `options` receives."""
    return add_options(command, TrainingOptions, "options")


@with_training_options
def train_tokenizer(options: TrainingOptions) -> None:
    """Train a tokenizer on images."""
    from arpg.train.recipe import TokenizerRecipe
    from arpg.train.tokenizer import train_tokenizer

    options.run(train_tokenizer, TokenizerRecipe)


@with_training_options
def train(options: TrainingOptions) -> None:
    """Train an ARPG on tokens; the same command under `torchrun` uses many GPUs and machines."""
    from arpg.train.model import train_model
    from arpg.train.recipe import ModelRecipe

    options.run(train_model, ModelRecipe)


def finetune(
    images: Annotated[str, typer.Argument(help="Images: a folder per class, or captions beside them; or a zip.")],
    output: Annotated[Path, output_option("The run's folder: tokens, logs, sheets, snapshots, the result.")],
    base: Annotated[
        str | None,
        typer.Option(help=f"The model to start from; none: {DEFAULT_MODEL}, or {DEFAULT_TEXT_MODEL} for captions."),
    ] = None,
    lora: Annotated[int | None, typer.Option(metavar="RANK", help="Train a LoRA adapter of this rank alone.")] = None,
    set_: SetOption = None,
    device: DeviceOption = "auto",
) -> None:
    """Fine-tune a model on your own images; all settings are chosen for you. Run it again to continue."""
    from arpg.device import set_threads
    from arpg.train.finetune import finetune as run

    set_threads()
    logging.getLogger("arpg").setLevel(logging.INFO)  # the reports of training
    with progress_bar("tokenizing") as progress:
        done = run(images, output, base=base, lora=lora, overrides=set_ or [], device=device, progress=progress)
    out.print(f"validation loss {done.base_loss:.3f} -> {done.loss:.3f} (step {done.step}); wrote {done.path}")
    out.print("generate with:")
    out.print(f"  {done.command}", markup=False)


def tokenize(
    images: Annotated[list[str], typer.Argument(help="Image folders, zips, or paths into zips; together one set.")],
    tokenizer: Annotated[str, typer.Option("--tokenizer", "-t", help="A model folder with a tokenizer.")],
    folder: Annotated[str, output_option("The token folder to write.")],
    size: Annotated[int, typer.Option(help="Side of the square that is tokenized, in pixels.")],
    ten_crops: Annotated[bool, typer.Option("--ten-crops", help="Ten views of each image instead of one.")] = False,
    views: Annotated[
        int, typer.Option(help="Views of each image: the centre crop, then random ones, half mirrored.")
    ] = 1,
    zoom: Annotated[bool, typer.Option("--zoom", help="Random views also differ in size.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the random views.")] = 0,
    control: Annotated[
        str, typer.Option(help=f"Also keep condition images of this kind: {', '.join(CONTROL_KINDS)}.")
    ] = "",
    depth_model: DepthModelOption = None,
    batch_size: Annotated[int, typer.Option(help="Images encoded together.")] = 64,
    shard_size: Annotated[int, typer.Option(help="Images of a shard, which one worker encodes.")] = 8192,
    ray: RayOption = False,
    workers: WorkersOption = 0,
    device: DeviceOption = "auto",
) -> None:
    """Turn images into token shards for `arpg train`; continues where it stopped."""
    import torch

    from arpg.checkpoint import load_tokenizer
    from arpg.data.images import concatenate, open_images
    from arpg.data.tokenize import tokenize as run
    from arpg.device import choose_device
    from arpg.hub import resolve

    cluster = ray_options(ray, workers)
    here = choose_device("cpu" if cluster else device)
    loaded = load_tokenizer(resolve(tokenizer), device=here, dtype=torch.float32)
    sets = [open_images(path) for path in images]
    with progress_bar("tokenizing") as progress:
        tokens = run(
            loaded,
            concatenate(sets) if len(sets) > 1 else sets[0],
            as_path(folder),
            size=size,
            ten_crops=ten_crops,
            views=views,
            zoom=zoom,
            seed=seed,
            batch_size=batch_size,
            shard_size=shard_size,
            control=control,
            depth=depth_model,
            progress=progress,
            ray=cluster,
            device=device if cluster else None,
        )
    out.print(
        f"{tokens.num_images} images, {tokens.views} views of {tokens.grid[0]}x{tokens.grid[1]} tokens in {folder}"
    )


def embed(
    folder: Annotated[str, typer.Argument(help="A token folder with captions.")],
    encoder: Annotated[
        str, typer.Option(help="minilm, flan-t5-xl (or another size), a hub id or a folder.")
    ] = "minilm",
    max_tokens: Annotated[int, typer.Option(help="Captions are cut there.")] = 32,
    batch_size: Annotated[int, typer.Option(help="Captions encoded together.")] = 512,
    ray: RayOption = False,
    workers: WorkersOption = 0,
    device: DeviceOption = "auto",
) -> None:
    """Compute the text states of a token set's captions, once, for `arpg train`; continues where it stopped."""
    from arpg.config import TextConfig
    from arpg.data.dataset import TEXT, open_text_states, write_text_states
    from arpg.data.tokens import open_tokens
    from arpg.text_encoder import load_encoder

    cluster = ray_options(ray, workers)
    tokens = open_tokens(folder)
    if (as_path(folder) / TEXT).exists():  # how wide the states are is known without the encoder
        width = open_text_states(tokens).config.width
        load = None
    else:
        load = load_encoder(encoder, max_tokens=max_tokens, device="cpu" if cluster else device)
        width = load.width
    with progress_bar("embedding") as progress:
        states = write_text_states(
            tokens,
            TextConfig(encoder, width, max_tokens),
            load,
            batch_size=batch_size,
            progress=progress,
            ray=cluster,
            load=partial(load_encoder, encoder, max_tokens=max_tokens, device=device) if cluster else None,
        )
    out.print(f"{len(states)} captions in {folder}, {width} numbers for each token")


def train_cost(
    recipe: Annotated[Path, typer.Argument(help="A recipe of `arpg train`, see recipes/.")],
    gpus: Annotated[str, typer.Option(help="Numbers of GPUs, with commas.")] = "8,64,512",
    strategy: Annotated[str, typer.Option(help="Shardings, with commas: ddp, fsdp, hsdp.")] = "ddp,fsdp,hsdp",
    gpu: Annotated[str, typer.Option(help="The GPU, like H200 or A100.")] = "H200",
    mfu: Annotated[
        float, typer.Option(help="Share of the peak that forward and backward reach on one GPU; measure it.")
    ] = 0.49,  # ARPG-L, 256 images on an NVIDIA H200: 0.484 of 258.2 ms, of which the optimizer takes 2.7 ms
    overlap: Annotated[float, typer.Option(help="Share of computation that hides communication.")] = 0.8,
    gpus_per_node: Annotated[int, typer.Option(help="GPUs of a machine.")] = 8,
    node_bandwidth: Annotated[float, typer.Option(help="GB/s of each GPU to those of its machine.")] = 360,
    network_bandwidth: Annotated[float, typer.Option(help="GB/s of each GPU to other machines.")] = 40,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Override a value of the recipe.")] = None,
) -> None:
    """Estimate time, memory and network traffic of a training run on many GPUs."""
    from arpg.device import GPU_SPECS, gpu_spec
    from arpg.train.cost import Cluster, cost_table, step_cost
    from arpg.train.recipe import ModelRecipe, read_recipe

    spec = present(gpu_spec(gpu), f"gpu is {gpu!r}; expected one of {', '.join(GPU_SPECS)}")
    read = read_recipe(recipe, ModelRecipe, set_ or [])
    clusters = [
        Cluster(
            count,
            spec.bf16_flops,
            spec.bandwidth,
            gpus_per_node=gpus_per_node,
            node_bandwidth=1e9 * node_bandwidth,
            network_bandwidth=1e9 * network_bandwidth,
        )
        for count in parse_values("gpus", gpus, int)
    ]
    batch_size, names = read.run.batch_size, parse_values("strategy", strategy, str)
    costs = [
        step_cost(read.model, cluster, name, batch_size=batch_size, mfu=mfu, overlap=overlap)
        for cluster in clusters
        for name in names
        if batch_size % cluster.gpus == 0
    ]
    out.print(cost_table(costs, steps=read.run.steps), markup=False)
    for cluster in clusters:
        if batch_size % cluster.gpus:
            out.print(f"{cluster.gpus} GPUs are left out: the batch of {batch_size} images does not divide evenly.")
