"""The tokenizer's decoder on a GPU: the same layers through fused kernels, in half precision.

Made once from a plain decoder, which is not changed. Upsampling convolutions run on the small grid: each of the four
pixels that one becomes sees only 2 x 2 of its neighbours, so a 3 x 3 convolution over the enlarged image is four of
2 x 2 over the small one, with the weights that meet summed: 4/9 of the products.
Shapes: B batch, C channels, hw grid, N = h * w, O outputs, I inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from arpg.kernels.group_norm import Moments, add, last, moments, norm, spread
from arpg.tokenizer.autoencoder import Decoder, ResBlock, SpatialAttention, Upsample

_OUTPUTS = 8  # what the last convolution is filled up to: tensor cores want a multiple of 8


class FusedDecoder(nn.Module):
    """A `Decoder` with fused group norm, SiLU and residual sums. For inference only."""

    def __init__(self, decoder: Decoder, dtype: torch.dtype) -> None:
        super().__init__()
        self.conv_in = _Conv(decoder.conv_in, dtype)
        self.stages = nn.ModuleList()
        for layer in decoder.mid:
            self.stages.append(_fused(layer, dtype))
        for level in decoder.conv_blocks:
            for i, block in enumerate(level.res):  # type: ignore[arg-type]
                self.stages.append(_fused(block, dtype))
                if len(level.attn):  # type: ignore[arg-type]
                    self.stages.append(_fused(level.attn[i], dtype))  # type: ignore[index, arg-type]
            if level.resize:
                self.stages.append(_fused(level.upsample, dtype))  # type: ignore[arg-type]
        self.norm_out = decoder.norm_out
        self.conv_out = _Conv(decoder.conv_out, dtype, outputs=_OUTPUTS)

    @torch.no_grad()
    def forward(self, z: Tensor) -> Tensor:
        first = self.conv_in
        x = F.conv2d(last(z.to(first.weight.dtype)), first.weight, first.bias.to(first.weight.dtype), padding=1)
        of = moments(x)
        for stage in self.stages:
            x, of = stage(x, of)
        image: Tensor = self.conv_out(norm(x, of, None, self.norm_out))
        return image[:, :3].float() + self.conv_out.bias[:3, None, None]


class _Conv(nn.Module):
    """A convolution without its bias, which the next kernel adds."""

    weight: Tensor
    bias: Tensor

    def __init__(self, conv: nn.Conv2d, dtype: torch.dtype, *, outputs: int = 0) -> None:
        super().__init__()
        assert conv.bias is not None
        more = max(0, outputs - conv.out_channels)
        weight = F.pad(conv.weight.detach(), (0, 0, 0, 0, 0, 0, 0, more))
        self.register_buffer("weight", last(weight.to(dtype)), persistent=False)
        self.register_buffer("bias", F.pad(conv.bias.detach().float(), (0, more)), persistent=False)
        self.padding = conv.kernel_size[0] // 2

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight, padding=self.padding)


class _ResBlock(nn.Module):
    bias: Tensor

    def __init__(self, block: ResBlock, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm1, self.norm2 = block.norm1, block.norm2
        self.conv1, self.conv2 = _Conv(block.conv1, dtype), _Conv(block.conv2, dtype)
        self.shortcut = None if isinstance(block.nin_shortcut, nn.Identity) else _Conv(block.nin_shortcut, dtype)
        both = self.conv2.bias if self.shortcut is None else self.conv2.bias + self.shortcut.bias
        self.register_buffer("bias", both, persistent=False)

    def forward(self, x: Tensor, of: Moments) -> tuple[Tensor, Moments]:
        h = self.conv1(norm(x, of, None, self.norm1))
        h = self.conv2(norm(h, moments(h), self.conv1.bias, self.norm2))
        return add(x if self.shortcut is None else self.shortcut(x), h, self.bias)


class _Attention(nn.Module):
    """Queries, keys and values by one product. The one head is too wide for fused attention."""

    weight: Tensor
    bias: Tensor

    def __init__(self, attention: SpatialAttention, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = attention.norm
        parts = (attention.q, attention.k, attention.v)
        self.register_buffer("weight", torch.cat([part.weight.detach() for part in parts]).flatten(1).to(dtype), False)
        biases = [part.bias.detach() for part in parts]  # type: ignore[union-attr]
        self.register_buffer("bias", torch.cat(biases).to(dtype), False)
        self.out = _Conv(attention.proj_out, dtype)

    def forward(self, x_BChw: Tensor, of: Moments) -> tuple[Tensor, Moments]:
        normed_BNC = norm(x_BChw, of, None, self.norm, silu=False).permute(0, 2, 3, 1).flatten(1, 2)
        q, k, v = F.linear(normed_BNC, self.weight, self.bias).chunk(3, -1)
        chance_BNN = ((q * q.shape[-1] ** -0.5) @ k.transpose(1, 2)).softmax(-1)
        mixed_BNC = F.linear(chance_BNN @ v, self.out.weight.flatten(1))
        batch, _, high, wide = x_BChw.shape
        return add(x_BChw, mixed_BNC.reshape(batch, high, wide, -1).permute(0, 3, 1, 2), self.out.bias)


class _Upsample(nn.Module):
    weight: Tensor
    bias: Tensor

    def __init__(self, upsample: Upsample, dtype: torch.dtype) -> None:
        super().__init__()
        conv = upsample.conv
        assert conv.bias is not None
        self.register_buffer("weight", last(small_weights(conv.weight.detach()).to(dtype)), persistent=False)
        self.register_buffer("bias", conv.bias.detach().float(), persistent=False)

    def forward(self, x: Tensor, of: Moments) -> tuple[Tensor, Moments]:
        return spread(F.conv2d(x, self.weight, padding=1), self.bias)


def small_weights(weight_OI33: Tensor) -> Tensor:
    """`[4 O, I, 2, 2]`: of a 3 x 3 convolution over an image enlarged twice, the four over the small image.

    Output (a, b) belongs to pixel (2i + a, 2j + b). In each direction a = 0 sees the pixel before (weight 0) and
    its own (1 + 2); a = 1 its own (0 + 1) and the next (2).
    """

    def halves(w: Tensor, dim: int) -> list[Tensor]:
        w0, w1, w2 = w.unbind(dim)
        return [torch.stack((w0, w1 + w2), dim), torch.stack((w0 + w1, w2), dim)]

    return torch.cat([part for rows in halves(weight_OI33, 2) for part in halves(rows, 3)])


def _fused(layer: nn.Module, dtype: torch.dtype) -> nn.Module:
    if isinstance(layer, ResBlock):
        return _ResBlock(layer, dtype)
    if isinstance(layer, SpatialAttention):
        return _Attention(layer, dtype)
    assert isinstance(layer, Upsample)
    return _Upsample(layer, dtype)
