"""Where a model runs and in which precision, from what a user says."""

from __future__ import annotations

import torch
from torch import Tensor

from arpg.config import PRECISIONS
from arpg.errors import InputError, require


def choose_device(device: str | torch.device) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise InputError(f"device is {device!r}; expected auto, cpu, cuda or cuda:0") from None
    require(
        chosen.type != "cuda" or torch.cuda.is_available(),
        f"device is {device!r}, but torch sees no GPU; use --device cpu",
    )
    return chosen


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """On the device, without waiting for it: from ordinary memory, a copy waits for all that is still to be done."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def choose_dtype(precision: str | torch.dtype, device: torch.device) -> torch.dtype:
    """The type that a model computes in; with weights of 8 bits, the type of everything else."""
    if isinstance(precision, torch.dtype):
        return precision
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    require(precision in PRECISIONS, f"precision is {precision!r}; expected one of {', '.join(PRECISIONS)}")
    return known.get(precision, torch.bfloat16 if device.type == "cuda" else torch.float32)
