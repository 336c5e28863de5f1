"""Compiles every Triton kernel for an NVIDIA GPU, by its compute capability (`80`, `120`), on a machine without one.

The interpreter that the other tests use is more patient than the compiler: it lets a variable change its shape in a
loop, for one. Run by `test_compiled.py` as a program of its own, since Triton is either interpreted or compiled. Prints
the kernels, each with the most shared memory that a program of it takes.
"""

import sys
from collections import Counter

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction


class Driver:
    """All that compiling asks of a driver."""

    def __init__(self, capability):
        self.capability = capability

    def get_current_target(self):
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


SHARED = Counter()  # the most bytes of a kernel


def compile_only(run):
    def wrapped(self, *args, grid, warmup, **options):
        made = run(self, *args, grid=grid, warmup=True, **options)
        assert made.asm["cubin"]
        SHARED[self.fn.__name__] = max(SHARED[self.fn.__name__], made.metadata.shared)

    return wrapped


def half(*shape):
    return torch.zeros(shape, dtype=torch.bfloat16)


def compile_float8_cache(attention, fused_rope):
    """Few and many programs, prefetched and not, new slots and none, limits and none."""

    def cache(rows, slots):
        return tuple(torch.zeros(rows, slots, 4, 64, dtype=torch.float8_e4m3fn) for _ in range(2))

    for rows, queries in ((2, 5), (2, 20), (256, 5), (256, 20)):
        by = torch.zeros(rows, queries, 64), torch.zeros(rows, queries, 64)
        limit, lengths = torch.ones(rows, queries, dtype=torch.long), torch.zeros(rows, dtype=torch.long)
        attention.attend(half(rows, queries, 4, 64), *cache(rows, 90), None, by)
        attention.attend_and_store(half(rows, queries, 3, 4, 64), cache(rows, 90), None, by, 7)
        attention.attend_and_store(half(rows, queries, 3, 4, 64), cache(rows, 90), limit, by, lengths)
    qkv, by = half(2, 5, 3, 4, 64), (torch.zeros(2, 5, 64), torch.zeros(2, 5, 64))
    for settled in (90, 200, 300):
        seen = [x[:, : settled + 5] for x in cache(2, 520)]
        attention.attend(qkv[:, :, 0], *seen, None, by, settled=settled)
        attention.attend_and_store(qkv, cache(2, 520), None, by, settled, settled=settled)
    key_BTHK, value_BTHK = cache(2, 90)
    fused_rope.store_rope(*qkv.unbind(2)[1:], *by, key_BTHK=key_BTHK, value_BTHK=value_BTHK, first=7)


def main(capability):
    triton.runtime.driver.set_active(Driver(capability))
    JITFunction.run = compile_only(JITFunction.run)
    from arpg.kernels import (
        attention,
        fused_rope,
        group_norm,
        gumbel,
        int8_gemm,
        residual_norm,
        small_gemm,
        swiglu,
        token_io,
        wgmma_gemm,
    )
    from arpg.kernels.ops import Packing

    for module in (attention, fused_rope, gumbel, residual_norm, small_gemm, token_io, wgmma_gemm):
        module.prefetch_weights = lambda x: capability >= 90  # this compiles what it would leave out, too
    cache, lengths = (half(2, 90, 4, 64), half(2, 90, 4, 64)), torch.zeros(2, dtype=torch.long)
    for slots in (5, 20, 70):
        qkv, by = half(2, slots, 3, 4, 64), (torch.zeros(2, slots, 64), torch.zeros(2, slots, 64))
        attention.attend(qkv[:, :, 0], *cache, None, by)
        attention.attend(qkv[:, :, 0], *cache, torch.ones(2, slots, dtype=torch.long))
        attention.attend_and_store(qkv, cache, None, by, 7)
        attention.attend_and_store(qkv, cache, torch.ones(2, slots, dtype=torch.long), by, lengths)
    qkv, by = half(2, 5, 3, 4, 64), (torch.zeros(2, 5, 64), torch.zeros(2, 5, 64))
    long = half(2, 520, 4, 64), half(2, 520, 4, 64)
    for settled in (90, 200, 300):  # prefetched
        seen = [x[:, : settled + 5] for x in long]
        for limit in (None, torch.ones(2, 5, dtype=torch.long)):
            attention.attend(qkv[:, :, 0], *seen, limit, by, settled=settled)
            attention.attend_and_store(qkv, long, limit, by, settled, settled=settled)
    if capability >= 89:
        attention.attend(qkv[:, :, 0], *seen, None, by, settled=settled, dtype=torch.float8_e4m3fn)
    qkv = half(2, 70, 3, 4, 64)
    by = torch.zeros(2, 70, 64), torch.zeros(2, 70, 64)
    many = half(256, 90, 4, 64), half(256, 90, 4, 64)  # many programs: other tiles
    attention.attend(half(256, 5, 4, 64), *many, None)
    for slots in (5, 20):
        turned = torch.zeros(256, slots, 64), torch.zeros(256, slots, 64)
        attention.attend(half(256, slots, 4, 64), *many, None, turned)
        attention.attend_and_store(half(256, slots, 3, 4, 64), many, None, turned, 7)
    for rows, width in ((2, 5), (2, 20), (2, 70), (256, 5), (256, 20)):  # packed
        start, count = torch.zeros(rows, dtype=torch.long), torch.zeros(rows, dtype=torch.long)
        packing = Packing(start, count, width, (2, 40))
        packed, turned = half(2, 40, 3, 4, 64), (torch.zeros(2, 40, 64), torch.zeros(2, 40, 64))
        rows_of = half(rows, 90, 4, 64), half(rows, 90, 4, 64)
        for limit in (torch.ones(rows, 1, dtype=torch.long), torch.ones(rows, width, dtype=torch.long)):
            attention.attend(packed[:, :, 0], *rows_of, limit, turned, packing=packing)
            attention.attend_and_store(packed, rows_of, limit, turned, start, packing=packing)
        parts = {"key_BTHK": rows_of[0], "value_BTHK": rows_of[1], "first": start, "packing": packing}
        fused_rope.store_rope(*packed.unbind(2)[1:], *turned, **parts)
    if capability >= 89:
        attention.attend(qkv[:, :, 0], *cache, None, dtype=torch.float8_e4m3fn)
        compile_float8_cache(attention, fused_rope)
    for rows in (2, 24) if capability >= 90 else ():
        few, weight = half(rows, 1024), half(1024)
        small_gemm.linear(few, half(3072, 1024))
        small_gemm.linear(few, half(3072, 1024), norm_D=weight, eps=1e-5)
        small_gemm.linear(few, half(5632, 1024), norm_D=weight, eps=1e-5, swiglu=True)
        squares = small_gemm.empty_sums(few, half(1024, 2816))
        small_gemm.linear(half(rows, 2816), half(1024, 2816), add=few, sums_PM=squares)
        small_gemm.linear(few, half(3072, 1024), norm_D=weight, eps=1e-5, squares_PM=squares)
        small_gemm.linear(few, half(5632, 1024), norm_D=weight, eps=1e-5, swiglu=True, squares_PM=squares)
    for rows in (24, 64) if capability == 90 else ():
        few, weight, down = half(rows, 1280), half(1280), half(1280, 3584)  # of ARPG-XL, the widest
        squares = wgmma_gemm.empty_sums(few, down)
        wgmma_gemm.linear(half(rows, 3584), down, add=few, squares_PM=squares, sums_PM=squares)
        wgmma_gemm.linear(few, half(3840, 1280), norm_D=weight, eps=1e-5, squares_PM=squares)
        wgmma_gemm.linear(few, half(7168, 1280), norm_D=weight, eps=1e-5, swiglu=True, squares_PM=squares)
        wgmma_gemm.linear(few, half(16384, 1280))
    fused_rope.split_qkv_rope(qkv, *by)
    fused_rope.merge_qkv_rope(*qkv.unbind(2), *by)
    fused_rope.apply_rope(qkv[:, :, 0], *by)
    fused_rope.rope_table(torch.zeros(2, 5, 2), 64, 1e4)
    key, value = qkv[:, :, 1], qkv[:, :, 2]
    fused_rope.store_rope(key, value, *by, key_BTHK=cache[0], value_BTHK=cache[1], first=7)
    fused_rope.store_rope(key, value, *by, key_BTHK=cache[0], value_BTHK=cache[1], first=lengths)
    ids, known, place = (
        torch.zeros(2, 257, dtype=torch.long),
        torch.zeros(2, 257, dtype=torch.bool),
        torch.zeros(2, 257, 2),
    )
    at, to = torch.zeros(2, 5, dtype=torch.long), {"copies": 2, "head_dim": 64, "base": 1e4}
    token_io.rope_at(place, at, **to)
    token_io.rope_at(place, at, **to, static=True)
    token_io.embed_at(half(20000, 1024), ids, place, at, **to)
    token_io.embed_at(half(20000, 1024), ids, place, at, **to, static=True)
    token_io.scatter_tokens(ids, known, at, at)

    key, position = torch.zeros(2, 2, dtype=torch.long), torch.zeros(2, 3, dtype=torch.long)
    gumbel.sample(half(2, 3, 8192), 1.0, key, 0, position)
    gumbel.sample(half(2, 3, 8192), 1.0, key, 0, position, static=True)
    gumbel.sample(half(2, 3, 16384), 1.0, key, 0, position)
    many = torch.zeros(2, 200, dtype=torch.long)
    gumbel.sample(half(2, 200, 8192), 1.0, key, 0, many)

    x, weight, drop = half(2, 8, 1024), half(1024), torch.zeros(2, dtype=torch.int32)
    for p in (0.0, 0.1):
        residual_norm.residual_norm(x, x, weight, drop, p, 1e-5)
        residual_norm.residual_norm_backward(x, x, x, weight, drop, p, 1e-5)
    for delta in (None, x):
        residual_norm.guided_norm(x, delta, weight, torch.ones(1, 1), 1e-5, dtype=torch.bfloat16)
    swiglu.swiglu(half(16, 5632))
    swiglu.swiglu_backward(half(16, 5632), half(16, 2816))

    if capability >= 89:
        swiglu.swiglu_float8(half(16, 5632))
        residual_norm.residual_norm_float8(x, x, weight, 1e-5)
        residual_norm.guided_norm(x, x, weight, torch.ones(1, 1), 1e-5, dtype=torch.float8_e4m3fn)
    int8_gemm.int8_gemm(half(9, 1024), torch.zeros(2048, 1024, dtype=torch.int8), torch.ones(2048))

    image, bias = half(2, 128, 16, 16).to(memory_format=torch.channels_last), half(128)
    moments = group_norm.moments(image)
    group_norm.add(image, image, bias)
    group_norm.spread(half(2, 512, 9, 9), bias)
    group_norm.norm(image, moments, bias, torch.nn.GroupNorm(32, 128).to(torch.bfloat16))
    for name, size in sorted(SHARED.items()):
        print(name, size)  # noqa: T201


if __name__ == "__main__":
    main(int(sys.argv[1]))
