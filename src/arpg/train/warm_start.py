"""Warm starts: take from another model what fits, and say what is new."""

from __future__ import annotations

import torch

from arpg.checkpoint import load_model
from arpg.config import ModelConfig
from arpg.hub import resolve
from arpg.model import ARPG


def warm_start(model: ARPG, name: str) -> list[str]:
    """Take from another model what fits; returns lines that say what is new.

    The grid may differ (places are not learned). Of another vocabulary or class set, the rows with the same
    meaning are taken: codes, [MASK], the null class; classes only where their number is the same.
    """
    other = load_model(resolve(name), dtype=torch.float32)
    ours, theirs = model.state_dict(), other.state_dict()
    sizes = [(c.vocab_size, c.num_classes) for c in (model.config, other.config)]
    same_rows = sizes[0] == sizes[1]
    lines, taken = [], 0
    with torch.no_grad():
        for key, tensor in ours.items():
            source = theirs.get(key)
            if (
                key == "embedding.weight"
                and source is not None
                and not same_rows
                and source.shape[1] == tensor.shape[1]
            ):
                rows = _same_rows(model.config, other.config)
                for ours_rows, theirs_rows in rows:
                    tensor[ours_rows] = source[theirs_rows]
                taken += 1
                if model.config.num_classes != other.config.num_classes:
                    lines.append(f"new: the {model.config.num_classes} class rows of {key}")
            elif source is not None and source.shape == tensor.shape:
                tensor.copy_(source)
                taken += 1
            else:
                lines.append(f"new: {key}" + (f" ({list(source.shape)} there)" if source is not None else ""))
    lines.insert(0, f"started from {name}: {taken} of {len(ours)} tensors")
    return lines


def _same_rows(ours: ModelConfig, theirs: ModelConfig) -> list[tuple[slice, slice]]:
    rows = [(slice(ours.null_class_id, ours.null_class_id + 1), slice(theirs.null_class_id, theirs.null_class_id + 1))]
    rows.append((slice(ours.mask_id, ours.mask_id + 1), slice(theirs.mask_id, theirs.mask_id + 1)))
    if ours.vocab_size == theirs.vocab_size:
        rows.append((slice(0, ours.vocab_size), slice(0, ours.vocab_size)))
    if ours.num_classes == theirs.num_classes:
        span = [slice(c.first_class_id, c.first_class_id + c.num_classes) for c in (ours, theirs)]
        rows.append((span[0], span[1]))
    return rows
