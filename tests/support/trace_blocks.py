"""Traces the blocks of both passes by torch.compile with the kernels that a GPU takes, without one; prints "whole".

Run by `test_compiled.py` as a program of its own, since Triton is either interpreted or compiled. Nothing is launched:
the backend raises as soon as a block has been traced in one piece, and torch.compile raises where it cannot be.
"""

import sys
from unittest import mock

import torch
from torch.utils import _triton

from arpg.kernels import dispatch, ops
from arpg.kernels.ops import Rope
from arpg.quantization import precision
from support.small import small_model


class Traced(BaseException):
    """A block was traced."""


def backend(graph, inputs):
    raise Traced


def trace(blocks, call):
    for block in blocks:
        block.compile(backend=backend, dynamic=True, fullgraph=True)
    try:
        call()
    except Traced:
        print("whole")  # noqa: T201


@torch.no_grad()
def main(name):
    chosen = ("can_fuse", "can_fuse_half", "can_fuse_inference")
    with (
        mock.patch.multiple(dispatch, **{each: lambda x: True for each in chosen}),
        mock.patch.multiple(ops, **{each: lambda x: True for each in chosen}),
        mock.patch.multiple(ops, rope_table=rotation, cache_write=lambda *_, **options: None),
        mock.patch.multiple(
            precision, check_fp8=lambda *_: None, choose_dtype=lambda *_: torch.bfloat16, has_int8_product=lambda: False
        ),
        mock.patch.multiple(_triton, has_triton=lambda: True, has_triton_package=lambda: True),
    ):
        model = precision.to_precision(small_model(), name, torch.device("cpu"), head=False)
        cache, pos = model.allocate_cache(2, 40), torch.rand(2, 3, 2)
        trace(
            model.pass1,
            lambda: model.encode(torch.randn(2, 3, model.config.width).bfloat16(), pos, cache, causal=False),
        )
        cache.end = 5
        cache.settle()
        trace(model.pass2, lambda: model.predict(pos, None, cache))


def rotation(pos_BS2, head_dim, base):
    return Rope(*torch.ones(2, *pos_BS2.shape[:2], head_dim))


if __name__ == "__main__":
    main(sys.argv[1])
