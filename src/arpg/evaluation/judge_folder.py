"""Judges on disk: a classifier or a detector as a folder of NAME.json (its configuration) and NAME.safetensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
import torch
from torch import nn

from arpg.checkpoint import check_state
from arpg.config import from_dict, to_dict
from arpg.errors import InputError, require
from arpg.files import read_tensors, write_whole

Judge = TypeVar("Judge", bound=nn.Module)


def save_judge(judge: nn.Module, folder: Path, *, name: str, config: Any) -> None:
    state = {key: tensor.detach().cpu().contiguous() for key, tensor in judge.state_dict().items()}
    data = safetensors.torch.save(state)
    write_whole(folder / f"{name}.safetensors", lambda path: path.write_bytes(data))
    text = json.dumps(to_dict(config), indent=1) + "\n"
    write_whole(folder / f"{name}.json", lambda path: path.write_text(text, encoding="utf-8"))


def load_judge(
    make: Callable[[Any], Judge], folder: Path, *, name: str, config: type, device: torch.device | str, hint: str = ""
) -> Judge:
    """`make` builds it from its configuration; `hint` says where one comes from."""
    path, weights = folder / f"{name}.json", folder / f"{name}.safetensors"
    require(path.is_file(), f"{folder} holds no {name}: it has no {path.name}{hint}")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON: {error}") from None
    with torch.device("meta"):
        judge = make(from_dict(config, data, where=str(path)))
    state = read_tensors(weights)
    check_state(state, judge, where=str(weights))
    judge.load_state_dict(state, strict=True, assign=True)
    return judge.to(device).eval()
