"""A small detector: which kinds of objects a scene shows, where, and in which colour. The judge of text-to-image.

Centres of objects are peaks of one map per kind; size, place within the cell and colour are read off at the peaks.
Shapes: B batch, K kinds, C colours, h w cells of the maps.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from arpg.errors import InputError, require
from arpg.evaluation.classifier import Block, load_scorer, save_scorer
from arpg.image import Pixels, check_pixels, to_images

STRIDE = 4  # pixels per cell
MOST = 12  # detections of an image


@dataclass(frozen=True)
class DetectorConfig:
    kinds: tuple[str, ...]
    colours: tuple[str, ...]
    width: int = 32
    threshold: float = 0.4  # peaks below are nothing

    def __post_init__(self) -> None:
        require(len(self.kinds) >= 1 and len(self.colours) >= 1, "kinds or colours are empty; expected names")
        require(
            self.width >= 8 and self.width % 8 == 0,
            f"width is {self.width}; GroupNorm has 8 groups, so it must be a multiple of 8",
        )
        require(0 < self.threshold < 1, f"threshold is {self.threshold}; expected a number between 0 and 1")


@dataclass(frozen=True)
class Found:
    """A detection."""

    kind: str
    colour: str
    box: tuple[float, float, float, float]  # left, top, right, bottom in pixels
    score: float


class Maps(NamedTuple):
    """What the network says at each cell."""

    heat_BKhw: Tensor  # logits of a centre
    size_B2hw: Tensor  # logarithms of width and height in cells
    offset_B2hw: Tensor  # of the centre within its cell, x and y
    colour_BChw: Tensor  # logits


class Detector(nn.Module):
    """Down to 1/16 of the size and up again to 1/4, with the maps of the way down added."""

    def __init__(self, config: DetectorConfig) -> None:
        super().__init__()
        self.config = config
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
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        last = self.head[-1]
        assert isinstance(last, nn.Conv2d)
        nn.init.normal_(last.weight, std=0.01)
        assert last.bias is not None
        nn.init.zeros_(last.bias)
        nn.init.constant_(last.bias[:kinds], -4.0)  # a centre is rare

    @property
    def device(self) -> torch.device:
        return self.stem.weight.device

    def forward(self, image_B3HW: Tensor) -> Maps:
        """From images in [-1, 1]."""
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
    def detect(self, pixels: Pixels, *, batch_size: int = 256) -> list[list[Found]]:
        """The objects of each image, surest first."""
        check_pixels(pixels)
        parts = [pixels[i : i + batch_size] for i in range(0, len(pixels), batch_size)]
        return [found for part in parts for found in self._read(self(to_images(part, self.device)))]

    def _read(self, maps: Maps) -> list[list[Found]]:
        heat = maps.heat_BKhw.float().sigmoid()
        # One object, one peak: the highest of its neighbourhood over all kinds.
        best, kind = heat.max(1)
        peak = (F.max_pool2d(best[:, None], 3, stride=1, padding=1)[:, 0] == best) & (best >= self.config.threshold)
        colour = maps.colour_BChw.argmax(1)
        arrays = (best, kind, peak, maps.size_B2hw.float(), maps.offset_B2hw.float(), colour)
        score_, kind_, peak_, size_, offset_, colour_ = (tensor.cpu().numpy() for tensor in arrays)
        found: list[list[Found]] = []
        for b in range(len(score_)):
            here = []
            for row, column in np.argwhere(peak_[b]).tolist():
                wide, high = np.exp(size_[b, :, row, column].clip(-2, 4)) * STRIDE
                x, y = (np.array([column, row]) + offset_[b, :, row, column]) * STRIDE
                box = (float(x - wide / 2), float(y - high / 2), float(x + wide / 2), float(y + high / 2))
                names = self.config.kinds[kind_[b, row, column]], self.config.colours[colour_[b, row, column]]
                here.append(Found(*names, box, float(score_[b, row, column])))
            found.append(sorted(here, key=lambda f: -f.score)[:MOST])
        return found

    def save(self, folder: Path) -> None:
        save_scorer(self, folder, name="detector", config=self.config)

    @staticmethod
    def load(folder: Path, *, device: torch.device | str = "cpu") -> Detector:
        return load_scorer(
            Detector,
            folder,
            name="detector",
            config=DetectorConfig,
            device=device,
            hint="; `arpg train-detector` makes one",
        )
