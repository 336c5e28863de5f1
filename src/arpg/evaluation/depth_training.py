"""Training the depth judge on composed scenes, whose depth is exact; and its own error on scenes that it never saw.

Shapes: B batch, n scenes, H W pixels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from arpg.data.composer import SIZE, Scene
from arpg.errors import require
from arpg.evaluation.classifier import Progress, autocast_bf16, fit, seeded
from arpg.evaluation.depth_judge import Depth, DepthJudge, DepthJudgeConfig, rmse
from arpg.evaluation.detector_scenes import draw_parts
from arpg.evaluation.detector_training import spoil
from arpg.evaluation.metrics import bootstrap
from arpg.extractors import depth_map
from arpg.image import Pixels, to_images


@dataclass(frozen=True, eq=False)
class DepthScenes:
    """Scenes with their depth as a condition image has it: 255 is nearest, 0 the background."""

    pixels_nHW3: Pixels
    near_nHW: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.pixels_nHW3)

    def depth(self) -> Depth:
        return to_depth(self.near_nHW)


def to_depth(near_nHW: NDArray[np.uint8]) -> Depth:
    """Of condition images: 0 near, 1 the background."""
    return 1 - near_nHW.astype(np.float32) / np.float32(255)


def draw_depth_scenes(
    sets: tuple[str, str],
    *,
    num: int,
    seed: int = 0,
    size: int = SIZE,
    processes: int = 0,
    progress: Callable[[int], None] | None = None,
) -> DepthScenes:
    """Scenes of whatever can be asked, of the fruit and emoji sets; 0 processes: in this one."""
    require(num >= 1, f"the number of scenes is {num}; expected 1 or more")
    parts: list[tuple[Pixels, NDArray[np.uint8]]] = []
    for part in draw_parts(sets, _pack, num=num, seed=seed, size=size, processes=processes):
        parts.append(part)
        if progress is not None:
            progress(sum(len(pixels) for pixels, _ in parts))
    return DepthScenes(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def _pack(scenes: list[Scene]) -> tuple[Pixels, NDArray[np.uint8]]:
    return np.stack([s.pixels_HW3 for s in scenes]), np.stack([depth_map(s.depth_HW) for s in scenes])


def train_depth_judge(
    scenes: DepthScenes,
    config: DepthJudgeConfig,
    *,
    steps: int,
    device: torch.device | str,
    batch_size: int = 256,
    lr: float = 2e-3,
    seed: int = 0,
    progress: Progress = None,
) -> DepthJudge:
    """AdamW with a warm-up and a cosine; flips, colour jitter, blur and noise.

    The loss is cross-entropy with the depth as a share: like that of squares its least is at the mean, and its gradient
    does not vanish at 0 and 1.
    """
    require(batch_size >= 1, f"batch_size is {batch_size}; expected 1 or more")
    device = torch.device(device)
    judge = seeded(lambda: DepthJudge(config), seed).to(device)
    generator = torch.Generator(device).manual_seed(seed)
    pixels, near = torch.from_numpy(scenes.pixels_nHW3).to(device), torch.from_numpy(scenes.near_nHW).to(device)

    def loss(step: int) -> Tensor:
        pick = torch.randint(len(scenes), (batch_size,), generator=generator, device=device)
        image, depth = to_images(pixels[pick]), 1 - near[pick].float() / 255
        flip = torch.rand(batch_size, 1, 1, generator=generator, device=device) < 0.5
        image = torch.where(flip[:, None], image.flip(3), image)
        depth = torch.where(flip, depth.flip(2), depth)
        image = spoil(image, generator).contiguous(memory_format=torch.channels_last)
        with autocast_bf16(device):
            logits = judge(image)
        return F.binary_cross_entropy_with_logits(logits.float(), depth)

    return fit(judge, loss, steps=steps, lr=lr, warmup=0.05, weight_decay=0.02, clip=5.0, progress=progress)


def depth_error(judge: DepthJudge, scenes: DepthScenes) -> dict[str, Any]:
    """The judge's own error: `rmse` (the mean over scenes) with its interval, and `blank`, that of seeing nothing."""
    depth_nHW = scenes.depth()
    errors = rmse(judge.estimate(scenes.pixels_nHW3), depth_nHW)
    value = float(errors.mean())
    blank = float(rmse(np.ones_like(depth_nHW), depth_nHW).mean())
    return {"rmse": value, "rmse interval": bootstrap(value, errors), "blank": blank, "n": len(scenes)}
