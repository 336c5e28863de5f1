"""Losses of tokenizer training: LPIPS, the patch discriminator, quantisation with gradients, code restarts.

Shapes: B batch, HW pixels, hw latent grid, N = h * w tokens, E codebook channels, V codes, M candidates.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from arpg.errors import InputError, require
from arpg.files import check_keys, check_state, read_pickle, read_tensors

VGG16_CHANNELS = (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)
TAPS = (1, 3, 6, 9, 12)  # LPIPS compares the outputs of these convolutions
POOL_BEFORE = (2, 4, 7, 10)
TORCHVISION = (0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28)  # the convolutions in vgg16().features
NOISE = 1e-3  # keeps two codes that restart from one candidate apart


class LPIPS(nn.Module):
    """Perceptual distance: VGG16 features, unit length per pixel, compared channel by channel. Frozen."""

    shift: Tensor
    scale: Tensor

    def __init__(self, channels: tuple[int, ...] = VGG16_CHANNELS) -> None:
        super().__init__()
        assert len(channels) == len(VGG16_CHANNELS)
        pairs = zip((3, *channels), channels, strict=False)
        self.vgg = nn.ModuleList(nn.Conv2d(i, o, 3, padding=1) for i, o in pairs)
        self.lin = nn.ModuleList(nn.Conv2d(channels[tap], 1, 1, bias=False) for tap in TAPS)
        # Constants of the metric, not weights, so no file has to hold them.
        self.register_buffer("shift", torch.tensor([-0.030, -0.088, -0.188]).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("scale", torch.tensor([0.458, 0.448, 0.450]).view(1, 3, 1, 1), persistent=False)
        self.requires_grad_(False).eval()

    @staticmethod
    def load(path: Path, heads: Path | None = None) -> LPIPS:
        """Load one file in our layout, or torchvision's VGG16 and the published linear heads (`vgg.pth`)."""
        state = _read(path)
        if any(key.startswith("features.") for key in state):
            if heads is None:
                raise InputError(
                    f"{path} holds VGG16 without the linear heads of LPIPS; give their file too, heads=.../vgg.pth"
                )
            state = _from_torchvision(state, where=path) | _from_heads(_read(heads), where=heads)
        else:
            require(heads is None, f"{path} is no torchvision VGG16, so heads ({heads}) do not belong to it; leave out")
        module = LPIPS(_channels(state, where=path))
        check_state(state, module, where=str(path))
        module.load_state_dict({key: tensor.float() for key, tensor in state.items()}, strict=True)
        return module

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.shift.device

    def train(self, mode: bool = True) -> LPIPS:
        """A metric has no training mode."""
        return super().train(False)

    def features(self, image_B3HW: Tensor) -> list[Tensor]:
        """Return the five feature maps, of unit length over channels, in float32."""
        x = (image_B3HW - self.shift) / self.scale
        out = []
        for i, conv in enumerate(self.vgg):
            if i in POOL_BEFORE:
                x = F.max_pool2d(x, 2)
            x = F.relu(conv(x))
            if i in TAPS:
                full = x.float()  # squares of bfloat16 would lose small distances
                # The small number stands inside the root: where all features are 0 the gradient stays finite.
                out.append(full * torch.rsqrt(full.square().sum(1, keepdim=True) + 1e-10))
        return out

    def forward(self, a_B3HW: Tensor, b_B3HW: Tensor) -> Tensor:
        """Return the distance of each pair of images in [-1, 1], `[B]`."""
        if a_B3HW.shape != b_B3HW.shape or min(a_B3HW.shape[2:]) < 16:
            raise InputError(
                f"images are {list(a_B3HW.shape)} and {list(b_B3HW.shape)}; LPIPS compares equal shapes of 16 pixels "
                "or more per side; resize them"
            )
        # One after the other, not as one batch: an image that needs no gradient then keeps no activations.
        pairs = zip(self.features(a_B3HW), self.features(b_B3HW), self.lin.parameters(), strict=True)
        parts = [((a - b).square().mean((2, 3)) * weight.flatten()).sum(1) for a, b, weight in pairs]
        return torch.stack(parts).sum(0)


class PatchDiscriminator(nn.Module):
    """PatchGAN: a map of logits, one per patch."""

    def __init__(self) -> None:
        super().__init__()
        width = 64
        layers: list[nn.Module] = [nn.Conv2d(3, width, 4, stride=2, padding=1), nn.LeakyReLU(0.2)]
        for stride in (2, 2, 1):
            previous, width = width, 2 * width
            layers += [
                nn.Conv2d(previous, width, 4, stride=stride, padding=1, bias=False),
                # Not BatchNorm: its statistics would differ per rank unless every step synchronises them, and they
                # would mix real with fake images. A group belongs to one image.
                nn.GroupNorm(32, width),
                nn.LeakyReLU(0.2),
            ]
        layers.append(nn.Conv2d(width, 1, 4, padding=1))
        self.layers = nn.Sequential(*layers)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, image_B3HW: Tensor) -> Tensor:
        logits: Tensor = self.layers(image_B3HW)
        return logits


def hinge_discriminator_loss(real_logits: Tensor, fake_logits: Tensor) -> Tensor:
    """Return the hinge loss of a discriminator."""
    return 0.5 * (F.relu(1 - real_logits.float()).mean() + F.relu(1 + fake_logits.float()).mean())


def hinge_generator_loss(fake_logits: Tensor) -> Tensor:
    """Return the hinge loss of the generator."""
    return -fake_logits.float().mean()


def balance(gradient_B3HW: Tensor, adversarial_B3HW: Tensor) -> Tensor:
    """Return by what to multiply the adversarial loss so that both losses pull equally hard at the pixels.

    The ratio of the norms of their gradients there, at most 10,000. VQGAN (Esser et al., 2021) balances at the last
    layer's weight, which takes two more backward passes.
    """
    ratio: Tensor = gradient_B3HW.float().norm() / (adversarial_B3HW.float().norm() + 1e-12)
    return ratio.clamp(0, 1e4)


class Quantized(NamedTuple):
    """The nearest codes of features, and the losses of the codebook."""

    codes_BEhw: Tensor  # the nearest codes, with the gradient of z
    ids_BN: Tensor
    codebook_loss: Tensor  # moves the codes towards z
    commitment_loss: Tensor  # moves z towards the codes


def vector_quantize(z_BEhw: Tensor, codes_VE: Tensor) -> Quantized:
    """Replace z by the nearest (normalised) code on the sphere, in float32, with a straight-through gradient."""
    with torch.autocast(z_BEhw.device.type, enabled=False):
        z = F.normalize(z_BEhw.float().flatten(2).transpose(1, 2), dim=-1)
        codes_VE = codes_VE.float()
        ids_BN = (z.detach() @ codes_VE.detach().T).argmax(-1)
        codes = F.embedding(ids_BN, codes_VE)
        codebook_loss = (codes - z.detach()).square().mean()
        commitment_loss = (z - codes.detach()).square().mean()
        through_BNE = z + (codes - z).detach()
        codes_BEhw = through_BNE.transpose(1, 2).reshape(z_BEhw.shape)
        return Quantized(codes_BEhw, ids_BN, codebook_loss, commitment_loss)


@torch.no_grad()
def restart_dead_codes(
    weight_VE: Tensor, count_V: Tensor, candidates_ME: Tensor, *, generator: torch.Generator
) -> Tensor:
    """Replace codes that were never used by encoder outputs, in place; return the mask of the replaced codes.

    The random numbers come from a CPU generator and do not depend on how many codes are dead, so all devices and ranks
    agree, and nothing waits for the device. No candidate is used twice before all have been used once.
    """
    num_candidates = len(candidates_ME)
    require(num_candidates >= 1, "there are 0 candidates; expected encoder outputs to restart codes from")
    order_M = torch.randperm(num_candidates, generator=generator).to(weight_VE.device)
    noise_VE = NOISE * torch.randn(weight_VE.shape, generator=generator).to(weight_VE.device)
    dead_V = count_V == 0
    rank_V = (dead_V.cumsum(0) - 1).clamp(min=0)
    # Unit length, as codes are used: the step an optimiser takes on the sphere depends on it.
    fresh_VE = F.normalize(candidates_ME.float(), dim=-1)[order_M[rank_V % num_candidates]] + noise_VE
    weight_VE.copy_(torch.where(dead_V[:, None], fresh_VE.to(weight_VE.dtype), weight_VE))
    return dead_V


def _read(path: Path) -> dict[str, Tensor]:
    state: Any = read_tensors(path) if path.suffix == ".safetensors" else read_pickle(path)
    is_state = isinstance(state, Mapping) and all(isinstance(value, Tensor) for value in state.values())
    require(is_state, f"{path} holds no plain dictionary of tensors; expected a published state dict")
    return dict(state)


def _from_torchvision(state: dict[str, Tensor], *, where: Path) -> dict[str, Tensor]:
    names = {f"features.{j}.{k}": f"vgg.{i}.{k}" for i, j in enumerate(TORCHVISION) for k in ("weight", "bias")}
    convs = {key: tensor for key, tensor in state.items() if not key.startswith("classifier.")}  # ImageNet's layers
    check_keys(set(convs), set(names), where=str(where))
    return {names[key]: tensor for key, tensor in convs.items()}


def _from_heads(state: dict[str, Tensor], *, where: Path) -> dict[str, Tensor]:
    names = {f"lin{i}.model.1.weight": f"lin.{i}.weight" for i in range(len(TAPS))}
    check_keys(set(state), set(names), where=str(where))
    return {names[key]: tensor for key, tensor in state.items()}


def _channels(state: dict[str, Tensor], *, where: Path) -> tuple[int, ...]:
    """Check all keys, and return the widths of the 13 convolutions."""
    expected = {f"vgg.{i}.{k}" for i in range(len(VGG16_CHANNELS)) for k in ("weight", "bias")}
    check_keys(set(state), expected | {f"lin.{i}.weight" for i in range(len(TAPS))}, where=str(where))
    return tuple(len(state[f"vgg.{i}.bias"].flatten()) for i in range(len(VGG16_CHANNELS)))
