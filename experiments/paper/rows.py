"""The rows of the paper's tables as configurations: designs, peers and sizes, on one base model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from arpg.checkpoint import load_model, store_folder
from arpg.config import ModelConfig
from arpg.files import check_state, read_tensors, write_tensors, write_whole
from arpg.model import ARPG
from arpg.quantization.storage import pack, unpack
from arpg.storage import AnyPath
from arpg.train.loop import train
from arpg.train.model import ModelTraining
from arpg.train.objective import Objective
from arpg.train.recipe import ModelRecipe
from experiments.paper.peers import GROUP, PEERS, SCALES, Peer, PeerObjective

WEIGHTS = "peer.safetensors"
BASE = ModelConfig(width=384, num_heads=6, pass1_layers=12, pass2_layers=12, vocab_size=8192, num_classes=225)


@dataclass(frozen=True)
class Row:
    """A row of a table: a network, how it is trained and how it is sampled."""

    name: str
    model: ModelConfig
    peer: str | None = None  # None: ARPG itself
    order: str = "random"
    confidence: float | None = None  # tokens are accepted by their probability, see `RemainingSteps`
    steps: tuple[int, ...] = (64,)
    # Fine-tuned from the row without it: on its own "orders", as long on "random" ones, or to distill "guidance".
    tuned: str | None = None
    trained: bool = True  # False: only speed and memory are measured

    @property
    def trained_as(self) -> str:
        """The name of the training run, which rows that differ in sampling alone share."""
        c = self.model
        parts = [self.peer or "arpg", f"{c.pass1_layers}-{c.pass2_layers}", str(c.width), c.positions]
        return "-".join([*parts, *([] if c.shared_kv else ["unshared"]), *([self.tuned] if self.tuned else [])])

    @property
    def sampled_as(self) -> str:
        """The training run and how it is sampled: rows of several tables with the same one are measured once."""
        how = self.order if self.confidence is None else f"confidence {self.confidence:g}"
        return f"{self.trained_as}, {how}"

    def untuned(self) -> Row:
        """Return the row that a tuned one starts from."""
        model = replace(self.model, guidance_input=False, dropout=BASE.dropout)
        return replace(self, model=model, tuned=None, confidence=None)

    def build(self, config: ModelConfig | None = None) -> ARPG | Peer:
        """Make the network, with the weights uninitialised."""
        return (ARPG if self.peer is None else PEERS[self.peer])(config or self.model)


def designs(base: ModelConfig = BASE) -> list[Row]:
    """Return the rows of Table 5: how layers are divided, unshared keys and values, cosine positions, no Pass 2."""
    depth, tokens = base.pass1_layers + base.pass2_layers, base.grid[0] * base.grid[1]
    half, quarter = depth // 2, depth // 4

    def split(first: int) -> ModelConfig:
        return replace(base, pass1_layers=first, pass2_layers=depth - first)

    even, steps = split(half), (min(64, tokens),)
    return [
        Row(f"{half}+{half}", even, steps=steps),
        Row("cosine positions", replace(even, positions="cosine"), steps=steps),
        Row("unshared KV", replace(even, shared_kv=False), steps=steps),
        Row(f"{depth - quarter}+{quarter}", split(depth - quarter), steps=steps),
        Row(f"{quarter}+{depth - quarter}", split(quarter), steps=steps),
        Row(f"0+{depth}", split(0), steps=steps),
        Row(f"{depth}+0, random orders", even, peer="random", steps=(tokens,)),
        Row(f"{depth}+0, raster order", even, peer="raster", order="raster", steps=(tokens,)),
    ]


def peers(base: ModelConfig = BASE) -> list[Row]:
    """Return the rows of the comparison with peers: ARPG and what Table 2 compares it with, on equal terms."""
    tokens = base.grid[0] * base.grid[1]
    few = tuple(steps for steps in (8, 16) if steps <= tokens)
    some = tuple(steps for steps in (24, 32, 64) if steps <= tokens) or (tokens,)
    return [
        Row("ARPG", base, steps=some),
        Row("raster AR", base, peer="raster", order="raster", steps=(tokens,)),
        Row("interleaved positions", base, peer="interleaved", steps=some),
        Row("2x2 regions", base, peer="regions", steps=(GROUP + tokens // GROUP - 1,)),
        Row("next scale", base, peer="scales", steps=(len(SCALES),), trained=False),
        Row("masked, confidence", base, peer="masked", confidence=4.5, steps=few or (tokens,)),
        Row("masked, Halton", base, peer="masked", order="halton", steps=few or (tokens,)),
    ]


def sizes(base: ModelConfig = BASE) -> list[Row]:
    """Return three sizes of the same shape: half, once and one and a half times the width."""
    found = []
    for factor in (0.5, 1.0, 1.5):
        heads = max(1, round(base.num_heads * factor))
        width = heads * base.head_dim
        steps = (min(64, base.grid[0] * base.grid[1]),)
        found.append(Row(f"width {width}", replace(base, width=width, num_heads=heads), steps=steps))
    return found


def fine_tuned_orders(base: ModelConfig = BASE) -> list[Row]:
    """Return the row that is fine-tuned on the orders it is surest of, and before it one as long on random orders."""
    first = designs(base)[0]
    return [replace(first, name="random orders", tuned="random"), replace(first, name="own orders", tuned="orders")]


def distilled(base: ModelConfig = BASE) -> Row:
    """Return the row that takes the guidance scale as an input."""
    first = designs(base)[0]
    model = replace(first.model, guidance_input=True, dropout=0.0)
    return replace(first, name="distilled guidance", model=model, tuned="guidance")


class PeerTraining(ModelTraining):
    """The training of a row's peer, by the loop, data and optimizer of ARPG."""

    row: Row

    def build_model(self, config: ModelConfig) -> ARPG:
        return self.row.build(config)  # type: ignore[return-value]

    def build_objective(self, model: ARPG) -> Objective:
        return PeerObjective(model, self.dataset.tokens.grid)

    def export(self) -> AnyPath:
        """Write the averaged weights."""
        target = self.folder / "model"
        weights = self.averaged_weights()
        if self.world.main:
            write_whole(target / WEIGHTS, lambda path: write_tensors(weights, path))
        return target


def train_row(row: Row, recipe: ModelRecipe, folder: Path, *, resume: bool, device: str) -> AnyPath:
    """Train the network of a row with a recipe, whose `model` is the row's; return the folder of the result."""
    kind = ModelTraining if row.peer is None else type("RowTraining", (PeerTraining,), {"row": row})
    return train(lambda world: kind(recipe, folder, world), resume=resume, device=device)


def store_row(row: Row, folder: Path, target: Path) -> None:
    """Store what `train_row` wrote, in 8 bits: what comes back from a machine, and what is measured."""
    if row.peer is None:
        store_folder(folder, target, form="int8")
    else:
        packed = pack(read_tensors(folder / WEIGHTS), "int8")
        write_whole(target / WEIGHTS, lambda path: write_tensors(packed, path))


def load_row(row: Row, folder: Path, *, device: torch.device, dtype: torch.dtype) -> ARPG | Peer:
    """Load what `store_row` or `train_row` wrote, in eval mode."""
    if row.peer is None:
        return load_model(folder, device=device, dtype=dtype)
    path = folder / WEIGHTS
    network, state = row.build(), unpack(read_tensors(path), where=str(path))
    check_state(state, network, where=str(path))
    network.load_state_dict(state)
    return network.to(device=device, dtype=dtype).eval()
