"""Weights in files: reading them safely, and storing them small (half precision, or int8 rows with a scale each)."""

from __future__ import annotations

import argparse
import pickle
import struct
import warnings
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from arpg.errors import InputError, require

State = dict[str, Tensor]
# What torch.load raises for files that are cut short or no checkpoints at all.
_BROKEN = (RuntimeError, EOFError, OSError, ValueError, LookupError, TypeError, AttributeError, struct.error)
SCALE = ".scale"  # the key of a row-wise scale, after the key of its int8 tensor
KEEP = ("quantize.embedding.weight",)  # codes are directions: small, and every decoded token depends on them


def read_tensors(path: Path) -> State:
    """A safetensors file."""
    require(path.is_file(), f"{path} does not exist; the folder is incomplete, fetch or convert it again")
    try:
        return safetensors.torch.load_file(path)
    except (safetensors.SafetensorError, OSError) as error:
        raise InputError(f"{path} is not a whole safetensors file ({error}); fetch or convert it again") from None


def read_pickle(path: Path) -> Any:
    """A torch file, opened so that it cannot run code."""
    require(path.exists(), f"{path} does not exist; expected a published checkpoint (.pt)")
    require(path.is_file(), f"{path} is not a file; expected a published checkpoint (.pt)")
    try:
        # Training checkpoints carry their command line; nothing else may be constructed.
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickle protocols: what matters ends up in an error
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        first = str(error).splitlines()[0].rstrip(". ")
        raise InputError(f"{path} is refused by the safe loader: {first[:200]}; expected plain tensors") from None
    except _BROKEN as error:
        first = str(error).splitlines()[0][:200] if str(error) else "no content"
        raise InputError(f"{path} cannot be read ({first}); is it truncated? Fetch it again") from None


def write_tensors(state: State, path: Path) -> None:
    try:
        safetensors.torch.save_file(state, path)
    except safetensors.SafetensorError as error:  # a full disk, for one
        raise OSError(str(error)) from None


def pack(state: State, form: str) -> State:
    """The state in a storage format. `int8` is for matrices and convolutions; the rest becomes float16."""
    if form != "int8":
        return {key: tensor.to(getattr(torch, form)) for key, tensor in state.items()}
    packed: State = {}
    for key, tensor in state.items():
        if tensor.dim() < 2 or key.endswith(KEEP):
            packed[key] = tensor.to(torch.float16)
            continue
        packed[key], packed[key + SCALE] = to_int8(tensor)
    return packed


def to_int8(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The tensor in 8 bits and a scale for each of its rows. What was in int8 before gets its numbers back."""
    rows = tensor.detach().float().flatten(1)
    scale = rows.abs().amax(1).clamp_min(1e-12) / 127
    return (rows / scale[:, None]).round().clamp(-127, 127).to(torch.int8).reshape(tensor.shape), scale


def unpack(state: State, *, where: str) -> State:
    """Plain tensors: int8 ones are multiplied by their scales (in float32), others stay as they are."""
    plain: State = {}
    for key, tensor in state.items():
        if key.endswith(SCALE):
            continue
        if tensor.dtype == torch.int8:
            scale = state.get(key + SCALE)
            if scale is None or scale.shape != tensor.shape[:1]:
                raise InputError(
                    f"{where}: {key} is stored in 8 bits without a scale for each of its rows; pack it again"
                )
            tensor = tensor.float() * scale.float().reshape(-1, *[1] * (tensor.dim() - 1))
        plain[key] = tensor
    return plain
