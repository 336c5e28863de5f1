"""Compiles `arpg.kernels.wgmma_gemm` for Hopper, as the layers of ARPG-L and ARPG-XL launch it for a number of rows.

Run by `test_wgmma_gemm.py` as a program of its own, since Triton is either interpreted or compiled. Prints JSON: shared
memory, registers and stack of each product, and its instructions before and after the dependency barrier.
"""

import json
import re
import subprocess
import sys
import tempfile

import torch
import triton
from triton.runtime.jit import JITFunction

from arpg.kernels import wgmma_gemm
from support.compile_kernels import Driver

INSTRUCTIONS = {
    "launch_dependents": "griddepcontrol.launch_dependents",
    "copies": "cp.async.bulk.tensor",
    "products": "wgmma.mma_async",
    "fences": "fence.proxy.async",
    "loads": "ld.global",
    "stores": "st.global",
}


def facts(made):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        tool = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(tool, capture_output=True, text=True, check=True).stdout
    before, after = made.asm["ptx"].split("griddepcontrol.wait")
    counts = [{name: part.count(code) for name, code in INSTRUCTIONS.items()} for part in (before, after)]
    registers, stack = (int(re.search(rf"{name}:(\d+)", usage).group(1)) for name in ("REG", "STACK"))
    return {"registers": registers, "stack": stack, "before": counts[0], "after": counts[1]}


def main(rows):
    triton.runtime.driver.set_active(Driver(90))
    run, found, made = JITFunction.run, {}, []

    def compile_only(self, *args, grid, warmup, **options):
        made.append((grid, run(self, *args, grid=grid, warmup=True, **options)))

    JITFunction.run, wgmma_gemm.prefetch_weights = compile_only, lambda x: True
    for name, width, hidden, dtype in (
        ("L", 1024, 2816, torch.bfloat16),
        ("XL", 1280, 3584, torch.bfloat16),
        ("L in float16", 1024, 2816, torch.float16),
    ):
        x, norm, out = (torch.zeros(shape, dtype=dtype) for shape in ((rows, width), (width,), (width, width)))
        sums = wgmma_gemm.empty_sums(x, out)
        normed, added = (
            {"norm_D": norm, "eps": 1e-5, "squares_PM": sums},
            {"add": x, "squares_PM": sums, "sums_PM": sums},
        )
        calls = {
            "qkv": (x, (3 * width, width), normed),
            "gate, up": (x, (2 * hidden, width), {**normed, "swiglu": True}),
            "out": (x, (width, width), added),
            "down": (x.new_zeros(rows, hidden), (width, hidden), added),
        }
        for kind, (inputs, shape, options) in calls.items():
            wgmma_gemm.linear(inputs, x.new_zeros(shape), **options)
            grid, kernel = made.pop()
            about = {"programs": grid, "shared": kernel.metadata.shared, "norm": "norm_D" in options}
            found[f"{name}, {kind}"] = {**about, **facts(kernel)}
    print(json.dumps(found, indent=1))  # noqa: T201


if __name__ == "__main__":
    with torch.no_grad():
        main(int(sys.argv[1]))
