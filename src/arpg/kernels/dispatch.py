"""Which kernels a tensor can take: questions about its device, type and shape, and the policy of the caller."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor, nn

from arpg.device import nvidia_capability

log = logging.getLogger(__name__)

FLOAT8, FLOAT8_MAX = torch.float8_e4m3fn, 448.0
SMALL_BATCH_ROWS = 48  # rows up to which one image is made faster with the small-batch GEMM than with the library's
WGMMA_ROWS = range(24, 65)  # rows for which that of Hopper is faster than both
LARGE_GEMM_ROWS = 65  # rows from which on a GEMM with a fused epilogue is faster than the library's and other kernels
MAX_WGMMA_INPUTS, WGMMA_SPLIT = 1280, 4  # whose weights a program holds in shared memory; programs that share more
TRITON_AVAILABLE = importlib.util.find_spec("triton") is not None
QUACK_AVAILABLE = importlib.util.find_spec("quack") is not None
_OLDEST_GPU = (8, 0)  # compute capability: Ampere has tensor cores for bfloat16, and more than 64 KiB of shared memory


@dataclass(frozen=True)
class KernelPolicy:
    """Which optional kernel features may be used; benchmarks and tests turn them off to compare."""

    small_gemm: bool = True  # decode layers of small batches in five kernels each (`small_gemm.py`)
    wgmma_gemm: bool = True  # another kernel for those of 24 to 64 rows on Hopper (`wgmma_gemm.py`)
    large_gemm: bool = True  # decode layers of more rows in as few, by QuACK on Hopper (`large_gemm.py`)
    pdl: bool = True  # programmatic dependent launch: a kernel prefetches while the one before it still runs
    pixel_graphs: bool = True  # images from CUDA graphs, where the tokenizer decodes by kernels (`decode/graphs.py`)


_DEFAULT_POLICY = KernelPolicy()
_policy: ContextVar[KernelPolicy] = ContextVar("kernel_policy", default=_DEFAULT_POLICY)


@contextmanager
def kernel_policy(policy: KernelPolicy) -> Iterator[None]:
    """Use `policy` inside the block, in this thread."""
    token = _policy.set(policy)
    try:
        yield
    finally:
        _policy.reset(token)


def has_kernels(x: Tensor) -> bool:
    """Whether the kernels run on the device of `x`: an NVIDIA GPU since Ampere, with Triton (Windows may lack it).

    AMD's GPUs, on which they have not been tried, take the plain code.
    """
    return TRITON_AVAILABLE and x.is_cuda and (nvidia_capability(x.device) or (0, 0)) >= _OLDEST_GPU


def can_compile(x: Tensor) -> bool:
    """Whether small functions of `x` are worth compiling: on a GPU, with Triton, which torch's compiler needs there."""
    return TRITON_AVAILABLE and x.is_cuda


def can_fuse(x: Tensor) -> bool:
    """Whether kernels that compute in float32, whatever they read, take this tensor."""
    return has_kernels(x) and x.dtype in (torch.float32, torch.bfloat16, torch.float16)


def can_fuse_half(x: Tensor) -> bool:
    """Whether the kernels for half precision take this tensor."""
    return can_fuse(x) and x.dtype != torch.float32


def can_fuse_inference(x: Tensor) -> bool:
    """Whether the half-precision kernels without a gradient take this tensor."""
    return can_fuse_half(x) and not torch.is_grad_enabled()


class FusedGemm(Protocol):
    """A module with a GEMM that includes the norm, SwiGLU or residual sum: `small_gemm`, `wgmma_gemm`, `large_gemm`.

    Where `SCALES_STREAM` is true (`large_gemm`), `linear` takes the stream times the norm's weight, which `add_linear`
    makes, and neither `norm_D` nor `add` and `sums_PM`. Elsewhere `linear` takes all of them, and there is no
    `add_linear`.
    """

    SCALES_STREAM: bool

    def linear(
        self,
        x: Tensor,
        weight_ND: Tensor,
        *,
        norm_D: Tensor | None = None,
        eps: float = 0.0,
        add: Tensor | None = None,
        swiglu: bool = False,
        squares_PM: Tensor | None = None,
        sums_PM: Tensor | None = None,
    ) -> Tensor:
        """`[..., N]`, as `small_gemm.linear` says."""

    def empty_sums(self, x: Tensor, weight_ND: Tensor) -> Tensor:
        """Allocate partial sums of the squares of `x @ weight + add`, `[P, M]`."""

    def add_linear(self, x: Tensor, weight_ND: Tensor, add: Tensor, norm_D: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The stream, the same times `norm_D`, and its sums, as `large_gemm.add_linear` says."""


def fused_gemm(x: Tensor, layer: nn.Module) -> FusedGemm | None:
    """Return the GEMM for the residual stream `x` and a `layer` (plain weights of the same type), if there is one.

    Only where programmatic dependent launch exists: other GPUs have not been measured. The choice depends on the shape
    of the stream, so all layers of a pass have the same.
    """
    if not can_fuse_inference(x) or not supports_pdl(x):
        return None
    if not isinstance(layer, nn.Linear) or layer.bias is not None or layer.weight.dtype != x.dtype:  # quantized: no
        return None
    policy, rows, width = _policy.get(), x.numel() // x.shape[-1], x.shape[-1]
    if width % 16 or layer.in_features % 16:  # loads of 16 bytes
        return None
    if policy.small_gemm and kernel_works(x.device, "small_gemm"):
        fits = width <= MAX_WGMMA_INPUTS and layer.in_features <= WGMMA_SPLIT * MAX_WGMMA_INPUTS
        if policy.wgmma_gemm and fits and rows in WGMMA_ROWS and has_wgmma(x) and kernel_works(x.device, "wgmma_gemm"):
            return _import("wgmma_gemm")
        if rows <= SMALL_BATCH_ROWS:
            return _import("small_gemm")
    large = policy.large_gemm and QUACK_AVAILABLE and rows >= LARGE_GEMM_ROWS and has_wgmma(x)
    return _import("large_gemm") if large and kernel_works(x.device, "large_gemm") else None


def working_gemms(device: torch.device) -> list[str]:
    """Return the fused GEMMs that a device has and that compile for it: those that `fused_gemm` chooses from."""
    x = torch.empty(0, device=device)
    if not (has_kernels(x) and supports_pdl(x)):
        return []
    names = ["small_gemm"]
    if has_wgmma(x):
        names += ["wgmma_gemm", "large_gemm"] if QUACK_AVAILABLE else ["wgmma_gemm"]
    return [name for name in names if kernel_works(device, name)]


def has_wgmma(x: Tensor) -> bool:
    """Whether the GPU multiplies matrices in shared memory by warpgroups: Hopper has it, and no later one."""
    return nvidia_capability(x.device) == (9, 0)


@cache
def num_processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU; elsewhere that of an H200, for tests."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 132


def use_pixel_graphs() -> bool:
    """Whether images may come from CUDA graphs: not where a gradient is wanted, nor inside compiled code."""
    return not torch.compiler.is_compiling() and not torch.is_grad_enabled() and _policy.get().pixel_graphs


@cache
def kernel_works(device: torch.device, kernel: str) -> bool:
    """Whether a GEMM, `small_gemm`, `wgmma_gemm` or `large_gemm`, compiles for `device`: tried once.

    Gluon and QuACK may still change from one version to the next, so whatever goes wrong is a reason to do without.
    """
    try:
        gemm = _import(kernel)
        x = torch.zeros(24, 256, dtype=torch.bfloat16, device=device)
        weight_ND = x.new_zeros(256, 256)
        norm: dict[str, Tensor] = {} if gemm.SCALES_STREAM else {"norm_D": x[0]}
        gemm.linear(x, weight_ND, **norm, eps=1e-5, swiglu=True, squares_PM=gemm.empty_sums(x, weight_ND))
    except Exception as error:
        why = str(error).strip().partition("\n")[0]
        log.warning("%s is not used, because it does not work: %s: %s", kernel, type(error).__name__, why)
        return False
    return True


def _import(kernel: str) -> FusedGemm:
    """Import a kernel when it is needed: this module is also there without Triton."""
    gemm: FusedGemm = importlib.import_module(f"arpg.kernels.{kernel}")
    return gemm


def prefetch_weights(x: Tensor) -> bool:
    """Whether kernels are launched before those in front of them end.

    Each must then wait itself (`gdc_wait`) before it reads or writes what another kernel writes or reads.
    """
    if not supports_pdl(x):
        return False
    policy = _policy.get()
    return policy.pdl and (policy.small_gemm or policy.large_gemm)


def supports_pdl(x: Tensor) -> bool:
    """Whether the GPU has programmatic dependent launch: compute capability 9.0 (Hopper) and later."""
    return x.is_cuda and not torch.compiler.is_compiling() and (nvidia_capability(x.device) or (0, 0)) >= (9, 0)
