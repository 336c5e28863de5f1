"""Fused kernels in Triton, for NVIDIA GPUs. Each has a plain twin in `model/layers.py`, which runs everywhere else."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

FLOAT8, FLOAT8_MAX = torch.float8_e4m3fn, 448.0
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
