"""Several token sets as one: of different kinds of condition images, with classes and without."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from arpg.data.tokens import NO_CLASS, TokenSet
from arpg.errors import require


def join_tokens(sets: Sequence[TokenSet]) -> TokenSet:
    """Several sets of one tokenizer as one. Those without classes stand beside one with classes as the null class.

    What is told apart by its condition image alone needs no class: it is learned as if the class was dropped.
    """
    if len(sets) == 1:
        return sets[0]
    first = next((tokens for tokens in sets if tokens.classes), sets[0])
    for tokens in sets:
        where = f"{tokens.folder} cannot stand beside {first.folder}"
        for name in ("grid", "vocab_size"):
            ours, theirs = getattr(tokens, name), getattr(first, name)
            require(ours == theirs, f"{where}: {name} is {ours}, not {theirs}; use the tokenizer that made them")
        require(tokens.classes in ((), first.classes), f"{where}: it has other classes; tokenize the images together")
        require(bool(tokens.controls) == bool(first.controls), f"{where}: only one of them has condition images")
    info = replace(first.info, views=max(tokens.views for tokens in sets), captioned=False)
    return TokenSet(
        info,
        [ids for tokens in sets for ids in tokens._ids],
        np.concatenate(
            [t.labels if t.classes or not first.classes else np.full(len(t), NO_CLASS, np.int32) for t in sets]
        ),
        folder=first.folder,
        views_of=np.concatenate([tokens.views_of for tokens in sets]),
        controls=[maps for tokens in sets for maps in tokens.controls],
    )
