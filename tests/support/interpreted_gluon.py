"""Runs a Gluon kernel in Triton's interpreter, which knows none: places mean nothing there, only numbers.

What is placed where is checked by the compiler, for which a conversion that should move nothing is an error.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import triton
import triton.language as tl
from triton.runtime.interpreter import TensorHandle


class Shared:
    """Shared memory is a tensor like any other."""

    def __init__(self, value=None):
        self.value = value

    def load(self, layout):
        return self.value

    def slice(self, start, length, axis):
        handle = self.value.handle
        index = [slice(None)] * handle.data.ndim
        index[axis] = slice(start, start + length)
        data = handle.data[tuple(index)]
        return Shared(tl.tensor(TensorHandle(data, handle.dtype), tl.block_type(self.value.dtype, list(data.shape))))


def copy(to, pointer, mask=None):
    to.value = tl.load(pointer) if mask is None else tl.load(pointer, mask, other=0.0)


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
    ):
        setattr(gl, shared, lambda *a, shared=shared, **k: getattr(tl, shared)(*a, **k))
    gl.float32, gl.bfloat16 = tl.float32, tl.bfloat16
    gl.constexpr, gl.static_range = (lambda value: value), range
    gl.thread_barrier = lambda: None
    gl.arange = lambda first, end, layout: tl.arange(first, end)
    gl.zeros = lambda shape, dtype, layout: tl.zeros(shape, dtype)
    gl.convert_layout = lambda value, layout, assert_trivial=False: value
    gl.allocate_shared_memory = lambda dtype, shape, layout, value=None: Shared(value)
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
