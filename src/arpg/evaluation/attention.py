"""What each pass looks at: the attention weights of an image's tokens, decoded again step by step as planned.

The network keeps no weights and is not changed: its one attention is overheard while it runs, and the softmax is
computed a second time. Shapes: L layers, H heads, N grid tokens, T slots (prefix, then tokens in decoding order),
S slots of a call, K channels of a head, D width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from arpg.decode import SamplePlan, make_plan
from arpg.errors import require
from arpg.image import adm_crop, to_images, to_pil, to_rgb
from arpg.kernels.dispatch import can_fuse_half
from arpg.model import ARPG, Condition, class_condition
from arpg.model.rope import grid_positions
from arpg.pipeline import Pipeline

Weights = NDArray[np.float32]


@dataclass(frozen=True)
class AttentionMaps:
    """The weights of one image under one plan; what is not seen is 0, and every row sums to 1."""

    pass1_LHTT: Weights  # a slot of Pass 1 (prefix, then tokens in decoding order) to those that it sees
    pass2_LHNT: Weights  # the query for a token (in decoding order) to the slots it is predicted from
    seen1_TT: NDArray[np.bool_]
    seen2_NT: NDArray[np.bool_]
    order: tuple[int, ...]  # the raster position of each token, in decoding order
    num_prefix: int
    grid: tuple[int, int]

    def on_grid(self, weights_T: Weights) -> Weights:
        """`[h, w]`: the weights of slots at the places of their tokens; NaN where there is no token yet."""
        image_N = np.full(self.grid[0] * self.grid[1], np.nan, np.float32)
        tokens = len(weights_T) - self.num_prefix
        image_N[list(self.order[:tokens])] = weights_T[self.num_prefix :]
        return image_N.reshape(self.grid)


class Listener(TorchFunctionMode):
    """While active, keeps queries, keys, values, mask and output of every attention call, under its layer's name."""

    def __init__(self, model: ARPG) -> None:
        super().__init__()
        self.model = model
        self.heard: list[Heard] = []
        self._name = ("", 0)
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> Listener:
        for kind, blocks in (("pass1", self.model.pass1), ("pass2", self.model.pass2)):
            for i, block in enumerate(blocks):
                self._hooks.append(block.register_forward_pre_hook(partial(self._enter_layer, (kind, i))))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _enter_layer(self, name: tuple[str, int], *_: Any) -> None:
        self._name = name

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is F.scaled_dot_product_attention:
            query, key, value = args
            mask = kwargs.get("attn_mask")
            if kwargs.get("is_causal"):
                mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
            # Copies: keys and values are views of a cache, whose padding is written over later.
            self.heard.append(Heard(*self._name, query, key.clone(), value.clone(), mask, out))
        return out


@dataclass(frozen=True)
class Heard:
    """One call of the attention: `[B, H, S or T, K]` each, the mask as a tensor (None: everything is seen)."""

    kind: str
    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    out: Tensor

    def weights(self) -> Tensor:
        """`[B, H, S, T]`, in float32."""
        score = self.query.float() @ self.key.float().transpose(-1, -2) / math.sqrt(self.query.shape[-1])
        if self.mask is not None:
            score = score.masked_fill(~self.mask, float("-inf"))
        return score.softmax(-1)


@torch.no_grad()
def attention_maps(
    model: ARPG, ids_N: Tensor, condition: Condition, *, plan: SamplePlan, attention: str = "block"
) -> AttentionMaps:
    """Take an image's tokens through both passes as the loop would have, and keep who looked at whom.

    `plan` fills the whole grid; one token per step is what training sees. The tokens of the last step are never
    encoded, so Pass 1 has no rows for them. These are the conditional rows: what guidance compares with is left out.
    """
    config, device = model.config, model.device
    num_tokens = config.grid[0] * config.grid[1]
    require(
        len(condition) == 1 and ids_N.shape == (num_tokens,) == (len(plan.order),),
        f"{len(condition)} conditions, {list(ids_N.shape)} tokens and a plan of {len(plan.order)}; "
        f"expected one image of {num_tokens} tokens and a plan that fills all of it",
    )
    require(
        not can_fuse_half(model.embedding.weight),
        f"the model is in {model.dtype} on a GPU, whose fused attention keeps no weights; load it with dtype float32",
    )
    num_prefix = condition.prefix_BPD.shape[1]
    num_slots = num_prefix + num_tokens - plan.sizes[-1]
    order = torch.tensor(plan.order, device=device)
    pos_N2 = grid_positions(*config.grid, device=device)[order]
    x_ND = model.embed(ids_N.to(device)[order])
    cache = model.allocate_cache(1, num_slots)
    pass1 = np.zeros((config.pass1_layers, config.num_heads, num_slots, num_slots), np.float32)
    pass2 = np.zeros((config.pass2_layers, config.num_heads, num_tokens, num_slots), np.float32)
    seen1, seen2 = np.zeros((num_slots, num_slots), bool), np.zeros((num_tokens, num_slots), bool)

    def note(listener: Listener, target: Weights, seen: NDArray[np.bool_], first: int) -> None:
        assert len(listener.heard) == len(target), "the attention of a layer was not heard: did it change its function?"
        for heard in listener.heard:
            weights = heard.weights()[0].cpu().numpy()
            _, rows, columns = weights.shape
            target[heard.layer, :, first : first + rows, :columns] = weights
            visible = np.ones((rows, columns), bool) if heard.mask is None else heard.mask.cpu().numpy()
            seen[first : first + rows, :columns] = np.broadcast_to(visible, (1, 1, rows, columns))[0, 0]

    with Listener(model) as listener:
        model.encode(condition.prefix_BPD, condition.pos_BP2, cache, causal=True)
    note(listener, pass1, seen1, 0)
    done = 0
    for size in plan.sizes:
        part = slice(done, done + size)
        query_BSD = None if condition.query_BND is None else condition.query_BND[:, order[part]]
        with Listener(model) as listener:
            model.predict(pos_N2[None, part], query_BSD, cache)
        note(listener, pass2, seen2, done)
        done += size
        if done < num_tokens:
            with Listener(model) as listener:
                model.encode(x_ND[None, part], pos_N2[None, part], cache, causal=attention == "causal")
            note(listener, pass1, seen1, num_prefix + part.start)
    return AttentionMaps(pass1, pass2, seen1, seen2, plan.order, num_prefix, config.grid)


@torch.no_grad()
def image_attention(
    pipe: Pipeline, image: Image.Image | None, class_: str | int | None, *, seed: int = 0, **settings: Any
) -> tuple[AttentionMaps, Image.Image]:
    """The maps of a picture (its centre, as tokens), or of one that is generated first; and the picture looked at.

    Settings as in `Pipeline.generate`; order, schedule, steps and attention decide in which steps the tokens come.
    """
    resolved = pipe.sampling.settings(**settings)
    config, stride = pipe.model.config, pipe.tokenizer.config.stride
    label = config.num_classes if class_ is None else pipe.classes.find(class_)
    if image is None:
        require(class_ is not None, "there is neither a picture nor a class; give one of them")
        for step in pipe.generate_task(label, seed=seed, **settings).steps():
            ids_N = step.ids_BN[0]
    else:
        require(config.grid[0] == config.grid[1], f"the model's grid is {config.grid}; pictures need a square one")
        pixels = np.asarray(adm_crop(to_rgb(image), config.grid[0] * stride))
        ids_N = pipe.tokenizer.encode(to_images(pixels[None], pipe.tokenizer.device))[0]
    plan = make_plan(config.grid, torch.zeros(1, len(ids_N), dtype=torch.bool), [seed], resolved).samples[0]
    condition = class_condition(pipe.model, torch.tensor([label]))
    maps = attention_maps(pipe.model, ids_N, condition, plan=plan, attention=resolved.attention)
    return maps, to_pil(pipe.tokenizer.decode(ids_N[None], config.grid))[0]


@dataclass(frozen=True)
class LayerSummary:
    """How one layer's attention is spread, as means over heads and rows that have a choice of tokens."""

    kind: str
    layer: int
    on_prefix: float  # the share of attention that goes to the condition
    evenness: float  # exp(entropy) over the number of slots seen: 1 is uniform
    reach: float  # mean distance on the grid to the tokens attended to, over that of uniform attention


def summarize(maps: AttentionMaps) -> list[LayerSummary]:
    """One line per layer: is attention spread, or does it fall on few tokens, and does it fall off with distance?"""
    row, column = np.divmod(np.array(maps.order), maps.grid[1])
    distance_NN = np.hypot(row[:, None] - row, column[:, None] - column)
    p = maps.num_prefix
    tokens = maps.pass1_LHTT.shape[-1] - p
    lines = []
    for kind, weights_LHST, seen, distance in (
        ("pass1", maps.pass1_LHTT[:, :, p:], maps.seen1_TT[p:], distance_NN[:tokens, :tokens]),
        ("pass2", maps.pass2_LHNT, maps.seen2_NT, distance_NN[:, :tokens]),
    ):
        rows = seen[:, p:].sum(1) >= 2
        seen_tokens = seen[rows, p:]
        uniform = (distance[rows] * seen_tokens).sum(1) / seen_tokens.sum(1)
        for layer, weights_HST in enumerate(weights_LHST[:, :, rows]):
            entropy = -(weights_HST * np.log(np.maximum(weights_HST, 1e-30))).sum(-1)
            on_tokens = weights_HST[..., p:]
            mean = (on_tokens * distance[rows]).sum(-1) / np.maximum(on_tokens.sum(-1), 1e-30)
            lines.append(
                LayerSummary(
                    kind,
                    layer,
                    on_prefix=float(weights_HST[..., :p].sum(-1).mean()),
                    evenness=float((np.exp(entropy) / seen[rows].sum(1)).mean()),
                    reach=float((mean / uniform).mean()),
                )
            )
    return lines
