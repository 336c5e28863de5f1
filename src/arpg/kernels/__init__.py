"""Fused kernels in Triton, for NVIDIA GPUs. Each has a plain twin in `model/layers.py`, which runs everywhere else."""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache

import torch
from torch import Tensor, nn

FLOAT8, FLOAT8_MAX = torch.float8_e4m3fn, 448.0
FEW_ROWS = True  # decoding layers of a handful of rows in five kernels each (`few_rows.py`)
MOST_ROWS = 32  # that count as a handful
AHEAD = True  # with these, kernels fetch weights while the kernel in front still runs
HAS_TRITON = importlib.util.find_spec("triton") is not None and torch.version.hip is None


def fusible(x: Tensor) -> bool:
    """Whether the kernels that compute in float32, whatever they read, take this tensor."""
    return HAS_TRITON and x.is_cuda and x.dtype in (torch.float32, torch.bfloat16, torch.float16)


def usable(x: Tensor) -> bool:
    """Whether the kernels take this tensor: half precision on a GPU, where Triton is installed."""
    return fusible(x) and x.dtype != torch.float32


def decoding(x: Tensor) -> bool:
    """Whether the kernels without a gradient may take it, too."""
    return usable(x) and not torch.is_grad_enabled()


def few(x: Tensor, layer: nn.Linear) -> bool:
    """Whether the kernels for a handful of rows take this product of the channels: plain weights of the same type.

    Only where they can start early: other GPUs have not been measured.
    """
    if not FEW_ROWS or not decoding(x) or x.numel() > MOST_ROWS * x.shape[-1] or not early(x) or not has_gluon():
        return False
    if x.shape[-1] % 16 or layer.in_features % 16:  # loads of 16 bytes
        return False
    weight = layer._parameters.get("weight")  # not there: kept in 8 bits
    return weight is not None and weight.dtype == x.dtype and layer.bias is None


@cache
def has_gluon() -> bool:
    """Gluon is a part of Triton that may still change; products of a handful of rows are written in it."""
    try:
        importlib.import_module("arpg.kernels.few_rows_gluon")
    except (ImportError, AttributeError):
        return False
    return True


def ahead(x: Tensor) -> bool:
    """Whether kernels start before those in front of them end.

    Each of them must then wait itself (`gdc_wait`) before it reads or writes what another kernel writes or reads.
    """
    return FEW_ROWS and AHEAD and early(x)


def early(x: Tensor) -> bool:
    """Whether kernels can be started so (programmatic dependent launch): compute capability 9.0, Hopper, and later."""
    return x.is_cuda and not torch.compiler.is_compiling() and torch.cuda.get_device_capability(x.device) >= (9, 0)
