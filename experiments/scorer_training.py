"""Training of the scorer networks: their common loop, and the classifier of the photographs with its accuracy.

Shapes: T steps, B batch, A random numbers of an augmentation, HW pixels, K classes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from arpg.errors import require
from arpg.evaluation.classifier import Classifier, ClassifierConfig
from arpg.image import Pixels, check_pixels, to_images

log = logging.getLogger("experiments")

NUM_AUGMENTATIONS = 7
REPORT_EVERY = 50  # steps

Labels = NDArray[np.integer[Any]]
Module = TypeVar("Module", bound=nn.Module)
Progress = Callable[[int, float], None] | None  # steps done, loss


def seeded(build: Callable[[], Module], seed: int) -> Module:
    """Build a network whose initial weights only depend on the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def autocast_bf16(device: torch.device) -> torch.autocast:
    """Return the autocast context of the forward pass: bfloat16 on a GPU; augmentation and losses stay in float32."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")


def fit(
    network: Module,
    loss: Callable[[int], Tensor],
    *,
    steps: int,
    lr: float,
    warmup: float,
    weight_decay: float,
    clip: float | None = None,
    progress: Progress = None,
) -> Module:
    """Train with AdamW, a linear warm-up and a cosine; `loss(step)` is the loss of a step's batch, `warmup` a share.

    The network is returned in eval mode. `progress(steps done, loss)` is called every 50 steps and at the end.
    """
    require(steps >= 1, f"steps is {steps}; expected 1 or more")
    cuda = next(network.parameters()).is_cuda
    optimizer = torch.optim.AdamW(network.train().parameters(), lr=lr, weight_decay=weight_decay, fused=cuda)
    warm = max(1, round(warmup * steps))
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min((step + 1) / warm, 0.5 + 0.5 * math.cos(math.pi * step / steps))
        value = loss(step)
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(value)
        if clip is not None:
            nn.utils.clip_grad_norm_(network.parameters(), clip)
        optimizer.step()
        if progress is not None and ((step + 1) % REPORT_EVERY == 0 or step + 1 == steps):
            progress(step + 1, value.item())
    return network.eval()


def log_loss(step: int, loss: float) -> None:
    """Log the loss after `step` steps, as `progress` of a training."""
    log.info("step %d, loss %.3f", step, loss)


def train_classifier(
    pixels: Pixels,
    labels: Labels,
    *,
    num_classes: int,
    steps: int,
    device: torch.device | str,
    width: int = 32,
    batch_size: int = 256,
    lr: float = 2e-3,
    seed: int = 0,
    weights: NDArray[np.floating[Any]] | None = None,
    progress: Progress = None,
) -> Classifier:
    """Train with label smoothing 0.1; images are sampled in proportion to `weights`.

    `progress(steps done, loss)` is called every 50 steps and at the end.
    """
    check_pixels(pixels)
    _check_labels(labels, len(pixels), num_classes)
    require(steps >= 1 and batch_size >= 1, f"steps is {steps}, batch_size {batch_size}; expected 1 or more of each")
    if weights is not None:
        good = weights.shape == labels.shape and bool(np.isfinite(weights).all() and (weights >= 0).all())
        require(good and weights.sum() > 0, f"weights must be {len(labels)} numbers of 0 or more, one per image")
    device = torch.device(device)
    classifier = seeded(lambda: Classifier(ClassifierConfig(num_classes, width)), seed).to(device)

    # Random numbers are made before the loop and on the CPU, so a seed means the same on every device.
    generator = torch.Generator().manual_seed(seed)
    chance = torch.ones(len(labels)) if weights is None else torch.from_numpy(np.array(weights, dtype=np.float32))
    picks = torch.multinomial(chance, steps * batch_size, replacement=True, generator=generator)
    picks_TB = picks.view(steps, batch_size).to(device)
    random_TBA = torch.rand(steps, batch_size, NUM_AUGMENTATIONS, generator=generator).to(device)
    all_pixels = torch.from_numpy(np.array(pixels)).to(device)
    all_labels = torch.from_numpy(np.array(labels, dtype=np.int64)).to(device)

    def loss(step: int) -> Tensor:
        chosen = picks_TB[step]
        image_B3HW = augment(to_images(all_pixels[chosen]), random_TBA[step])
        with autocast_bf16(device):
            logits_BK = classifier(image_B3HW)
        return F.cross_entropy(logits_BK.float(), all_labels[chosen], label_smoothing=0.1)

    return fit(classifier, loss, steps=steps, lr=lr, warmup=0.1, weight_decay=0.05, progress=progress)


def augment(image_B3HW: Tensor, random_BA: Tensor) -> Tensor:
    """Crop to 70 to 100 % per side, flip, and change brightness, contrast and saturation; `random_BA` is in [0, 1)."""
    scale, x, y, flip, brightness, contrast, saturation = random_BA.unbind(1)
    scale = 0.7 + 0.3 * scale
    mirror = torch.where(flip < 0.5, -scale, scale)
    zero = torch.zeros_like(scale)
    row_x = torch.stack([mirror, zero, (2 * x - 1) * (1 - scale)], dim=1)
    row_y = torch.stack([zero, scale, (2 * y - 1) * (1 - scale)], dim=1)
    grid = F.affine_grid(torch.stack([row_x, row_y], dim=1), list(image_B3HW.shape), align_corners=False)
    image = F.grid_sample(image_B3HW, grid, padding_mode="border", align_corners=False)
    # Mild: the colour is all that tells some fruits apart.
    brightness, contrast, saturation = (
        (0.3 * number - 0.15).view(-1, 1, 1, 1) for number in (brightness, contrast, saturation)
    )
    mean, grey = image.mean((1, 2, 3), keepdim=True), image.mean(1, keepdim=True)
    image = image + contrast * (image - mean) + saturation * (image - grey) + brightness
    return image.clamp(-1, 1).contiguous(memory_format=torch.channels_last)


@torch.no_grad()
def predict(classifier: Classifier, pixels: Pixels, *, batch_size: int = 256) -> NDArray[np.int64]:
    """Return the most likely class of each image."""
    check_pixels(pixels)
    require(batch_size >= 1, f"batch_size is {batch_size}; expected 1 or more")
    parts = [
        classifier(to_images(pixels[start : start + batch_size], classifier.device)).argmax(1)
        for start in range(0, len(pixels), batch_size)
    ]
    return torch.cat(parts).cpu().numpy()


def accuracy(classifier: Classifier, pixels: Pixels, labels: Labels, batch_size: int = 256) -> dict[str, Any]:
    """Return `top1` over all images, `per_class` (an array; NaN where a class has no image) and `n`."""
    num_classes = classifier.config.num_classes
    check_pixels(pixels)
    _check_labels(labels, len(pixels), num_classes)
    right = predict(classifier, pixels, batch_size=batch_size) == labels
    count = np.bincount(labels, minlength=num_classes)
    hits = np.bincount(labels, weights=right, minlength=num_classes)
    per_class = np.divide(hits, count, out=np.full(num_classes, np.nan), where=count > 0)
    return {"top1": float(right.mean()), "per_class": per_class, "n": len(labels)}


def _check_labels(labels: Labels, n: int, num_classes: int) -> None:
    require(
        labels.shape == (n,) and np.issubdtype(labels.dtype, np.integer),
        f"labels are {labels.dtype} {list(labels.shape)}; expected whole numbers [{n}], one per image",
    )
    low, high = int(labels.min()), int(labels.max())
    require(low >= 0 and high < num_classes, f"labels run from {low} to {high}; expected 0 to {num_classes - 1}")
