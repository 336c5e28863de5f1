"""Weights that lie as a CPU's matrix products want them: packed once, not again in every call.

torch's own product on a CPU brings the weight into shape each time, which for a handful of rows takes longer than the
product. Only the place of the numbers changes, so a packed weight gives back exactly the plain one.
Shapes: O outputs, I inputs.
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Module = TypeVar("Module", bound=nn.Module)

_ROWS = 16  # the number of rows that the layout is chosen for; it suits all others, too
TYPES = (torch.float32, torch.bfloat16)


@cache
def can_pack() -> bool:
    """Does this torch have the packed product, and is it right?"""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    generator = torch.Generator().manual_seed(0)
    x, weight_OI = (torch.randn(rows, 32, generator=generator) for rows in (3, 48))
    try:
        made = _product(x, _pack(weight_OI))
    except (AttributeError, RuntimeError, NotImplementedError):  # the operators are not part of torch's promises
        return False
    return torch.allclose(made, F.linear(x, weight_OI), atol=1e-4)


class PackedLinear(nn.Linear):
    """A layer without bias whose weight is packed. It is no parameter any more; `weight` unpacks a copy."""

    plain: type[nn.Linear] = nn.Linear  # what it was
    packed: Tensor

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return self.packed.to_dense()

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu" or x.dtype != self.packed.dtype or (torch.is_grad_enabled() and x.requires_grad):
            return F.linear(x, self.weight)
        return _product(x, self.packed)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.weight

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """On its way to another device or type it becomes plain again."""
        _unpack(self)
        return self._apply(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "packed": self.weight}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "packed": _pack(state["packed"])})  # type: ignore[no-untyped-call]


def pack_linears(module: Module) -> Module:
    """Pack, in place, what can be packed: on a CPU, in float32 or bfloat16, without bias. For inference only.

    A layer keeps its name, its place and what its class does.
    """
    if can_pack():
        for layer in module.modules():
            if isinstance(layer, nn.Linear) and not isinstance(layer, PackedLinear) and _fits(layer):
                packed = _pack(layer._parameters.pop("weight"))
                layer.__class__ = _packed_class(type(layer))
                layer.packed = packed
    return module


def unpack_linears(module: Module) -> Module:
    """Plain layers again, in place."""
    for layer in module.modules():
        if isinstance(layer, PackedLinear):
            _unpack(layer)
    return module


def _fits(layer: nn.Linear) -> bool:
    weight = layer.weight
    return weight.device.type == "cpu" and weight.dtype in TYPES and layer.bias is None


def _packed_class(plain: type[nn.Linear]) -> type[PackedLinear]:
    """The same kind of layer, but its `super().forward` is the packed product."""
    if plain not in _classes:
        _classes[plain] = type(f"Packed{plain.__name__}", (plain, PackedLinear), {"plain": plain})
    return _classes[plain]


_classes: dict[type[nn.Linear], type[PackedLinear]] = {nn.Linear: PackedLinear}


def _unpack(layer: PackedLinear) -> None:
    weight = layer.weight
    del layer.packed
    layer.__class__ = layer.plain  # type: ignore[assignment]
    layer.weight = nn.Parameter(weight)  # type: ignore[misc]


def _pack(weight_OI: Tensor | None) -> Tensor:
    assert weight_OI is not None
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach().contiguous(), _ROWS)
    return packed


def _product(x: Tensor, packed: Tensor) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    return out
