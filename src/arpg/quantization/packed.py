"""Weights that lie as a CPU's matrix products want them: packed once, not again in every call.

torch's own product on a CPU brings the weight into shape each time, which for a handful of rows takes longer than the
product. Only the place of the numbers changes, so a packed weight gives back exactly the plain one.
Shapes: O outputs, I inputs.
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Module = TypeVar("Module", bound=nn.Module)
Stored = TypeVar("Stored", bound="StoredLinear")

_ROWS = 16  # the number of rows that the layout is chosen for; it suits all others, too
TYPES = (torch.float32, torch.bfloat16)


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Return whether this torch, on this CPU, computes the packed product of `dtype` correctly.

    oneDNN packs bfloat16 only on CPUs with AVX-512 or AVX-NE-CONVERT, so each type is tried by itself.
    """
    if dtype not in TYPES or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    generator = torch.Generator().manual_seed(0)
    x, weight_OI = (torch.randn(rows, 32, generator=generator).to(dtype) for rows in (3, 48))
    try:
        product = _product(x, _pack(weight_OI))
    except (AttributeError, RuntimeError, NotImplementedError):  # the operators are not part of torch's public API
        return False
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    return torch.allclose(product.float(), F.linear(x, weight_OI).float(), atol=tolerance)


class StoredLinear(nn.Linear):
    """A layer without bias whose weight is no parameter any more, but kept in another form; `weight` makes a copy."""

    plain: type[nn.Linear] = nn.Linear  # what it was

    def forget(self) -> None:
        """Drop what is kept."""
        raise NotImplementedError

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.weight

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """On its way to another device or type it becomes plain again."""
        _unpack(self)
        return self._apply(*args, **kwargs)


class PackedLinear(StoredLinear):
    packed: Tensor

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return self.packed.to_dense()

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu" or x.dtype != self.packed.dtype or (torch.is_grad_enabled() and x.requires_grad):
            return F.linear(x, self.weight)
        return _product(x, self.packed)

    def forget(self) -> None:
        del self.packed

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "packed": self.weight}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "packed": _pack(state["packed"])})  # type: ignore[no-untyped-call]


def pack_linears(module: Module) -> Module:
    """Pack, in place, what can be packed: on a CPU, in float32 or bfloat16, without bias. For inference only.

    A layer keeps its name, its place and what its class does.
    """
    for layer in module.modules():
        if isinstance(layer, nn.Linear) and not isinstance(layer, StoredLinear) and _fits(layer):
            packed = _pack(layer.weight)
            become(layer, PackedLinear).packed = packed
    return module


def unpack_linears(module: Module) -> Module:
    """Plain layers again, in place."""
    for layer in module.modules():
        if isinstance(layer, StoredLinear):
            _unpack(layer)
    return module


def become(layer: nn.Linear, kind: type[Stored]) -> Stored:
    """The same layer, in place, without its weight: what its class does stays, its `super().forward` is the kind's."""
    plain = type(layer)
    if (plain, kind) not in _classes:
        name = f"{kind.__name__.removesuffix('Linear')}{plain.__name__}"
        bases = (kind,) if plain is nn.Linear else (plain, kind)
        _classes[plain, kind] = type(name, bases, {"plain": plain})
    del layer._parameters["weight"]
    layer.__class__ = _classes[plain, kind]
    return cast(Stored, layer)


_classes: dict[tuple[type[nn.Linear], type[StoredLinear]], type[StoredLinear]] = {}


def _fits(layer: nn.Linear) -> bool:
    weight = layer.weight
    return weight.device.type == "cpu" and layer.bias is None and can_pack(weight.dtype)


def _unpack(layer: StoredLinear) -> None:
    weight = layer.weight
    layer.forget()
    layer.__class__ = layer.plain  # type: ignore[assignment]
    layer.weight = nn.Parameter(weight)


def _pack(weight_OI: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach().contiguous(), _ROWS)
    return packed


def _product(x: Tensor, packed: Tensor) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    return out
