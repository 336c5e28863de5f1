"""`arpg train-detector` and `arpg evaluate-text`: the judge, and what it says of a model that takes prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from arpg.cli.options import DeviceOption, SamplingOptions, out, progress_bar, with_sampling_options
from arpg.errors import require

FruitsOption = Annotated[str, typer.Option(help="The fruit set: class folders on white.")]
EmojiOption = Annotated[str, typer.Option(help="The emoji set, with its captions.json.")]


def train_detector(
    fruits: FruitsOption,
    emoji: EmojiOption,
    folder: Annotated[Path, typer.Option("--out", "-o", help="The folder of the detector.")],
    num: Annotated[int, typer.Option("--num", "-n", help="Scenes to train on.")] = 60000,
    steps: Annotated[int, typer.Option(help="Of training.")] = 6000,
    batch_size: Annotated[int, typer.Option(help="Scenes of a step.")] = 256,
    width: Annotated[int, typer.Option(help="Channels of the first level.")] = 32,
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", "-t", help="Half of the scenes as this one gives them back.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the scenes and of the training.")] = 0,
    processes: Annotated[int | None, typer.Option(help="That draw; 0: this one. Not given: one for each core.")] = None,
    device: DeviceOption = "auto",
) -> None:
    """Train the judge of `arpg evaluate-text` on composed scenes."""
    import os

    from arpg.data.catalogue import KINDS, TINTS
    from arpg.evaluation.detector import DetectorConfig
    from arpg.evaluation.detector_scenes import draw_scenes, through_tokenizer
    from arpg.evaluation.detector_training import calibrate
    from arpg.evaluation.detector_training import train_detector as run
    from arpg.pipeline import choose_device

    chosen = choose_device(device)
    config = DetectorConfig(tuple(KINDS), tuple(TINTS), width)
    with progress_bar() as progress:
        task = progress.add_task("composing", total=num)

        def told(done: int) -> None:
            progress.update(task, completed=done)

        count = len(os.sched_getaffinity(0)) if processes is None else processes
        scenes = draw_scenes((fruits, emoji), config, num=num, seed=seed, processes=count, progress=told)
        if tokenizer is not None:
            scenes = through_tokenizer(scenes, tokenizer, device=chosen)
        task = progress.add_task("training", total=steps)

        def trained(done: int, loss: float) -> None:
            progress.update(task, completed=done, description=f"training, loss {loss:.3f}")

        detector = run(scenes, config, steps=steps, batch_size=batch_size, device=chosen, seed=seed, progress=trained)
        fresh = draw_scenes((fruits, emoji), config, num=max(8, num // 40), seed=seed + 1)
        detector = calibrate(detector, fresh)
    detector.save(folder)
    out.print(f"wrote {folder}")


@with_sampling_options
def evaluate_text(
    folder: Annotated[Path, typer.Option("--out", "-o", help="Where the images go, in GenEval's layout.")],
    detector: Annotated[Path | None, typer.Option(help="The judge's folder; none: only draw.")] = None,
    fruits: Annotated[str | None, typer.Option(help="The fruit set, for the ceiling; views not trained on.")] = None,
    emoji: Annotated[str | None, typer.Option(help="The emoji set, for the ceiling.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="GenEval's evaluation_metadata.jsonl; none: our held-out combinations.")
    ] = None,
    per_task: Annotated[int, typer.Option(help="Prompts of each of the six tasks.")] = 60,
    images: Annotated[int, typer.Option(help="Of each prompt.")] = 4,
    batch_size: Annotated[int, typer.Option(help="Images decoded together; does not change them.")] = 64,
    json_: Annotated[Path | None, typer.Option("--json", help="Also write everything to this file.")] = None,
    *,
    sampling: SamplingOptions,
) -> None:
    """GenEval's six tasks: draw the prompts, and judge what was drawn against real scenes of the same prompts."""
    from arpg.data.composer import SIZE, Composer
    from arpg.evaluation.detector import Detector
    from arpg.evaluation.geneval import read_tasks
    from arpg.evaluation.text_score import ceiling, generate, held_out_questions, judge, read_pixels

    require((fruits is None) == (emoji is None), "the ceiling needs --fruits and --emoji, both or neither")
    require(fruits is None or detector is not None, "the ceiling needs a judge; give --detector")
    require(prompts is None or fruits is None, "the ceiling is of our own prompts; leave --fruits or --prompts out")
    questions = [] if prompts is not None else held_out_questions(per_task)
    tasks = [q.task for q in questions] if prompts is None else read_tasks(prompts)
    sampling = sampling.with_default_model(prompts=True)
    pipe = sampling.load()
    require(pipe.prompts is not None, f"{sampling.model} takes classes; expected a model that takes prompts")
    with progress_bar() as progress:
        task = progress.add_task("drawing", total=len(tasks) * images)
        paths = generate(
            pipe,
            tasks,
            folder,
            images=images,
            seed=sampling.seed,
            batch_size=batch_size,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
            **sampling.settings,
        )
    out.print(f"{len(paths)} images in {folder}/")
    if detector is None:
        return
    judged_by = Detector.load(detector, device=pipe.model.device)
    report: dict[str, Any] = {"score": judge(tasks, read_pixels(paths, SIZE), judged_by, images=images)}
    if fruits is not None and emoji is not None:
        report["ceiling"] = ceiling(questions, Composer(fruits, emoji), judged_by, images=images)
    for line in _table(report):
        out.print(line, markup=False)
    if json_ is not None:
        about = {"model": sampling.model, "detector": str(detector), "prompts": len(tasks), "images": images}
        about |= {"seed": sampling.seed, "settings": {k: v for k, v in sampling.settings.items() if v is not None}}
        json_.parent.mkdir(parents=True, exist_ok=True)
        json_.write_text(json.dumps(about | report, indent=1) + "\n", encoding="utf-8")
        out.print(f"wrote {json_}")


def _table(report: dict[str, Any]) -> list[str]:
    score, most = report["score"], report.get("ceiling")
    lines = [f"{'task':<16}{'score':>8}" + ("" if most is None else f"{'ceiling':>10}{'of it':>8}")]
    for name, value in score.items():
        ours = value if name == "overall" else value["accuracy"]
        line = f"{name:<16}{ours:>8.3f}"
        if most is not None:
            best = most[name] if name == "overall" else most[name]["accuracy"]
            line += f"{best:>10.3f}{ours / best if best else 0.0:>8.3f}"
        lines.append(line)
    return lines
