"""Compiles the kernel of `benchmarks/wgmma_gemm.py` for Hopper, as each variant launches it for some number of rows.

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

from benchmarks import wgmma_gemm
from support.compile_kernels import Driver, half

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
    x, norm = half(rows, 1024), half(1024)
    sums = wgmma_gemm.empty_sums(x, half(1024, 0))
    normed = {"norm_D": norm, "eps": 1e-5, "squares_PM": sums}
    for variant, tiles in wgmma_gemm.VARIANTS.items():
        calls = {
            "plain": (x, half(3072, 1024), normed),
            "swiglu": (x, half(5632, 1024), {**normed, "swiglu": True}),
            "out": (half(rows, 1024), half(1024, 1024), {"add": x, "sums_PM": sums}),
            "down": (half(rows, 2816), half(1024, 2816), {"add": x, "sums_PM": sums}),
        }
        for kind, (inputs, weight, options) in calls.items():
            wgmma_gemm.linear(inputs, weight, tile=tiles[kind], **options)
            grid, kernel = made.pop()
            norm_inside = "norm_D" in options
            about = {"programs": grid, "shared": kernel.metadata.shared, "norm": norm_inside}
            found[f"{variant}, {kind}"] = {**about, **facts(kernel)}
    print(json.dumps(found, indent=1))  # noqa: T201


if __name__ == "__main__":
    with torch.no_grad():
        main(int(sys.argv[1]))
