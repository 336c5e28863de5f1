"""Training the detector on composed scenes: targets, losses, the loop.

Shapes: B batch, O objects of a scene (filled up with -1), K kinds, C colours, h w cells, HW pixels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from arpg.data.composer import Scene
from arpg.errors import require
from arpg.evaluation.classifier import Progress, autocast_bf16, fit, seeded
from arpg.evaluation.detector import STRIDE, Detector, DetectorConfig, Maps
from arpg.image import to_images

MOST = 4  # objects of a scene
THRESHOLDS = (0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6)


@dataclass(frozen=True)
class Scenes:
    """Scenes as arrays."""

    pixels_nHW3: NDArray[np.uint8]
    kind_nO: NDArray[np.int64]  # -1: there is none, or none of the catalogue
    colour_nO: NDArray[np.int64]  # -1: not said
    box_nO4: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.pixels_nHW3)


def to_arrays(scenes: Sequence[Scene], kinds: Sequence[str], colours: Sequence[str]) -> Scenes:
    kind = np.full((len(scenes), MOST), -1, np.int64)
    colour, box = kind.copy(), np.zeros((len(scenes), MOST, 4), np.float32)
    kind_of, colour_of = ({name: i for i, name in enumerate(names)} for names in (kinds, colours))
    for i, scene in enumerate(scenes):
        for j, placed in enumerate(scene.objects):
            kind[i, j] = kind_of.get(placed.kind, -1)
            colour[i, j] = colour_of.get(placed.colour, -1)
            box[i, j] = placed.box
    return Scenes(np.stack([scene.pixels_HW3 for scene in scenes]), kind, colour, box)


def train_detector(
    scenes: Scenes,
    config: DetectorConfig,
    *,
    steps: int,
    device: torch.device | str,
    batch_size: int = 256,
    lr: float = 2e-3,
    seed: int = 0,
    progress: Progress = None,
) -> Detector:
    """AdamW with a warm-up and a cosine; flips, colour jitter, blur and noise."""
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


def calibrate(detector: Detector, scenes: Scenes) -> Detector:
    """The same detector with the threshold under which it most often finds exactly what a scene has."""
    low = Detector(dataclasses.replace(detector.config, threshold=THRESHOLDS[0])).to(detector.device).eval()
    low.load_state_dict(detector.state_dict())
    names = detector.config.kinds
    truth = [sorted(names[kind] for kind in row if kind >= 0) for row in scenes.kind_nO]
    found = low.detect(scenes.pixels_nHW3)

    def share(threshold: float) -> float:
        kinds = [sorted(f.kind for f in some if f.score >= threshold) for some in found]
        return float(np.mean([a == b for a, b in zip(kinds, truth, strict=True)]))

    best = max(THRESHOLDS, key=share)
    chosen = Detector(dataclasses.replace(detector.config, threshold=best)).to(detector.device).eval()
    chosen.load_state_dict(detector.state_dict())
    return chosen


def detection_loss(maps: Maps, kind_BO: Tensor, colour_BO: Tensor, box_BO4: Tensor) -> Tensor:
    """Focal loss of the centres, L1 of size and offset, cross-entropy of the colour where one is said."""
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
    """`[B, K, h, w]`: 1 in the cell of a centre, falling off around it with the size of the object."""
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
    """Half of the images mirrored, and spoiled a little."""
    width = image.shape[3]
    flip = torch.rand(len(image), 1, 1, 1, generator=generator, device=image.device) < 0.5
    image = torch.where(flip, image.flip(3), image)
    mirrored = torch.stack((width - box[..., 2], box[..., 1], width - box[..., 0], box[..., 3]), -1)
    return spoil(image, generator), torch.where(flip[:, 0], mirrored, box)


def spoil(image_B3HW: Tensor, generator: torch.Generator) -> Tensor:
    """A little colour jitter, some blurred, some noisy: a judge shall not mind what models do to pixels."""
    image = image_B3HW

    def draw() -> Tensor:
        return torch.rand(len(image), 1, 1, 1, generator=generator, device=image.device)

    mean = image.mean((2, 3), keepdim=True)
    image = image + 0.2 * (draw() - 0.5) * (image - mean) + 0.12 * (draw() - 0.5)
    soft = F.avg_pool2d(F.pad(image, (1, 1, 1, 1), mode="replicate"), 3, stride=1)
    image = torch.lerp(image, soft, (2 * draw() - 1).clamp_min(0))
    noise = torch.randn(image.shape, generator=generator, device=image.device)
    return (image + 0.08 * (2 * draw() - 1).clamp_min(0) * noise).clamp(-1, 1)
