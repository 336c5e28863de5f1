"""What is added to the [MASK] queries of Pass 2: a condition image, and the guidance scale where it is an input.

Each is an MLP whose last layer starts at zero: a fine-tune starts exactly at the pre-trained network. A condition image
has an encoder with a state for each grid position; a factor on what it adds interpolates between plain [MASK] and the
condition. A model that was trained to match guided logits (`arpg.train.objective.GuidanceDistillation`) needs no
unconditional rows: Pass 1 does not depend on the scale, and Pass 2 has it in its queries, so every step and token may
have its own.

Shapes: B batch, H W pixels, N grid tokens, S positions, F features, E width of the encoder's states, D width of the
network.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from arpg.config import ControlConfig, ModelConfig
from arpg.errors import InputError, first_line, require, require_transformers
from arpg.image import normalize
from arpg.kernels.ops import Stream
from arpg.model.layers import Block, ResidualNorm, SelfAttention
from arpg.model.rope import grid_positions, make_rope

FREQUENCIES = 16  # of the guidance scale
FAMILIES = ("vit", "dinov2", "dinov2_with_registers")  # whose patch tokens come last, in raster order


class ControlQueries(nn.Module):
    """What a condition image adds to the [MASK] query of each position."""

    def __init__(self, config: ControlConfig, width: int) -> None:
        super().__init__()
        self.config = config
        self.encoder: PatchEncoder | PretrainedEncoder
        self.encoder = PatchEncoder(config) if config.encoder == "patches" else PretrainedEncoder(config)
        self.up = nn.Linear(self.encoder.width, width, bias=False)
        self.down = nn.Linear(width, width, bias=False)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Zero the last layer and load pre-trained weights, after the common initialisation."""
        self.down.weight.zero_()
        if isinstance(self.encoder, PretrainedEncoder):
            self.encoder.load_pretrained()

    def grid(self, pixels_BHW: Tensor) -> tuple[int, int]:
        """Return the tokens of a condition image along each side."""
        height, width = pixels_BHW.shape[1:]
        patch = self.config.patch
        require(
            height % patch == 0 and width % patch == 0 and min(height, width) >= patch,
            f"the condition image is {width}x{height} pixels; expected multiples of {patch}",
        )
        return height // patch, width // patch

    def forward(self, pixels_BHW: Tensor, kind_B: Tensor) -> Tensor:
        """Return `[B, N, D]` from uint8 images and the kind of each."""
        grid = self.grid(pixels_BHW)
        x_BHW = normalize(pixels_BHW.to(self.encoder.kind.weight.dtype))
        states_BNE = self.encoder(x_BHW, kind_B, grid)
        added: Tensor = self.down(F.gelu(self.up(states_BNE), approximate="tanh"))
        return added


class PatchEncoder(nn.Module):
    """A small ViT: one token for each patch, 2-D RoPE, the network's own blocks without a mask."""

    def __init__(self, config: ControlConfig) -> None:
        super().__init__()
        shape = ModelConfig(config.width, config.num_heads, pass1_layers=config.layers, pass2_layers=1, dropout=0.0)
        self.patch, self.width, self.head_dim = config.patch, config.width, shape.head_dim
        self.patches = nn.Linear(config.patch**2, config.width, bias=False)
        self.kind = nn.Embedding(len(config.kinds), config.width)
        self.blocks = nn.ModuleList(Block(shape, SelfAttention(shape)) for _ in range(config.layers))
        self.norm = ResidualNorm(config.width, dropout=0.0)

    def forward(self, x_BHW: Tensor, kind_B: Tensor, grid: tuple[int, int]) -> Tensor:
        """`[B, N, E]`."""
        high, wide = grid
        patches = x_BHW.reshape(-1, high, self.patch, wide, self.patch).transpose(2, 3)
        patches_BNP = patches.reshape(-1, high * wide, self.patch**2)
        pos_N2 = grid_positions(high, wide, device=x_BHW.device)
        rope = make_rope(pos_N2.expand(len(x_BHW), -1, -1), self.head_dim)
        x = self.patches(patches_BNP)
        x = x + self.kind(kind_B)[:, None].to(x)
        stream = Stream(x)
        for block in self.blocks:
            stream = block(stream, rope, None, None)
        states: Tensor = self.norm(stream)[1]
        return states


class PretrainedEncoder(nn.Module):
    """A ViT of `transformers`. The image is resized so that it has one patch for each grid position.

    One channel is repeated to three; the class token (and registers) are dropped. The kind is added to the states.
    """

    MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # what DINOv2 was trained with

    def __init__(self, config: ControlConfig) -> None:
        super().__init__()
        self.name = config.encoder
        library = require_transformers("a ViT as control encoder needs the extra")
        described = _found(library.AutoConfig.from_pretrained, self.name)
        require(
            described.model_type in FAMILIES,
            f"control encoder {self.name!r} is a {described.model_type}; expected one of {', '.join(FAMILIES)}",
        )
        self.width: int = described.hidden_size
        self.patch: int = described.patch_size
        self.network = library.AutoModel.from_config(described)
        if getattr(self.network, "pooler", None) is not None:  # not used
            self.network.pooler = None
        for name, parameter in self.network.named_parameters():
            parameter.requires_grad_(not name.endswith("mask_token"))  # for its own pre-training
        self.kind = nn.Embedding(len(config.kinds), self.width)

    def load_pretrained(self) -> None:
        """Load the published weights of the encoder."""
        from transformers import AutoModel

        found = _found(AutoModel.from_pretrained, self.name)
        own = self.network.state_dict()
        self.network.load_state_dict({key: tensor for key, tensor in found.state_dict().items() if key in own})

    def forward(self, x_BHW: Tensor, kind_B: Tensor, grid: tuple[int, int]) -> Tensor:
        """`[B, N, E]`."""
        size = (grid[0] * self.patch, grid[1] * self.patch)
        x_B1HW = F.interpolate(x_BHW[:, None].float(), size, mode="bilinear", align_corners=False, antialias=True)
        mean, std = (x_B1HW.new_tensor(v).reshape(1, 3, 1, 1) for v in (self.MEAN, self.STD))
        x_B3HW = ((x_B1HW.expand(-1, 3, -1, -1) + 1) / 2 - mean) / std
        resized = {"interpolate_pos_encoding": True} if self.network.config.model_type == "vit" else {}
        states: Tensor = self.network(pixel_values=x_B3HW.to(x_BHW.dtype), **resized).last_hidden_state
        states = states[:, -grid[0] * grid[1] :]
        kind: Tensor = self.kind(kind_B)
        return states + kind[:, None].to(states)


class GuidanceQueries(nn.Module):
    """What the guidance scale adds to the [MASK] queries: sines and cosines of its logarithm, then an MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(2 * FREQUENCIES, width, bias=False)
        self.down = nn.Linear(width, width, bias=False)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Zero the last layer, after the common initialisation: training starts at the model without this input."""
        self.down.weight.zero_()

    def forward(self, scale_BS: Tensor) -> Tensor:
        """Return `[B, S, D]`."""
        octaves = torch.arange(FREQUENCIES, device=scale_BS.device) * (6 / (FREQUENCIES - 1)) - 1
        angle_BSF = torch.log1p(scale_BS.float())[..., None] * (math.pi / 2 * 2**octaves)
        features = torch.cat((angle_BSF.sin(), angle_BSF.cos()), dim=-1).to(self.up.weight.dtype)
        added: Tensor = self.down(F.gelu(self.up(features), approximate="tanh"))
        return added


def _found(load: Any, name: str) -> Any:
    try:
        return load(name)
    except (OSError, ValueError) as error:
        raise InputError(
            f"control encoder {name!r} could not be loaded ({first_line(error)}); expected patches, a hub id or a "
            "folder with a ViT"
        ) from None
