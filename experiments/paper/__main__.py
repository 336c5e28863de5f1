"""`python -m experiments.paper VERB ...`, from the root of the repository."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from experiments.verbs import run_verb

VERBS = {
    "reference": ("queue:reference_verb", "the statistics of the training photographs, once"),
    "designs": ("queue:designs_verb", "Table 5: how layers are divided, what is shared, positions"),
    "peers": ("queue:peers_verb", "Table 2: raster, interleaved, grouped and masked models on equal terms"),
    "scaling": ("queue:scaling_verb", "Figure 10: losses and FID of three sizes"),
    "steps": ("queue:steps_verb", "Table 8: speed and memory of L, XL, XXL by steps and attention"),
    "block-causal": ("queue:block_causal_verb", "block-wise against causal attention, paired"),
    "few-steps": ("queue:few_steps_verb", "the best settings for 8 to 24 steps"),
    "orders": ("queue:orders_verb", "a fine-tune on the orders that the model is surest of, before and after"),
    "guidance": ("queue:guidance_verb", "guidance as an input against guidance by a second pass"),
    "attention": ("queue:attention_verb", "Figures 3 and 11: attention maps, evenness over 1,000 images"),
    "surest-orders": ("orders:main", "the order that a model is surest of, for every image, as training orders"),
    "collect": ("queue:collect", "what a call sent back, into the results"),
    "send": ("queue:send", "the pieces that did not come back with the last call"),
    "report": ("report:main", "tables, figures and verdicts from the lines"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a verb; an error of the user is one line and exit code 2."""
    return run_verb("paper", VERBS, arguments)


if __name__ == "__main__":
    sys.exit(main())
