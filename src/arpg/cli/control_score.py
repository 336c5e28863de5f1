"""`arpg train-depth` and `arpg evaluate-control`: whether a model follows edges and depth."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from arpg.cli.options import DeviceOption, SamplingOptions, err, out, progress_bar, with_sampling_options
from arpg.cli.text_score import EmojiOption, FruitsOption
from arpg.errors import require
from arpg.image import check_writable


def train_depth(
    fruits: FruitsOption,
    emoji: EmojiOption,
    folder: Annotated[Path, typer.Option("--out", "-o", help="The folder of the judge.")],
    num: Annotated[int, typer.Option("--num", "-n", help="Scenes to train on.")] = 30000,
    steps: Annotated[int, typer.Option(help="Of training.")] = 3000,
    batch_size: Annotated[int, typer.Option(help="Scenes of a step.")] = 256,
    width: Annotated[int, typer.Option(help="Channels of the first level.")] = 32,
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", "-t", help="Half of the scenes as this one gives them back.")
    ] = None,
    fresh: Annotated[int, typer.Option(help="Scenes that it never saw, for its own error.")] = 1000,
    seed: Annotated[int, typer.Option(help="Of the scenes and of the training.")] = 0,
    processes: Annotated[int | None, typer.Option(help="That draw; 0: this one. Not given: one for each core.")] = None,
    device: DeviceOption = "auto",
) -> None:
    """Train the depth judge of `arpg evaluate-control` on composed scenes, and say how well it sees."""
    import os

    from arpg.evaluation.depth_judge import DepthJudgeConfig
    from arpg.evaluation.depth_training import depth_error, draw_depth_scenes, train_depth_judge
    from arpg.evaluation.detector_scenes import half_tokenized
    from arpg.pipeline import choose_device

    chosen, config = choose_device(device), DepthJudgeConfig(width)
    require(fresh >= 1, f"--fresh is {fresh}; expected 1 or more scenes")
    count = len(os.sched_getaffinity(0)) if processes is None else processes
    with progress_bar() as progress:
        task = progress.add_task("composing", total=num)

        def told(done: int) -> None:
            progress.update(task, completed=done)

        scenes = draw_depth_scenes((fruits, emoji), num=num, seed=seed, processes=count, progress=told)
        if tokenizer is not None:
            mixed = half_tokenized(scenes.pixels_nHW3, tokenizer, device=chosen)
            scenes = dataclasses.replace(scenes, pixels_nHW3=mixed)
        task = progress.add_task("training", total=steps)

        def trained(done: int, loss: float) -> None:
            progress.update(task, completed=done, description=f"training, loss {loss:.3f}")

        judge = train_depth_judge(
            scenes, config, steps=steps, batch_size=batch_size, device=chosen, seed=seed, progress=trained
        )
        unseen = draw_depth_scenes((fruits, emoji), num=fresh, seed=seed + 1, processes=min(count, fresh // 256))
    error = depth_error(judge, unseen)
    judge.save(folder)
    out.print(f"RMSE {error['rmse']:.4f} on {fresh} new scenes; seeing nothing gives {error['blank']:.4f}")
    out.print(f"wrote {folder}")


@with_sampling_options
def evaluate_control(
    folder: Annotated[Path, typer.Option("--out", "-o", help="Where conditions and images go; run again to go on.")],
    test: Annotated[list[str] | None, typer.Option(help="Class folders or zips of them: for edges.")] = None,
    train: Annotated[list[str] | None, typer.Option(help="Likewise: for the nearest image, and for FID.")] = None,
    num: Annotated[int, typer.Option("--num", "-n", help="Test images, evenly chosen.")] = 500,
    classifier: Annotated[Path | None, typer.Option(help="A folder with a classifier: adds its accuracy.")] = None,
    base: Annotated[str | None, typer.Option(help="A model without control that draws the same classes.")] = None,
    fid: Annotated[bool, typer.Option("--fid/--no-fid", help="Needs --train and Inception weights.")] = True,
    reference: Annotated[int, typer.Option(help="Images of --train, evenly chosen, for FID; 0: all.")] = 5000,
    inception: Annotated[Path | None, typer.Option(help="Inception weights; none: those of the extra eval.")] = None,
    depth_judge: Annotated[Path | None, typer.Option(help="The folder of `arpg train-depth`: for depth.")] = None,
    fruits: Annotated[str | None, typer.Option(help="The fruit set of the test scenes.")] = None,
    emoji: Annotated[str | None, typer.Option(help="The emoji set of the test scenes.")] = None,
    scenes: Annotated[int, typer.Option(help="Composed scenes, for depth.")] = 500,
    train_fruits: Annotated[str | None, typer.Option(help="The fruit set of training: for the nearest scene.")] = None,
    train_scenes: Annotated[int, typer.Option(help="Scenes among which the nearest is looked for.")] = 5000,
    batch_size: Annotated[int, typer.Option(help="Images decoded together; does not change them.")] = 64,
    json_: Annotated[Path | None, typer.Option("--json", help="Also write everything to this file.")] = None,
    *,
    sampling: SamplingOptions,
) -> None:
    """Edge F1, depth RMSE, class accuracy and FID of images that follow a condition, against what they must beat."""
    both = (fruits is not None, emoji is not None, depth_judge is not None)
    require(all(both) or not any(both), "depth needs --fruits, --emoji and --depth-judge, all or none of them")
    require(bool(test) or all(both), "there is nothing to evaluate; give --test for edges, --depth-judge for depth")
    require(reference >= 0, f"--reference is {reference}; expected 0 (all) or a number of images")
    require(batch_size >= 1, f"--batch-size is {batch_size}; expected 1 or more")
    check_writable(folder, folder=True)
    from arpg.data.images import concatenate, open_images
    from arpg.evaluation.classifier import Classifier
    from arpg.evaluation.control_images import choose_evenly
    from arpg.evaluation.control_pipeline import plain, side, steered
    from arpg.evaluation.control_score import Judges, compare, depth_score, edge_score, follows_nothing, table
    from arpg.evaluation.depth_judge import DepthJudge
    from arpg.evaluation.depth_training import depth_error, draw_depth_scenes
    from arpg.evaluation.inception import Inception
    from arpg.evaluation.measure import reference_features
    from arpg.evaluation.results import claim
    from arpg.evaluation.sampling import fingerprint
    from arpg.files import write_whole

    images = concatenate([open_images(path) for path in test]) if test else None
    training = concatenate([open_images(path) for path in train]) if train else None
    sampling = sampling.with_default_model(control=True)
    pipe = sampling.load()
    device = pipe.model.device
    size = side(pipe)
    settings = {name: value for name, value in sampling.settings.items() if value is not None}
    about: dict[str, Any] = {"model": fingerprint(pipe), "seed": sampling.seed, "settings": settings}
    about |= {"test": test, "images": num, "train": train, "base": base}
    about |= {"fruits": fruits, "emoji": emoji, "scenes": scenes, "train_fruits": train_fruits}
    claim(folder, about)
    generate = steered(pipe, settings)
    report: dict[str, Any] = {}
    with progress_bar() as bar:
        tasks: dict[str, Any] = {}

        def told(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done, total=total)

        if images is not None:
            require(bool(images.classes), f"{images.where} has no class folders; expected those of the model's classes")
            network = Inception.load(inception, device=device) if fid and training is not None else None
            real = None
            if network is not None and training is not None:
                some = choose_evenly(training.labels, min(reference or len(training), len(training)))
                told_of = partial(told, "reference")
                real = reference_features(network, training.only(some.tolist()), size, keep=folder, progress=told_of)
            judged_by = None if classifier is None else Classifier.load(classifier, device=device)
            class_ids = [pipe.classes.find(name) for name in images.classes]
            report["canny"] = edge_score(
                generate,
                images,
                class_ids,
                folder,
                size=size,
                num=num,
                training=training,
                tokenizer=pipe.tokenizer,
                judges=Judges(judged_by, network, real),
                base=None if base is None else plain(_load(sampling, base), settings),
                seed=sampling.seed,
                batch_size=batch_size,
                device=device,
                progress=told,
            )
        if fruits is not None and emoji is not None and depth_judge is not None:
            judge = DepthJudge.load(depth_judge, device=device)
            tests = draw_depth_scenes((fruits, emoji), num=scenes, seed=sampling.seed + 2026, size=size)
            others = None
            if train_fruits is not None:
                others = draw_depth_scenes((train_fruits, emoji), num=train_scenes, seed=sampling.seed, size=size)
            report["depth judge"] = depth_error(judge, tests)
            report["depth"] = depth_score(
                generate,
                tests,
                judge,
                folder,
                training=others,
                tokenizer=pipe.tokenizer,
                seed=sampling.seed,
                batch_size=batch_size,
                progress=told,
            )
    same = follows_nothing(generate, plain(pipe, settings), size=size, kind="canny" if test else "depth")
    report["strength 0 is no control"] = same
    report["compared"] = compare(report)
    for kind in ("canny", "depth"):
        if kind in report:
            out.print(table(report[kind], title=kind), markup=False)
    for name, value in report["compared"].items():
        out.print(f"{name}: {value:.3f}", markup=False)
    out.print(f"strength 0 is no control: {'yes' if same else 'NO'}")
    if json_ is not None:
        judges = {"classifier": classifier, "depth_judge": depth_judge, "inception": inception}
        about |= {"model": sampling.model, "reference": reference if fid and train else None}
        about |= {name: path and str(path) for name, path in judges.items()}
        text = json.dumps(about | report, indent=1) + "\n"
        write_whole(json_, lambda path: path.write_text(text, encoding="utf-8"))
        out.print(f"wrote {json_}")


def _load(sampling: SamplingOptions, name: str) -> Any:
    from arpg.pipeline import Pipeline

    with err.status(f"loading {name}"):
        return Pipeline.from_pretrained(name, device=sampling.device, dtype=sampling.dtype, engine=sampling.engine)
