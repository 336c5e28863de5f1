"""How weights are stored small: half precision, or rows of int8 with a scale each. Loading gives plain tensors back."""

from __future__ import annotations

import torch
from torch import Tensor

from arpg.errors import InputError

State = dict[str, Tensor]
SCALE = ".scale"  # the key of a row-wise scale, after the key of its int8 tensor
KEEP = ("quantize.embedding.weight",)  # codes are directions: small, and every decoded token depends on them


def pack(state: State, form: str) -> State:
    """The state in a storage format. `int8` is for matrices and convolutions; the rest becomes float16."""
    if form != "int8":
        return {key: tensor.to(getattr(torch, form)) for key, tensor in state.items()}
    packed: State = {}
    for key, tensor in state.items():
        if tensor.dim() < 2 or key.endswith(KEEP):
            packed[key] = tensor.to(torch.float16)
            continue
        rows = tensor.detach().float().flatten(1)
        scale = rows.abs().amax(1).clamp_min(1e-12) / 127
        packed[key] = (rows / scale[:, None]).round().clamp(-127, 127).to(torch.int8).reshape(tensor.shape)
        packed[key + SCALE] = scale.to(torch.float32)
    return packed


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
