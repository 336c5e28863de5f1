"""Small scorer networks: their checkpoints, their training loop, and a residual classifier of images.

Shapes: B batch, C channels, HW pixels, K classes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from arpg.checkpoint import check_state
from arpg.config import from_dict, to_dict
from arpg.errors import InputError, require
from arpg.files import read_tensors, write_whole
from arpg.image import Pixels, check_pixels, to_images

SMALLEST = 64  # pixels: four halvings leave a map worth averaging
NUM_AUGMENTATIONS = 7
REPORT_EVERY = 50  # steps

Labels = NDArray[np.integer[Any]]
Module = TypeVar("Module", bound=nn.Module)
Progress = Callable[[int, float], None] | None  # steps done, loss


def save_scorer(network: nn.Module, folder: Path, *, name: str, config: Any) -> None:
    """Write NAME.json (the configuration) and NAME.safetensors into `folder`."""
    state = {key: tensor.detach().cpu().contiguous() for key, tensor in network.state_dict().items()}
    data = safetensors.torch.save(state)
    write_whole(folder / f"{name}.safetensors", lambda path: path.write_bytes(data))
    text = json.dumps(to_dict(config), indent=1) + "\n"
    write_whole(folder / f"{name}.json", lambda path: path.write_text(text, encoding="utf-8"))


def load_scorer(
    build: Callable[[Any], Module], folder: Path, *, name: str, config: type, device: torch.device | str, hint: str = ""
) -> Module:
    """Load a network that `build` makes from its configuration; `hint` says in errors where one comes from."""
    path, weights = folder / f"{name}.json", folder / f"{name}.safetensors"
    require(path.is_file(), f"{folder} holds no {name}: it has no {path.name}{hint}")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON: {error}") from None
    with torch.device("meta"):
        network = build(from_dict(config, data, where=str(path)))
    state = read_tensors(weights)
    check_state(state, network, where=str(weights))
    network.load_state_dict(state, strict=True, assign=True)
    return network.to(device).eval()


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


@dataclass(frozen=True)
class ClassifierConfig:
    num_classes: int
    width: int = 32  # 2.8 M parameters

    def __post_init__(self) -> None:
        require(self.num_classes >= 1, f"num_classes is {self.num_classes}; expected 1 or more")
        require(
            self.width >= 8 and self.width % 8 == 0,
            f"width is {self.width}; GroupNorm has 8 groups, so it must be a multiple of 8",
        )


class Block(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, *, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(8, out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(8, out_channels)
        nn.init.zeros_(self.norm2.weight)  # a block starts as its shortcut, which makes the first steps safe
        # Pooled, then 1x1: nothing is skipped, and on a CPU the backward of a 1x1 convolution with a stride corrupts
        # memory when the image is channels-last (torch 2.13, oneDNN).
        self.pool = nn.AvgPool2d(2, ceil_mode=True) if stride == 2 else nn.Identity()
        self.shortcut = nn.Conv2d(in_channels, out_channels, 1) if in_channels != out_channels else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(self.shortcut(self.pool(x)) + h)


class Classifier(nn.Module):
    """Four levels of two residual blocks. GroupNorm computes the same in training and in evaluation."""

    def __init__(self, config: ClassifierConfig) -> None:
        super().__init__()
        self.config = config
        widths = [config.width * 2**i for i in range(4)]
        self.stem = nn.Conv2d(3, config.width, 3, stride=2, padding=1)
        self.blocks = nn.Sequential()
        previous = config.width
        for i, width in enumerate(widths):
            self.blocks.append(Block(previous, width, stride=2 if i else 1))
            self.blocks.append(Block(width, width, stride=1))
            previous = width
        self.norm = nn.LayerNorm(previous)
        self.head = nn.Linear(previous, config.num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):  # PyTorch's default shrinks the signal along the shortcuts
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    def forward(self, image_B3HW: Tensor) -> Tensor:
        """Return logits `[B, K]` of images in [-1, 1]."""
        height, width = image_B3HW.shape[2:]
        if min(height, width) < SMALLEST:
            raise InputError(f"images are {width}x{height} pixels; expected {SMALLEST} or more per side; enlarge them")
        logits_BK: Tensor = self.head(self.norm(self.blocks(self.stem(image_B3HW)).mean((2, 3))))
        return logits_BK

    def save(self, folder: Path) -> None:
        save_scorer(self, folder, name="classifier", config=self.config)

    @staticmethod
    def load(folder: Path, *, device: torch.device | str = "cpu") -> Classifier:
        return load_scorer(Classifier, folder, name="classifier", config=ClassifierConfig, device=device)


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
    compiled: bool = False,
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
    forward = torch.compile(classifier) if compiled and device.type == "cuda" else classifier

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
            logits_BK = forward(image_B3HW)
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
