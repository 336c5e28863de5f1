"""Runs a Gluon kernel in Triton's interpreter, which knows none: places mean nothing there, only numbers.

What is placed where is checked by the compiler, for which a conversion that should move nothing is an error. Shared
memory is simulated: what a bulk copy brings is not a number until its barrier has been waited for, a wait that would
not end is an error, and so is a copy over what a product of the tensor cores has not finished reading.
"""

import importlib.util
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import triton
import triton.language as tl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.interpreter import TensorHandle

ATOM = 64  # channels of a line of shared memory, 128 bytes in half precision


def tensor(array, dtype):
    return tl.tensor(TensorHandle(array, dtype), tl.block_type(dtype, list(array.shape)))


def number(value):
    return int(value.handle.data.item()) if isinstance(value, tl.tensor) else int(value)


class Shared:
    """Elements of shared memory: `where` gives the place of each in `memory`."""

    def __init__(self, dtype, memory, where):
        self.dtype, self.memory, self.where = dtype, memory, where

    def load(self, layout):
        return tensor(self.memory[self.where], self.dtype)

    def store(self, value):
        self.memory[self.where] = value.handle.data

    def slice(self, start, length, axis):
        return Shared(self.dtype, self.memory, self.where.take(range(start, start + length), axis))

    def index(self, index):
        return Shared(self.dtype, self.memory, self.where[number(index)])

    def permute(self, order):
        return Shared(self.dtype, self.memory, self.where.transpose(order))

    def _reinterpret(self, dtype, shape, layout):
        assert len(self.memory) == math.prod(shape)
        return Shared(dtype, self.memory, places(shape, layout))

    def _keep_alive(self):
        pass


def places(shape, layout):
    """The place of each element: operands of the tensor cores lie in columns of `ATOM` channels."""
    where = np.arange(math.prod(shape)).reshape(shape)
    if not hasattr(layout, "swizzle_byte_width") or shape[-1] <= ATOM:
        return where
    columns = np.arange(math.prod(shape)).reshape(*shape[:-2], shape[-1] // ATOM, shape[-2], ATOM)
    return columns.swapaxes(-3, -2).reshape(shape)


def allocate(dtype, shape, layout, value=None):
    if dtype == tl.int64:
        return Barriers(shape[0])
    filled = np.full(math.prod(shape), np.nan, np.float32)
    shared = Shared(dtype, filled, places(shape, layout))
    if value is not None:
        shared.store(value)
    return shared


def copy(to, pointer, mask=None):
    to.store(tl.load(pointer) if mask is None else tl.load(pointer, mask, other=0.0))


class Barrier:
    """Completes a phase when as many threads have arrived as it counts, and the bytes they expect."""

    def __init__(self):
        self.count = self.missing = self.bytes = self.phases = 0
        self.copies = []

    def init(self, count):
        self.count = self.missing = count

    def expect(self, size, pred=True):
        if number(pred):
            self.missing -= 1
            self.bytes += size
            assert self.missing >= 0, "more arrivals than the barrier counts"
            self.complete()

    def complete(self):
        if self.missing == 0 and self.bytes == 0:
            self.missing, self.phases = self.count, self.phases + 1

    def wait(self, phase):
        assert self.phases % 2 != number(phase), f"waits forever: {self.missing} arrivals, {self.bytes} bytes missing"
        for to, array in self.copies:
            to.memory[to.where] = array
        self.copies = []


class Barriers:
    def __init__(self, size):
        self.barriers = [Barrier() for _ in range(size)]

    def index(self, index):
        return self.barriers[number(index)]


@dataclass
class TensorMap(TensorDescriptor):
    """A tensor for bulk copies, as the kernel sees it."""

    @property
    def dtype(self):
        assert str(self.base.dtype) == "torch.float32"
        return tl.float32


reading = []  # what products have been given and not finished, the last one last


def bulk_copy(source, place, barrier, to, pred=True):
    """Copy a block; what lies past an end is zero."""
    if not number(pred):
        return
    for part in reading:
        used = part.memory is to.memory and np.isin(to.where, part.where).any()
        assert not used, "a copy over what a product still reads"
    assert to.where.shape == tuple(source.block_shape)
    array = np.zeros(source.block_shape, np.float32)
    first = [number(at) for at in place]
    assert min(first) >= 0
    ends = [min(size, at + length) for size, at, length in zip(source.shape, first, source.block_shape, strict=True)]
    view = source.base.as_strided(source.shape, source.strides).numpy()
    if all(end > at for end, at in zip(ends, first, strict=True)):
        block = view[first[0] : ends[0], first[1] : ends[1]]
        array[: block.shape[0], : block.shape[1]] = block
    to.memory[to.where] = np.nan
    barrier.copies.append((to, array))
    barrier.bytes -= array.nbytes
    barrier.complete()


def multiply(a, b, total, is_async=False):
    reading.extend((a, b))
    if not is_async:
        wait_products(0)
    return tl.dot(a.load(None), b.load(None), total, input_precision="ieee")


def wait_products(outstanding=0, deps=()):
    del reading[: len(reading) - 2 * outstanding]
    return deps[0] if deps else None


def hopper():
    """The part of Gluon's language that only Hopper has."""
    language, mbarrier, tma = (ModuleType(part) for part in ("hopper", "mbarrier", "tma"))
    mbarrier.MBarrierLayout = lambda: None
    mbarrier.init = lambda barrier, count: barrier.init(count)
    mbarrier.expect = lambda barrier, size, pred=True: barrier.expect(size, pred)
    mbarrier.wait = lambda barrier, phase: barrier.wait(phase)
    tma.async_copy_global_to_shared = bulk_copy
    language.mbarrier, language.tma, language.fence_async_shared = mbarrier, tma, lambda: None
    language.warpgroup_mma, language.warpgroup_mma_wait = multiply, wait_products
    return language


def interpreted(path, folder):
    """The module of a file, of which the folder gets a copy, with Gluon's language replaced by Triton's."""
    written = folder / "interpreted_kernel.py"
    written.write_text(Path(path).read_text().replace(": gl.constexpr", ": tl.constexpr"))
    gl = ModuleType("language")
    for shared in (
        "load",
        "store",
        "where",
        "exp",
        "rsqrt",
        "program_id",
        "num_programs",
        "minimum",
        "sum",
        "broadcast",
        "atomic_add",
    ):
        setattr(gl, shared, lambda *a, shared=shared, **k: getattr(tl, shared)(*a, **k))
    gl.float32, gl.bfloat16, gl.int64 = tl.float32, tl.bfloat16, tl.int64
    gl.constexpr, gl.static_range = (lambda value: value), range
    gl.thread_barrier = lambda: None
    gl.arange = lambda first, end, layout: tl.arange(first, end)
    gl.zeros = lambda shape, dtype, layout: tl.zeros(shape, dtype)
    gl.convert_layout = lambda value, layout, assert_trivial=False: value
    gl.allocate_shared_memory = allocate
    gl.inline_asm_elementwise = lambda code, constraints, values, **options: values[0] * values[1]
    for layout in [
        "BlockedLayout",
        "DistributedLinearLayout",
        "DotOperandLayout",
        "NVMMADistributedLayout",
        "SharedLinearLayout",
        "SliceLayout",
        "SwizzledSharedLayout",
    ]:
        setattr(gl, layout, lambda *a: a)
    ampere, gluon, experimental, jit = (ModuleType(part) for part in ("ampere", "gluon", "experimental", "jit"))
    ampere.mma_v2 = lambda a, b, total: tl.dot(a, b, total, input_precision="ieee")
    ampere.async_copy = ModuleType("async_copy")
    ampere.async_copy.async_copy_global_to_shared = copy
    ampere.async_copy.commit_group = lambda: None
    ampere.async_copy.wait_group = lambda count: None
    gluon.language, gluon.jit, experimental.gluon, jit.constexpr_function = gl, triton.jit, gluon, lambda f: f
    stubs = {
        "triton.experimental": experimental,
        "triton.experimental.gluon": gluon,
        "triton.experimental.gluon.language.nvidia.ampere": ampere,
        "triton.experimental.gluon.language.nvidia.hopper": hopper(),
        "triton.runtime.jit": jit,
    }
    kept = {part: sys.modules.get(part) for part in stubs}
    spec = importlib.util.spec_from_file_location(written.stem, written)
    module = importlib.util.module_from_spec(spec)
    sys.modules.update(stubs)
    try:
        spec.loader.exec_module(module)
    finally:
        for part, before in kept.items():
            if before is None:
                del sys.modules[part]
            else:
                sys.modules[part] = before
    return module
