r"""The folder that is bundled: weights, what the page shows, and the card, written from the records of `model-card`.

    python -m experiments.meadow bundle results/model results/card/card.json src/arpg/assets/meadow \
        --training "12,000 steps of 512 images, 24 minutes on one NVIDIA H200" --limits limits.md
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from arpg.checkpoint import (
    CLASSES,
    CONFIG,
    INDEX,
    MODEL,
    TOKENIZER,
    FolderConfig,
    load_model,
    load_tokenizer,
    read_folder,
)
from arpg.checkpoint import write_folder as write_config
from arpg.errors import InputError, present, require
from arpg.files import write_text
from arpg.hub import resolve
from arpg.quantization.storage import pack
from arpg.tables import markdown_table
from experiments.meadow.build_data import SOURCES
from experiments.photos import photo_set

ABOUT = "{classes} classes of cats, dogs, birds, flowers and things in photographs, at {side} x {side} pixels."
EXAMPLES = ("golden retriever", "siamese cat", "sunflower", "puffin", "water lily", "church")
TOKENIZER_TRAINING = "4,900 steps of 256 images, 19 minutes of steps on one NVIDIA H200"
METRICS = {"fid": ("FID", 2), "sfid": ("sFID", 2), "is": ("Inception Score", 1), "kid": ("KID", 4)}
PARTS = {
    "accuracy": "the share of samples that a classifier recognises",
    "diversity": "the LPIPS between samples of a class",
    "nearest": "the LPIPS to the nearest training photograph",
}
METRICS |= {"precision": ("precision", 3), "recall": ("recall", 3)}

log = logging.getLogger("experiments")


def card(name: str, folder: Path, found: Mapping[str, Any], counts: Mapping[str, int], **written: str) -> str:
    """Return the card of a model folder from the records of `model-card`.

    `counts`: photographs of each split. `written`: what no record says, `training` and `limits`.
    """
    missing = [part for part in ("tokenizer", "fid") if part not in found]
    require(not missing, f"the record has no {', '.join(missing)}; run model-card again to measure it")
    parts = [
        f"# {name}",
        _introduction(folder),
        _shape(folder, training=written["training"]),
        "## Data and licences",
        _sources(counts),
        "## Numbers",
        _numbers(found),
        "## Limits",
        _limits(found, written["limits"]),
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _introduction(folder: Path) -> str:
    config, base = load_model(folder).config, read_folder(folder).base
    rows, columns = config.grid
    side = rows * load_tokenizer(folder).config.stride
    origin = (
        "and its VQ tokenizer. Both were trained from scratch by this project."
        if base is None
        else f"fine-tuned from `{base}` by this project. It uses the tokenizer of `{base}`."
    )
    return _wrapped(
        f"A class-conditional ARPG model of photographs: {config.num_classes} classes of cats, dogs, birds, flowers "
        f"and things at {side} x {side} pixels ({rows} x {columns} = {rows * columns} tokens), {origin} "
        "**The weights are for research use**, see the licences below."
    )


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 120)


def _shape(folder: Path, *, training: str) -> str:
    networks = (load_tokenizer(folder), load_model(folder))
    tokenizer, config = networks[0].config, networks[1].config
    counts = [sum(p.numel() for p in network.parameters()) / 1e6 for network in networks]
    if (base := read_folder(folder).base) is None:
        stored = [f"8 bits per weight, {_megabytes(folder / file)}" for file in (TOKENIZER, MODEL)]
    else:
        stored = [f"that of `{base}`", f"differences from `{base}`, {_megabytes(folder / MODEL)}"]
    sampling = present(read_folder(folder).sampling, f"{folder / CONFIG} has no sampling section")
    table = sampling.guidance_by_steps
    scales = ", ".join(f"{scale:g} at {steps} steps" for steps, scale in table)
    guidance = f"{table[0][1]:g}" if len(table) == 1 else f"({scales})"  # one applies to every number of steps
    levels = ", ".join(map(str, tokenizer.multipliers))
    rows = [
        ["parameters", *(f"{count:.2f} M" for count in counts)],
        [
            "shape",
            f"{tokenizer.channels} channels x ({levels}), {tokenizer.codebook_size:,} codes of "
            f"{tokenizer.codebook_dim} channels, {tokenizer.stride} x {tokenizer.stride} pixels per token",
            f"width {config.width}, {config.num_heads} heads, {config.pass1_layers} + {config.pass2_layers} layers",
        ],
        ["stored as", *stored],
        ["training", TOKENIZER_TRAINING, training],
        [
            "defaults",
            "",
            f"{sampling.steps} steps, `{sampling.order}` order, `{sampling.schedule}` schedule, "
            f"{sampling.guidance_schedule} guidance {guidance}",
        ],
    ]
    return markdown_table(["", "tokenizer", "network"], rows)


def _megabytes(path: Path) -> str:
    return f"{path.stat().st_size / 1e6:.1f} MB"


def _sources(counts: Mapping[str, int]) -> str:
    lines = [f"- {source.terms} (`{source.repository.replace('+', '/')}`)" for source in SOURCES.values()]
    said = f"{sum(counts.values()):,} photographs, {counts['train']:,} of them in the training split."
    terms = "Like the data, the weights may be used for non-commercial research only. The code is MIT."
    return "\n".join([said, "", *lines, "", terms])


def _numbers(found: Mapping[str, Any]) -> str:
    splits = {"train": "training", "test": "test"}
    measured = {
        f"{steps}, {name} split": each[split]
        for steps, each in found["fid"].items()
        for split, name in splits.items()
        if split in each
    }
    reports = list(measured.values())
    cells = []
    for metric, (title, digits) in METRICS.items():
        if metric in reports[0]:
            cells.append([title, *(_with_interval(report[metric], digits) for report in reports)])
    tokenizer = found["tokenizer"]
    where = f" ({tokenizer['device']})" if "device" in tokenizer else ""  # where it was measured with other weights
    domains = {name: report for name, report in tokenizer.items() if isinstance(report, dict)}
    parts = [
        _wrapped(
            f"{reports[0]['fid']['samples']:,} samples with classes as frequent as in the training split, default "
            f"settings, {found['device']}, {found['precision']}; 95% intervals:"
        ),
        "",
        markdown_table(["", *measured], cells),
        f"The tokenizer has rFID {tokenizer['rfid, test images']:.2f} on {tokenizer['images']:,} test "
        f"photographs{where}.",
        "",
        markdown_table(
            ["reconstruction", "PSNR", "SSIM", "LPIPS", "codes used"],
            [
                [name, f"{r['psnr']:.2f} dB", f"{r['ssim']:.3f}", f"{r['lpips']:.3f}", f"{r['usage']:.1%}"]
                for name, r in domains.items()
            ],
        ),
    ]
    if (accuracy := found.get("accuracy")) is not None:
        low, high = accuracy["interval"]
        parts.append(
            _wrapped(
                f"A classifier trained on the real training split recognises {accuracy['samples']:.1%} of the samples "
                f"({accuracy['samples per class']} per class, 95% interval {low:.1%} to {high:.1%}) and "
                f"{accuracy['real test images']:.1%} of the real test photographs."
            )
        )
    if (diversity := found.get("diversity")) is not None:
        said = (
            "The mean LPIPS between two samples of a class is {samples:.3f}, between two real training photographs "
            "of a class {real:.3f}."
        )
        parts += ["", _wrapped(said.format(samples=diversity["samples"], real=diversity["real training images"]))]
    if (nearest := found.get("nearest")) is not None:
        titles = ["LPIPS to the nearest training photograph of the class", "mean", "closest 1%"]
        rows = [[name, f"{each['mean']:.3f}", f"{each['closest 1%']:.3f}"] for name, each in nearest.items()]
        parts += ["", markdown_table(titles, rows)]
    if unmeasured := [what for part, what in PARTS.items() if part not in found]:
        parts += ["", _wrapped(f"Not measured yet: {', '.join(unmeasured)}.")]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(parts))  # tables end with a line break of their own


def _with_interval(entry: Mapping[str, Any], digits: int) -> str:
    text = f"{entry['value']:.{digits}f}"
    if "interval" in entry:
        low, high = entry["interval"]
        text += f" ({low:.{digits}f} to {high:.{digits}f})"
    return text


def _limits(found: Mapping[str, Any], written: str) -> str:
    accuracy = found.get("accuracy", {})
    never, low = accuracy.get("classes never recognised", []), accuracy.get("classes under 50%", {})
    worst = [f"{name} {low[name]:.0%}" for name in sorted(low, key=lambda name: low[name]) if name not in never]
    lines = [f"- Classes without a recognised sample ({len(never)}): {', '.join(never)}."] if never else []
    if worst:
        lines.append(f"- Classes with less than half of the samples recognised ({len(worst)}): {', '.join(worst)}.")
    return "\n".join([*(textwrap.fill(line, 120, subsequent_indent="  ") for line in lines), written.strip()])


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the bundled folder of a model: its weights, what the page shows, and its card."""
    parser = argparse.ArgumentParser(prog="experiments.meadow bundle", description=main.__doc__)
    parser.add_argument(
        "model", type=Path, help="A folder that `train` stored: in 8 bits, or as differences from an installed model."
    )
    parser.add_argument("record", type=Path, help="card.json of model-card.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokenizer", help="Its tokenizer, where the folder has none (staged runs leave it out).")
    parser.add_argument("--set", default="meadow", help="The photographs it was trained on.")
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--training", required=True, help="Steps, batch, time and hardware, in words.")
    parser.add_argument("--limits", type=Path, help="Markdown list of what was seen on the sheet of all classes.")
    options = parser.parse_args(arguments)
    described = read_folder(options.model)
    names = present(described.classes, f"{options.model} has no classes")
    for name in EXAMPLES:
        names.find(name)
    options.out.mkdir(parents=True, exist_ok=True)
    for file in (MODEL, CLASSES, INDEX, CONFIG):
        require((options.model / file).is_file(), f"{options.model / file} does not exist; store the model whole")
        shutil.copyfile(options.model / file, options.out / file)
    if described.base is None:
        state = load_tokenizer(options.model if options.tokenizer is None else resolve(options.tokenizer)).state_dict()
        write_config(options.out, FolderConfig(tokenizer=described.tokenizer), tokenizer=pack(state, "int8"))
    photos = photo_set(options.set)
    about = ABOUT.format(classes=len(names), side=photos.size)
    write_config(options.out, FolderConfig(about=about, examples=EXAMPLES))
    try:
        found = json.loads(options.record.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{options.record} is not a record of model-card ({error})") from None
    counts = {split: len(photos.open(options.data, split)) for split in ("train", "test")}
    limits = "" if options.limits is None else options.limits.read_text(encoding="utf-8")
    text = card(options.out.name, options.out, found, counts, training=options.training, limits=limits)
    write_text(options.out / "README.md", text)
    size = sum(path.stat().st_size for path in options.out.iterdir()) / 1e6
    log.info("%s: %.1f MB; next: python examples/thumbnails.py %s", options.out, size, options.out)
