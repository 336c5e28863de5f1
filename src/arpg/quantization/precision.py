"""8-bit weights: float8 with float8 activations (Ada, Hopper), or int8 (any GPU, and CPUs).

A float8 number has the same relative precision from 2^-6 to 448, so activations, which are about 1, need no scale, and
a weight needs one only. int8 has no exponent: a weight has a scale for each output there, and on a CPU an activation
has one for each row. Quantized are the matrices of the blocks and between the passes, and the head unless it is left
out; embeddings and norms are looked up or small. The residual stream, queries, keys and values stay in 16 bits (on a
CPU, 32), and so does the key-value cache unless it is asked for in float8, which any precision can be.
Shapes: O outputs, I inputs.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from arpg.config import KV_CACHE_DTYPES, PRECISIONS
from arpg.device import choose_dtype, nvidia_capability
from arpg.errors import one_of, present, require
from arpg.kernels import ops
from arpg.kernels.dispatch import FLOAT8, FLOAT8_MAX
from arpg.kernels.ops import to_float8
from arpg.model import ARPG
from arpg.quantization.packed import (
    QuantizedLinear,
    computes,
    from_pickle,
    replace_layers,
    to_pickle,
    unpack_linears,
)
from arpg.quantization.storage import to_int8

Precision = str | torch.dtype  # one of PRECISIONS, or a type


class Fp8Linear(QuantizedLinear):
    """Float8 times float8. Takes float8 as it is, and casts other tensors."""

    precision = "fp8"
    input_dtype = FLOAT8
    values_OI: Tensor
    scale: Tensor  # of the weight
    one: Tensor  # the scale of the input
    dtype: torch.dtype  # of the output

    def store(self, weight_OI: Tensor) -> None:
        """Quantize a weight with one scale; the output then has the weight's type."""
        require(
            self.in_features % 16 == 0 and self.out_features % 16 == 0,
            f"a layer has {self.in_features} inputs and {self.out_features} outputs; fp8 needs multiples of 16",
        )
        self.dtype = weight_OI.dtype
        wide_OI = weight_OI.float()
        self.scale = wide_OI.abs().amax().clamp_min(1e-12) / FLOAT8_MAX
        self.one = torch.ones_like(self.scale)
        self.values_OI = to_float8(wide_OI / self.scale).contiguous()

    @property
    def weight(self) -> Tensor:
        """A plain copy of the weight, `[O, I]`."""
        return (self.values_OI.float() * self.scale).to(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply in float8 on a GPU; on a CPU the same numbers in float32."""
        if torch.is_grad_enabled() and x.requires_grad:
            return F.linear(x, self.weight)
        x = to_float8(x)
        if not x.is_cuda:
            return F.linear(x.float(), self.values_OI.float()).mul_(self.scale).to(self.dtype)
        rows_MI, right_IO = x.flatten(0, -2), self.values_OI.t()
        out: Tensor = torch._scaled_mm(
            rows_MI, right_IO, scale_a=self.one, scale_b=self.scale, out_dtype=self.dtype, use_fast_accum=True
        )
        return out.unflatten(0, x.shape[:-1])  # type: ignore[no-any-return, no-untyped-call]


class Int8Linear(QuantizedLinear):
    """int8 weights. On a GPU activations stay as they are; on a CPU with the product for it, they are int8 by row."""

    precision = "int8"
    values: Tensor  # [O, I] in int8; packed, [I, O], where a CPU has the product
    packed: bool  # torch.compile does not see it in the values
    scale_O: Tensor
    dtype: torch.dtype

    def store(self, weight_OI: Tensor) -> None:
        """Quantize a weight with a scale for each output."""
        self.dtype = weight_OI.dtype
        values_OI, self.scale_O = to_int8(weight_OI)
        self._keep(values_OI)

    @property
    def weight(self) -> Tensor:
        """A plain copy of the weight, `[O, I]`."""
        return (self._plain().float() * self.scale_O[:, None]).to(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by the int8 weight."""
        if torch.is_grad_enabled() and x.requires_grad:
            return F.linear(x, self.weight.to(x.dtype))
        if self.packed and x.device.type == "cpu":
            product = _compiled_product if torch.compiler.is_compiling() else _cpu_product
            return product(x, self.values, self.scale_O).to(x.dtype)
        return ops.int8_linear(x, self._plain(), self.scale_O)

    def _keep(self, values_OI: Tensor) -> None:
        self.packed = values_OI.device.type == "cpu" and has_int8_product()
        self.values = _pack(values_OI.contiguous()) if self.packed else values_OI.contiguous()

    def _plain(self) -> Tensor:
        return self.values.to_dense().t() if self.packed else self.values

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "values": to_pickle(self._plain(), self.values)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._keep(from_pickle(state["values"]))


def to_precision(
    model: ARPG, precision: Precision, device: torch.device, *, head: bool = True, kv_cache_dtype: str = "auto"
) -> ARPG:
    """Move the model, in place, to the device and the precision, for inference.

    `head`: quantize it, too. Weights are quantized one by one from what they are now, so the device never holds all of
    them in full, and those that come from an int8 file are what the file has. `kv_cache_dtype`: of the caches that it
    allocates, auto (the type that it computes in) or fp8 (float8 e4m3).
    """
    dtype = choose_dtype(precision, device)
    check_kv_cache(kv_cache_dtype, device)
    model.kv_cache_dtype = FLOAT8 if kv_cache_dtype == "fp8" else None
    if precision not in ("fp8", "int8"):
        return model.to(device=device, dtype=dtype)
    if precision == "fp8":
        check_fp8(device)
    kind: type[Fp8Linear | Int8Linear] = Fp8Linear if precision == "fp8" else Int8Linear

    def quantized(layer: nn.Module) -> nn.Module:
        if not isinstance(layer, nn.Linear):
            return layer
        weight_OI = layer.weight.detach().to(device)
        made = kind.from_linear(layer, weight_OI=weight_OI)
        made.dtype = dtype
        return made

    unpack_linears(model)
    for part in (model.pass1, model.memory_kv, model.pass2):
        replace_layers(part, quantized)
    if head:
        model.head = quantized(model.head)  # type: ignore[assignment]
    for module in model.modules():
        if not isinstance(module, Fp8Linear | Int8Linear):
            _move(module, device, dtype)
    return model


def precision_of(model: ARPG) -> str:
    """Return the precision of a model by the name that `to_precision` takes."""
    kinds = {layer.precision for layer in model.modules() if isinstance(layer, Fp8Linear | Int8Linear)}
    return kinds.pop() if kinds else str(model.dtype).removeprefix("torch.")


def kv_cache_dtype_of(model: ARPG) -> str:
    """Return the type of the model's caches by the name that `to_precision` takes."""
    return "auto" if model.kv_cache_dtype is None else "fp8"


def check_fp8(device: torch.device, setting: str = "precision", choices: tuple[str, ...] = PRECISIONS) -> None:
    """Raise an `InputError` unless the device has float8: compute capability 8.9 and later."""
    others = [name for name in choices if name != "fp8"]
    instead = f"use {'one of ' if len(others) > 1 else ''}{', '.join(others)}"
    kind = "an AMD GPU" if device.type == "cuda" else device.type
    found = present(nvidia_capability(device), f"{setting} is fp8, which needs an NVIDIA GPU, not {kind}; {instead}")
    require(
        found >= (8, 9),
        f"{setting} is fp8, but {torch.cuda.get_device_name(device)} has compute capability {found[0]}.{found[1]}; "
        f"expected 8.9 or more (Ada, Hopper); {instead}",
    )


def check_kv_cache(kv_cache_dtype: str, device: torch.device) -> None:
    """Raise an `InputError` unless caches on the device can be of this type; plain code converts float8 on a CPU."""
    one_of("kv_cache_dtype", kv_cache_dtype, KV_CACHE_DTYPES)
    if kv_cache_dtype == "fp8" and device.type != "cpu":
        check_fp8(device, "kv_cache_dtype", KV_CACHE_DTYPES)


@cache
def has_int8_product() -> bool:
    """Return whether this torch has oneDNN's int8 product and it is right on this CPU, also at the largest numbers.

    CPUs without VNNI add in 16 bits on the way and overflow.
    """
    x, values_OI = torch.linspace(-3, 5, 6 * 64).reshape(6, 64), torch.full((48, 64), 127, dtype=torch.int8)
    values_OI[::2, ::3] = -127
    return computes(lambda: _cpu_product(x, _pack(values_OI), torch.ones(48)), x @ values_OI.float().t(), 0.02)


def _pack(values_OI: Tensor) -> Tensor:
    packed: Tensor = torch.ops.onednn.qlinear_prepack(values_OI, None)
    return packed


def _cpu_product(x: Tensor, packed: Tensor, scale_O: Tensor) -> Tensor:
    """In float32. The product takes bytes from 0 to 255: rows are scaled to -127..127 and shifted by 128."""
    wide = x.flatten(0, -2).float()
    scale_M1 = wide.abs().amax(-1, keepdim=True).clamp_min_(1e-12).div_(127)
    bytes_MI = (wide / scale_M1).add_(128).round_().to(torch.uint8)
    no_shift_O = torch.zeros(len(scale_O), dtype=torch.long)
    out: Tensor = torch.ops.onednn.qlinear_pointwise(
        bytes_MI, 1.0, 128, packed, scale_O, no_shift_O, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return out.mul_(scale_M1).unflatten(0, x.shape[:-1])  # type: ignore[no-any-return, no-untyped-call]


@torch.library.custom_op("arpg::int8_product", mutates_args=())
def _compiled_product(x: Tensor, packed: Tensor, scale_O: Tensor) -> Tensor:
    """The product as one operator: the compiler cannot read its parts."""
    return _cpu_product(x, packed, scale_O)


@_compiled_product.register_fake
def _(x: Tensor, packed: Tensor, scale_O: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], len(scale_O)), dtype=torch.float32)


def _move(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Move a module's own tensors, not those of its submodules."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            moved = parameter.detach().to(device=device, dtype=dtype)
            module._parameters[name] = nn.Parameter(moved, requires_grad=parameter.requires_grad)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = buffer.to(device=device, dtype=dtype if buffer.is_floating_point() else None)
