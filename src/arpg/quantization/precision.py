"""Weights of 8 bits: float8 with float8 activations (Hopper, Ada), or int8 (any GPU, and CPUs).

A float8 number has the same relative precision from 2^-6 to 448, so activations, which are about 1, need no scale,
and a weight needs one only. int8 has no exponent: a weight has a scale for each output there, and on a CPU an
activation has one for each row. What is quantised are the matrices of the blocks and between the passes, and the head
unless it is left out; embeddings and norms are looked up or small. The residual stream, queries, keys, values and the
cache stay in 16 bits (on a CPU, 32).
Shapes: O outputs, I inputs.
"""

from __future__ import annotations

from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from arpg.config import PRECISIONS
from arpg.device import choose_dtype
from arpg.errors import require
from arpg.kernels import FLOAT8, FLOAT8_MAX, usable
from arpg.model import ARPG
from arpg.quantization.packed import StoredLinear, become, unpack_linears
from arpg.quantization.storage import to_int8

Precision = str | torch.dtype  # one of PRECISIONS, or a type


def to_precision(model: ARPG, precision: Precision, device: torch.device, *, head: bool = True) -> ARPG:
    """The model, in place, on the device and in the precision, for inference.

    `head`: quantise it, too. Weights are quantised one by one from what they are now, so the device never holds all
    of them in full, and those that come from an int8 file are what the file has.
    """
    dtype = choose_dtype(precision, device)
    if precision not in ("fp8", "int8"):
        return model.to(device=device, dtype=dtype)
    if precision == "fp8":
        check_fp8(device)
    for layer in _matrices(unpack_linears(model), head=head):
        weight_OI = layer.weight.detach().to(device)
        if precision == "fp8":
            become(layer, Fp8Linear).keep(weight_OI, dtype)
        else:
            become(layer, Int8Linear).keep(weight_OI, dtype)
    for module in model.modules():
        if not isinstance(module, StoredLinear):
            _move(module, device, dtype)
    if precision == "fp8":
        _hand_over_float8(model, head=head)
    return model


def precision_of(model: ARPG) -> str:
    """As a user would say it."""
    kinds = {layer.precision for layer in model.modules() if isinstance(layer, Fp8Linear | Int8Linear)}
    return kinds.pop() if kinds else str(model.dtype).removeprefix("torch.")


def check_fp8(device: torch.device) -> None:
    """Float8 products exist from compute capability 8.9 on."""
    others = f"use one of {', '.join(name for name in PRECISIONS if name != 'fp8')}"
    require(device.type == "cuda", f"precision is fp8, which needs an NVIDIA GPU, not {device.type}; {others}")
    found = torch.cuda.get_device_capability(device)
    require(
        found >= (8, 9),
        f"precision is fp8, but {torch.cuda.get_device_name(device)} has compute capability {found[0]}.{found[1]}; "
        f"expected 8.9 or more (Ada, Hopper); {others}",
    )


def to_float8(x: Tensor) -> Tensor:
    """As it is, without a scale; what float8 cannot reach becomes its largest number."""
    return x if x.dtype == FLOAT8 else x.clamp(-FLOAT8_MAX, FLOAT8_MAX).to(FLOAT8)


class Fp8Linear(StoredLinear):
    """Float8 times float8. Takes what is float8 already, and other tensors."""

    precision = "fp8"
    values_OI: Tensor
    scale: Tensor  # of the weight
    one: Tensor  # the scale of what comes in
    dtype: torch.dtype  # of what comes out

    def keep(self, weight_OI: Tensor, dtype: torch.dtype) -> None:
        require(
            self.in_features % 16 == 0 and self.out_features % 16 == 0,
            f"a layer has {self.in_features} inputs and {self.out_features} outputs; fp8 needs multiples of 16",
        )
        self.dtype = dtype
        wide_OI = weight_OI.float()
        self.scale = wide_OI.abs().amax().clamp_min(1e-12) / FLOAT8_MAX
        self.one = torch.ones_like(self.scale)
        self.values_OI = to_float8(wide_OI / self.scale).contiguous()

    def forget(self) -> None:
        del self.values_OI, self.scale, self.one, self.dtype

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return (self.values_OI.float() * self.scale).to(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
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


class Int8Linear(StoredLinear):
    """int8 weights. On a GPU activations stay as they are; on a CPU with the product for it, they are int8 by row."""

    precision = "int8"
    values: Tensor  # [O, I] in int8; packed where a CPU has the product
    scale_O: Tensor
    dtype: torch.dtype

    def keep(self, weight_OI: Tensor, dtype: torch.dtype) -> None:
        self.dtype = dtype
        values_OI, self.scale_O = to_int8(weight_OI)
        self.values = _pack(values_OI)

    def forget(self) -> None:
        del self.values, self.scale_O, self.dtype

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return (self._plain().float() * self.scale_O[:, None]).to(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and x.requires_grad:
            return F.linear(x, self.weight.to(x.dtype))
        if self.values.is_mkldnn and x.device.type == "cpu":
            return _cpu_product(x, self.values, self.scale_O).to(x.dtype)
        if usable(x):
            from arpg.kernels.quantised import MAX_ROWS, int8_product

            if x.numel() <= MAX_ROWS * x.shape[-1]:
                product: Tensor = int8_product(x, self.values, self.scale_O)
                return product
        if x.dtype == torch.float16:  # sums of numbers up to 127 would leave its range
            return F.linear(x, self.weight.to(x.dtype))
        return F.linear(x, self._plain().to(x.dtype)).mul_(self.scale_O)

    def _plain(self) -> Tensor:
        return self.values.to_dense().t() if self.values.is_mkldnn else self.values

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "values": self._plain().contiguous()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "values": _pack(state["values"])})  # type: ignore[no-untyped-call]


@cache
def has_int8_product() -> bool:
    """Does this torch have oneDNN's product of 8-bit numbers, and is it right here, at the largest of them, too?

    CPUs without VNNI add in 16 bits on the way and overflow.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    x, values_OI = torch.linspace(-3, 5, 6 * 64).reshape(6, 64), torch.full((48, 64), 127, dtype=torch.int8)
    values_OI[::2, ::3] = -127
    try:
        made = _cpu_product(x, torch.ops.onednn.qlinear_prepack(values_OI, None), torch.ones(48))
    except (AttributeError, RuntimeError, NotImplementedError):  # the operators are not part of torch's promises
        return False
    expected = x @ values_OI.float().t()
    return bool((made - expected).norm() < 0.02 * expected.norm())


def _pack(values_OI: Tensor) -> Tensor:
    if values_OI.device.type != "cpu" or not has_int8_product():
        return values_OI.contiguous()
    packed: Tensor = torch.ops.onednn.qlinear_prepack(values_OI.contiguous(), None)
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


def _matrices(model: ARPG, *, head: bool) -> list[nn.Linear]:
    blocks = chain.from_iterable(part.modules() for part in (model.pass1, model.memory_kv, model.pass2))
    return [layer for layer in blocks if isinstance(layer, nn.Linear)] + [model.head] * head


def _move(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Its own tensors, not those of what it contains."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            moved = parameter.detach().to(device=device, dtype=dtype)
            module._parameters[name] = nn.Parameter(moved, requires_grad=parameter.requires_grad)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = buffer.to(device=device, dtype=dtype if buffer.is_floating_point() else None)


def _hand_over_float8(model: ARPG, *, head: bool) -> None:
    """Norms, attention and SwiGLU give float8 to those who take it, so that nobody reads a tensor just to cast it."""
    for block in chain(model.pass1, model.pass2):
        for part in (block.attn_norm, block.attn, block.ffn_norm, block.ffn):
            part.in_float8 = True  # type: ignore[union-attr]
    model.memory_norm.in_float8 = True
    model.norm.in_float8 = head
