"""`python -m experiments.garden VERB ...`, from the root of the repository."""

from __future__ import annotations

import sys
from functools import partial

from experiments.verbs import run_verb

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
    "model-card": ("/model_card:main", "the numbers of a model card"),
    "ablations": ("measurements.ablations:main", "measure the paper's ablations on garden"),
    "order-bits": ("measurements.ablations:order_bits", "measure bits per token in each order"),
    "ablation-report": ("measurements.ablation_report:main", "tables and figures of the ablations"),
    "zero-shot": ("/zero_shot:main", "measure inpainting, outpainting, edits, classification, expansion"),
    "exact": ("measurements.exact:main", "measure exact and speculative decoding"),
    "metric-truths": ("measurements.metric_truths:main", "check metrics on images that are known to be worse"),
}

main = partial(run_verb, "garden", VERBS)

if __name__ == "__main__":
    sys.exit(main())
