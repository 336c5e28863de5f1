r"""The score of garden-control: edges as in `experiments/control_photos.py`, depth of composed scenes.

    python -m experiments.garden evaluate-control --model garden-control --base garden --classifier runs/classifier \
        --depth-net runs/depth-net --out runs/control-score

The exact depth of composed scenes is the condition, without a class. A network that was trained on other scenes
(`train-depth`) estimates the depth of what is generated.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from arpg.errors import present
from arpg.image import Pixels
from experiments.control_images import Grey, Labels, nearest_by_depth, rmse, to_depth
from experiments.control_photos import Conditions, ControlScore, control_parser, score_control
from experiments.garden.depth_net import DepthNet, compose_depth_scenes, depth_error
from experiments.garden.scene_sets import Sets, num_processes
from experiments.photo_measures import Row, mean

SCENE_SEED = 2026  # the test scenes are those of this seed + --seed


def scene_sources(data: Path, split: str) -> Sets:
    """Return the fruit and emoji sets that scenes of a split are composed of."""
    return f"{data}/fruits.zip/fruits/{split}", f"{data}/emoji.zip/emoji"


class GardenControlScore(ControlScore):
    """Edges of photographs, depth of composed scenes."""

    def depth(self) -> Row:
        """Score the depth of composed scenes; the row of the scenes is the error of the network alone."""
        options = self.options
        net = DepthNet.load(options.depth_net, device=self.pipe.model.device)
        seed = SCENE_SEED + options.seed
        scenes = compose_depth_scenes(scene_sources(self.data, "test"), num=options.num, seed=seed, size=self.size)

        def follows(made: Pixels, index: Labels) -> Row:
            return mean("RMSE", rmse(net.estimate(made), to_depth(scenes.near_nHW[index])))

        def nearest(wanted: Grey) -> Pixels:
            sets, num = scene_sources(self.data, "train"), options.train_scenes
            others = compose_depth_scenes(
                sets, num=num, seed=options.seed, size=self.size, processes=num_processes(num)
            )
            return others.pixels_nHW3[nearest_by_depth(wanted, others.near_nHW)]

        tests = Conditions(
            "depth", scenes.near_nHW, scenes.pixels_nHW3, None, follows, nearest, real="scenes themselves"
        )
        return {"depth network": depth_error(net, scenes)} | self.score(tests)


def main(arguments: Sequence[str] | None = None) -> None:
    """Score edges, depth, classes and FID of garden's images that follow a condition image."""
    parser = control_parser("evaluate-control", main.__doc__)
    parser.set_defaults(set="garden", num=500, seed=0, reference=5000, batch_size=64, depth_model=None)
    parser.add_argument("--depth-net", type=Path, help="The folder of `train-depth`, for depth.")
    parser.add_argument("--train-scenes", type=int, default=5000, help="Scenes among which the nearest is looked for.")
    options = parser.parse_args(arguments)
    if "depth" in options.parts:
        present(options.depth_net, "depth needs --depth-net; `train-depth` trains it, --parts canny leaves depth out")
    score_control(GardenControlScore, options)
