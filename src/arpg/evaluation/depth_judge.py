"""A small network that says how far each pixel of a composed scene is: the judge of control by depth.

Depth is 0 (near) to 1 (the background). Shapes: B batch, n images, H W pixels.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from arpg.errors import InputError, require
from arpg.evaluation.classifier import Block, load_scorer, save_scorer
from arpg.image import Pixels, check_pixels, to_images

Depth = NDArray[np.float32]


@dataclass(frozen=True)
class DepthJudgeConfig:
    width: int = 32

    def __post_init__(self) -> None:
        require(
            self.width >= 8 and self.width % 8 == 0,
            f"width is {self.width}; GroupNorm has 8 groups, so it must be a multiple of 8",
        )


class DepthJudge(nn.Module):
    """Down to 1/16 of the size and up again to 1/2; each place there says the depth of its four pixels."""

    def __init__(self, config: DepthJudgeConfig) -> None:
        super().__init__()
        self.config = config
        widths = [config.width * n for n in (1, 2, 4, 6)]
        self.stem = nn.Conv2d(4, widths[0], 3, stride=2, padding=1)
        self.first = Block(widths[0], widths[0], stride=1)
        self.down = nn.ModuleList([Block(a, b, stride=2) for a, b in itertools.pairwise(widths)])
        self.up = nn.ModuleList([nn.Conv2d(widths[i], widths[i - 1], 1) for i in (3, 2, 1)])
        self.merge = nn.ModuleList([Block(widths[i - 1], widths[i - 1], stride=1) for i in (3, 2, 1)])
        self.head = nn.Conv2d(widths[0], 4, 3, padding=1)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        nn.init.normal_(self.head.weight, std=0.01)
        assert self.head.bias is not None
        nn.init.constant_(self.head.bias, 2.0)  # most of a scene is background

    @property
    def device(self) -> torch.device:
        return self.stem.weight.device

    def forward(self, image_B3HW: Tensor) -> Tensor:
        """`[B, H, W]`: logits of the depth, from images in [-1, 1]."""
        batch, _, height, width = image_B3HW.shape
        if height % 16 or width % 16:
            raise InputError(f"images are {width}x{height} pixels; expected multiples of 16")
        # Who stands lower is nearer, so each pixel is told its row.
        row = torch.linspace(-1, 1, height, device=image_B3HW.device).view(1, 1, -1, 1).expand(batch, 1, -1, width)
        x = self.first(self.stem(torch.cat((image_B3HW, row), 1)))
        levels = [x]
        for level in self.down:
            x = level(x)
            levels.append(x)
        for up, merge, level in zip(self.up, self.merge, levels[-2::-1], strict=True):
            x = merge(F.interpolate(up(x), scale_factor=2.0) + level)
        return F.pixel_shuffle(self.head(x), 2)[:, 0]

    @torch.no_grad()
    def estimate(self, pixels_nHW3: Pixels, *, batch_size: int = 256) -> Depth:
        """`[n, H, W]`: the depth of each pixel."""
        check_pixels(pixels_nHW3)
        require(batch_size >= 1, f"batch_size is {batch_size}; expected 1 or more")
        parts = [pixels_nHW3[i : i + batch_size] for i in range(0, len(pixels_nHW3), batch_size)]
        return np.concatenate([self(to_images(part, self.device)).float().sigmoid().cpu().numpy() for part in parts])

    def save(self, folder: Path) -> None:
        save_scorer(self, folder, name="depth", config=self.config)

    @staticmethod
    def load(folder: Path, *, device: torch.device | str = "cpu") -> DepthJudge:
        hint = "; `arpg train-depth` makes one"
        return load_scorer(DepthJudge, folder, name="depth", config=DepthJudgeConfig, device=device, hint=hint)


def rmse(depth_nHW: Depth, other_nHW: Depth) -> NDArray[np.float64]:
    """The root of the mean squared difference over the pixels of each image."""
    require(
        depth_nHW.shape == other_nHW.shape and depth_nHW.ndim == 3,
        f"depths are {list(depth_nHW.shape)} and {list(other_nHW.shape)}; expected two alike, [n, H, W]",
    )
    squares = (depth_nHW.astype(np.float64) - other_nHW.astype(np.float64)) ** 2
    errors: NDArray[np.float64] = np.sqrt(squares.mean((1, 2)))
    return errors
