"""A small base with named classes, and adapters of it whose weights are random."""

import torch

from arpg import ARPG
from arpg.checkpoint import FolderConfig, write_folder
from arpg.classes import ClassNames
from arpg.lora import AdapterConfig, add_adapters, grow_embedding, trained_weights, write_adapter
from support.small import SMALL, small_model, small_tokenizer

NAMES = ("apple", "bear, brown bear", "cat", "dog", "egg")


def write_base(folder):
    """Write the base as a model folder."""
    model, tokenizer = small_model(seed=3), small_tokenizer()
    config = FolderConfig(model=SMALL, tokenizer=tokenizer.config, classes=ClassNames(NAMES))
    write_folder(folder, config, model=model.state_dict(), tokenizer=tokenizer.state_dict())
    return folder


def adapted(config, class_ids=(), seed=0, model=None):
    """A model with an adapter whose weights are random, as if it was trained."""
    model = add_adapters(model or small_model(seed=3), config, class_ids, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.requires_grad and "lora_A" not in name:
                p.copy_(torch.randn(p.shape, generator=generator) * 0.2)
    return model


def grown(names):
    """The base with rows for more classes, as fine-tuning makes it."""
    model = small_model(seed=3)
    table = grow_embedding(model.embedding.weight, SMALL, len(names))
    made = ARPG(type(SMALL)(**{**SMALL.__dict__, "num_classes": len(names)}))
    made.load_state_dict({**model.state_dict(), "embedding.weight": table})
    return made.eval()


def save(folder, *, classes, seed=0, names=NAMES, **change):
    """Write an adapter for the base; return its file and the model that was trained."""
    config = AdapterConfig(**{"rank": 2, "alpha": 4.0, "base": "base", "classes": classes, **change})
    model = adapted(config, [names.index(name) for name in classes], seed, grown(names))
    return write_adapter(folder, config, trained_weights(model)), model
