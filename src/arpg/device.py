"""Devices: the device and type a model runs in, the threads of a CPU, peak memory, and the peaks of known GPUs."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.overrides import TorchFunctionMode

from arpg.config import PRECISIONS
from arpg.errors import InputError, require

log = logging.getLogger(__name__)

VARIABLE = "ARPG_THREADS"
_tuning, _num_tuning, _tuned_before = threading.Lock(), 0, False  # blocks of `tuned_convolutions`, in all threads
_ALIGNMENT = 16  # bytes; kernels are compiled for pointers that are multiples of it
_OLDEST_GPU = (7, 0)  # compute capability: Volta, the first with tensor cores
_DEVICES = "auto, cpu, cuda, cuda:0 or mps"


@dataclass(frozen=True)
class GpuSpec:
    """Peaks of a GPU by the vendor's data sheet."""

    bf16_flops: float  # dense, summed in float32, per second; those of float16 on GPUs without bfloat16
    float32_flops: float  # without TF32, per second
    bandwidth: float  # bytes per second
    memory: float  # GB
    capability: tuple[int, int] | None  # None: not NVIDIA's


# By a part of the device's name; the first that matches counts.
GPU_SPECS = {
    "B200": GpuSpec(2250e12, 75e12, 8.0e12, 180, (10, 0)),
    "H200": GpuSpec(989e12, 67e12, 4.8e12, 141, (9, 0)),
    "H100": GpuSpec(989e12, 67e12, 3.35e12, 80, (9, 0)),
    "A100-SXM4-40GB": GpuSpec(312e12, 19.5e12, 1.555e12, 40, (8, 0)),
    "A100-PCIE-40GB": GpuSpec(312e12, 19.5e12, 1.555e12, 40, (8, 0)),
    "A100": GpuSpec(312e12, 19.5e12, 2.039e12, 80, (8, 0)),
    "A800": GpuSpec(312e12, 19.5e12, 2.039e12, 80, (8, 0)),
    "L40S": GpuSpec(362e12, 91.6e12, 0.864e12, 48, (8, 9)),
    "L40": GpuSpec(181e12, 90.5e12, 0.864e12, 48, (8, 9)),
    "NVIDIA L4": GpuSpec(121e12, 30.3e12, 0.3e12, 24, (8, 9)),
    "5090": GpuSpec(209.5e12, 104.8e12, 1.792e12, 32, (12, 0)),
    "4090": GpuSpec(165e12, 82.6e12, 1.008e12, 24, (8, 9)),
    "Tesla T4": GpuSpec(65e12, 8.1e12, 0.32e12, 16, (7, 5)),
    "MI300X": GpuSpec(1307e12, 163.4e12, 5.3e12, 192, None),
}


def gpu_spec(device_name: str) -> GpuSpec | None:
    """Return the peaks of a GPU by the name that CUDA reports; None where they are not known."""
    return next((spec for name, spec in GPU_SPECS.items() if name in device_name), None)


class _SkipInit(TorchFunctionMode):
    """Let the functions of `torch.nn.init` return their tensor as it is."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", "") == "torch.nn.init":
            return kwargs["tensor"]
        return func(*args, **kwargs)


@contextlib.contextmanager
def meta_device() -> Iterator[None]:
    """Make modules on the meta device, without initial values: for those, torch would import its compiler (seconds)."""
    with torch.device("meta"), _SkipInit():
        yield


def choose_device(device: str | torch.device) -> torch.device:
    """Return the device by its name; `auto` is the NVIDIA or AMD GPU where there is one that is not too old."""
    if device == "auto":
        if not torch.cuda.is_available():
            return torch.device("cpu")
        if (reason := _too_old(torch.device("cuda"))) is not None:
            log.warning("%s; the CPU is used", reason)
            return torch.device("cpu")
        return torch.device("cuda")
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise InputError(f"device is {device!r}; expected {_DEVICES}") from None
    require(chosen.type in ("cpu", "cuda", "mps"), f"device is {str(device)!r}; expected {_DEVICES}")
    require(
        chosen.type != "cuda" or torch.cuda.is_available(),
        f"device is {str(device)!r}, but torch sees no GPU; use --device cpu",
    )
    require(
        chosen.type != "cuda" or (chosen.index or 0) < torch.cuda.device_count(),
        f"device is {str(device)!r}, but torch sees {torch.cuda.device_count()} GPUs, which count from cuda:0",
    )
    if chosen.type == "cuda" and (reason := _too_old(chosen)) is not None:
        raise InputError(f"{reason}; use --device cpu")
    require(
        chosen.type != "mps" or torch.backends.mps.is_available(),
        f"device is {str(device)!r}, but torch sees no Apple GPU; use --device cpu",
    )
    return chosen


def nvidia_capability(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of an NVIDIA GPU; None for others, also AMD's, which torch calls cuda, too."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return torch.cuda.get_device_capability(device)


def _too_old(device: torch.device) -> str | None:
    """Return why a GPU is not supported; None: it is."""
    found = nvidia_capability(device)
    if found is None or found >= _OLDEST_GPU:
        return None
    name, (major, minor) = torch.cuda.get_device_name(device), _OLDEST_GPU
    return (
        f"{name} has compute capability {found[0]}.{found[1]}, which is not supported; expected {major}.{minor} "
        "(Volta) or later"
    )


def half_dtype(device: torch.device) -> torch.dtype | None:
    """Return the 16-bit type that a device multiplies fast: bfloat16, float16 on GPUs before Ampere; None: neither."""
    found = nvidia_capability(device)
    if found is None:
        return torch.bfloat16 if device.type == "cuda" else None
    return torch.bfloat16 if found >= (8, 0) else torch.float16


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy `tensor` to the device without a synchronisation, through pinned memory."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def receive(tensor: Tensor) -> Tensor:
    """Copy `tensor` to the CPU through pinned memory: other threads can use the driver while this one waits."""
    if tensor.device.type != "cuda":
        return tensor.cpu()
    received = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    received.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return received


def send_all(arrays: Mapping[str, NDArray[Any]], device: torch.device) -> dict[str, Tensor]:
    """Copy `arrays` to the device as `send` does, in one transfer; the tensors are views of one buffer."""
    if device.type == "mps":  # whose operations have had faults with views in another type
        return {name: send(torch.from_numpy(array), device) for name, array in arrays.items()}
    sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays.values()]
    packed = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
    packed_bytes, start = packed.numpy(), 0
    for array, size in zip(arrays.values(), sizes, strict=True):
        packed_bytes[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
        start += size
    parts = zip(arrays.items(), torch.split(packed.to(device, non_blocking=True), sizes), strict=True)
    return {name: part[: x.nbytes].view(torch.from_numpy(x).dtype).view(x.shape) for (name, x), part in parts}


@contextlib.contextmanager
def tuned_convolutions(tune: bool) -> Iterator[None]:
    """Let cuDNN time its algorithms for each convolution inside that it has not timed yet, where `tune` is set.

    A flag of the process: convolutions of other threads may be tuned meanwhile. The last thread to leave restores it.
    """
    global _num_tuning, _tuned_before
    if not tune:
        yield
        return
    with _tuning:
        if _num_tuning == 0:
            _tuned_before = torch.backends.cudnn.benchmark
            torch.backends.cudnn.benchmark = True
        _num_tuning += 1
    try:
        yield
    finally:
        with _tuning:
            _num_tuning -= 1
            if _num_tuning == 0:
                torch.backends.cudnn.benchmark = _tuned_before


def synchronize(device: torch.device) -> None:
    """Wait until `device` has finished its work; nothing to do on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def choose_dtype(precision: str | torch.dtype, device: torch.device) -> torch.dtype:
    """Return the type that a model computes in; with 8-bit weights, the type of everything else.

    `auto` is `half_dtype` on a GPU. Elsewhere it is float32: no Apple GPU has been measured.
    """
    if isinstance(precision, torch.dtype):
        return precision
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    require(precision in PRECISIONS, f"precision is {precision!r}; expected one of {', '.join(PRECISIONS)}")
    return known.get(precision, half_dtype(device) or torch.float32)


def has_bfloat16(root: Path = Path("/")) -> bool:
    """Return whether the CPU has products of bfloat16; elsewhere they are many times slower than those of float32."""
    words = set(_read(root / "proc/cpuinfo").split())
    return bool(words & {"avx512_bf16", "amx_bf16", "bf16"})  # the last is Arm's


def training_precision(precision: str, device: torch.device) -> str:
    """Return bf16 or float32 for `run.precision`; auto is bf16 where the device multiplies it in hardware."""
    if precision != "auto":
        return precision
    fast = has_bfloat16() if device.type == "cpu" else half_dtype(device) == torch.bfloat16
    return "bf16" if fast else "float32"


def available_bytes(device: torch.device, root: Path = Path("/")) -> int | None:
    """Return the memory that is free on the device; on a CPU within the limit of the container. None: not known."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    lines = dict(line.split(":", 1) for line in _read(root / "proc/meminfo").splitlines() if ":" in line)
    if "MemAvailable" not in lines:
        return None
    free = 1024 * int(lines["MemAvailable"].split()[0])
    limit, used = (_read(root / f"sys/fs/cgroup/memory.{name}").strip() for name in ("max", "current"))
    return min(free, max(0, int(limit) - int(used))) if limit.isdecimal() and used.isdecimal() else free


def set_threads(wanted: int | None = None) -> int:
    """Set the number of torch's CPU threads, and return it.

    The argument comes first, then $ARPG_THREADS, then $OMP_NUM_THREADS (which torch reads), then `good_threads`.
    """
    text = os.environ.get(VARIABLE) if wanted is None else str(wanted)
    if text is not None:
        if not text.isdecimal() or int(text) < 1:
            raise InputError(f"the number of threads is {text!r}; expected 1 or more ({VARIABLE} or --threads)")
        torch.set_num_threads(int(text))
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(good_threads())
    return torch.get_num_threads()


def good_threads(root: Path = Path("/")) -> int:
    """Return the number of physical cores that this process may use, less those that are busy right now.

    Hyperthreads share what matrix products need. A thread without a core of its own makes all others wait for it,
    spinning, at the end of every operation: too many threads are far worse than too few.
    """
    cores = {_core(root, cpu) for cpu in usable_cpus()}
    quota = _quota(root)
    usable = len(cores) if quota is None else min(len(cores), max(1, math.floor(quota)))
    return max(1, min(usable, (os.cpu_count() or 1) - _others(root)))


def usable_cpus() -> list[int]:
    """Return the numbers of the logical CPUs that this process may use; all of them where the system does not say."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def cpu_name(root: Path = Path("/")) -> str:
    """Return the CPU's model name."""
    for line in _read(root / "proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def reset_peak(device: torch.device) -> None:
    """Start to count the peak memory anew; on a CPU that is possible on Linux only."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(device: torch.device) -> int:
    """Return the most bytes that CUDA's allocator, or on a CPU the process, has held since `reset_peak`.

    Windows does not say: 0. An Apple GPU says what it holds now.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
    except (OSError, StopIteration, ValueError, IndexError):
        try:
            import resource
        except ModuleNotFoundError:
            return 0
        unit = 1 if sys.platform == "darwin" else 1024
        return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _core(root: Path, cpu: int) -> str:
    """Return the list of logical CPUs that share the core of `cpu`; `cpu` itself where the system does not say."""
    return _read(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").strip() or str(cpu)


def _quota(root: Path) -> float | None:
    """Return the CPU quota of the container in CPUs (cgroup v2, else v1); None without a limit."""
    numbers = _read(root / "sys/fs/cgroup/cpu.max").split()
    if not numbers:
        v1 = root / "sys/fs/cgroup/cpu"
        numbers = [_read(v1 / name).strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
    if len(numbers) != 2 or not all(number.isdecimal() for number in numbers):  # "max", -1 or nothing
        return None
    return int(numbers[0]) / max(1, int(numbers[1]))


def _others(root: Path) -> int:
    """Return how many other threads of the machine are runnable: the median of five readings of the load average."""
    readings = []
    for _ in range(5):
        fields = _read(root / "proc/loadavg").split()
        if len(fields) < 4:
            return 0
        readings.append(max(0, int(fields[3].partition("/")[0]) - 1))
        time.sleep(0.002)
    return int(statistics.median(readings))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
