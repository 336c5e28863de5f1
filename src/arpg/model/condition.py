"""Conditions: the prefix slots before the tokens (a class or a prompt), and the queries of Pass 2 (a condition image).

Shapes: B batch, P prefix slots, N grid tokens, D width, T tokens of one prompt, E width of the text states, I condition
images, H W pixels.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from arpg.config import DEFAULT_CONTROL_MODEL, TextConfig
from arpg.device import send
from arpg.errors import present, require
from arpg.model.rope import identity_positions, no_positions

if TYPE_CHECKING:
    from arpg.model.decoder import TokenDecoder

ENCODED_TOGETHER = 64  # condition images, which bounds the memory of their encoder


@dataclass(frozen=True)
class Condition:
    """The condition of each sample, and the null condition for guidance."""

    prefix_BPD: Tensor
    null_prefix_BPD: Tensor
    pos_BP2: Tensor  # positions of the prefix slots (a class has none)
    query_BND: Tensor | None = None  # replaces the [MASK] queries, position by position; the null is plain [MASK]
    length_B: Tensor | None = None  # how many prefix slots of each sample are real, the first ones; None: all P
    null_length_B: Tensor | None = None  # likewise of the null prefix
    label_B: Tensor | None = None  # on the CPU: the classes that the prefix consists of (and the null class the null)

    def __len__(self) -> int:
        return self.prefix_BPD.shape[0]

    def rows(self, rows: slice | Tensor) -> Condition:
        """Return the condition of some of the samples: a slice, or their indices."""

        def some(part: Tensor | None) -> Tensor | None:
            return None if part is None else part[rows.to(part.device) if isinstance(rows, Tensor) else rows]

        parts: dict[str, Any] = {field.name: some(getattr(self, field.name)) for field in dataclasses.fields(self)}
        return Condition(**parts)

    def lengths(self, *, guided: bool) -> list[int]:
        """Return the real prefix slots of each row: the conditional ones, then (guided) the unconditional."""
        given = (self.length_B, self.null_length_B) if guided else (self.length_B,)
        whole = [self.prefix_BPD.shape[1]] * len(self)
        return [n for length_B in given for n in (whole if length_B is None else length_B.tolist())]

    @classmethod
    def gather(cls, parts: Sequence[tuple[Condition, int]]) -> Condition:
        """Return samples of several conditions as one; shorter prefixes are padded."""
        queries = [condition.query_BND[row] for condition, row in parts if condition.query_BND is not None]
        assert len(queries) in (0, len(parts))
        labels = [condition.label_B[row] for condition, row in parts if condition.label_B is not None]

        def side(name: str) -> Tensor:
            return pad_sequence([getattr(condition, name)[row] for condition, row in parts], batch_first=True)

        def lengths(name: str, prefix: str) -> Tensor | None:
            if all(getattr(condition, name) is None for condition, _ in parts):
                return None
            given = [(getattr(c, name), getattr(c, prefix).shape[1], row) for c, row in parts]
            return torch.tensor([whole if length is None else int(length[row]) for length, whole, row in given])

        return cls(
            prefix_BPD=side("prefix_BPD"),
            null_prefix_BPD=side("null_prefix_BPD"),
            pos_BP2=side("pos_BP2"),
            query_BND=torch.stack(queries) if queries else None,
            length_B=lengths("length_B", "prefix_BPD"),
            null_length_B=lengths("null_length_B", "null_prefix_BPD"),
            label_B=torch.stack(labels) if len(labels) == len(parts) else None,
        )


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


def class_condition(model: TokenDecoder, labels_B: Tensor) -> Condition:
    """Return the condition of class labels: one slot each; `num_classes` is the null class (a dropped label)."""
    config = model.config
    require(config.text is None, "the model takes prompts, not classes; give a prompt")
    if labels_B.device.type == "cpu":  # a check on an accelerator would have to wait for it
        bad = [label for label in labels_B.tolist() if not 0 <= label <= config.num_classes]
        require(not bad, f"class {bad} does not exist; expected 0 to {config.num_classes - 1}")
    ids_R = F.pad(labels_B + config.first_class_id, (0, 1), value=config.null_class_id)
    prefix_RPD, batch = model.embedding(send(ids_R, model.device)[:, None]), len(labels_B)
    return Condition(
        prefix_BPD=prefix_RPD[:batch],
        null_prefix_BPD=prefix_RPD[batch:].expand(batch, -1, -1),
        pos_BP2=no_positions(batch, 1, device=model.device),
        label_B=labels_B if labels_B.device.type == "cpu" else None,
    )


def text_condition(
    model: TokenDecoder, states: Sequence[Tensor | None], negative: Sequence[Tensor | None] | None = None
) -> Condition:
    """Return the condition of prompts: a slot for each token, from the encoder's states `[T, E]`; None: no prompt.

    The null condition is no prompt, or the negative prompt where there is one. Real slots come first, and the padding
    of shorter prompts is never attended to.
    """
    text = present(model.text, "the model takes classes, not prompts; give a class (see `arpg classes`)")
    sides = [states, [None] * len(states) if negative is None else negative]
    assert len(sides[1]) == len(states)
    rows = [text.null_TE if row is None else row.to(text.null_TE) for side in sides for row in side]
    for row in rows:
        text.check(row)
    lengths_R = torch.tensor([len(row) for row in rows])
    prefix_RPD = text(pad_sequence(rows, batch_first=True))
    batch = len(states)
    return Condition(
        prefix_BPD=prefix_RPD[:batch],
        null_prefix_BPD=prefix_RPD[batch:],
        pos_BP2=identity_positions(batch, prefix_RPD.shape[1], device=model.device),
        length_B=lengths_R[:batch],
        null_length_B=lengths_R[batch:],
    )


def training_condition(model: TokenDecoder, states_BTE: Tensor, length_B: Tensor) -> Condition:
    """Return the condition of a training batch of prompts, padded to the model's `max_tokens`: shapes never change.

    A length of 0: the prompt is dropped. There is no guidance in training, so the null prefix is empty.
    """
    text = present(model.text, "the model takes classes, not prompts; set [model.text] to train on captions")
    dropped_B11 = (length_B == 0)[:, None, None]
    prefix_BPD = text(torch.where(dropped_B11, text.null_TE, states_BTE.to(text.null_TE)))
    return Condition(
        prefix_BPD=prefix_BPD,
        null_prefix_BPD=prefix_BPD[:, :0],
        pos_BP2=identity_positions(*prefix_BPD.shape[:2], device=model.device),
        length_B=torch.where(length_B == 0, len(text.null_TE), length_B),
    )


@dataclass(frozen=True, eq=False)
class ControlMap:
    """A condition image that covers the grid of a request: uint8, as many pixels as its tokens stand for."""

    pixels_HW: Tensor
    kind: str
    strength: float  # 1 is what was trained, 0 is plain [MASK]


def control_condition(model: TokenDecoder, condition: Condition, maps: Sequence[ControlMap]) -> Condition:
    """Add a condition image to each sample of `condition`. The null condition has neither class, prompt nor image."""
    control = present(model.control, f"the model takes no condition images; one that does is {DEFAULT_CONTROL_MODEL}")
    assert len(maps) == len(condition)
    for each in maps:
        require(
            math.isfinite(each.strength) and each.strength >= 0,
            f"strength is {each.strength}; expected 0 (no control) or more (1 is what the model was trained with)",
        )
    keys = [(id(each.pixels_HW), control.config.kind_id(each.kind)) for each in maps]
    if not any(each.strength for each in maps):
        return condition
    mask_D = model.embedding.weight[model.config.mask_id]
    distinct = {key: each.pixels_HW for key, each in zip(keys, maps, strict=True)}
    pixels_IHW = torch.stack(list(distinct.values())).to(model.device)
    kind_I = torch.tensor([kind for _, kind in distinct], device=model.device)
    # In float32 one by one, so that an image does not depend on its batch. Below, every sum depends on it anyway.
    batch = 1 if mask_D.dtype == torch.float32 else ENCODED_TOGETHER
    parts = zip(torch.split(pixels_IHW, batch), torch.split(kind_I, batch), strict=True)
    made = dict(zip(distinct, torch.cat([control(*part) for part in parts]), strict=True))
    rows = []
    for key, each in zip(keys, maps, strict=True):
        added_ND = made[key]
        rows.append(mask_D + each.strength * added_ND if each.strength else mask_D.expand_as(added_ND))
    return dataclasses.replace(condition, query_BND=torch.stack(rows))


def training_control(
    model: TokenDecoder, condition: Condition, pixels_BHW: Tensor, kind_B: Tensor, dropped_B: Tensor
) -> Condition:
    """Add the condition images of a training batch; plain [MASK] where they are dropped."""
    control = present(model.control, "the model takes no condition images; set [model.control] to train with them")
    mask_D = model.embedding.weight[model.config.mask_id]
    added_BND = control(pixels_BHW, kind_B).masked_fill(dropped_B[:, None, None], 0.0)
    return dataclasses.replace(condition, query_BND=mask_D + added_BND)
