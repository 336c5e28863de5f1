"""Text states to prefix slots: an MLP over the encoder's states, and the states of no prompt.

Shapes: T tokens of a prompt, E width of the text states, D width of the network; anything before them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from arpg.config import TextConfig
from arpg.errors import require


class TextPrefix(nn.Module):
    """Two layers without biases. No prompt is a fixed random matrix, saved with the weights and not trained."""

    null_TE: Tensor

    def __init__(self, config: TextConfig, width: int) -> None:
        super().__init__()
        self.config = config
        self.up = nn.Linear(config.width, width, bias=False)
        self.down = nn.Linear(width, width, bias=False)
        self.register_buffer("null_TE", torch.empty(config.max_tokens, config.width))

    @torch.no_grad()
    def init_null(self, generator: torch.Generator) -> None:
        """Draw the states of no prompt: vectors of about unit length."""
        self.null_TE.copy_(torch.randn(self.null_TE.shape, generator=generator) * self.config.width**-0.5)

    def check(self, states_TE: Tensor) -> None:
        """Raise an `InputError` for states of another encoder, or of a prompt that was not truncated."""
        shape, config = tuple(states_TE.shape), self.config
        require(
            len(shape) == 2 and 1 <= shape[0] <= config.max_tokens and shape[1] == config.width,
            f"text states have shape {shape}; {config.encoder} gives this model 1 to {config.max_tokens} tokens "
            f"of {config.width} numbers",
        )

    def forward(self, states_TE: Tensor) -> Tensor:
        """Return the prefix slots `[..., T, D]`."""
        slots: Tensor = self.down(F.gelu(self.up(states_TE), approximate="tanh"))
        return slots
