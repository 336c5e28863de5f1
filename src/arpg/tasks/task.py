"""ImageTask: a picture task on its way. It hands out requests, takes what filled them, and shows what is there.

    while (request := drawing.next_request()) is not None:
        for step in decode(model, request, ...):
            drawing.preview(step)
        drawing.accept(step)
    drawing.images()

Shapes: C candidates (best_of for each picture wanted), B those of one request, N tokens, h w grid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from arpg import tasks
from arpg.decode import Request, Step
from arpg.decode.likelihood import fill_bits
from arpg.errors import require
from arpg.image import sheet, to_images, to_pil
from arpg.model import ARPG
from arpg.settings import SamplingSettings
from arpg.tasks.control_input import WHOLE, ControlInput
from arpg.tasks.stages import Stage
from arpg.tokenizer import VQTokenizer

UNKNOWN = 0.75  # the grey of a patch that is not there yet, in [-1, 1]


@dataclass(frozen=True)
class TaskSpec:
    """How many pictures of what: one for each label (a class, `num_classes` for none, or a prompt), the best of so many
    candidates.

    Candidates are numbered on: candidate j of picture i has seed `seed + i * best_of + j`, or `seeds[i] + j` where
    each picture has a seed of its own.
    """

    labels: tuple[tasks.Label, ...]
    settings: SamplingSettings
    seed: int = 0
    best_of: int = 1
    batch_size: int = 32
    seeds: tuple[int, ...] | None = None
    controls: tuple[ControlInput, ...] = ()  # condition images: none, one for all, or one for each picture

    def __post_init__(self) -> None:
        require(len(self.labels) >= 1, "the number of images is 0; expected 1 or more")
        require(self.best_of >= 1, f"best_of is {self.best_of}; expected 1 or more candidates for each image")
        require(self.batch_size >= 1, f"batch_size is {self.batch_size}; expected 1 or more")
        require(0 <= self.seed <= 2**64 - len(self), f"seed is {self.seed}; expected 0 to 2^64 - {len(self)}")
        require(
            len(self.controls) in (0, 1, len(self.labels)),
            f"there are {len(self.controls)} condition images for {len(self.labels)} images; expected one for all, or "
            "one for each",
        )
        if self.seeds is not None:
            require(
                len(self.seeds) == len(self.labels),
                f"there are {len(self.seeds)} seeds for {len(self.labels)} images; expected one for each",
            )
            for seed in self.seeds:
                require(0 <= seed <= 2**64 - self.best_of, f"seed is {seed}; expected 0 to 2^64 - {self.best_of}")

    def __len__(self) -> int:
        """Candidates."""
        return len(self.labels) * self.best_of

    def control_of(self, candidate: int) -> ControlInput:
        return self.controls[0 if len(self.controls) == 1 else candidate // self.best_of]

    def seed_of(self, candidate: int) -> int:
        if self.seeds is None:
            return self.seed + candidate
        return self.seeds[candidate // self.best_of] + candidate % self.best_of


@dataclass(frozen=True)
class Part:
    """What one request is about: some candidates and one window of a stage."""

    stage: int
    number: int  # of the window, over all stages
    rows: slice
    corner: tuple[int, int]


class ImageTask:
    def __init__(
        self,
        model: ARPG,
        tokenizer: VQTokenizer,
        spec: TaskSpec,
        *,
        stages: Sequence[Stage],
        pictures: Sequence[Image.Image] = (),
    ) -> None:
        """The first stage starts from the pictures (one for all, or one for each candidate), the others from what was
        drawn before.
        """
        self.model, self.tokenizer, self.spec, self.stages = model, tokenizer, spec, tuple(stages)
        assert len(pictures) in (1, len(spec)) or self.stages[0].see is None
        self._pictures = list(pictures)  # what the current stage starts from
        self._parts = self._plan()
        self._index = 0  # of the request that comes next, or was handed out last
        self._request: Request | None = None
        self._bits_C = torch.zeros(len(spec))
        self._start(self.stages[0], spec.batch_size)

    def __len__(self) -> int:
        """Requests, from first to last."""
        return len(self._parts)

    @property
    def index(self) -> int:
        """How many requests are filled."""
        return self._index

    @property
    def rows(self) -> range:
        """The candidates that the current request is about."""
        return range(len(self.spec))[self._parts[self._index].rows]

    @property
    def kept(self) -> list[int]:
        """The candidate that is kept for each picture: the most likely. Known when everything is drawn."""
        each = self._bits_C.reshape(-1, self.spec.best_of).argmin(1).tolist()
        return [i * self.spec.best_of + j for i, j in enumerate(each)]

    @property
    def seeds(self) -> list[int]:
        """The seed of each picture."""
        return [self.spec.seed_of(row) for row in self.kept]

    def next_request(self) -> Request | None:
        """The next request; None when everything is drawn."""
        if self._index == len(self._parts):
            return None
        part = self._parts[self._index]
        stage, view = self.stages[part.stage], self._view(part)
        # Each window has noise of its own; the same would repeat the same picture.
        seeds = [(self.spec.seed_of(row) + (part.number << 40)) % 2**64 for row in self.rows]
        self._request = tasks.fill(
            self.model,
            [self.spec.labels[row // self.spec.best_of] for row in self.rows],
            seeds,
            ids_N=self._ids_Chw[part.rows, *view].flatten(1),
            known_N=self._known_Chw[part.rows, *view].flatten(1),
            grid=stage.window,
            pos_N2=stage.pos_N2,
            control=self._control(part),
        )
        return self._request

    @torch.no_grad()
    def preview(self, step: Step) -> list[Image.Image]:
        """The candidates of the current request after a step; patches whose token is not known yet are light grey."""
        part = self._parts[self._index]
        stage, view = self.stages[part.stage], self._view(part)
        ids, known = self._ids_Chw[part.rows].clone(), self._known_Chw[part.rows].clone()
        ids[:, *view] = step.ids_BN.cpu().reshape(-1, *stage.window)
        known[:, *view] = step.known_BN.cpu().reshape(-1, *stage.window)
        return self._pixels(stage, ids, known)

    def accept(self, step: Step) -> None:
        """The last step of the current request."""
        assert self._request is not None
        part = self._parts[self._index]
        view = self._view(part)
        if self.spec.best_of > 1:
            self._bits_C[part.rows] += fill_bits(self.model, self._request, step.ids_BN)
        self._ids_Chw[part.rows, *view] = step.ids_BN.cpu().reshape(-1, *self.stages[part.stage].window)
        self._known_Chw[part.rows, *view] = True
        self._request = None
        self._index += 1
        if self._index < len(self._parts) and self._parts[self._index].stage != part.stage:
            # One at a time: convolutions round differently in another batch, and then tokens would depend on it.
            self._pictures = self._drawn(part.stage, range(len(self.spec)), 1)
            self._start(self.stages[part.stage + 1], 1)

    def images(self) -> list[Image.Image]:
        """The pictures, one for each label."""
        assert self._index == len(self._parts)
        return self._drawn(len(self.stages) - 1, self.kept, self.spec.batch_size)

    def _plan(self) -> list[Part]:
        parts: list[Part] = []
        size, number = self.spec.batch_size, 0
        for s, stage in enumerate(self.stages):
            for i in range(0, len(self.spec), size):
                rows = slice(i, min(i + size, len(self.spec)))
                parts += [Part(s, number + k, rows, corner) for k, corner in enumerate(stage.corners)]
            number += len(stage.corners)
        return parts

    def _view(self, part: Part) -> tuple[slice, slice]:
        (top, left), (high, wide) = part.corner, self.stages[part.stage].window
        return slice(top, top + high), slice(left, left + wide)

    def beside(self, rows: Sequence[int], images: Sequence[Image.Image]) -> list[Image.Image]:
        """The pictures of these candidates, each with its condition image at its left."""
        require(self._steered, "there is no condition image to show beside the result; give one")
        part = None if self.stages[-1].part is None else WHOLE
        shown = [self.spec.control_of(row).fit(image.size, part) for row, image in zip(rows, images, strict=True)]
        return [sheet([seen, image], columns=2) for seen, image in zip(shown, images, strict=True)]

    @property
    def _steered(self) -> bool:
        return bool(self.spec.controls)

    def _control(self, part: Part) -> list[tasks.ControlMap]:
        """Of each candidate, what the window has of its condition image; the same object where it is the same image."""
        stage, stride = self.stages[part.stage], self.tokenizer.config.stride
        rows, columns = (slice(s.start * stride, s.stop * stride) for s in self._view(part))
        cut: dict[int, tasks.ControlMap] = {}
        for row in self.rows if self._steered else ():
            control = self.spec.control_of(row)
            if id(control) not in cut:
                pixels_HW = np.array(control.fit(self._size(stage), stage.part))[rows, columns]
                cut[id(control)] = tasks.ControlMap(torch.from_numpy(pixels_HW), control.kind, control.strength)
        return [cut[id(self.spec.control_of(row))] for row in self.rows if self._steered]

    def _size(self, stage: Stage) -> tuple[int, int]:
        """Width and height of its pixels."""
        stride = self.tokenizer.config.stride
        return stage.grid[1] * stride, stage.grid[0] * stride

    @torch.no_grad()
    def _start(self, stage: Stage, batch_size: int) -> None:
        """Lay the tokens of the pictures on the grid."""
        candidates = len(self.spec)
        ids_CN = torch.zeros(candidates, stage.grid[0] * stage.grid[1], dtype=torch.long)
        if stage.see is not None:
            stand = slice(None) if stage.stand_M is None else stage.stand_M
            shown = np.stack([stage.see(picture) for picture in self._pictures])
            parts = [shown[i : i + batch_size] for i in range(0, len(shown), batch_size)]
            ids_CM = [self.tokenizer.encode(to_images(pixels, self.tokenizer.device)).cpu() for pixels in parts]
            ids_CN[:, stand] = torch.cat(ids_CM)  # one for all, or one for each
        self._ids_Chw = ids_CN.reshape(-1, *stage.grid)
        self._known_Chw = torch.from_numpy(stage.known_hw).repeat(candidates, 1, 1)

    @torch.no_grad()
    def _drawn(self, stage: int, rows: Sequence[int], batch_size: int) -> list[Image.Image]:
        parts = torch.split(self._ids_Chw[torch.tensor(rows)], batch_size)
        return [image for ids in parts for image in self._pixels(self.stages[stage], ids, None)]

    def _pixels(self, stage: Stage, ids_Bhw: Tensor, known_Bhw: Tensor | None) -> list[Image.Image]:
        device, stride = self.tokenizer.device, self.tokenizer.config.stride
        ids_BN = ids_Bhw.flatten(1).to(device)
        if known_Bhw is None or bool(known_Bhw.all()):
            made = self.tokenizer.decode(ids_BN, stage.grid)
        else:
            known_Bhw = known_Bhw.to(device)
            made = self.tokenizer.decode(ids_BN, stage.grid, known_BN=known_Bhw.flatten(1))
            known_BHW = known_Bhw.repeat_interleave(stride, 1).repeat_interleave(stride, 2)
            made = torch.where(known_BHW[:, None], made, UNKNOWN)
        return [stage.give(image) for image in to_pil(made)]
