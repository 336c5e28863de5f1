"""A residual classifier of images, and what it shares with other small scorer networks.

Shapes: B batch, HW pixels, K classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from arpg.config import from_dict, to_dict
from arpg.device import meta_device
from arpg.errors import InputError, require
from arpg.files import check_state, read_json, read_tensors, write_json, write_tensors, write_whole

SMALLEST = 64  # pixels: four halvings leave a map worth averaging


class Scorer(nn.Module):
    """A small convolutional network. A folder holds it as NAME.json (the configuration) and NAME.safetensors."""

    name: ClassVar[str]
    config_type: ClassVar[type]
    hint: ClassVar[str] = ""  # says in errors where one comes from

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def init_convolutions(self) -> None:
        """Give convolutions initial weights; PyTorch's default shrinks the signal along shortcuts."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")

    @property
    def device(self) -> torch.device:
        """Return the device of the weights."""
        return next(self.parameters()).device

    def save(self, folder: Path) -> None:
        """Write the network into `folder`."""
        state = {key: tensor.detach().cpu().contiguous() for key, tensor in self.state_dict().items()}
        write_whole(folder / f"{self.name}.safetensors", lambda path: write_tensors(state, path))
        write_json(folder / f"{self.name}.json", to_dict(self.config))

    @classmethod
    def load(cls, folder: Path, *, device: torch.device | str = "cpu") -> Self:
        """Load a network; it computes in float32, also where the file has half precision."""
        path, weights = folder / f"{cls.name}.json", folder / f"{cls.name}.safetensors"
        require(path.is_file(), f"{folder} holds no {cls.name}: it has no {path.name}{cls.hint}")
        with meta_device():
            network = cls(from_dict(cls.config_type, read_json(path), where=str(path)))
        state = read_tensors(weights)
        check_state(state, network, where=str(weights))
        network.load_state_dict(state, strict=True, assign=True)
        return network.to(device, torch.float32).eval()


def check_width(width: int) -> None:
    """Raise an `InputError` unless the channels of a `Block` can be normalised in groups."""
    require(width >= 8 and width % 8 == 0, f"width is {width}; GroupNorm has 8 groups, so it must be a multiple of 8")


@dataclass(frozen=True)
class ClassifierConfig:
    """The shape of a classifier."""

    num_classes: int
    width: int = 32  # 2.8 M parameters

    def __post_init__(self) -> None:
        require(self.num_classes >= 1, f"num_classes is {self.num_classes}; expected 1 or more")
        check_width(self.width)


class Block(nn.Module):
    """A residual block of two 3x3 convolutions with GroupNorm."""

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


class Classifier(Scorer):
    """Four levels of two residual blocks. GroupNorm computes the same in training and in evaluation."""

    name, config_type = "classifier", ClassifierConfig

    def __init__(self, config: ClassifierConfig) -> None:
        super().__init__(config)
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
        self.init_convolutions()

    def forward(self, image_B3HW: Tensor) -> Tensor:
        """Return logits `[B, K]` of images in [-1, 1]."""
        height, width = image_B3HW.shape[2:]
        if min(height, width) < SMALLEST:
            raise InputError(f"images are {width}x{height} pixels; expected {SMALLEST} or more per side; enlarge them")
        logits_BK: Tensor = self.head(self.norm(self.blocks(self.stem(image_B3HW)).mean((2, 3))))
        return logits_BK
