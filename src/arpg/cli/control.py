"""`arpg control`: a picture that follows a condition image."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from arpg.cli.drawing import Output, draws
from arpg.cli.generate import ClassOption, NegativeOption, NumOption, PromptOption
from arpg.cli.sampling import Sampling
from arpg.errors import require
from arpg.image import open_image
from arpg.tasks.control_input import ControlInput


@draws
def control(
    image: Annotated[Path | None, typer.Argument(help="The condition image; with --from-image, a picture.")] = None,
    from_image: Annotated[
        bool, typer.Option("--from-image", help="Take the condition from the picture: its edges or its depth.")
    ] = False,
    depth_model: Annotated[
        str | None, typer.Option(help="What estimates depth: an .onnx file, or a model of transformers. [FastDepth]")
    ] = None,
    class_: ClassOption = None,
    prompt: PromptOption = None,
    negative: NegativeOption = None,
    num: NumOption = 1,
    *,
    output: Output,
    sampling: Sampling,
) -> None:
    """Draw what follows the edges or the depth of a condition image (IMAGE or --condition)."""
    given = output.options.pop("control", None)
    require((image is None) == (given is not None), "give an image or --condition, one of them; see --help")
    require(
        image is not None or not from_image, "--from-image needs a picture; give it instead of --condition, before it"
    )
    picture = None if image is None else open_image(image)
    sampling = sampling.asked(prompts=prompt is not None, control=True)
    pipe = sampling.load()
    if picture is not None and from_image:
        given = pipe.extract_control(picture, output.kind, output.strength, depth=depth_model)
    elif picture is not None:
        given = ControlInput(picture, output.kind, output.strength)
    drawing = pipe.generate_task(
        class_,
        prompt=prompt,
        negative=negative,
        control=given,
        num_images=num,
        seed=sampling.seed,
        **output.options,
        **sampling.settings,
    )
    name = "control" if image is None else image.stem
    about = {"task": "control", "from_image": from_image, **({"image": image.name} if image else {})}
    output.draw(drawing, pipe=pipe, sampling=sampling, about=about, names=[name] * num)
