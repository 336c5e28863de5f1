"""The depth network that scores control by depth: the depth of each pixel of a composed scene, and its training.

Depth is 0 (near) to 1 (the background). Shapes: B batch, n images, H W pixels.
"""

from __future__ import annotations

import argparse
import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from arpg.errors import InputError, require
from arpg.evaluation.classifier import Block, Scorer, check_width
from arpg.files import write_json
from arpg.image import Pixels, check_pixels, to_images
from experiments.control_images import Depth, rmse, to_depth
from experiments.garden.composer import SIZE, Composer
from experiments.garden.detector import degrade
from experiments.garden.scene_sets import (
    Sets,
    add_training_options,
    any_scenes,
    compose_parts,
    depth_map,
    reconstruct_half,
    training_arguments,
)
from experiments.photo_measures import mean
from experiments.scorer_training import Progress, autocast_bf16, fit, log_loss, seeded

log = logging.getLogger("garden")


@dataclass(frozen=True)
class DepthNetConfig:
    width: int = 32

    def __post_init__(self) -> None:
        check_width(self.width)


class DepthNet(Scorer):
    """A small U-Net: down to 1/16 of the size and up again to 1/2; each cell has the depth of four pixels."""

    name, config_type = "depth", DepthNetConfig
    hint = "; `python -m experiments.garden train-depth` trains one"

    def __init__(self, config: DepthNetConfig) -> None:
        super().__init__(config)
        widths = [config.width * n for n in (1, 2, 4, 6)]
        self.stem = nn.Conv2d(4, widths[0], 3, stride=2, padding=1)
        self.first = Block(widths[0], widths[0], stride=1)
        self.down = nn.ModuleList([Block(a, b, stride=2) for a, b in itertools.pairwise(widths)])
        self.up = nn.ModuleList([nn.Conv2d(widths[i], widths[i - 1], 1) for i in (3, 2, 1)])
        self.merge = nn.ModuleList([Block(widths[i - 1], widths[i - 1], stride=1) for i in (3, 2, 1)])
        self.head = nn.Conv2d(widths[0], 4, 3, padding=1)
        self.init_convolutions()
        nn.init.normal_(self.head.weight, std=0.01)
        assert self.head.bias is not None
        nn.init.constant_(self.head.bias, 2.0)  # most of a scene is background

    def forward(self, image_B3HW: Tensor) -> Tensor:
        """Return logits of the depth `[B, H, W]`, from images in [-1, 1]."""
        batch, _, height, width = image_B3HW.shape
        if height % 16 or width % 16:
            raise InputError(f"images are {width}x{height} pixels; expected multiples of 16")
        # Lower objects are nearer, so the row of each pixel is an input.
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
        """Return the depth of each pixel, `[n, H, W]`."""
        check_pixels(pixels_nHW3)
        require(batch_size >= 1, f"batch_size is {batch_size}; expected 1 or more")
        parts = [pixels_nHW3[i : i + batch_size] for i in range(0, len(pixels_nHW3), batch_size)]
        return np.concatenate([self(to_images(part, self.device)).float().sigmoid().cpu().numpy() for part in parts])


@dataclass(frozen=True, eq=False)
class DepthScenes:
    """Scenes with their depth as a condition image has it: 255 is nearest, 0 the background."""

    pixels_nHW3: Pixels
    near_nHW: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.pixels_nHW3)

    def depth(self) -> Depth:
        return to_depth(self.near_nHW)


def compose_depth_scenes(sets: Sets, *, num: int, seed: int = 0, size: int = SIZE, processes: int = 0) -> DepthScenes:
    """Compose scenes of all combinations with their depth; 0 processes: in this one."""
    parts = compose_parts(sets, partial(_depth_part, seed=seed), num=num, size=size, processes=processes)
    return DepthScenes(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def _depth_part(composer: Composer, numbers: range, *, seed: int) -> tuple[Pixels, NDArray[np.uint8]]:
    scenes = any_scenes(composer, numbers, seed=seed)
    return np.stack([s.pixels_HW3 for s in scenes]), np.stack([depth_map(s.depth_HW) for s in scenes])


def train_depth_net(
    scenes: DepthScenes,
    config: DepthNetConfig,
    *,
    steps: int,
    device: torch.device | str,
    batch_size: int = 256,
    lr: float = 2e-3,
    seed: int = 0,
    progress: Progress = None,
) -> DepthNet:
    """Train with flips, colour jitter, blur and noise as augmentation.

    The loss is binary cross-entropy with the depth as the target: like the squared error it is least at the mean, and
    its gradient does not vanish at 0 and 1.
    """
    require(batch_size >= 1, f"batch_size is {batch_size}; expected 1 or more")
    device = torch.device(device)
    net = seeded(lambda: DepthNet(config), seed).to(device)
    generator = torch.Generator(device).manual_seed(seed)
    pixels, near = torch.from_numpy(scenes.pixels_nHW3).to(device), torch.from_numpy(scenes.near_nHW).to(device)

    def loss(step: int) -> Tensor:
        pick = torch.randint(len(scenes), (batch_size,), generator=generator, device=device)
        image, depth = to_images(pixels[pick]), 1 - near[pick].float() / 255
        flip = torch.rand(batch_size, 1, 1, generator=generator, device=device) < 0.5
        image = torch.where(flip[:, None], image.flip(3), image)
        depth = torch.where(flip, depth.flip(2), depth)
        image = degrade(image, generator).contiguous(memory_format=torch.channels_last)
        with autocast_bf16(device):
            logits = net(image)
        return F.binary_cross_entropy_with_logits(logits.float(), depth)

    return fit(net, loss, steps=steps, lr=lr, warmup=0.05, weight_decay=0.02, clip=5.0, progress=progress)


def depth_error(net: DepthNet, scenes: DepthScenes) -> dict[str, Any]:
    """Return the network's own error: `rmse` (mean over scenes) with its interval, and `blank`, that of a constant."""
    depth_nHW = scenes.depth()
    blank = float(rmse(np.ones_like(depth_nHW), depth_nHW).mean())
    return mean("rmse", rmse(net.estimate(scenes.pixels_nHW3), depth_nHW)) | {"blank": blank, "n": len(scenes)}


def train_and_save(
    sets: Sets,
    folder: Path,
    *,
    num: int,
    steps: int,
    device: torch.device,
    fresh: int = 1000,
    batch_size: int = 256,
    width: int = 32,
    tokenizer: str | None = "garden",
    seed: int = 0,
    processes: int = 0,
) -> dict[str, Any]:
    """Train a depth network, and write it with its error on `fresh` scenes that it was not trained on."""
    require(fresh >= 1, f"the number of fresh scenes is {fresh}; expected 1 or more")
    config = DepthNetConfig(width)
    scenes = compose_depth_scenes(sets, num=num, seed=seed, processes=processes)
    if tokenizer is not None:
        scenes = reconstruct_half(scenes, tokenizer, device=device)
    net = train_depth_net(
        scenes, config, steps=steps, batch_size=batch_size, device=device, seed=seed, progress=log_loss
    )
    error = depth_error(
        net, compose_depth_scenes(sets, num=fresh, seed=seed + 1, processes=min(processes, fresh // 256))
    )
    net.save(folder)
    write_json(folder / "error.json", error)
    log.info("RMSE %.4f on %d new scenes; a blank image has %.4f", error["rmse"], fresh, error["blank"])
    return error


def main(arguments: Sequence[str] | None = None) -> None:
    """Train the depth network of `evaluate-control` on composed scenes, and report its own error."""
    parser = argparse.ArgumentParser(prog="experiments.garden train-depth", description=main.__doc__)
    add_training_options(parser, num=30000, steps=3000)
    parser.add_argument("--fresh", type=int, default=1000, help="New scenes, to measure its own error.")
    options = parser.parse_args(arguments)
    train_and_save((options.fruits, options.emoji), options.out, fresh=options.fresh, **training_arguments(options))
    log.info("wrote %s", options.out)
