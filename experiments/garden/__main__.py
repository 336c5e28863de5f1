"""`python -m experiments.garden VERB ...`, from the root of the repository."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Sequence

from arpg.errors import InputError

# Verb: module and function, and what it does. Only the module of the chosen verb is imported.
VERBS = {
    "compose": ("scene_sets:compose", "compose captioned scenes as tokens for `arpg train`"),
    "train-detector": ("detector:main", "train the detector of evaluate-text"),
    "evaluate-text": ("geneval:main", "score a text model with GenEval's tasks"),
    "train-depth": ("depth_net:main", "train the depth network of evaluate-control"),
    "evaluate-control": ("control_score:main", "score how far images follow edges and depth"),
    "text-model": ("text_model:main", "make garden-text: scenes, detector, training, score"),
    "text-settings": ("text_model:compare_settings", "score garden-text under several sampling settings"),
    "control-model": ("control_model:main", "make garden-control: tokens, scorers, training, score"),
    "text-gallery": ("gallery:text", "the images of prompts in the documentation"),
    "control-gallery": ("gallery:control", "the images of control in the documentation"),
    "model-card": ("measurements.model_card:main", "the numbers of garden's model card"),
    "ablations": ("measurements.ablations:main", "measure the paper's ablations on garden"),
    "order-bits": ("measurements.ablations:order_bits", "measure bits per token in each order"),
    "ablation-report": ("measurements.ablation_report:main", "tables and figures of the ablations"),
    "zero-shot": ("measurements.zero_shot:main", "measure inpainting, edits, classification, expansion"),
    "exact": ("measurements.exact:main", "measure exact and speculative decoding"),
    "metric-truths": ("measurements.metric_truths:main", "check metrics on images that are known to be worse"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a verb; an error of the user is one line and exit code 2."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        lines = [f"  {verb:<17}{about}" for verb, (_, about) in VERBS.items()]
        sys.stdout.write("usage: python -m experiments.garden VERB ...\n\n" + "\n".join(lines) + "\n")
        return 0
    if arguments[0] not in VERBS:
        sys.stderr.write(f"garden: unknown verb {arguments[0]!r}; expected one of {', '.join(VERBS)}\n")
        return 2
    handler = logging.StreamHandler(sys.stdout)
    logging.getLogger().addHandler(handler)
    for name in ("garden", "experiments", "arpg"):
        logging.getLogger(name).setLevel(logging.INFO)
    module, function = VERBS[arguments[0]][0].split(":")
    try:
        getattr(importlib.import_module(f"experiments.garden.{module}"), function)(arguments[1:])
    except InputError as error:
        sys.stderr.write("garden: " + " ".join(str(error).split()) + "\n")
        return 2
    except KeyboardInterrupt:
        if os.environ.get("ARPG_DEBUG"):
            raise
        sys.stderr.write("garden: interrupted\n")
        return 130
    finally:
        logging.getLogger().removeHandler(handler)
    return 0


if __name__ == "__main__":
    sys.exit(main())
