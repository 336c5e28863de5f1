"""What a step trains on: a pure function of (seed, step), whatever the number of processes.

Sample number = step * batch size + place in the batch; everything about a sample follows from it.
Shapes: B local batch, N grid tokens, T most tokens of a caption, E width of the text states, H W pixels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from arpg.data.control_maps import ControlMaps
from arpg.data.text_states import TextStates
from arpg.data.tokens import NO_CLASS, TokenSet
from arpg.device import send
from arpg.errors import require
from arpg.noise import Stream, random_words, seed_keys


@dataclass(frozen=True)
class Batch:
    ids_BN: Tensor
    labels_B: Tensor  # the null class (num_classes) where the label is dropped
    order_BN: Tensor
    dropout_key_B: Tensor
    states_BTE: Tensor | None = None  # of the captions, where the model takes prompts
    length_B: Tensor | None = None  # tokens of each caption; 0 where it is dropped
    pixels_BHW: Tensor | None = None  # condition images, where the model takes them
    kind_B: Tensor | None = None
    dropped_B: Tensor | None = None


class TokenBatches:
    """Every image once per epoch, in a fresh permutation; one of its views, an order and a label drop per sample."""

    def __init__(
        self,
        tokens: TokenSet,
        *,
        batch_size: int,
        parts: int,
        num_classes: int,
        label_drop: float,
        seed: int,
        device: torch.device,
        text: TextStates | None = None,
        control: ControlMaps | None = None,
    ) -> None:
        """`parts`: into how many equal parts a batch is cut (processes times accumulation).

        `text`: the states of the captions, which then take the place of the labels; `control`: condition images.
        """
        require(
            batch_size % parts == 0,
            f"run.batch_size {batch_size} cannot be cut into {parts} equal parts (processes x run.accumulate)",
        )
        self.tokens, self.batch_size, self.part_size = tokens, batch_size, batch_size // parts
        self.text, self.control = text, control
        self.num_classes, self.label_drop, self.seed, self.device = num_classes, label_drop, seed, device
        self.key = seed_keys([seed])  # on the CPU, which has time: on a GPU this would be a hundred small kernels
        self._epoch = -1
        self._permutation = np.empty(0, dtype=np.int64)

    def indices(self, step: int, part: int) -> NDArray[np.int64]:
        """Which images the part of a step's batch holds."""
        numbers = self._numbers(step, part)
        result = np.empty(len(numbers), dtype=np.int64)
        for epoch in np.unique(numbers // self.tokens.num_images):
            chosen = numbers // self.tokens.num_images == epoch
            result[chosen] = self._order_of(int(epoch))[numbers[chosen] % self.tokens.num_images]
        return result

    def batch(self, step: int, part: int) -> Batch:
        index = self.indices(step, part)
        number = torch.from_numpy(self._numbers(step, part))[None]
        view = random_words(self.key, Stream.VIEW, number, 1)[0, :, 0].numpy() % self.tokens.views_of[index]
        ids = torch.from_numpy(self.tokens.gather(index, view))
        labels = torch.from_numpy(self.tokens.labels[index].astype(np.int64))
        dropped = random_words(self.key, Stream.LABEL_DROP, number, 1)[0, :, 0] < round(self.label_drop * 2**32)
        labels = torch.where(dropped | (labels == NO_CLASS), self.num_classes, labels)
        words = random_words(self.key, Stream.TRAIN_ORDER, number, ids.shape[1] + 1)[0]
        states = length = None
        if self.text is not None:
            states, length = (torch.from_numpy(part) for part in self.text.gather(index))
            states, length = send(states, self.device), send(length.masked_fill(dropped, 0), self.device)
        pixels, kind = (None, None) if self.control is None else self.control.gather(index, view)
        return Batch(
            ids_BN=send(ids, self.device),
            labels_B=send(labels, self.device),
            order_BN=send(words[:, 1:].argsort(-1), self.device),
            dropout_key_B=send(words[:, 0].to(torch.int32), self.device),
            states_BTE=states,
            length_B=length,
            pixels_BHW=pixels,
            kind_B=kind,
            dropped_B=None if pixels is None else send(dropped, self.device),
        )

    def _numbers(self, step: int, part: int) -> NDArray[np.int64]:
        start = step * self.batch_size + part * self.part_size
        return np.arange(start, start + self.part_size)

    def _order_of(self, epoch: int) -> NDArray[np.int64]:
        if epoch != self._epoch:
            self._permutation = np.random.default_rng([self.seed, epoch]).permutation(self.tokens.num_images)
            self._epoch = epoch
        return self._permutation
