"""Every kernel compiles for every kind of GPU that takes it, and torch.compile takes it; no GPU is needed."""

import os
import re
import subprocess
import sys

import pytest

from support.paths import ROOT

pytest.importorskip("triton", reason="Triton is not installed")

KERNELS = ROOT / "src" / "arpg" / "kernels"
# Compute capability: the most shared memory of a program, in KiB (CUDA C++ Programming Guide, "Technical Specifications
# per Compute Capability"). 8.6 has what 8.9 has. 7.5 is not among them: no kernel is chosen there (test_devices.py).
SHARED_KIB = {80: 163, 89: 99, 90: 227, 100: 227, 120: 99}


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_KIB)
def test_every_kernel_compiles_for_a_gpu(capability):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = [sys.executable, "-m", "support.compile_kernels", str(capability)]
    run = subprocess.run(program, cwd=ROOT / "tests", env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    shared = {name: int(size) for name, size in (line.split() for line in run.stdout.splitlines())}
    launched = {
        name for path in KERNELS.glob("*.py") for name in re.findall(r"^ *(_\w+)\[", path.read_text(), re.MULTILINE)
    }
    missing = launched - set(shared)
    early = set() if capability >= 90 else {"_small_gemm"}  # only chosen with dependent launch
    assert missing == early | (set() if capability == 90 else {"_wgmma_gemm"})  # only chosen on Hopper
    assert {name: size for name, size in shared.items() if size > SHARED_KIB[capability] * 1024} == {}


@pytest.mark.parametrize("precision", ["bfloat16", "fp8", "int8"])
def test_torch_compile_traces_the_blocks_whole(precision):
    """With the kernels, as `--engine compiled` does on a GPU."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = [sys.executable, "-m", "support.trace_blocks", precision]
    run = subprocess.run(program, cwd=ROOT / "tests", env=environment, capture_output=True, text=True)
    assert run.stdout.split() == ["whole", "whole"], run.stderr[-2000:]
