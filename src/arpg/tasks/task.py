"""ImageTask: an image task from its first request to its images.

    images = task.run()            # all of it
    for previews in task.stream()  # or with previews after every step

A server decodes the requests itself, together with those of other tasks:

    while (request := task.next_request()) is not None:
        for step in decode(model, request, ...):
            task.preview(step)
        task.accept(step)
    task.images()

Shapes: C candidates (best_of for each image), B those of one request, M N tokens, h w grid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from arpg import tasks
from arpg.decode import Engine, Request, Step, make_plan
from arpg.decode.likelihood import fill_bits
from arpg.decode.order import resolve_order
from arpg.errors import require
from arpg.image import Pixels, sheet
from arpg.model import ControlMap
from arpg.settings import TASK_SETTINGS, SamplingSettings
from arpg.tasks.control_input import WHOLE, ControlInput
from arpg.tasks.stages import Stage
from arpg.tokenizer import PixelCodec

UNKNOWN = 223  # the grey of patches that are not sampled yet

OnStep = Callable[[Step], None] | None


@dataclass(frozen=True)
class TaskSpec:
    """What to make: an image for each label (a class id, `num_classes` for none, or a prompt), and how to sample it.

    Candidate j of image i has seed `seed + i * best_of + j`, or `seeds[i] + j` where each image has a seed of its own.
    """

    labels: tuple[tasks.Label, ...]
    settings: SamplingSettings
    seed: int = 0
    best_of: int = 1
    batch_size: int = 32
    seeds: tuple[int, ...] | None = None
    controls: tuple[ControlInput, ...] = ()  # condition images: none, one for all, or one for each image

    def __post_init__(self) -> None:
        TASK_SETTINGS["num_images"].check(len(self.labels))
        for name in ("best_of", "batch_size"):
            TASK_SETTINGS[name].check(getattr(self, name))
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
        """Return the number of candidates."""
        return len(self.labels) * self.best_of

    def control_of(self, candidate: int) -> ControlInput:
        """Return the condition image of a candidate."""
        return self.controls[0 if len(self.controls) == 1 else candidate // self.best_of]

    def seed_of(self, candidate: int) -> int:
        """Return the seed of a candidate."""
        if self.seeds is None:
            return self.seed + candidate
        return self.seeds[candidate // self.best_of] + candidate % self.best_of


@dataclass(frozen=True)
class RequestSpec:
    """What one request samples: a window of a stage, for some of the candidates."""

    stage: int
    window_index: int  # counted over all stages
    rows: slice  # candidates
    corner: tuple[int, int]


@dataclass(frozen=True)
class StepTokens:
    """The tokens of some candidates after a step, from which their preview can be rendered at any later time."""

    stage: int
    rows: range  # candidates
    ids_Bhw: Tensor
    known_Bhw: Tensor


class ImageTask:
    """The state of one image task. `run`, `stream` and `steps` decode it with the engine that it owns."""

    def __init__(
        self,
        engine: Engine,
        codec: PixelCodec,
        spec: TaskSpec,
        *,
        stages: Sequence[Stage],
        images: Sequence[Image.Image] = (),
    ) -> None:
        """Start the first stage from `images` (one for all candidates, or one for each); later stages start from the
        result of the one before.
        """
        self.engine, self.model, self.codec = engine, engine.model, codec
        self.spec, self.stages = spec, tuple(stages)
        for stage in self.stages:  # an order that does not fit is refused before any work
            resolve_order(spec.settings.order, stage.window)
        assert len(images) in (1, len(spec)) or self.stages[0].preprocess is None
        self._inputs = list(images)  # of the current stage
        self._requests = self._plan_requests()
        self._index = 0  # of the request that is next, or being decoded
        self._request: Request | None = None
        self._bits_C = torch.zeros(len(spec))
        self._start_stage(self.stages[0], spec.batch_size)

    def run(self, on_step: OnStep = None) -> list[Image.Image]:
        """Decode what is left of the task and return its images; `on_step` is called after every step."""
        for step in self.steps():
            if on_step is not None:
                on_step(step)
        return self.images()

    def stream(self) -> Iterator[list[Image.Image]]:
        """Decode the task and yield a preview of the current candidates after every step."""
        for step in self.steps():
            yield self.preview(step)

    def steps(self) -> Iterator[Step]:
        """Decode the task, one request after the other, and yield every step."""
        settings = self.spec.settings
        while (request := self.next_request()) is not None:
            plan = make_plan(request.grid, request.known_BN, request.seeds, settings)
            for step in self.engine.decode(request, plan, settings):
                yield step
            self.accept(step)

    def __len__(self) -> int:
        """Return the number of requests of the whole task."""
        return len(self._requests)

    @property
    def index(self) -> int:
        """The number of requests that are decoded."""
        return self._index

    @property
    def rows(self) -> range:
        """The candidates of the current request."""
        return range(len(self.spec))[self._requests[self._index].rows]

    @property
    def starts_grid(self) -> bool:
        """Whether the current request is the first on its grid: of a stage, for some of the candidates."""
        before, current = self._requests[max(0, self._index - 1)], self._requests[self._index]
        return self._index == 0 or (before.stage, before.rows) != (current.stage, current.rows)

    @property
    def known_grid(self) -> Tensor:
        """Which tokens of the whole grid are known to the current candidates, `[B, h, w]`."""
        return self._known_Chw[self._requests[self._index].rows]

    @property
    def window(self) -> tuple[slice, slice]:
        """The rows and columns of the grid that the current request samples."""
        return self._view(self._requests[self._index])

    @property
    def kept(self) -> list[int]:
        """The most likely candidate of each image. Valid after the last request."""
        if self.spec.best_of == 1:
            return list(range(len(self.spec)))
        each = self._bits_C.reshape(-1, self.spec.best_of).argmin(1).tolist()
        return [i * self.spec.best_of + j for i, j in enumerate(each)]

    @property
    def seeds(self) -> list[int]:
        """The seed of each image. Valid after the last request."""
        return [self.spec.seed_of(row) for row in self.kept]

    def next_request(self) -> Request | None:
        """Build the next request; None after the last one."""
        if self._index == len(self._requests):
            return None
        current = self._requests[self._index]
        stage, view = self.stages[current.stage], self._view(current)
        # Each window has noise of its own; the same noise would repeat the same content.
        seeds = [(self.spec.seed_of(row) + (current.window_index << 40)) % 2**64 for row in self.rows]
        self._request = tasks.fill(
            self.model,
            [self.spec.labels[row // self.spec.best_of] for row in self.rows],
            seeds,
            ids_N=self._ids_Chw[current.rows, *view].flatten(1),
            known_N=self._known_Chw[current.rows, *view].flatten(1),
            grid=stage.window,
            pos_N2=stage.pos_N2,
            control=self._control_maps(current),
        )
        return self._request

    def preview(self, step: Step) -> list[Image.Image]:
        """Return the current candidates after `step`; patches of unknown tokens are light grey."""
        return self.render(self.tokens_after(step))

    def tokens_after(self, step: Step) -> StepTokens:
        """Return a copy of the tokens of the current candidates after `step`."""
        current = self._requests[self._index]
        stage, view = self.stages[current.stage], self._view(current)
        ids, known = self._ids_Chw[current.rows].clone(), self._known_Chw[current.rows].clone()
        ids[:, *view] = step.ids_BN.cpu().reshape(-1, *stage.window)
        known[:, *view] = step.known_BN.cpu().reshape(-1, *stage.window)
        return StepTokens(current.stage, self.rows, ids, known)

    def render(self, tokens: StepTokens, rows: Sequence[int] | None = None) -> list[Image.Image]:
        """Return the previews of the candidates `rows` (None: all) of `tokens`."""
        chosen = slice(None) if rows is None else [tokens.rows.index(row) for row in rows]
        made = self._to_pixels(self.stages[tokens.stage], tokens.ids_Bhw[chosen], tokens.known_Bhw[chosen])
        return [Image.fromarray(pixels_HW3) for pixels_HW3 in made]

    def accept(self, step: Step) -> None:
        """Take the last step of the current request as its result."""
        assert self._request is not None
        current = self._requests[self._index]
        view = self._view(current)
        if self.spec.best_of > 1:
            self._bits_C[current.rows] += fill_bits(self.model, self._request, step.ids_BN)
        self._ids_Chw[current.rows, *view] = step.ids_BN.cpu().reshape(-1, *self.stages[current.stage].window)
        self._known_Chw[current.rows, *view] = True
        self._request = None
        self._index += 1
        if self._index < len(self._requests) and self._requests[self._index].stage != current.stage:
            # One at a time: convolutions round differently in another batch, and then tokens would depend on it.
            made = self._decode_pixels(current.stage, range(len(self.spec)), 1)
            self._inputs = [Image.fromarray(pixels_HW3) for pixels_HW3 in made]
            self._start_stage(self.stages[current.stage + 1], 1)

    def images(self) -> list[Image.Image]:
        """Return the images, one for each label. Valid after the last request."""
        return [Image.fromarray(pixels_HW3) for pixels_HW3 in self.pixels()]

    def pixels(self) -> list[Pixels]:
        """Return the pixels `[H, W, 3]` of the images, one for each label. Valid after the last request."""
        assert self._index == len(self._requests)
        return self._decode_pixels(len(self.stages) - 1, self.kept, self.spec.batch_size)

    def ids(self) -> Tensor:
        """Return the token ids of the images, `[images, h, w]`. Valid after the last request."""
        assert self._index == len(self._requests)
        return self._ids_Chw[torch.tensor(self.kept)]

    def beside_conditions(self, rows: Sequence[int], images: Sequence[Image.Image]) -> list[Image.Image]:
        """Put the condition image of each candidate at the left of its image."""
        require(bool(self.spec.controls), "there is no condition image to show beside the result; give one")
        part = None if self.stages[-1].control_part is None else WHOLE
        conditions = [self.spec.control_of(row).fit(image.size, part) for row, image in zip(rows, images, strict=True)]
        return [sheet(pair, columns=2) for pair in zip(conditions, images, strict=True)]

    def _plan_requests(self) -> list[RequestSpec]:
        requests: list[RequestSpec] = []
        size, windows = self.spec.batch_size, 0
        for s, stage in enumerate(self.stages):
            for i in range(0, len(self.spec), size):
                rows = slice(i, min(i + size, len(self.spec)))
                requests += [RequestSpec(s, windows + k, rows, corner) for k, corner in enumerate(stage.corners)]
            windows += len(stage.corners)
        return requests

    def _view(self, request: RequestSpec) -> tuple[slice, slice]:
        """Return the rows and columns of the grid that a request samples."""
        (top, left), (high, wide) = request.corner, self.stages[request.stage].window
        return slice(top, top + high), slice(left, left + wide)

    def _control_maps(self, request: RequestSpec) -> list[ControlMap]:
        """Cut the request's window out of each candidate's condition image; equal images give the same object."""
        if not self.spec.controls:
            return []
        stage, stride = self.stages[request.stage], self.codec.config.stride
        size = (stage.grid[1] * stride, stage.grid[0] * stride)
        rows, columns = (slice(s.start * stride, s.stop * stride) for s in self._view(request))
        maps: dict[int, ControlMap] = {}
        for control in map(self.spec.control_of, self.rows):
            if id(control) not in maps:
                pixels_HW = np.array(control.fit(size, stage.control_part))[rows, columns]
                maps[id(control)] = ControlMap(torch.from_numpy(pixels_HW), control.kind, control.strength)
        return [maps[id(self.spec.control_of(row))] for row in self.rows]

    def _start_stage(self, stage: Stage, batch_size: int) -> None:
        """Encode the stage's input images and put their tokens on its grid."""
        candidates = len(self.spec)
        ids_CN = torch.zeros(candidates, stage.grid[0] * stage.grid[1], dtype=torch.long)
        if stage.preprocess is not None:
            index = slice(None) if stage.token_index_M is None else stage.token_index_M
            pixels = np.stack([stage.preprocess(image) for image in self._inputs])
            batches = [pixels[i : i + batch_size] for i in range(0, len(pixels), batch_size)]
            ids_CM = torch.cat([self.codec.encode(batch) for batch in batches])
            ids_CN[:, index] = ids_CM  # one for all, or one for each
        self._ids_Chw = ids_CN.reshape(-1, *stage.grid)
        self._known_Chw = torch.from_numpy(stage.known_hw).repeat(candidates, 1, 1)

    def _decode_pixels(self, stage: int, rows: Sequence[int], batch_size: int) -> list[Pixels]:
        batches = torch.split(self._ids_Chw[list(rows)], batch_size)
        return [pixels for ids in batches for pixels in self._to_pixels(self.stages[stage], ids, None)]

    def _to_pixels(self, stage: Stage, ids_Bhw: Tensor, known_Bhw: Tensor | None) -> list[Pixels]:
        """Decode tokens to pixels; None: all of them are known."""
        if known_Bhw is None or bool(known_Bhw.all()):
            pixels_BHW3 = self.codec.decode(ids_Bhw.flatten(1), stage.grid)
        else:
            stride = self.codec.config.stride
            pixels_BHW3 = self.codec.decode(ids_Bhw.flatten(1), stage.grid, known_BN=known_Bhw.flatten(1))
            known_BHW = known_Bhw.numpy().repeat(stride, 1).repeat(stride, 2)
            pixels_BHW3 = np.where(known_BHW[..., None], pixels_BHW3, np.uint8(UNKNOWN))
        if stage.postprocess is None:
            return list(pixels_BHW3)
        return [np.asarray(stage.postprocess(Image.fromarray(pixels_HW3))) for pixels_HW3 in pixels_BHW3]
