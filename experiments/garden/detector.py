"""The object detector that scores text-to-image: network, targets and losses, and training on composed scenes.

Centres of objects are peaks of one map per kind; size, offset within the cell and colour are read off at the peaks.
Shapes: B batch, O objects of a scene (padded with -1), K kinds, C colours, h w cells of the maps, HW pixels.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from arpg.errors import InputError, require
from arpg.evaluation.classifier import Block, Scorer, check_width
from arpg.image import Pixels, check_pixels, to_images
from experiments.garden.composer import Composer, Scene
from experiments.garden.objects import KINDS, TINTS
from experiments.garden.scene_sets import (
    Sets,
    add_training_options,
    any_scenes,
    compose_parts,
    reconstruct_half,
    training_arguments,
)
from experiments.garden.scene_spec import MAX_OBJECTS
from experiments.scorer_training import Progress, autocast_bf16, fit, log_loss, seeded

STRIDE = 4  # pixels per cell

log = logging.getLogger("garden")


@dataclass(frozen=True)
class DetectorConfig:
    kinds: tuple[str, ...]
    colours: tuple[str, ...]
    width: int = 32
    threshold: float = 0.3  # detections with a lower score are dropped

    def __post_init__(self) -> None:
        require(len(self.kinds) >= 1 and len(self.colours) >= 1, "kinds or colours are empty; expected names")
        check_width(self.width)
        require(0 < self.threshold < 1, f"threshold is {self.threshold}; expected a number between 0 and 1")


@dataclass(frozen=True)
class Detection:
    """A detected object."""

    kind: str
    colour: str
    box: tuple[float, float, float, float]  # left, top, right, bottom in pixels
    score: float


class Maps(NamedTuple):
    """The outputs of the network at each cell."""

    heat_BKhw: Tensor  # logits of a centre
    size_B2hw: Tensor  # logarithms of width and height in cells
    offset_B2hw: Tensor  # of the centre within its cell, x and y
    colour_BChw: Tensor  # logits


class Detector(Scorer):
    """A small U-Net: down to 1/16 of the size and up again to 1/4, with skip connections."""

    name, config_type = "detector", DetectorConfig
    hint = "; `python -m experiments.garden train-detector` trains one"

    def __init__(self, config: DetectorConfig) -> None:
        super().__init__(config)
        widths = [config.width * n for n in (1, 2, 4, 6)]
        self.stem = nn.Conv2d(3, widths[0], 3, stride=2, padding=1)
        self.down = nn.ModuleList()
        for i in range(1, 4):
            self.down.append(
                nn.Sequential(Block(widths[i - 1], widths[i], stride=2), Block(widths[i], widths[i], stride=1))
            )
        self.first = Block(widths[0], widths[0], stride=1)
        self.up = nn.ModuleList([nn.Conv2d(widths[i], widths[i - 1], 1) for i in (3, 2)])
        self.merge = nn.ModuleList([Block(widths[i - 1], widths[i - 1], stride=1) for i in (3, 2)])
        kinds, colours = len(config.kinds), len(config.colours)
        self.head = nn.Sequential(
            nn.Conv2d(widths[1], widths[2], 3, padding=1), nn.ReLU(), nn.Conv2d(widths[2], kinds + 4 + colours, 1)
        )
        self.init_convolutions()
        last = self.head[-1]
        assert isinstance(last, nn.Conv2d)
        nn.init.normal_(last.weight, std=0.01)
        assert last.bias is not None
        nn.init.zeros_(last.bias)
        nn.init.constant_(last.bias[:kinds], -4.0)  # a centre is rare

    def forward(self, image_B3HW: Tensor) -> Maps:
        """Return the maps of images in [-1, 1]."""
        height, width = image_B3HW.shape[2:]
        if height % 16 or width % 16:
            raise InputError(f"images are {width}x{height} pixels; expected multiples of 16")
        x = self.first(self.stem(image_B3HW))
        levels = []
        for level in self.down:
            x = level(x)
            levels.append(x)
        for i, (up, merge) in enumerate(zip(self.up, self.merge, strict=True)):
            x = merge(F.interpolate(up(x), scale_factor=2.0) + levels[1 - i])
        kinds = len(self.config.kinds)
        return Maps(*self.head(x).split((kinds, 2, 2, len(self.config.colours)), dim=1))

    @torch.no_grad()
    def detect(self, pixels: Pixels, *, threshold: float | None = None) -> list[list[Detection]]:
        """Return the objects of each image with a score of `threshold` (default: of the config) or more, best first."""
        check_pixels(pixels)
        least = self.config.threshold if threshold is None else threshold
        parts = [pixels[i : i + 256] for i in range(0, len(pixels), 256)]
        return [found for part in parts for found in self._read(self(to_images(part, self.device)), least)]

    def _read(self, maps: Maps, threshold: float) -> list[list[Detection]]:
        heat = maps.heat_BKhw.float().sigmoid()
        # One object, one peak: the highest of its neighbourhood over all kinds.
        best, kind = heat.max(1)
        peak = (F.max_pool2d(best[:, None], 3, stride=1, padding=1)[:, 0] == best) & (best >= threshold)
        colour = maps.colour_BChw.argmax(1)
        arrays = (best, kind, peak, maps.size_B2hw.float(), maps.offset_B2hw.float(), colour)
        score_, kind_, peak_, size_, offset_, colour_ = (tensor.cpu().numpy() for tensor in arrays)
        found: list[list[Detection]] = []
        for b in range(len(score_)):
            here = []
            for row, column in np.argwhere(peak_[b]).tolist():
                wide, high = np.exp(size_[b, :, row, column].clip(-2, 4)) * STRIDE
                x, y = (np.array([column, row]) + offset_[b, :, row, column]) * STRIDE
                box = (float(x - wide / 2), float(y - high / 2), float(x + wide / 2), float(y + high / 2))
                names = self.config.kinds[kind_[b, row, column]], self.config.colours[colour_[b, row, column]]
                here.append(Detection(*names, box, float(score_[b, row, column])))
            found.append(sorted(here, key=lambda f: -f.score))
        return found


@dataclass(frozen=True)
class DetectorScenes:
    """Scenes as arrays, with the objects that a detector should find."""

    pixels_nHW3: NDArray[np.uint8]
    kind_nO: NDArray[np.int64]  # -1: no object, or none of `KINDS`
    colour_nO: NDArray[np.int64]  # -1: not named
    box_nO4: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.pixels_nHW3)


def to_arrays(scenes: Sequence[Scene], kinds: Sequence[str], colours: Sequence[str]) -> DetectorScenes:
    """Return pixels, and kind, colour and box of every object, padded with -1."""
    kind = np.full((len(scenes), MAX_OBJECTS), -1, np.int64)
    colour, box = kind.copy(), np.zeros((len(scenes), MAX_OBJECTS, 4), np.float32)
    kind_of, colour_of = ({name: i for i, name in enumerate(names)} for names in (kinds, colours))
    for i, scene in enumerate(scenes):
        for j, placed in enumerate(scene.objects):
            kind[i, j] = kind_of.get(placed.kind, -1)
            colour[i, j] = colour_of.get(placed.colour, -1)
            box[i, j] = placed.box
    return DetectorScenes(np.stack([scene.pixels_HW3 for scene in scenes]), kind, colour, box)


def compose_detector_scenes(
    sets: Sets, config: DetectorConfig, *, num: int, seed: int = 0, processes: int = 0
) -> DetectorScenes:
    """Compose scenes of all combinations, held out or not."""
    parts: list[DetectorScenes] = []
    make = partial(_detector_part, seed=seed, kinds=config.kinds, colours=config.colours)
    for part in compose_parts(sets, make, num=num, processes=processes):
        parts.append(part)
        log.info("composed %d of %d", sum(map(len, parts)), num)
    names = [field.name for field in dataclasses.fields(DetectorScenes)]
    return DetectorScenes(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def _detector_part(
    composer: Composer, numbers: range, *, seed: int, kinds: Sequence[str], colours: Sequence[str]
) -> DetectorScenes:
    return to_arrays(any_scenes(composer, numbers, seed=seed), kinds, colours)


def train_detector(
    scenes: DetectorScenes,
    config: DetectorConfig,
    *,
    steps: int,
    device: torch.device | str,
    batch_size: int = 256,
    lr: float = 2e-3,
    seed: int = 0,
    progress: Progress = None,
) -> Detector:
    """Train with flips, colour jitter, blur and noise as augmentation."""
    require(batch_size >= 1, f"batch_size is {batch_size}; expected 1 or more")
    device = torch.device(device)
    detector = seeded(lambda: Detector(config), seed).to(device)
    generator = torch.Generator(device).manual_seed(seed)
    pixels = torch.from_numpy(scenes.pixels_nHW3).to(device)
    kind, colour, box = (torch.from_numpy(a).to(device) for a in (scenes.kind_nO, scenes.colour_nO, scenes.box_nO4))

    def loss(step: int) -> Tensor:
        pick = torch.randint(len(scenes), (batch_size,), generator=generator, device=device)
        image, boxes = _augment(to_images(pixels[pick]), box[pick], generator)
        with autocast_bf16(device):
            maps = detector(image.contiguous(memory_format=torch.channels_last))
        return detection_loss(Maps(*(m.float() for m in maps)), kind[pick], colour[pick], boxes)

    return fit(detector, loss, steps=steps, lr=lr, warmup=0.05, weight_decay=0.02, clip=5.0, progress=progress)


def detection_loss(maps: Maps, kind_BO: Tensor, colour_BO: Tensor, box_BO4: Tensor) -> Tensor:
    """Focal loss of the centres, L1 of size and offset, cross-entropy of the colour where one is named."""
    heat = maps.heat_BKhw
    target = heat_target(kind_BO, box_BO4, heat.shape[1:])
    p = heat.sigmoid().clamp(1e-4, 1 - 1e-4)
    at = target == 1
    focal = torch.where(at, (1 - p) ** 2 * p.log(), (1 - target) ** 4 * p**2 * (1 - p).log())
    real = kind_BO >= 0
    count = real.sum().clamp_min(1)
    x, y, wide, high = _centres(box_BO4)
    column, row = x.floor().long().clamp(0, heat.shape[3] - 1), y.floor().long().clamp(0, heat.shape[2] - 1)
    batch = torch.arange(len(heat), device=heat.device)[:, None]
    size = maps.size_B2hw[batch, :, row, column]
    offset = maps.offset_B2hw[batch, :, row, column]
    size_loss = (size - torch.stack((wide, high), -1).clamp_min(0.25).log()).abs().sum(-1)
    offset_loss = (offset - torch.stack((x - column, y - row), -1)).abs().sum(-1)
    said = real & (colour_BO >= 0)
    logits = maps.colour_BChw[batch, :, row, column]
    named = F.cross_entropy(logits.flatten(0, 1), colour_BO.clamp_min(0).flatten(), reduction="none").view_as(colour_BO)
    return (
        -focal.sum() / count
        + ((size_loss + offset_loss) * real).sum() / count
        + (named * said).sum() / said.sum().clamp_min(1)
    )


def heat_target(kind_BO: Tensor, box_BO4: Tensor, shape: Sequence[int]) -> Tensor:
    """Return `[B, K, h, w]`: 1 in the cell of a centre, falling off around it with the size of the object."""
    kinds, high, wide = shape
    heat = torch.zeros(len(kind_BO), kinds, high, wide, device=kind_BO.device)
    x, y, width, height = _centres(box_BO4)
    rows = torch.arange(high, device=heat.device)[:, None]
    columns = torch.arange(wide, device=heat.device)
    batch = torch.arange(len(heat), device=heat.device)
    for j in range(kind_BO.shape[1]):
        sigma = (0.12 * torch.minimum(width[:, j], height[:, j])).clamp_min(0.5)[:, None, None]
        away = (rows - y[:, j].floor()[:, None, None]) ** 2 + (columns - x[:, j].floor()[:, None, None]) ** 2
        bump = torch.exp(-away / (2 * sigma**2)) * (kind_BO[:, j] >= 0)[:, None, None]
        index = kind_BO[:, j].clamp_min(0)
        heat[batch, index] = torch.maximum(heat[batch, index], bump)
    return heat


def _centres(box_BO4: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Centre, width and height, in cells."""
    left, top, right, bottom = (box_BO4 / STRIDE).unbind(-1)
    return (left + right) / 2, (top + bottom) / 2, right - left, bottom - top


def _augment(image: Tensor, box: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Mirror half of the images, and degrade all a little."""
    width = image.shape[3]
    flip = torch.rand(len(image), 1, 1, 1, generator=generator, device=image.device) < 0.5
    image = torch.where(flip, image.flip(3), image)
    mirrored = torch.stack((width - box[..., 2], box[..., 1], width - box[..., 0], box[..., 3]), -1)
    return degrade(image, generator), torch.where(flip[:, 0], mirrored, box)


def degrade(image_B3HW: Tensor, generator: torch.Generator) -> Tensor:
    """Apply a little colour jitter, blur and noise, so that a scorer does not depend on artefacts of generation."""
    image = image_B3HW

    def uniform() -> Tensor:
        return torch.rand(len(image), 1, 1, 1, generator=generator, device=image.device)

    mean = image.mean((2, 3), keepdim=True)
    image = image + 0.2 * (uniform() - 0.5) * (image - mean) + 0.12 * (uniform() - 0.5)
    soft = F.avg_pool2d(F.pad(image, (1, 1, 1, 1), mode="replicate"), 3, stride=1)
    image = torch.lerp(image, soft, (2 * uniform() - 1).clamp_min(0))
    noise = torch.randn(image.shape, generator=generator, device=image.device)
    return (image + 0.08 * (2 * uniform() - 1).clamp_min(0) * noise).clamp(-1, 1)


def train_and_save(
    sets: Sets,
    folder: Path,
    *,
    num: int,
    steps: int,
    device: torch.device,
    batch_size: int = 256,
    width: int = 32,
    tokenizer: str | None = "garden",
    seed: int = 0,
    processes: int = 0,
) -> None:
    """Train a detector on composed scenes, half of them reconstructed by the tokenizer of a model, and write it."""
    config = DetectorConfig(tuple(KINDS), tuple(TINTS), width)
    scenes = compose_detector_scenes(sets, config, num=num, seed=seed, processes=processes)
    if tokenizer is not None:
        scenes = reconstruct_half(scenes, tokenizer, device=device)
    detector = train_detector(
        scenes, config, steps=steps, batch_size=batch_size, device=device, seed=seed, progress=log_loss
    )
    detector.save(folder)
    log.info("wrote %s", folder)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train the detector of `evaluate-text` on composed scenes."""
    parser = argparse.ArgumentParser(prog="experiments.garden train-detector", description=main.__doc__)
    add_training_options(parser, num=60000, steps=6000)
    options = parser.parse_args(arguments)
    train_and_save((options.fruits, options.emoji), options.out, **training_arguments(options))
