"""`arpg sweep`: what settings do to quality and speed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from arpg import config as configs
from arpg.cli.options import DeviceOption, EngineOption, PrecisionOption, err, out, with_axes
from arpg.cli.sample import LikeOption, choose_labels, image_progress
from arpg.errors import one_of, require
from arpg.image import check_writable
from arpg.settings import SamplingDefaults


@with_axes("steps", "guidance", "order", "schedule", "guidance_schedule", "attention", "temperature")
def sweep(
    reference: Annotated[
        list[str],
        typer.Option("--reference", "-r", help="Real images: folders or zips, as often as needed; or one npz."),
    ],
    output: Annotated[Path, typer.Option("--out", "-o", help="A folder for results, table and plots.")] = Path("sweep"),
    num: Annotated[int, typer.Option("--num", "-n", help="Images of each combination.")] = 1000,
    like: LikeOption = None,
    classifier: Annotated[Path | None, typer.Option(help="A folder with a classifier: adds its accuracy.")] = None,
    inception: Annotated[Path | None, typer.Option(help="Inception weights; none: those of the extra eval.")] = None,
    model: Annotated[
        str, typer.Option("--model", "-m", help="garden, a folder, a published name or a hub id.")
    ] = configs.DEFAULT_MODEL,
    batch_size: Annotated[int, typer.Option(help="Images decoded together.")] = 32,
    seed: Annotated[int, typer.Option(help="Image i has seed SEED + i.")] = 0,
    device: DeviceOption = "auto",
    dtype: PrecisionOption = "auto",
    engine: EngineOption = "auto",
    *,
    axes: dict[str, list[Any]],
) -> None:
    """Measure every combination of settings: FID, KID, precision, recall and images/s. Run it again to continue."""
    require(num >= 4, f"the number of images is {num}; expected 4 or more (FID wants thousands)")
    require(batch_size >= 1, f"batch_size is {batch_size}; expected 1 or more")
    one_of("engine", engine, configs.ENGINES)
    check_writable(output, folder=True)
    from arpg.data.images import concatenate, open_images
    from arpg.evaluation.sweep import combinations

    combinations(SamplingDefaults(), axes)  # bad settings fail before anything is loaded
    npz = reference[0].endswith(".npz") and len(reference) == 1
    images = None if npz else concatenate([open_images(path) for path in reference])
    with err.status("loading"):
        from arpg.device import set_threads
        from arpg.evaluation.classifier import Classifier
        from arpg.evaluation.inception import Inception
        from arpg.evaluation.measure import Judge, reference_features
        from arpg.evaluation.reference import read_features
        from arpg.evaluation.sweep import draw, table
        from arpg.evaluation.sweep import sweep as run
        from arpg.files import write_whole
        from arpg.pipeline import Pipeline

        set_threads()
        pipe = Pipeline.from_pretrained(model, device=device, dtype=dtype, engine=engine)
        network = Inception.load(inception, device=pipe.model.device)
        judged_by = None if classifier is None else Classifier.load(classifier, device=pipe.model.device)
    height, width = (side * pipe.tokenizer.config.stride for side in pipe.model.config.grid)
    require(height == width, f"the model draws {width}x{height} pixels; real images are cropped to squares only")
    combos = combinations(pipe.sampling, axes)
    labels = choose_labels(pipe, num, like)
    with image_progress("reference") as progress:
        if images is None:
            real = read_features(Path(reference[0]), network, keep=True, progress=progress)
        else:
            real = reference_features(network, images, height, keep=output, progress=progress)
    about: dict[str, Any] = {"reference": ", ".join(reference), "real images": real.n, "classes like": like}
    if classifier is not None:
        about["classifier"] = str(classifier)
    with image_progress(f"{len(combos)} combinations") as progress:
        lines = run(
            pipe,
            Judge(network, real, judged_by),
            output,
            combos=combos,
            labels=labels,
            about=about,
            seed=seed,
            batch_size=batch_size,
            progress=_over_all(progress, num, len(combos)),
        )
    text = table(lines)
    write_whole(output / "table.md", lambda path: path.write_text(text, encoding="utf-8"))
    draw(lines, output)
    out.print(text, markup=False)
    out.print(f"{len(lines)} combinations of {num} images in {output}/")


def _over_all(progress: Callable[[int, int], None], num: int, combos: int) -> Callable[[int, int], None]:
    """One bar over the images of all combinations that are left to do."""
    finished = 0

    def told(done: int, total: int) -> None:
        nonlocal finished
        progress(finished + done, num * combos)
        if done == total:
            finished += total

    return told
