"""Linear layers whose weight includes that of the RMS norm before them, for inference in bfloat16 on a GPU.

norm(x) W^T = r (x (W w)^T), with r = 1 / RMS of each row and w the weight of the norm. So the product takes the
residual stream as it is, the kernel that reads the product multiplies by r (`ops.Projected`), and no normed rows are
written. Rounding W w to bfloat16 cannot be undone, so the plain weight is kept, in the host's memory: it is read only
to save, move, quantize or merge adapters, and what those give is exact. The device holds one copy of each weight.
Shapes: O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from torch import Tensor, nn
from torch.nn import functional as F

from arpg.kernels.dispatch import can_fold_norms
from arpg.model import ARPG
from arpg.quantization.packed import QuantizedLinear, replace_layers


class FoldedLinear(QuantizedLinear):
    """A linear layer with the weight of the norm before it folded in where that pays; elsewhere a plain one.

    The operations of `arpg.kernels.ops` that have the stream read `folded_OI`. The layer itself, called with normed
    rows, multiplies by the plain weight.
    """

    norm_D: Tensor
    folded_OI: Tensor | None
    plain_OI: Tensor  # on the host where `folded_OI` is there

    @classmethod
    def from_linear(cls, layer: nn.Module, *, weight_OI: Tensor | None = None, norm_D: Tensor | None = None) -> Self:
        """Return the layer with the weight of a norm folded in, by default the same as in `layer`."""
        assert isinstance(layer, nn.Linear | FoldedLinear)
        made = cls(layer.in_features, layer.out_features)
        found: Any = layer.norm_D if norm_D is None else norm_D
        made.norm_D = found.detach()
        made.store((layer.weight if weight_OI is None else weight_OI).detach())
        return made.train(layer.training)

    def store(self, weight_OI: Tensor) -> None:
        """Fold the norm into a weight, rounded once."""
        fits = can_fold_norms(weight_OI)
        self.folded_OI = (weight_OI.float() * self.norm_D.float()).to(weight_OI.dtype) if fits else None
        self.plain_OI = weight_OI.cpu() if fits else weight_OI

    @property
    def weight(self) -> Tensor:
        """A plain copy of the weight, `[O, I]`."""
        return self.plain_OI if self.folded_OI is None else self.plain_OI.to(self.folded_OI.device)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply normed rows by the plain weight."""
        return F.linear(x, self.weight)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.plain_OI  # where it is: saving takes no memory of the device

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        weight_OI, self.norm_D = fn(self.weight), fn(self.norm_D)
        self.store(weight_OI)
        return self


def fold_norms(model: ARPG) -> ARPG:
    """Fold norms, in place, into the plain layers that follow them where that pays; `unpack_linears` undoes it.

    The last norm is left out: guidance comes between it and the head, so that its rows are written in any case.
    """
    norms: dict[nn.Module, Tensor] = dict.fromkeys(model.memory_kv, model.memory_norm.weight)
    for block in (*model.pass1, *model.pass2):
        norms |= {block.attn.projection: block.attn_norm.weight, block.ffn.gate_up: block.ffn_norm.weight}

    def folded(layer: nn.Module) -> nn.Module:
        fits = layer in norms and isinstance(layer, nn.Linear) and can_fold_norms(layer.weight)
        return FoldedLinear.from_linear(layer, norm_D=norms[layer]) if fits else layer

    for part in (model.pass1, model.memory_kv, model.pass2):
        replace_layers(part, folded)
    return model
