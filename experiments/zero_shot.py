r"""Zero-shot tasks measured: inpainting, outpainting, class edits, classification, resolution expansion.

    python -m experiments.meadow zero-shot --model results/model --classifier experiments/meadow/classifier \
        --inception weights/inception.safetensors --out results/zero-shot --minutes 9

Each part is written to zero-shot.json (and as tables to zero-shot.md) when it is finished; run it again to do what is
missing, or choose with --parts. The classifier is trained on the real training split if its folder does not exist yet.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from arpg import make_plan, tasks
from arpg.data.crops import center_crops
from arpg.decode.likelihood import make_orders, token_bits
from arpg.evaluation.metrics import KernelDistance, kernel_distance
from arpg.evaluation.sample import json_settings
from arpg.image import Pixels, to_images, to_uint8
from arpg.model import class_condition
from arpg.settings import EXPAND_METHODS, SamplingSettings
from arpg.tasks.stages import Box, Canvas, Mask, box_mask, expand_stage
from arpg.tasks.task import ImageTask, TaskSpec
from arpg.tokenizer import PixelCodec
from experiments.photo_measures import PhotoMeasures, Row, mean, measure_parser, measure_parts, share
from experiments.photos import Labels, evenly_spaced
from experiments.scorer_training import predict

log = logging.getLogger("experiments")
PARTS = ("inpaint", "outpaint", "edit", "classify", "expand")
SHOWN = 8  # examples on a sheet
GUIDANCES = (1.0, 2.0, 3.0, 5.0, 8.0)  # of the edits


def middle(size: int, part: float) -> Box:
    """Return the box in the middle of a square image with this part of its side."""
    side = round(part * size)
    start = (size - side) // 2
    return start, start, start + side, start + side


class ZeroShot(PhotoMeasures):
    """The parts of the measurement."""

    def known(self, mask: Mask) -> Tensor:
        """Return which tokens of an image are known when a mask is to be filled."""
        stride, grid = self.pipe.tokenizer.config.stride, self.pipe.model.config.grid
        return torch.from_numpy(Canvas.fit(Image.new("RGB", mask.shape[::-1]), mask, grid=grid, stride=stride).known())

    @torch.no_grad()
    def fill(
        self, pixels: Pixels, labels: Labels | None, mask: Mask, settings: SamplingSettings, seen: Pixels | None = None
    ) -> Pixels:
        """Return every image with its mask filled and the pixels outside unchanged; image i has seed i.

        `seen`: what the tokenizer encodes, where that is not the images themselves.
        """
        tokenizer, parts = self.pipe.tokenizer, []
        known_N = self.known(mask)
        for start in range(0, len(pixels), self.batch):
            some = slice(start, min(start + self.batch, len(pixels)))
            ids_BN = tokenizer.encode(to_images((pixels if seen is None else seen)[some], tokenizer.device))
            chosen = None if labels is None else labels[some].tolist()
            seeds = range(some.start, some.stop)
            request = tasks.fill(self.pipe.model, chosen, seeds, ids_N=ids_BN, known_N=known_N)
            plan = make_plan(request.grid, request.known_BN, request.seeds, settings)
            for step in self.pipe.engine.decode(request, plan, settings):
                made_BN = step.ids_BN
            assert torch.equal(made_BN.cpu()[:, known_N], ids_BN.cpu()[:, known_N])
            parts.append(within(pixels[some], to_uint8(tokenizer.decode(made_BN, request.grid)).cpu().numpy(), mask))
        return np.concatenate(parts)

    def inpaint(self) -> Row:
        """Inpaint the middle of every test image: half the side, a quarter of the tokens.

        The tokens around the hole are those of the whole image; one row encodes the image without its middle.
        """
        box = middle(self.size, 0.5)
        return {"box": box} | self._filled("inpaint", box_mask((self.size, self.size), box), box)

    def outpaint(self) -> Row:
        """Extend the middle of every test image to the whole: three quarters of the tokens are generated.

        As the pipeline does, the tokenizer encodes the middle with its border repeated.
        """
        box = middle(self.size, 0.5)
        return {"box": box} | self._filled("outpaint", ~box_mask((self.size, self.size), box), None)

    def _filled(self, name: str, mask: Mask, box: Box | None) -> Row:
        (pixels, labels), settings = self.test, self.pipe.sampling.settings()
        causal = dataclasses.replace(settings, attention="causal")
        colour = np.broadcast_to(pixels[:, ~mask].mean(1).round().astype(np.uint8)[:, None, None], pixels.shape)
        blank = within(pixels, colour, mask) if box is not None else repeat_border(pixels, middle(self.size, 0.5))
        seen = None if box is not None else blank
        fills: dict[str, Callable[[], Pixels]] = {
            "the originals": lambda: pixels,
            "the tokenizer alone": lambda: within(pixels, self.reconstruct(pixels), mask),
            "mean colour of the rest": lambda: within(pixels, colour, mask),
            "no class, block-wise": lambda: self.fill(pixels, None, mask, settings, seen),
            "its class, block-wise": lambda: self.fill(pixels, labels, mask, settings, seen),
            "its class, causal": lambda: self.fill(pixels, labels, mask, causal, seen),
        }
        if box is not None:
            fills["its class, block-wise, encoded without the box"] = partial(
                self.fill, pixels, labels, mask, settings, blank
            )
        else:
            fills["its border repeated"] = lambda: blank
        shown = evenly_spaced(len(pixels), SHOWN)
        sheet_rows, rows, real = [pixels[shown], blank[shown]], {}, self.features(pixels)
        for row, make in fills.items():
            began = time.perf_counter()
            made = make()
            kid = halves_distance(self.features(made), real)
            rows[row] = mean("LPIPS", self.distances(made, pixels))
            if box is not None:
                left, top, right, bottom = box
                parts = (x[:, top:bottom, left:right].copy() for x in (made, pixels))
                rows[row] |= mean("LPIPS of the box", self.distances(*parts))
            rows[row] |= {"KID x 1000": 1000 * kid.mean, "KID std x 1000": 1000 * kid.std}
            rows[row] |= share("recognised", predict(self.classifier, made) == labels)
            rows[row] |= {"seconds": time.perf_counter() - began}
            log.info("%s, %s: %s", name, row, rows[row])
            sheet_rows.append(made[shown])
        self.save_sheet(name, sheet_rows)
        return {"images": len(pixels), "settings": json_settings(settings), "rows": rows}

    def edit(self) -> Row:
        """Edit a box of 80 % of the side to another class, and classify the result."""
        chosen = evenly_spaced(len(self.test[0]), self.options.edits)
        pixels, old = self.test[0][chosen], self.test[1][chosen]
        known = np.unique(self.test[1])  # classes with photographs; all of them but in a trial run
        shift = np.random.default_rng(0).integers(1, max(2, len(known)), len(old))
        new = known[(np.searchsorted(known, old) + shift) % len(known)]
        box, base = middle(self.size, 0.8), self.pipe.sampling.settings()
        mask, shown = box_mask((self.size, self.size), box), evenly_spaced(len(pixels), SHOWN)
        rows: dict[str, Row] = {}
        sheet_rows = [pixels[shown]]
        for guidance in sorted({*GUIDANCES, base.guidance}):
            made = self.fill(pixels, new, mask, dataclasses.replace(base, guidance=guidance))
            variants = {f"guidance {guidance:g}": made}
            if guidance == base.guidance:
                soft = [self._feathered(a, b, mask, feather=3) for a, b in zip(pixels, made, strict=True)]
                variants[f"guidance {guidance:g}, feather 3"] = np.stack(soft)
                sheet_rows.append(made[shown])
            for name, edited in variants.items():
                seen = predict(self.classifier, edited)
                rows[name] = self.shares("seen as the new class", seen == new, new)
                rows[name] |= share("still seen as the old class", seen == old)
                log.info("edit, %s: %s", name, rows[name])
        self.save_sheet("edit", sheet_rows)
        return {"edits": len(pixels), "box": box, "settings": json_settings(base), "rows": rows}

    @torch.no_grad()
    def classify(self) -> Row:
        """Classify by the likelihood of the tokens under each class, in one random order, while time allows."""
        (pixels, labels), options = self.test, self.options
        model, tokenizer, num_classes = self.pipe.model, self.pipe.tokenizer, len(self.pipe.classes)
        order = np.random.default_rng(0).permutation(len(pixels))[: options.classify_images]
        order_N = make_orders("random", model.config.grid, range(1))
        condition = class_condition(model, torch.arange(num_classes))
        found: list[int] = []
        began = time.perf_counter()
        for start in range(0, len(order), self.batch):
            ids_BN = tokenizer.encode(to_images(pixels[order[start : start + self.batch]], tokenizer.device))
            for ids_N in ids_BN:
                bits = token_bits(model, ids_N.expand(num_classes, -1), condition, order_N.expand(num_classes, -1))
                found.append(int(bits.mean(1).argmin()))
                if time.perf_counter() - began > options.classify_seconds:
                    break
            if len(found) < min(start + self.batch, len(order)):
                break
        done = order[: len(found)]
        seen = {"likelihood": np.asarray(found), "classifier": predict(self.classifier, pixels[done])}
        rows = {name: self.shares("right", ids == labels[done], labels[done]) for name, ids in seen.items()}
        return {"images": len(done), "of": len(pixels), "seconds": time.perf_counter() - began, "rows": rows}

    def expand(self) -> Row:
        """Expand to twice the side by all methods. Real images of that size are those of `--large-data`."""
        size = 2 * self.size
        pixels, labels = self.test
        chosen = evenly_spaced(len(pixels), self.options.expand_images)
        small = [Image.fromarray(pixels[i]) for i in chosen]
        # Real images are those that no result is made from (in a trial run with few images, the same).
        others = np.setdiff1d(np.arange(len(pixels)), chosen) if len(pixels) > 2 * len(chosen) else chosen
        large = self.images("test", self.options.large_data)
        real = center_crops(large.only(others.tolist()), size)
        given = np.stack([np.asarray(image.resize((size, size), Image.Resampling.BICUBIC)) for image in small])
        real_features, wanted = self.features(real), labels[chosen]

        def expanded(method: str, guidance: float) -> Pixels:
            window, stride = self.pipe.model.config.grid, self.pipe.tokenizer.config.stride
            shape = (self.size, self.size)
            stage = expand_stage(shape, (size, size), window=window, stride=stride, method=method)
            settings = self.pipe.sampling.settings(guidance=guidance)
            spec = TaskSpec(tuple(wanted.tolist()), settings, batch_size=max(1, self.batch // 4))
            task = ImageTask(self.pipe.engine, PixelCodec(self.pipe.tokenizer), spec, stages=[stage], images=small)
            return np.stack([np.asarray(image) for image in task.run()])

        methods: dict[str, Callable[[], Pixels]] = {
            "bicubic": lambda: given,
            "bicubic through the tokenizer": lambda: self.reconstruct(given),
        }
        for method in EXPAND_METHODS:
            for guidance in sorted({1.0, self.pipe.sampling.settings().guidance}):
                methods[f"{method}, guidance {guidance:g}"] = partial(expanded, method, guidance)
        shown = evenly_spaced(len(small), SHOWN)
        sheet_rows, rows = [], {}
        for name, make in methods.items():
            began = time.perf_counter()
            made = make()
            kid = kernel_distance(self.features(made), real_features)
            rows[name] = {"KID x 1000": 1000 * kid.mean, "KID std x 1000": 1000 * kid.std}
            rows[name] |= mean("LPIPS to the enlarged input", self.distances(made, given))
            rows[name] |= share("recognised", predict(self.classifier, halved(made)) == wanted)
            rows[name] |= {"detail": detail(made), "seconds": time.perf_counter() - began}
            log.info("expand, %s: %s", name, rows[name])
            sheet_rows.append(made[shown])
        self.save_sheet("expand", sheet_rows)
        side = large.read(0).size
        about = {"images": len(small), "real images": len(real), "their pixels before": side, "size": [size, size]}
        return about | {"detail of real images": detail(real), "rows": rows}

    def _feathered(self, before: Pixels, after: Pixels, mask: Mask, *, feather: int) -> Pixels:
        stride, grid = self.pipe.tokenizer.config.stride, self.pipe.model.config.grid
        canvas = Canvas.fit(Image.fromarray(before), mask, grid=grid, stride=stride)
        soft = np.asarray(canvas.paste(Image.fromarray(after), feather=feather))
        assert np.array_equal(soft[~mask], before[~mask])
        return soft


def halves_distance(a_MF: Tensor, b_MF: Tensor) -> KernelDistance:
    """Return KID of images made from real ones to the real ones, never of an image to its own original.

    That would make the unbiased estimate too small: even images are compared with odd originals, and odd with even.
    """
    one, two = kernel_distance(a_MF[::2], b_MF[1::2]), kernel_distance(a_MF[1::2], b_MF[::2])
    return KernelDistance((one.mean + two.mean) / 2, (one.std + two.std) / 2, one.subsets + two.subsets, one.size)


def within(pixels: Pixels, made: Pixels, mask: Mask) -> Pixels:
    """Return `pixels` with those of `made` where the mask is set."""
    return np.where(mask[..., None], made, pixels)


def repeat_border(pixels: Pixels, box: Box) -> Pixels:
    """Return images with all but a box replaced by the border of the box, as `Canvas.extend` does."""
    left, top, right, bottom = box
    height, width = pixels.shape[1:3]
    sides = ((0, 0), (top, height - bottom), (left, width - right), (0, 0))
    return np.pad(pixels[:, top:bottom, left:right], sides, mode="edge")


def halved(pixels: Pixels) -> Pixels:
    """Return images of half the side."""
    size = (pixels.shape[2] // 2, pixels.shape[1] // 2)
    return np.stack([np.asarray(Image.fromarray(each).resize(size, Image.Resampling.BOX)) for each in pixels])


def detail(pixels: Pixels) -> float:
    """Return what halving and enlarging loses, root mean square, of 255: detail that a small image cannot have."""
    n, high, wide, _ = pixels.shape
    exact = pixels.astype(np.float32)
    blocks = exact.reshape(n, high // 2, 2, wide // 2, 2, 3).mean((2, 4), keepdims=True)
    lost = exact.reshape(n, high // 2, 2, wide // 2, 2, 3) - blocks
    return float(np.sqrt(np.square(lost).mean()))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure inpainting, outpainting, class edits, classification and resolution expansion."""
    began = time.monotonic()
    parser = measure_parser("zero-shot", main.__doc__, PARTS)
    parser.add_argument("--edits", type=int, default=300)
    parser.add_argument("--classify-images", type=int, help="Default: as many as --classify-seconds allow.")
    parser.add_argument("--classify-seconds", type=float, default=40.0)
    parser.add_argument("--expand-images", type=int, default=1000)
    parser.add_argument(
        "--large-data", type=Path, help="The set in larger pixels, for expansion; default: that of --data, enlarged."
    )
    options = parser.parse_args(arguments)
    measure_parts("zero-shot", ZeroShot.open(options), options, began)
