"""LoRA: low-rank additions to linear layers, and embedding rows of classes, trained alone and kept in a small file.

    base_model.model.LAYER.lora_A.weight        [R, I], with the names that peft gives them
    base_model.model.LAYER.lora_B.weight        [O, R]
    base_model.model.embedding.class_rows       [C, D]: a row for each class of the adapter

The metadata of the file (`arpg_lora`, JSON) holds an `AdapterConfig`. `adapter_config.json` beside it is for peft.
In training a `LoraLinear` takes the place of a linear layer. To generate, adapters are merged into the weights, so they
cost no time; the original layers are kept, so removing adapters is exact.
Shapes: R rank, O outputs, I inputs, C classes of the adapter, D width, E rows of the embedding.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from arpg.classes import ClassNames
from arpg.config import ModelConfig, from_dict, to_dict
from arpg.errors import InputError, require
from arpg.files import State, read_json, read_metadata, read_tensors, write_json, write_tensors, write_whole
from arpg.model import ARPG
from arpg.quantization.packed import QuantizedLinear
from arpg.storage import AnyPath

FORMAT = "arpg-lora-1"
WEIGHTS, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"  # peft's names
PEFT_UNSUPPORTED = ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern")  # they change how weights are scaled
TARGETS = ("qkv", "q", "out", "gate_up", "down", "memory_kv")
_METADATA, _PREFIX, _ROWS = "arpg_lora", "base_model.model.", "embedding.class_rows"


@dataclass(frozen=True)
class AdapterConfig:
    """What an adapter is: its size, what it was trained on top of, and its classes."""

    rank: int
    alpha: float  # the additions are scaled by alpha / rank
    targets: tuple[str, ...] = TARGETS  # names of the linear layers that it adds to
    base: str = ""  # name of the model
    base_hash: str = ""  # SHA-256 of the base's weight file
    classes: tuple[str, ...] = ()  # the classes that its rows belong to
    format: str = FORMAT

    def __post_init__(self) -> None:
        require(self.rank >= 1, f"rank is {self.rank}; expected 1 or more")
        require(math.isfinite(self.alpha) and self.alpha > 0, f"alpha is {self.alpha}; expected more than 0")
        require(bool(self.targets), "targets is empty; expected names of linear layers, like qkv")
        require(self.format == FORMAT, f"format is {self.format!r}; expected {FORMAT!r}")

    @property
    def scaling(self) -> float:
        """The factor of B A."""
        return self.alpha / self.rank


class LoraLinear(nn.Module):
    """A frozen linear layer plus a trained product of two narrow ones; the product is 0 at first."""

    def __init__(self, base_layer: nn.Linear, config: AdapterConfig, generator: torch.Generator) -> None:
        super().__init__()
        self.base_layer, self.scaling = base_layer, config.scaling
        inputs, outputs = base_layer.in_features, base_layer.out_features
        self.lora_A = nn.Linear(inputs, config.rank, bias=False)
        self.lora_B = nn.Linear(config.rank, outputs, bias=False)
        with torch.no_grad():
            bound = inputs**-0.5
            self.lora_A.weight.copy_(torch.empty(config.rank, inputs).uniform_(-bound, bound, generator=generator))
            self.lora_B.weight.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """Return base(x) + scaling B A x."""
        out: Tensor = self.base_layer(x) + self.lora_B(self.lora_A(x)) * self.scaling
        return out


class ClassRows(nn.Module):
    """An embedding in which only the rows of some classes are trained."""

    slot_E: Tensor  # the trained row of each id, or -1

    def __init__(self, base_layer: nn.Embedding, ids: Sequence[int]) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.class_rows = nn.Parameter(base_layer.weight.detach()[list(ids)].clone())
        slot_E = torch.full((base_layer.num_embeddings,), -1)
        slot_E[list(ids)] = torch.arange(len(ids))
        self.register_buffer("slot_E", slot_E, persistent=False)

    @property
    def weight(self) -> Tensor:
        """The whole table `[E, D]`."""
        ids = (self.slot_E >= 0).nonzero()[:, 0]
        return self.base_layer.weight.index_copy(0, ids, self.class_rows[self.slot_E[ids]])

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows of `ids`."""
        slot = self.slot_E[ids][..., None]
        return torch.where(slot >= 0, F.embedding(slot[..., 0].clamp(min=0), self.class_rows), self.base_layer(ids))


def add_adapters(model: ARPG, config: AdapterConfig, class_ids: Sequence[int] = (), *, seed: int = 0) -> ARPG:
    """Freeze the model, in place, and give its target layers and the rows of `class_ids` something to train."""
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for path in target_layers(model, config.targets):
        layer = model.get_submodule(path)
        assert isinstance(layer, nn.Linear)
        _replace(model, path, LoraLinear(layer, config, generator))
    if class_ids:
        first = model.config.first_class_id
        model.embedding = ClassRows(model.embedding, [first + i for i in class_ids])  # type: ignore[assignment]
    return model


def target_layers(model: nn.Module, targets: Sequence[str]) -> list[str]:
    """Return the paths of the linear layers with these names (a number at the end, of a list, does not count)."""
    found = [(path, path.rstrip("0123456789").rstrip(".").rpartition(".")[2]) for path, _ in _linears(model)]
    for target in targets:
        names = sorted({name for _, name in found})
        require(target in names or target in TARGETS, f"no layer is named {target!r}; there are {', '.join(names)}")
    return [path for path, name in found if name in targets]


def _linears(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, layer in model.named_modules():
        if isinstance(layer, nn.Linear | QuantizedLinear):
            yield path, layer


def trained_weights(model: nn.Module) -> State:
    """Return the weights that are trained, by name, without copies."""
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


@torch.no_grad()
def merged_weights(model: ARPG, trained: Mapping[str, Tensor]) -> State:
    """Return the weights of the plain network: those of a model with adapters, and `trained` merged into them."""
    state = {
        key.replace(".base_layer.weight", ".weight"): tensor
        for key, tensor in model.state_dict().items()
        if ".lora_" not in key and not key.endswith("class_rows")
    }
    for path, module in model.named_modules():
        if isinstance(module, LoraLinear):
            a_RI, b_OR = (trained[f"{path}.lora_{part}.weight"] for part in "AB")
            state[f"{path}.weight"] = _merged(state[f"{path}.weight"], [(a_RI, b_OR, module.scaling)])
    if isinstance(module := model.embedding, ClassRows):
        slot_E = module.slot_E.cpu()
        ids = (slot_E >= 0).nonzero()[:, 0]
        table, rows = state["embedding.weight"], trained[_ROWS][slot_E[ids]]
        state["embedding.weight"] = table.index_copy(0, ids.to(table.device), rows.to(table))
    return state


def _merged(weight_OI: Tensor, parts: Sequence[tuple[Tensor, Tensor, float]]) -> Tensor:
    """Return the weight plus factor B A of each part, summed in float32."""
    total = weight_OI.detach().float()
    for a_RI, b_OR, factor in parts:
        total = total + factor * (b_OR.to(total) @ a_RI.to(total))
    return total.to(weight_OI.dtype)


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter as read from its file."""

    where: str
    config: AdapterConfig
    layers: dict[str, tuple[Tensor, Tensor]]  # A and B by the path of the layer
    rows_CD: Tensor | None

    def check(self, model: ARPG, base_hash: str | None) -> None:
        """Raise an `InputError` unless the adapter fits the model; `base_hash` is that of its weights, if known."""
        config = self.config
        require(
            not config.base_hash or base_hash is None or config.base_hash == base_hash,
            f"{self.where} was trained for {config.base or 'another model'} (weights {config.base_hash[:12]}...), not "
            f"for this model (weights {(base_hash or '')[:12]}...); load it with --model {config.base or 'its base'}",
        )
        linears = dict(_linears(model))
        for path, (a_RI, b_OR) in self.layers.items():
            layer: Any = linears.get(path)
            require(layer is not None, f"{self.where} adds to {path}, which the model does not have; use its own base")
            found, expected = (b_OR.shape[0], a_RI.shape[1]), (layer.out_features, layer.in_features)
            require(
                found == expected and a_RI.shape[0] == b_OR.shape[1],
                f"{self.where}: {path} is {found[0]} x {found[1]} of rank {a_RI.shape[0]} and {b_OR.shape[1]}; the "
                f"model has {expected[0]} x {expected[1]}; use the adapter with its own base",
            )
        if self.rows_CD is not None:
            require(
                model.config.text is None and self.rows_CD.shape[1] == model.config.width,
                f"{self.where} has classes with rows of {self.rows_CD.shape[1]} numbers; the model takes "
                + ("prompts" if model.config.text is not None else f"{model.config.width}"),
            )


def write_adapter(folder: AnyPath, config: AdapterConfig, trained: Mapping[str, Tensor]) -> AnyPath:
    """Write an adapter and peft's configuration of it to a folder; return the path of the weights."""
    tensors = {_PREFIX + key: tensor.detach().cpu().contiguous() for key, tensor in trained.items()}
    layers = sorted({key.rpartition(".lora_")[0] for key in trained if ".lora_" in key})
    metadata = {"format": "pt", _METADATA: json.dumps(to_dict(config))}
    peft = {
        "peft_type": "LORA",
        "base_model_name_or_path": config.base,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "target_modules": layers,
        "bias": "none",
        "inference_mode": True,
    }
    write_json(folder / PEFT_CONFIG, peft)
    write_whole(folder / WEIGHTS, lambda path: write_tensors(tensors, path, metadata=metadata))
    return folder / WEIGHTS


def read_adapter(path: str | Path) -> Adapter:
    """Read an adapter from its file, or from a folder as peft writes it."""
    file = Path(path)
    file = file / WEIGHTS if file.is_dir() else file
    require(file.is_file(), f"adapter {file} does not exist; expected a .safetensors file of `arpg finetune --lora`")
    metadata, tensors = read_metadata(file), read_tensors(file)
    pairs: dict[str, dict[str, Tensor]] = {}
    rows_CD = None
    for key, tensor in tensors.items():
        layer, _, part = key.removeprefix(_PREFIX).rpartition(".lora_")
        if key == _PREFIX + _ROWS:
            rows_CD = tensor
        elif key.startswith(_PREFIX) and layer and part in ("A.weight", "B.weight") and tensor.dim() == 2:
            pairs.setdefault(layer, {})[part[0]] = tensor
        else:
            raise InputError(f"{file} is no LoRA adapter: it holds {key}; expected {_PREFIX}LAYER.lora_A.weight")
    whole = bool(pairs) and all(len(pair) == 2 for pair in pairs.values())
    require(whole, f"{file} is no LoRA adapter: it lacks lora_A or lora_B of a layer")
    config = _read_config(file, metadata, pairs)
    num_rows = 0 if rows_CD is None else len(rows_CD)
    require(num_rows == len(config.classes), f"{file} names {len(config.classes)} classes and has {num_rows} rows")
    return Adapter(str(path), config, {layer: (pair["A"], pair["B"]) for layer, pair in pairs.items()}, rows_CD)


def _read_config(file: Path, metadata: dict[str, str], pairs: Mapping[str, dict[str, Tensor]]) -> AdapterConfig:
    if _METADATA in metadata:
        try:
            data = json.loads(metadata[_METADATA])
        except ValueError as error:
            raise InputError(f"{file}: its metadata is not JSON ({error}); make it again") from None
        return from_dict(AdapterConfig, data, where=str(file))
    beside = file.parent / PEFT_CONFIG
    require(beside.is_file(), f"{file} has no metadata of `arpg finetune`, and there is no {PEFT_CONFIG} beside it")
    data = read_json(beside)
    if unsupported := [name for name in PEFT_UNSUPPORTED if isinstance(data, dict) and data.get(name)]:
        raise InputError(f"{beside} has {', '.join(unsupported)}, which is not supported; train the adapter without it")
    rank = next(iter(pairs.values()))["A"].shape[0]
    try:
        return AdapterConfig(rank, float(data["lora_alpha"]), tuple(pairs))
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{beside} does not describe a LoRA adapter ({error}); expected peft's lora_alpha") from None


def adapter_name(path: str | Path) -> str:
    """Return the name of an adapter: that of its file, or of the folder where the file has peft's name."""
    path = Path(path)
    return path.parent.name if path.name == WEIGHTS else path.name.removesuffix(".safetensors")


def parse_lora(text: str) -> tuple[str, float]:
    """Parse PATH or PATH:SCALE."""
    path, colon, scale = text.rpartition(":")
    try:
        return (path, float(scale)) if colon and path else (text, 1.0)
    except ValueError:  # a colon in the path
        return text, 1.0


class MergedAdapters:
    """The adapters that are merged into a model, and the layers that it had before."""

    def __init__(self, model: ARPG, classes: ClassNames, base_hash: str | None = None) -> None:
        self.model, self.base_classes, self.base_hash = model, classes, base_hash
        self.classes = classes  # with those of the adapters
        self.loaded: dict[str, tuple[Adapter, float]] = {}
        self._config, self._embedding = model.config, model.embedding
        self._layers: dict[str, nn.Module] = {}

    def add(self, name: str, adapter: Adapter, scale: float) -> None:
        """Merge an adapter into the model; one of the same name is replaced."""
        require(math.isfinite(scale), f"scale is {scale}; expected a number (1 is what was trained)")
        self._restore()  # so that layers and rows are checked against the base
        try:
            adapter.check(self.model, self.base_hash)
            self.loaded[name] = (adapter, scale)
        finally:
            self._merge()

    def remove(self, name: str | None = None) -> None:
        """Remove one adapter, or all of them; without adapters the model has its own layers again."""
        require(
            name is None or name in self.loaded,
            f"no adapter is named {name!r}; loaded are {', '.join(self.loaded) or 'none'}",
        )
        self.loaded = {} if name is None else {key: value for key, value in self.loaded.items() if key != name}
        self._restore()
        self._merge()

    @contextmanager
    def removed(self) -> Iterator[None]:
        """Give the model its own layers inside a `with`, where they may be moved; then merge the adapters again."""
        self._restore()
        try:
            yield
        finally:
            self._embedding = self.model.embedding
            self._merge()

    def _restore(self) -> None:
        for path, layer in self._layers.items():
            _replace(self.model, path, layer)
        self._layers = {}
        self.model.config, self.model.embedding, self.classes = self._config, self._embedding, self.base_classes

    @torch.no_grad()
    def _merge(self) -> None:
        for path in dict.fromkeys(path for adapter, _ in self.loaded.values() for path in adapter.layers):
            layer: Any = self.model.get_submodule(path)
            self._layers[path] = layer
            parts = [
                (*adapter.layers[path], scale * adapter.config.scaling)
                for adapter, scale in self.loaded.values()
                if path in adapter.layers
            ]
            _replace(self.model, path, _with_weight(layer, _merged(layer.weight, parts)))
        if any(adapter.rows_CD is not None for adapter, _ in self.loaded.values()):
            self._merge_classes()

    def _merge_classes(self) -> None:
        """Add the classes that the base does not know. A scale moves a row from the base's (or the null class)."""
        lines = list(self.base_classes.lines)
        known = len(lines)
        rows: dict[int, list[tuple[Tensor, float]]] = {}
        for adapter, scale in self.loaded.values():
            for i, line in enumerate(adapter.config.classes):
                found = self.base_classes.match(line)
                if found is None:
                    found = lines.index(line, known) if line in lines[known:] else len(lines)
                    lines += [line] if found == len(lines) else []
                assert adapter.rows_CD is not None
                rows.setdefault(found, []).append((adapter.rows_CD[i], scale))
        old, table = self._config, self._embedding.weight
        new = dataclasses.replace(old, num_classes=len(lines))
        made = grow_embedding(table, old, len(lines))
        for class_id, given in rows.items():
            row = new.first_class_id + class_id
            start = made[row].float()
            moves = [scale * (target.to(start) - start) for target, scale in given]
            made[row] = (start + torch.stack(moves).sum(0)).to(made)
        self.model.config, self.classes = new, ClassNames(tuple(lines))
        embedding = nn.Embedding(made.shape[0], made.shape[1], _weight=made)
        self.model.embedding = embedding.requires_grad_(table.requires_grad)


def grow_embedding(table_ED: Tensor, config: ModelConfig, num_classes: int) -> Tensor:
    """Return the embedding with rows for `num_classes` classes; new ones are copies of the null class."""
    null = config.null_class_id
    new = table_ED[null].expand(num_classes - config.num_classes, -1)
    return torch.cat((table_ED[:null], new, table_ED[null:])).detach()


def _with_weight(layer: Any, weight_OI: Tensor) -> nn.Module:
    """Return a layer like this one with another weight."""
    if isinstance(layer, QuantizedLinear):
        return type(layer).from_linear(layer, weight_OI=weight_OI)
    made = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta").train(layer.training)
    made.weight = nn.Parameter(weight_OI, requires_grad=layer.weight.requires_grad)
    return made


def _replace(model: nn.Module, path: str, layer: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, layer)
