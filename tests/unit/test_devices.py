"""What `auto` means on each kind of device, with faked GPUs: type, engine, kernels, and refusals in one line."""

import logging
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from arpg import InputError, device
from arpg.decode.engine import choose_mode
from arpg.kernels import dispatch
from arpg.quantization.precision import check_fp8

CUDA = torch.device("cuda", 0)


@dataclass
class Gpu:
    """A GPU as torch describes it, and what must be chosen for it."""

    name: str
    capability: tuple[int, int]
    dtype: torch.dtype
    kernels: bool
    pdl: bool = False
    fp8: bool = False
    amd: bool = False
    triton: bool = True


GPUS = [
    Gpu("Tesla V100", (7, 0), torch.float16, kernels=False),
    Gpu("Tesla T4", (7, 5), torch.float16, kernels=False),
    Gpu("NVIDIA A100", (8, 0), torch.bfloat16, kernels=True),
    Gpu("NVIDIA GeForce RTX 3090", (8, 6), torch.bfloat16, kernels=True),
    Gpu("NVIDIA GeForce RTX 4090", (8, 9), torch.bfloat16, kernels=True, fp8=True),
    Gpu("NVIDIA GeForce RTX 4090, Windows", (8, 9), torch.bfloat16, kernels=False, fp8=True, triton=False),
    Gpu("NVIDIA H200", (9, 0), torch.bfloat16, kernels=True, pdl=True, fp8=True),
    Gpu("NVIDIA B200", (10, 0), torch.bfloat16, kernels=True, pdl=True, fp8=True),
    Gpu("NVIDIA GeForce RTX 5090", (12, 0), torch.bfloat16, kernels=True, pdl=True, fp8=True),
    Gpu("AMD Instinct MI300X", (9, 4), torch.bfloat16, kernels=False, amd=True),
]


def install(monkeypatch, gpu):
    """Let torch see one GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda on=None: gpu.capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda on=None: gpu.name)
    monkeypatch.setattr(torch.version, "hip", "6.2" if gpu.amd else None)
    monkeypatch.setattr(dispatch, "TRITON_AVAILABLE", gpu.triton)


def on_gpu(dtype):
    return SimpleNamespace(is_cuda=True, device=CUDA, dtype=dtype)


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_auto_on_a_gpu(gpu, monkeypatch):
    install(monkeypatch, gpu)
    assert device.choose_device("auto").type == device.choose_device("cuda:0").type == "cuda"
    for precision in ("auto", "int8"):
        assert device.choose_dtype(precision, CUDA) == gpu.dtype
    assert device.choose_dtype("float32", CUDA) == torch.float32
    assert device.training_precision("auto", CUDA) == ("bf16" if gpu.dtype == torch.bfloat16 else "float32")
    assert choose_mode("auto", CUDA) == ("eager" if gpu.amd else "graph")
    x = on_gpu(gpu.dtype)
    assert dispatch.can_fuse(x) == dispatch.can_fuse_half(x) == dispatch.has_kernels(x) == gpu.kernels
    assert dispatch.supports_pdl(x) == gpu.pdl
    assert dispatch.can_compile(x) == gpu.triton
    if gpu.fp8:
        check_fp8(CUDA)
    else:
        with pytest.raises(InputError, match=r"^precision is fp8[^\n]*use one of"):
            check_fp8(CUDA)


def test_a_gpu_that_is_too_old_is_refused_in_one_line(monkeypatch, caplog):
    install(monkeypatch, Gpu("Tesla P100", (6, 0), torch.float32, kernels=False))
    expected = "Tesla P100 has compute capability 6.0, which is not supported; expected 7.0 (Volta) or later; "
    with pytest.raises(InputError) as raised:
        device.choose_device("cuda")
    assert str(raised.value) == expected + "use --device cpu"
    with caplog.at_level(logging.WARNING):
        assert device.choose_device("auto").type == "cpu"
    assert [record.getMessage() for record in caplog.records] == [expected + "the CPU is used"]


def test_auto_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device.choose_device("auto").type == "cpu"
    with pytest.raises(InputError, match="torch sees no GPU; use --device cpu"):
        device.choose_device("cuda")


def test_apple_gpus(monkeypatch):
    """By name alone; in float32, eagerly, without our kernels."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(InputError, match="torch sees no Apple GPU; use --device cpu"):
        device.choose_device("mps")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert device.choose_device("auto").type == "cpu"
    mps = device.choose_device("mps")
    assert device.choose_dtype("auto", mps) == torch.float32
    assert choose_mode("auto", mps) == "eager"
    assert device.training_precision("auto", mps) == "float32"
    with pytest.raises(InputError, match="needs an NVIDIA GPU, not mps"):
        check_fp8(mps)


@pytest.mark.parametrize("kernel", ["small_gemm", "wgmma_gemm", "large_gemm"])
def test_a_gemm_that_does_not_compile_is_logged_once(kernel, monkeypatch, caplog):
    pytest.importorskip("triton", reason="Triton is not installed")
    if kernel == "large_gemm":
        pytest.importorskip("quack", reason="QuACK is not installed")
    tried = []

    def linear(x, *rest, **options):
        tried.append(x)
        raise AttributeError("no attribute 'mma_v2'\nand more")

    monkeypatch.setattr(f"arpg.kernels.{kernel}.linear", linear)
    dispatch.kernel_works.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert not dispatch.kernel_works(torch.device("cpu"), kernel)
            assert not dispatch.kernel_works(torch.device("cpu"), kernel)
    finally:
        dispatch.kernel_works.cache_clear()
    assert len(tried) == 1
    line = f"{kernel} is not used, because it does not work: AttributeError: no attribute 'mma_v2'"
    assert [record.getMessage() for record in caplog.records] == [line]


def test_convolutions_are_tuned_inside_only(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    for tune in (True, False):
        with device.tuned_convolutions(tune):
            assert torch.backends.cudnn.benchmark == tune
        assert not torch.backends.cudnn.benchmark
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)  # as the caller wants it
    with device.tuned_convolutions(False):
        assert torch.backends.cudnn.benchmark
    assert torch.backends.cudnn.benchmark


def test_threads_that_tune_convolutions_at_once_leave_the_flag_as_it_was(monkeypatch):
    """The first to enter leaves first, as where a server decodes previews beside images."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    first, second = device.tuned_convolutions(True), device.tuned_convolutions(True)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert torch.backends.cudnn.benchmark
    second.__exit__(None, None, None)
    assert not torch.backends.cudnn.benchmark


@pytest.mark.parametrize("on", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_arrays_are_sent_together(on):
    """Any types, shapes and layouts; each begins where kernels expect a tensor to begin."""
    if on == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    numbers = np.arange(15).reshape(3, 5)
    arrays = {
        "flags": numbers % 2 == 0,
        "ids": numbers,
        "turned": numbers.T,
        "none": numbers[:0],
        "scales": numbers.astype(np.float32)[:, ::2] / 3,
    }
    sent = device.send_all(arrays, torch.device(on))
    assert list(sent) == list(arrays)
    for name, array in arrays.items():
        assert sent[name].dtype == torch.from_numpy(array.copy()).dtype
        assert sent[name].shape == array.shape
        assert sent[name].is_contiguous()
        assert np.array_equal(sent[name].cpu().numpy(), array)
        assert sent[name].data_ptr() % 16 == 0
