"""Weights in files: reading them safely, and storing them small.

Small is half precision, or rows of 8, 6 or 4 bits with a scale each; whole, or as differences from another model.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from arpg.errors import InputError, require
from arpg.files import State

SCALE = ".scale"  # the key of a row-wise scale, after the key of its tensor
SHAPE = ".shape"  # likewise of the number of bits and the shape, where bits are squeezed into bytes
BITS = {"int8": 8, "int6": 6, "int4": 4}
KEEP = ("quantize.embedding.weight",)  # codes are directions: small, and every decoded token depends on them


def pack(state: State, form: str) -> State:
    """The state in a storage format. Few bits are for matrices and convolutions; the rest becomes float16."""
    if form not in BITS:
        return {key: tensor.to(getattr(torch, form)) for key, tensor in state.items()}
    packed: State = {}
    for key, tensor in state.items():
        if tensor.dim() < 2 or key.endswith(KEEP):
            packed[key] = tensor.to(torch.float16)
            continue
        if BITS[form] == 8:
            packed[key], packed[key + SCALE] = to_int8(tensor)
        else:
            levels, packed[key + SCALE] = _rounded(tensor, BITS[form])
            packed[key] = _squeeze(levels.flatten(1) + 2 ** (BITS[form] - 1) - 1, BITS[form])
            packed[key + SHAPE] = torch.tensor([BITS[form], *tensor.shape], dtype=torch.int32)
    return packed


def to_int8(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The tensor in 8 bits and a scale for each of its rows. What was in int8 before gets its numbers back."""
    return _rounded(tensor, 8)


def _rounded(tensor: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Levels in the tensor's shape and a scale for each row, which reaches its largest number; 4 bits may clip it."""
    rows_RC = tensor.detach().float().flatten(1)
    scale_R = rows_RC.abs().amax(1).clamp_min(1e-12) / (2 ** (bits - 1) - 1)
    if bits == 4:
        scale_R = _closest_scale(rows_RC, scale_R, bits)
    return _to_levels(rows_RC, scale_R, bits).to(torch.int8).reshape(tensor.shape), scale_R


def _to_levels(rows_RC: Tensor, scale_R: Tensor, bits: int) -> Tensor:
    most = 2 ** (bits - 1) - 1
    return (rows_RC / scale_R[:, None]).round().clamp(-most, most)


def _closest_scale(rows_RC: Tensor, scale_R: Tensor, bits: int) -> Tensor:
    """Of scales down to half of those given, the ones with the least squared error of each row."""
    best_R, least_R = scale_R, torch.full_like(scale_R, torch.inf)
    for part in torch.linspace(1.0, 0.5, 11).tolist():
        tried_R = part * scale_R
        error_R = (_to_levels(rows_RC, tried_R, bits) * tried_R[:, None] - rows_RC).square().sum(1)
        best_R = torch.where(error_R < least_R, tried_R, best_R)
        least_R = torch.minimum(error_R, least_R)
    return best_R


def pack_difference(state: State, base: State, form: str) -> State:
    """What differs from another model in a storage format, and what it does not have in 8 bits."""
    for key, tensor in base.items():
        require(
            key in state and state[key].shape == tensor.shape,
            f"{key} of the other model is not there, or has another shape; differences need a model that grew from it",
        )
    difference = {key: state[key].float() - tensor.float().to(state[key].device) for key, tensor in base.items()}
    return {**pack(difference, form), **pack({key: t for key, t in state.items() if key not in base}, "int8")}


def add_difference(state: State, base: State) -> State:
    """Whole tensors, of plain differences and what they differ from."""
    return {
        key: tensor.float() + base[key].float() if key in base and base[key].shape == tensor.shape else tensor
        for key, tensor in state.items()
    }


def unpack(state: State, *, where: str) -> State:
    """Plain tensors: those of few bits are multiplied by their scales (in float32), others stay as they are."""
    plain: State = {}
    for key, tensor in state.items():
        if key.endswith((SCALE, SHAPE)):
            continue
        described = state[key + SHAPE].tolist() if key + SHAPE in state else None
        if described is not None:
            tensor = _levels(tensor, described, where=f"{where}: {key}")
        if tensor.dtype == torch.int8:
            scale = state.get(key + SCALE)
            if scale is None or scale.shape != tensor.shape[:1]:
                bits = 8 if described is None else described[0]
                raise InputError(
                    f"{where}: {key} is stored in {bits} bits without a scale for each of its rows; pack it again"
                )
            tensor = tensor.float() * scale.float().reshape(-1, *[1] * (tensor.dim() - 1))
        plain[key] = tensor
    return plain


def _group(bits: int) -> tuple[int, int]:
    """How many numbers fill how many bytes without a rest."""
    return 8 // math.gcd(8, bits), bits // math.gcd(8, bits)


def _squeeze(unsigned_RC: Tensor, bits: int) -> Tensor:
    """Each row's numbers one after the other, without the bits above; the last group of a row is filled up."""
    many, few = _group(bits)
    filled = F.pad(unsigned_RC, (0, -unsigned_RC.shape[1] % many))
    numbers = filled.to(torch.int32).unflatten(1, (-1, many))  # type: ignore[no-untyped-call]
    word = sum(numbers[..., i] << bits * (many - 1 - i) for i in range(many))
    return torch.stack([(word >> 8 * (few - 1 - i) & 255).to(torch.uint8) for i in range(few)], -1).flatten(1)


def _levels(squeezed: Tensor, described: list[int], *, where: str) -> Tensor:
    """Signed levels in their shape, from the number of bits and the shape."""
    bits, *shape = described
    columns = math.prod(shape[1:])
    many, few = _group(bits)
    right = bits in BITS.values() and squeezed.shape == (shape[0], -(-columns // many) * few)
    require(right and squeezed.dtype == torch.uint8, f"{where} does not hold {shape} of {bits} bits; pack it again")
    parts = squeezed.reshape(shape[0], -1, few).unbind(-1)
    word = sum(part.to(torch.int32) << 8 * (few - 1 - i) for i, part in enumerate(parts))
    most, mask = 2 ** (bits - 1) - 1, 2**bits - 1
    numbers = [((word >> bits * (many - 1 - i) & mask) - most).to(torch.int8) for i in range(many)]
    return torch.stack(numbers, -1).flatten(1)[:, :columns].reshape(shape)
