"""Pipeline: tokenizer, network and class names together; the API that most users need."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from arpg import tasks
from arpg.canvas import Box, Canvas, box_mask
from arpg.checkpoint import FolderConfig, load_model, load_tokenizer, read_folder, write_folder
from arpg.classes import ClassNames, numbered_classes
from arpg.config import ORDERS, SamplingDefaults, SamplingSettings, one_of
from arpg.decode import Request, Step, decode, make_plan
from arpg.decode.score import make_orders, token_bits
from arpg.errors import InputError, require
from arpg.hub import resolve
from arpg.image import adm_crop, to_images, to_pil, to_rgb
from arpg.model import ARPG, class_condition
from arpg.tokenizer import VQTokenizer
from arpg.windows import plan_windows

UNKNOWN = 0.75  # the grey of a patch that is not there yet, in [-1, 1]


class Pipeline:
    """From class names to images.

    >>> pipe = Pipeline.from_pretrained("arpg-xl")
    >>> images = pipe.generate(["golden retriever", "volcano"], num_images=4, seed=0)
    """

    def __init__(
        self,
        model: ARPG,
        tokenizer: VQTokenizer,
        *,
        sampling: SamplingDefaults | None = None,
        classes: ClassNames | None = None,
        license: str = "unknown",
    ) -> None:
        require(
            model.config.vocab_size == tokenizer.config.codebook_size,
            f"the model speaks {model.config.vocab_size} codes, the tokenizer {tokenizer.config.codebook_size}; "
            "they do not belong together",
        )
        self.model = model
        self.tokenizer = tokenizer
        self.sampling = sampling or SamplingDefaults()
        self.classes = classes or numbered_classes(model.config.num_classes)
        self.license = license

    @classmethod
    def from_pretrained(
        cls, name: str | Path, *, device: str | torch.device = "auto", dtype: str | torch.dtype = "auto"
    ) -> Pipeline:
        """Load a folder, a published name (`arpg-l`, `arpg-xl`, `arpg-xxl`) or a hub id.

        `device="auto"` takes a GPU if there is one; `dtype="auto"` is bfloat16 there and float32 on a CPU.
        The tokenizer stays in float32.
        """
        folder = resolve(name)
        config = read_folder(folder)
        on = choose_device(device)
        model = load_model(folder, device=on, dtype=_dtype(dtype, on))
        tokenizer = load_tokenizer(folder, device=on, dtype=torch.float32)
        return cls(model, tokenizer, sampling=config.sampling, classes=config.classes, license=config.license)

    def save_pretrained(self, folder: str | Path) -> None:
        config = FolderConfig(
            model=self.model.config,
            tokenizer=self.tokenizer.config,
            sampling=self.sampling,
            license=self.license,
            classes=self.classes,
        )
        write_folder(Path(folder), config, model=self.model.state_dict(), tokenizer=self.tokenizer.state_dict())

    def generate(
        self,
        classes: str | int | Sequence[str | int],
        *,
        num_images: int = 1,
        seed: int = 0,
        batch_size: int = 32,
        on_step: Callable[[Step], None] | None = None,
        **settings: Any,
    ) -> list[Image.Image]:
        """`num_images` images of each class; image i of the call has seed `seed + i`.

        `settings`: steps, guidance, order, schedule, guidance_schedule, temperature, top_k, top_p, attention, decode,
        draft; what is not given is the model's own recommendation. `on_step` is called after every step.
        """
        images: list[Image.Image] = []
        for request, resolved in self.requests(
            classes, num_images=num_images, seed=seed, batch_size=batch_size, **settings
        ):
            for step in self.run(request, resolved):
                if on_step is not None:
                    on_step(step)
            images += self.images(step, request.grid)
        return images

    @torch.no_grad()
    def inpaint(
        self,
        image: Image.Image,
        mask: Image.Image,
        class_: str | int | None = None,
        *,
        num_images: int = 1,
        seed: int = 0,
        feather: int = 0,
        on_step: Callable[[Step], None] | None = None,
        **settings: Any,
    ) -> list[Image.Image]:
        """Fill the white of the mask, given the rest, with a class or with what fits; pixels outside stay as they are.

        `feather` blends that many pixels inside the mask. Settings and seeds as in `generate`.
        """
        resolved = self.sampling.settings(**settings)
        require(num_images >= 1, f"the number of images is {num_images}; expected 1 or more")
        require(feather >= 0, f"feather is {feather}; expected 0 or more pixels")
        label = None if class_ is None else self.classes.find(class_)
        picture = to_rgb(image)
        masked = np.asarray(mask.convert("L")) >= 128
        grid, stride = self.model.config.grid, self.tokenizer.config.stride
        canvas = Canvas.fit(picture, masked, grid=grid, stride=stride)
        known = torch.from_numpy(canvas.known())
        ids = self.tokenizer.encode(to_images(canvas.pixels()[None], self.tokenizer.device))[0]
        request = tasks.fill(self.model, label, range(seed, seed + num_images), ids_N=ids, known_N=known)
        for step in self.run(request, resolved):
            if on_step is not None:
                on_step(step)
        return [canvas.paste(made, feather=feather) for made in self.images(step, grid)]

    def edit(self, image: Image.Image, box: Box, class_: str | int, **options: Any) -> list[Image.Image]:
        """Put a class into the box (left, top, right, bottom) of an image; options as in `inpaint`."""
        mask = Image.fromarray(box_mask(to_rgb(image).size, box).astype(np.uint8) * 255)
        return self.inpaint(image, mask, class_, **options)

    @torch.no_grad()
    def outpaint(
        self,
        image: Image.Image,
        class_: str | int | None = None,
        *,
        left: int = 0,
        top: int = 0,
        right: int = 0,
        bottom: int = 0,
        num_images: int = 1,
        seed: int = 0,
        on_step: Callable[[Step], None] | None = None,
        **settings: Any,
    ) -> list[Image.Image]:
        """Continue a picture beyond its sides, by as many pixels as wanted; the picture itself stays as it is.

        A canvas larger than the trained grid is filled window by window, each leaning on what is there already.
        """
        resolved = self.sampling.settings(**settings)
        require(num_images >= 1, f"the number of images is {num_images}; expected 1 or more")
        label = None if class_ is None else self.classes.find(class_)
        window, stride = self.model.config.grid, self.tokenizer.config.stride
        canvas = Canvas.extend(to_rgb(image), (left, top, right, bottom), grid=window, stride=stride)
        known = torch.from_numpy(canvas.known().reshape(canvas.grid))
        ids = self.tokenizer.encode(to_images(canvas.pixels()[None], self.tokenizer.device)).cpu()
        ids = ids.reshape(1, *canvas.grid).repeat(num_images, 1, 1)
        for k, (row, column) in enumerate(plan_windows(known.numpy(), window)):
            # Each window has noise of its own; the same would repeat the same picture.
            seeds = [(seed + i + (k << 40)) % 2**64 for i in range(num_images)]
            part = (slice(row, row + window[0]), slice(column, column + window[1]))
            request = tasks.fill(
                self.model, label, seeds, ids_N=ids[:, *part].flatten(1), known_N=known[part].flatten()
            )
            for step in self.run(request, resolved):
                if on_step is not None:
                    on_step(step)
            ids[:, *part] = step.ids_BN.reshape(num_images, *window).cpu()
            known[part] = True
        made = self.tokenizer.decode(ids.flatten(1).to(self.tokenizer.device), canvas.grid)
        return [canvas.paste(picture) for picture in to_pil(made)]

    def score(
        self,
        image: Image.Image,
        class_: str | int | None = None,
        *,
        orders: int = 1,
        order: str = "random",
        seed: int = 0,
    ) -> NDArray[np.float32]:
        """`[orders, h, w]`: the bits of each token of an image under each order; their mean is the bits per token.

        The image is brought to the model's size by a centre crop. No class: the unconditional likelihood.
        """
        require(orders >= 1, f"the number of orders is {orders}; expected 1 or more")
        one_of("order", order, ORDERS)
        label = self.model.config.num_classes if class_ is None else self.classes.find(class_)
        bits: NDArray[np.float32] = self._bits(image, [label], orders=orders, order=order, seed=seed)[0]
        return bits

    def classify(self, image: Image.Image, *, orders: int = 1, seed: int = 0) -> NDArray[np.float32]:
        """`[classes]`: bits per token of an image under each class, over the same random orders; the least is best."""
        require(orders >= 1, f"the number of orders is {orders}; expected 1 or more")
        bits = self._bits(image, range(self.model.config.num_classes), orders=orders, order="random", seed=seed)
        means: NDArray[np.float32] = bits.mean((1, 2, 3))
        return means

    @torch.no_grad()
    def _bits(
        self, image: Image.Image, labels: Sequence[int], *, orders: int, order: str, seed: int, batch_size: int = 32
    ) -> NDArray[np.float32]:
        """`[labels, orders, h, w]`."""
        grid, stride = self.model.config.grid, self.tokenizer.config.stride
        require(grid[0] == grid[1], f"the model's grid is {grid[0]}x{grid[1]}; only square ones can be scored")
        pixels = np.asarray(adm_crop(to_rgb(image), grid[0] * stride))
        ids_N = self.tokenizer.encode(to_images(pixels[None], self.tokenizer.device))[0]
        order_KN = make_orders(order, grid, range(seed, seed + orders))
        pairs = [(label, k) for label in labels for k in range(orders)]
        parts = []
        for i in range(0, len(pairs), batch_size):
            chosen, ks = (list(part) for part in zip(*pairs[i : i + batch_size], strict=True))
            condition = class_condition(self.model, torch.tensor(chosen))
            parts.append(token_bits(self.model, ids_N.expand(len(ks), -1), condition, order_KN[ks]).cpu())
        bits: NDArray[np.float32] = torch.cat(parts).numpy().reshape(len(labels), orders, *grid)
        return bits

    def stream(
        self, classes: str | int | Sequence[str | int], *, num_images: int = 1, seed: int = 0, **settings: Any
    ) -> Iterator[list[Image.Image]]:
        """The images after each step, all in one batch; patches that are not there yet are grey."""
        batch = num_images * (1 if isinstance(classes, str | int) else len(classes))
        for request, resolved in self.requests(
            classes, num_images=num_images, seed=seed, batch_size=max(1, batch), **settings
        ):
            for step in self.run(request, resolved):
                yield self.images(step, request.grid)

    def requests(
        self,
        classes: str | int | Sequence[str | int],
        *,
        num_images: int = 1,
        seed: int = 0,
        batch_size: int = 32,
        **settings: Any,
    ) -> list[tuple[Request, SamplingSettings]]:
        """What `generate` will run, one request per batch. All input is checked here, before any work."""
        resolved = self.sampling.settings(**settings)
        names = [classes] if isinstance(classes, str | int) else list(classes)
        require(len(names) >= 1, "no class is given; expected a name or an id")
        require(num_images >= 1, f"the number of images is {num_images}; expected 1 or more")
        require(batch_size >= 1, f"batch_size is {batch_size}; expected 1 or more")
        labels = [self.classes.find(name) for name in names for _ in range(num_images)]
        seeds = [seed + i for i in range(len(labels))]
        return [
            (tasks.generate(self.model, labels[i : i + batch_size], seeds[i : i + batch_size]), resolved)
            for i in range(0, len(labels), batch_size)
        ]

    def run(self, request: Request, settings: SamplingSettings) -> Iterator[Step]:
        """Plan a request and put it through the loop."""
        plan = make_plan(request.grid, request.known_BN, request.seeds, settings)
        return decode(self.model, request, plan, settings)

    @torch.no_grad()
    def images(self, step: Step, grid: tuple[int, int]) -> list[Image.Image]:
        """The pixels of a step; patches whose token is not known yet are light grey."""
        if step.last:
            return to_pil(self.tokenizer.decode(step.ids_BN, grid))
        decoded = self.tokenizer.decode(step.ids_BN, grid, known_BN=step.known_BN)
        stride = self.tokenizer.config.stride
        known_B1hw = step.known_BN.reshape(-1, 1, *grid)
        known_B1HW = known_B1hw.repeat_interleave(stride, 2).repeat_interleave(stride, 3)
        return to_pil(torch.where(known_B1HW, decoded, UNKNOWN))


def choose_device(device: str | torch.device) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise InputError(f"device is {device!r}; expected auto, cpu, cuda or cuda:0") from None
    require(
        chosen.type != "cuda" or torch.cuda.is_available(),
        f"device is {device!r}, but torch sees no GPU; use --device cpu",
    )
    return chosen


def _dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    require(dtype in known, f"dtype is {dtype!r}; expected auto, {', '.join(known)}")
    return known[dtype]
