"""`python -m experiments.paper VERB ...`, from the root of the repository."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from experiments.verbs import run_verb

VERBS = {
    "reference": ("queue:measure_table reference", "the statistics of the training photographs, once"),
    "designs": ("queue:measure_table designs", "Table 5: how layers are divided, what is shared, positions"),
    "peers": ("queue:measure_table peers", "Table 2: raster, interleaved, grouped and masked models on equal terms"),
    "scaling": ("queue:measure_table scaling", "Figure 10: losses and FID of three sizes"),
    "steps": ("queue:measure_table steps", "Table 8: speed and memory of L, XL, XXL by steps and attention"),
    "block-causal": ("queue:measure_table block-causal", "block-wise against causal attention, paired"),
    "few-steps": ("queue:measure_table few-steps", "the best settings for 8 to 24 steps"),
    "defaults": ("queue:write_defaults", "what few-steps found best, as the defaults of a model folder"),
    "orders": (
        "queue:measure_table orders",
        "a fine-tune on the orders that the model is surest of, against random orders",
    ),
    "guidance": ("queue:measure_table guidance", "guidance as an input against guidance by a second pass"),
    "attention": ("queue:measure_table attention", "Figures 3 and 11: attention maps, evenness over 1,000 images"),
    "surest-orders": ("orders:main", "the order that a model is surest of, for every image, as training orders"),
    "collect": ("queue:collect", "lines and figures that came back, into the results"),
    "report": ("report:main", "tables, figures and verdicts from the lines"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a verb; an error of the user is one line and exit code 2."""
    return run_verb("paper", VERBS, arguments)


if __name__ == "__main__":
    sys.exit(main())
