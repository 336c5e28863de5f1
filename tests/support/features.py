"""Stand-ins for Inception."""

import numpy as np
import torch
from torch.nn import functional as F

from arpg.evaluation.inception import Activations

SIZE = 12  # features of `Eye`


class Tiny:
    """A stand-in for Inception: two random convolutions, and logits of them where asked for."""

    device, source = torch.device("cpu"), "tiny"

    def __init__(self, *, logits=True, identity="tiny"):
        generator = torch.Generator().manual_seed(0)
        self.first = torch.randn(12, 3, 3, 3, generator=generator) / 5
        self.second = torch.randn(16, 12, 3, 3, generator=generator) / 8
        self.output = torch.randn(16, 5, generator=generator)
        self.has_logits, self.identity, self.seen = logits, identity, 0

    def features(self, pixels_BHW3):
        pixels = torch.from_numpy(pixels_BHW3) if isinstance(pixels_BHW3, np.ndarray) else pixels_BHW3
        self.seen += len(pixels)
        x = F.relu(F.conv2d(pixels.permute(0, 3, 1, 2).double() / 64 - 2, self.first.double(), stride=2))
        x = F.relu(F.conv2d(x, self.second.double()))
        pool = x.mean((2, 3)).float()
        return Activations(pool, x[:, :2, :2, :2].flatten(1).float(), pool @ self.output if self.has_logits else None)


class Eye:
    """A stand-in for Inception: random projections of the pixels."""

    device, has_logits, identity = torch.device("cpu"), False, "eye"
    seen = 0

    def features(self, pixels_BHW3):
        pixels = torch.from_numpy(pixels_BHW3) if isinstance(pixels_BHW3, np.ndarray) else pixels_BHW3
        flat = pixels.flatten(1).float() / 255
        weight = torch.randn(flat.shape[1], SIZE, generator=torch.Generator().manual_seed(0))
        self.seen += len(flat)
        return Activations(flat @ weight, flat @ weight, None)
