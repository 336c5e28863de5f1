"""`python -m experiments.meadow VERB ...`, from the root of the repository."""

from __future__ import annotations

import sys
from functools import partial

from experiments.verbs import run_verb

VERBS = {
    "build-data": ("build_data:main", "build the photographs from mirrors of public repositories"),
    "pack": ("training:pack", "write a folder as pieces that a call can carry"),
    "unpack": ("training:unpack", "join such pieces"),
    "tokenize": ("training:tokenize", "encode both splits"),
    "pack-tokens": ("training:pack_token_set", "write a token set in 13 bits per token"),
    "unpack-tokens": ("training:unpack_token_set", "write it back"),
    "model-card": ("/model_card:main", "the numbers of the model card and a sheet of all classes"),
    "zero-shot": ("/zero_shot:main", "measure inpainting, outpainting, edits, classification, expansion"),
    "control-score": ("/control_photos:main", "score how far photographs follow edges and depth, and their FID"),
    "gallery": ("/zero_shot_gallery:main", "pictures of the zero-shot tasks and of control, by seed"),
    "search-settings": ("/settings_search:main", "the best sampling settings, searched by halves"),
    "bundle": ("bundle:main", "the folder that is bundled: weights, and the card written from the records"),
    "train": ("training:train", "train for some minutes; resume; return the weights so far"),
}

main = partial(run_verb, "meadow", VERBS)

if __name__ == "__main__":
    sys.exit(main())
