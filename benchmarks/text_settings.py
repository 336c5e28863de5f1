"""Which sampling settings suit `garden-text`: its score under some of them, on other prompts than those of the score.

    python benchmarks/text_settings.py --detector runs/judge --out benchmarks/results/text-settings.json
    python benchmarks/text_settings.py --detector runs/judge --only "halton, constant 4" --out ...

The prompts have held-out combinations, too, but none of them is among those of `arpg evaluate-text`, so that what is
chosen here is not chosen by what it is judged by. 20 prompts of each task, two images each: differences below 0.05
mean little. What is in --out already is not measured again.
"""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np

from arpg import Pipeline
from arpg.evaluation.detector import Detector
from arpg.evaluation.geneval import TASKS, Task
from arpg.evaluation.text_score import held_out_questions, judge
from arpg.files import write_whole

log = logging.getLogger("text-settings")
IMAGES, BATCH = 2, 60
SETTINGS: dict[str, dict[str, Any]] = {
    "random, linear 6": {"order": "random", "guidance_schedule": "linear", "guidance": 6.0},
    "random, linear 10": {"order": "random", "guidance_schedule": "linear", "guidance": 10.0},
    "random, linear 6, 48 steps": {"order": "random", "guidance_schedule": "linear", "guidance": 6.0, "steps": 48},
    "random, constant 4": {"order": "random", "guidance_schedule": "constant", "guidance": 4.0},
    "halton, linear 6": {"order": "halton", "guidance_schedule": "linear", "guidance": 6.0},
    "halton, constant 3": {"order": "halton", "guidance_schedule": "constant", "guidance": 3.0},
    "halton, constant 4": {"order": "halton", "guidance_schedule": "constant", "guidance": 4.0},
    "halton, constant 5.5": {"order": "halton", "guidance_schedule": "constant", "guidance": 5.5},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="garden-text")
    parser.add_argument("--detector", type=Path, required=True, help="The judge's folder (`arpg train-detector`).")
    parser.add_argument("--only", nargs="*", default=list(SETTINGS), choices=SETTINGS)
    parser.add_argument("--per-task", type=int, default=20)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    pipe, detector = Pipeline.from_pretrained(options.model, device="cpu"), Detector.load(options.detector)
    tasks = other_tasks(options.per_task)
    found = json.loads(options.out.read_text()) if options.out.exists() else {}
    for name in (name for name in options.only if name not in found):
        found[name] = score(pipe, detector, tasks, SETTINGS[name])
        log.info("%-28s %.3f  %s", name, found[name]["overall"], found[name])
        text = json.dumps(found, indent=1) + "\n"
        write_whole(options.out, lambda path, text=text: path.write_text(text))


def other_tasks(per_task: int) -> list[Task]:
    """Prompts with held-out combinations that are not those of the score."""
    judged = {question.task.prompt for question in held_out_questions()}
    others = [question.task for question in held_out_questions(60 + 2 * per_task)]
    return [
        task
        for tag in TASKS
        for task in [task for task in others if task.tag == tag and task.prompt not in judged][:per_task]
    ]


def score(pipe: Pipeline, detector: Detector, tasks: list[Task], settings: dict[str, Any]) -> dict[str, float]:
    prompts = [task.prompt for task in tasks for _ in range(IMAGES)]
    pixels = [
        np.asarray(image)
        for start in range(0, len(prompts), BATCH)
        for image in pipe.generate(
            prompt=prompts[start : start + BATCH],
            seed=list(range(start, min(start + BATCH, len(prompts)))),
            **{"steps": 24, **settings},
        )
    ]
    report = judge(tasks, np.stack(pixels), detector, images=IMAGES)
    return {tag: round(report[tag]["accuracy"], 4) for tag in TASKS} | {"overall": round(report["overall"], 4)}


if __name__ == "__main__":
    main()
