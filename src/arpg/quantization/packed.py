"""Linear layers whose weight is stored in another form, and weights packed for a CPU's matrix products.

torch's own product on a CPU reorders the weight in each call, which for small batches takes longer than the product. A
packed weight is reordered once. Only the layout changes, so it gives back exactly the plain weight.
Shapes: O outputs, I inputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache
from typing import Any, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

Module = TypeVar("Module", bound=nn.Module)

_LAYOUT_ROWS = 16  # the number of rows that the layout is chosen for; it suits all others, too
PACKED_TYPES = (torch.float32, torch.bfloat16)


class QuantizedLinear(nn.Module, ABC):
    """A linear layer without bias that keeps its weight in another form than a parameter. For inference only.

    Saved and moved like a plain layer: `state_dict` has `weight`, and `to` converts it and stores it again.
    """

    bias = None
    input_dtype: torch.dtype | None = None  # the type that it reads without a cast; None: that of the weight

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features

    @classmethod
    def from_linear(cls, layer: nn.Module, *, weight_OI: Tensor | None = None) -> Self:
        """Return the layer with its weight stored in this form, or another weight of the same shape."""
        assert isinstance(layer, nn.Linear | QuantizedLinear)
        made = cls(layer.in_features, layer.out_features)
        made.store((layer.weight if weight_OI is None else weight_OI).detach())
        return made.train(layer.training)

    @abstractmethod
    def store(self, weight_OI: Tensor) -> None:
        """Store a weight in this layer's form."""

    @property
    @abstractmethod
    def weight(self) -> Tensor:
        """A plain copy of the weight, `[O, I]`."""

    def extra_repr(self) -> str:
        """Describe the layer in `repr(model)`."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias=False"

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.store(fn(self.weight))
        return self


class PackedLinear(QuantizedLinear):
    """A linear layer with a packed weight on CPUs that have the packed product; elsewhere the weight is plain."""

    stored: Tensor

    def store(self, weight_OI: Tensor) -> None:
        """Pack a weight where that can be done."""
        fits = weight_OI.device.type == "cpu" and can_pack(weight_OI.dtype)
        self.stored = _pack(weight_OI) if fits else weight_OI

    @property
    def weight(self) -> Tensor:
        """A plain copy of the weight, `[O, I]`."""
        return self.stored.to_dense() if self.stored.is_mkldnn else self.stored

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by the packed weight; by a plain copy of it where gradients or another type are wanted."""
        other = x.device.type != "cpu" or x.dtype != self.stored.dtype or not self.stored.is_mkldnn
        if other or (torch.is_grad_enabled() and x.requires_grad):
            return F.linear(x, self.weight)
        return _product(x, self.stored)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "stored": to_pickle(self.weight, self.stored)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.store(from_pickle(state["stored"]))


def to_pickle(plain: Tensor, stored: Tensor) -> Tensor | tuple[NDArray[np.uint8], torch.dtype]:
    """Return what is pickled of a weight: by value if it is packed, for `multiprocessing` shares tensors.

    A plain copy of a packed weight would be gone before the other process opens it.
    """
    return (plain.contiguous().view(torch.uint8).numpy(), plain.dtype) if stored.is_mkldnn else stored


def from_pickle(state: Tensor | tuple[NDArray[np.uint8], torch.dtype]) -> Tensor:
    """Return the plain weight."""
    return state if isinstance(state, Tensor) else torch.from_numpy(state[0]).view(state[1])


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Return whether this torch, on this CPU, computes the packed product of `dtype` correctly.

    oneDNN packs bfloat16 only on CPUs with AVX-512 or AVX-NE-CONVERT, so each type is tried by itself.
    """
    if dtype not in PACKED_TYPES:
        return False
    generator = torch.Generator().manual_seed(0)
    x, weight_OI = (torch.randn(rows, 32, generator=generator).to(dtype) for rows in (3, 48))
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    return computes(lambda: _product(x, _pack(weight_OI)), x.float() @ weight_OI.float().t(), tolerance)


def computes(product: Callable[[], Tensor], expected: Tensor, tolerance: float) -> bool:
    """Return whether oneDNN's operators exist in this torch and compute this, up to a relative error."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    try:
        error = product().float() - expected
    except (AttributeError, RuntimeError):  # the operators are not part of torch's public API
        return False
    return bool(error.norm() < tolerance * expected.norm())


def pack_linears(module: Module) -> Module:
    """Replace, in place, the linear layers that can be packed: on a CPU, of a type that packs, without bias."""

    def packed(layer: nn.Module) -> nn.Module:
        fits = isinstance(layer, nn.Linear) and layer.bias is None and layer.weight.device.type == "cpu"
        return PackedLinear.from_linear(layer) if fits and can_pack(layer.weight.dtype) else layer

    return replace_layers(module, packed)


def unpack_linears(module: Module) -> Module:
    """Replace, in place, layers that store their weight in another form by plain ones."""

    def plain(layer: nn.Module) -> nn.Module:
        if not isinstance(layer, QuantizedLinear):
            return layer
        made = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta").train(layer.training)
        made.weight = nn.Parameter(layer.weight)
        return made

    return replace_layers(module, plain)


def replace_layers(module: Module, replace: Callable[[nn.Module], nn.Module]) -> Module:
    """Replace, in place, every submodule by what `replace` returns for it; return the module, itself replaced."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if (new := replace(child)) is not child:
                setattr(parent, name, new)
    return replace(module)  # type: ignore[return-value]


def _pack(weight_OI: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach().contiguous(), _LAYOUT_ROWS)
    return packed


def _product(x: Tensor, packed: Tensor) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    return out
