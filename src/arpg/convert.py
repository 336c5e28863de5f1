"""Conversion of published checkpoints to our weights and back: one key map, used in both directions."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from arpg.config import MODELS, ModelConfig, TokenizerConfig
from arpg.device import meta_device
from arpg.errors import present, require
from arpg.files import State, check_keys, check_state, read_pickle, read_tensors, write_whole
from arpg.model import ARPG
from arpg.tokenizer import VQTokenizer

USAGE_BUFFER = "quantize.codebook_used"  # the published tokenizer's training statistics; not needed, dropped by name
CODEBOOK = "quantize.embedding.weight"
WRAPPERS = ("model", "module", "state_dict")
PREFIXES = ("module.", "_orig_mod.")  # left by DistributedDataParallel and torch.compile


def key_map(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Map each of our keys to the published keys whose tensors it concatenates."""
    require(
        config.shared_kv and config.positions == "rope",
        "the published format has shared keys and values and rotary positions; this model has "
        f"shared_kv={str(config.shared_kv).lower()}, positions={config.positions!r} and cannot be written in it",
    )
    require(config.text is None, "the published format has no place for prompts; this model cannot be written in it")
    require(
        config.control is None,
        "the published format has no place for condition images; this model cannot be written in it",
    )
    keys: dict[str, tuple[str, ...]] = {
        "embedding.weight": ("embeddings.weight",),
        "memory_norm.weight": ("layers.norm.weight",),
        "memory_kv.0.weight": ("layers.to_k.weight", "layers.to_v.weight"),
        "norm.weight": ("norm.weight",),
        "head.weight": ("head.weight",),
    }
    passes = (
        ("pass1", "layers.self_dec", config.pass1_layers, "attn.qkv", ("to_q", "to_k", "to_v")),
        ("pass2", "layers.cross_dec", config.pass2_layers, "attn.q", ("to_q",)),
    )
    for ours, theirs, num_layers, projection, parts in passes:
        for i in range(num_layers):
            a, b = f"{ours}.{i}", f"{theirs}.{i}"
            keys[f"{a}.{projection}.weight"] = tuple(f"{b}.attn.{part}.weight" for part in parts)
            keys[f"{a}.attn.out.weight"] = (f"{b}.attn.proj.weight",)
            keys[f"{a}.ffn.gate_up.weight"] = (f"{b}.ffn.w1.weight", f"{b}.ffn.w3.weight")
            keys[f"{a}.ffn.down.weight"] = (f"{b}.ffn.w2.weight",)
            keys[f"{a}.attn_norm.weight"] = (f"{b}.attn_norm.weight",)
            keys[f"{a}.ffn_norm.weight"] = (f"{b}.ffn_norm.weight",)
    return keys


def read_published(path: Path, *, ema: bool = False) -> State:
    """Read the weights of a published file out of their wrapper; `ema` reads the averaged ones."""
    payload: Any = read_tensors(path) if path.suffix == ".safetensors" else read_pickle(path)
    require(isinstance(payload, dict), f"{path} holds a {type(payload).__name__}; expected a dictionary of weights")
    state: Any = payload
    if ema:
        require("ema" in payload, f"{path} has no averaged weights (no 'ema'); convert it without --ema")
        state = payload["ema"]
    elif not _is_state(payload):
        state = present(
            next((payload[name] for name in (*WRAPPERS, "ema") if isinstance(payload.get(name), dict)), None),
            f"{path} holds {', '.join(sorted(map(str, payload))) or 'nothing'}; expected weights, or weights under "
            f"{', '.join(WRAPPERS)} or ema",
        )
    if isinstance(state, dict) and not _is_state(state) and isinstance(state.get("module"), dict):
        state = state["module"]
    require(_is_state(state), f"{path} holds no dictionary of tensors where its weights should be")
    for prefix in PREFIXES:
        if state and all(key.startswith(prefix) for key in state):
            state = {key[len(prefix) :]: tensor for key, tensor in state.items()}
    return dict(state)


def model_from_published(
    state: State, *, where: str, num_heads: int | None = None, grid: tuple[int, int] = (16, 16)
) -> tuple[ModelConfig, State]:
    """Return configuration and weights under our keys. `num_heads` cannot be read off the weights."""
    require(CODEBOOK not in state, f"{where} is a VQ tokenizer, not an ARPG checkpoint; use `arpg convert tokenizer`")
    for key in ("embeddings.weight", "head.weight", "layers.norm.weight"):
        require(key in state, f"{where}: missing keys: {key}; it has {_some_keys(state)}: is this an ARPG checkpoint?")
    rows, width = state["embeddings.weight"].shape
    vocab_size = state["head.weight"].shape[0]
    pass1_layers = _count(state, r"layers\.self_dec\.(\d+)\.")
    pass2_layers = _count(state, r"layers\.cross_dec\.(\d+)\.")
    if num_heads is None:
        sizes = {(p.width, p.pass1_layers, p.pass2_layers): p.num_heads for p in MODELS.values()}
        num_heads = present(
            sizes.get((width, pass1_layers, pass2_layers)),
            f"{where} is no published size (width {width}, {pass1_layers}+{pass2_layers} layers); a checkpoint does "
            "not say how many heads it has, so give --heads",
        )
    config = ModelConfig(
        width=width,
        num_heads=num_heads,
        pass1_layers=pass1_layers,
        pass2_layers=pass2_layers,
        vocab_size=vocab_size,
        num_classes=max(0, rows - vocab_size - 3),
        grid=grid,
    )
    keys = key_map(config)
    check_keys(set(state), {key for parts in keys.values() for key in parts}, where=where)
    ours = {key: torch.cat([state[part] for part in parts]) for key, parts in keys.items()}
    with meta_device():
        check_state(ours, ARPG(config), where=where)
    return config, ours


def model_to_published(config: ModelConfig, state: State) -> State:
    """Return the weights of a model under the published keys."""
    published: State = {}
    for key, parts in key_map(config).items():
        for part, tensor in zip(parts, state[key].chunk(len(parts)), strict=True):
            published[part] = tensor.clone()
    return published


def tokenizer_from_published(state: State, *, where: str) -> tuple[TokenizerConfig, State]:
    """Return configuration and weights; our keys are the published ones without the usage buffer."""
    ours = {key: tensor for key, tensor in state.items() if key != USAGE_BUFFER}
    require("layers.norm.weight" not in ours, f"{where} is an ARPG checkpoint, no tokenizer; use `arpg convert model`")
    for key in ("encoder.conv_in.weight", "encoder.conv_out.weight", CODEBOOK):
        require(
            key in ours,
            f"{where}: missing keys: {key}; it has {_some_keys(ours)}: is this a VQ tokenizer checkpoint?",
        )
    channels = ours["encoder.conv_in.weight"].shape[0]
    levels = _count(ours, r"encoder\.conv_blocks\.(\d+)\.")
    firsts = [ours.get(f"encoder.conv_blocks.{i}.res.0.conv1.weight") for i in range(levels)]
    require(levels > 0 and all(t is not None for t in firsts), f"{where}: missing keys: encoder.conv_blocks.*")
    codebook_size, codebook_dim = ours[CODEBOOK].shape
    config = TokenizerConfig(
        channels=channels,
        multipliers=tuple(t.shape[0] // channels for t in firsts if t is not None),
        res_blocks=_count(ours, r"encoder\.conv_blocks\.0\.res\.(\d+)\."),
        z_channels=ours["encoder.conv_out.weight"].shape[0],
        codebook_size=codebook_size,
        codebook_dim=codebook_dim,
    )
    with meta_device():
        check_state(ours, VQTokenizer(config), where=where)
    return config, ours


def write_published(path: Path, state: State) -> None:
    """Write weights under published keys as a .pt file."""
    write_whole(path, lambda temporary: torch.save({"model": state}, temporary))


def _some_keys(state: State) -> str:
    return ", ".join(sorted(state)[:3])


def _is_state(value: Any) -> bool:
    return isinstance(value, dict) and bool(value) and all(isinstance(v, Tensor) for v in value.values())


def _count(keys: Iterable[str], pattern: str) -> int:
    """Return one more than the largest number that the pattern finds at the start of a key."""
    return 1 + max((int(m.group(1)) for m in (re.match(pattern, key) for key in keys) if m), default=-1)
