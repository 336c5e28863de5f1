"""What is done for CPUs: packed weights compute the same, threads are counted right, pixels in bfloat16 are close."""

import copy
import multiprocessing
import os
import platform
import subprocess
import sys

import pytest
import torch

from arpg import InputError, Pipeline, SamplingSettings, tasks
from arpg import device as cpu
from arpg.decode import Engine, decode, make_plan
from arpg.decode.sampling import sample
from arpg.noise import seed_keys
from arpg.quantization.packed import PackedLinear, can_pack, pack_linears, unpack_linears
from arpg.quantization.precision import Int8Linear
from support.paths import ROOT
from support.small import small_model, small_tokenizer

needs_packing = pytest.mark.skipif(not can_pack(torch.float32), reason="this torch has no packed products")

# What once failed on a CPU without AVX-512. oneDNN reads its variable once, so a process has to start with it.
WITHOUT_AVX512 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
CPU_DEPENDENT_TESTS = (
    "tests/decode/test_cpu.py",
    "tests/unit/test_bench.py::test_the_command_measures_a_grid_and_compares",
    "tests/gpu/test_precision.py::test_the_benchmark_compares_engines",
    "tests/train/test_snapshot.py::test_two_processes_train_as_one",
    "tests/train/test_snapshot.py::test_shards_of_two_processes_load_in_one",
)


def tokens(model, **settings):
    settings = SamplingSettings(steps=5, guidance=3.0, **settings)
    request = tasks.generate(model, [0, 3], [1, 2])
    plan = make_plan(request.grid, request.known_BN, request.seeds, settings)
    return [step.ids_BN for step in decode(model, request, plan, settings)][-1]


@needs_packing
def test_a_packed_model_samples_the_same_tokens():
    plain, packed = small_model(), pack_linears(small_model())
    kinds = {type(layer).__name__ for layer in packed.modules() if isinstance(layer, PackedLinear)}
    assert kinds == {"PackedLinear"}
    assert not [layer for layer in packed.modules() if type(layer) is torch.nn.Linear]
    assert torch.equal(tokens(plain), tokens(packed))
    torch.testing.assert_close(packed.head(torch.eye(32)), plain.head(torch.eye(32)), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 32, 24), (3, 7, 5), (130, 64, 100), (2, 1, 1)])
def test_products_of_any_size(rows, inputs, outputs, dtype):
    torch.manual_seed(0)
    layer = torch.nn.Linear(inputs, outputs, bias=False).to(dtype)
    x = torch.randn(2, rows, inputs).to(dtype)
    with torch.no_grad():
        expected = layer(x).float()
        packed = pack_linears(layer)
        found = packed(x)
    assert isinstance(packed, PackedLinear) == can_pack(dtype)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected, atol=0.02 if dtype == torch.bfloat16 else 1e-5, rtol=0.01)


@needs_packing
def test_packing_loses_nothing():
    """State, copies, other types and the way back have the very weights."""
    state = small_model().state_dict()
    packed = pack_linears(small_model())
    for other in (packed, copy.deepcopy(packed), pack_linears(packed)):
        assert list(other.state_dict()) == list(state)
        assert all(torch.equal(other.state_dict()[key], tensor) for key, tensor in state.items())
    assert packed.double().head.weight.dtype == torch.float64
    assert torch.equal(packed.head.weight.float(), state["head.weight"])
    back = unpack_linears(pack_linears(small_model()))
    assert {name for name, _ in back.named_parameters()} == set(state)


def send_product(layer, x, connection):
    with torch.no_grad():
        connection.send(layer(x).tolist())


@pytest.mark.parametrize("kind", [pytest.param(PackedLinear, marks=needs_packing), Int8Linear])
def test_a_layer_can_be_passed_to_another_process(kind):
    """It shares tensors, of which a packed weight has none."""
    context, x = multiprocessing.get_context("spawn"), torch.randn(2, 32)
    layer = kind.from_linear(torch.nn.Linear(32, 48, bias=False))
    ours, theirs = context.Pipe()
    process = context.Process(target=send_product, args=(layer, x, theirs))
    process.start()
    theirs.close()
    torch.testing.assert_close(torch.tensor(ours.recv()), layer(x))
    process.join()


@needs_packing
def test_what_cannot_be_packed_stays_and_gradients_flow():
    with_bias = pack_linears(torch.nn.Linear(4, 4))
    assert type(with_bias) is torch.nn.Linear
    packed = pack_linears(small_model())
    x = torch.randn(2, 32, requires_grad=True)
    packed.head(x).sum().backward()
    torch.testing.assert_close(x.grad, packed.head.weight.sum(0).expand(2, -1))


def test_the_plain_loop_of_the_benchmark_samples_the_same(model):
    """What our speed is held against computes the same thing."""
    from arpg.bench.case import Case
    from benchmarks.cpu_speed import PlainLoop, on_context, tokens_of

    case = Case("small", 2, SamplingSettings(steps=5, guidance=3.0), model.config.grid)
    request, plan = case.request(model, 0)
    keys = seed_keys(request.seeds)
    ids, logits = PlainLoop(model).run(
        torch.tensor([0, 1]),
        torch.tensor([each.order for each in plan.samples]),
        list(plan.samples[0].sizes),
        list(plan.samples[0].scales),
        lambda x, position_BS: sample(x, case.settings, keys, position_BS),
    )
    ours = tokens_of(Engine(model, "eager"), case)
    assert torch.equal(ids, ours)
    for theirs, (found, drawn) in zip(logits, on_context(model, case, ours), strict=True):
        torch.testing.assert_close(found, theirs, atol=1e-4, rtol=1e-4)
        assert drawn.shape == theirs.shape[:2]


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the variables limit x86 CPUs")
@pytest.mark.skipif(WITHOUT_AVX512.items() <= os.environ.items(), reason="this is the process without AVX-512")
def test_a_cpu_without_avx512():
    """bfloat16 runs there with plain weights, and no test depends on the instruction set."""
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *CPU_DEPENDENT_TESTS],
        cwd=ROOT,
        env=os.environ | WITHOUT_AVX512,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.returncode == 0, found.stdout[-5000:] + found.stderr


def test_a_loaded_pipeline_is_packed_and_can_be_saved(folder, tmp_path):
    pipe = Pipeline.from_pretrained(folder, device="cpu")
    assert isinstance(pipe.model.head, PackedLinear) == can_pack(pipe.model.dtype)
    pipe.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_a_pipeline_that_is_compiled_has_plain_weights(folder):
    """The compiler cannot read packed weights."""
    pipe = Pipeline.from_pretrained(folder, device="cpu", engine="compiled")
    assert not any(isinstance(layer, PackedLinear) for layer in pipe.model.modules())
    pipe.to(torch.bfloat16)
    assert not any(isinstance(layer, PackedLinear) for layer in pipe.model.modules())


def test_pixels_in_bfloat16_are_close_and_tokens_do_not_change():
    plain, other = small_tokenizer(), small_tokenizer().decode_in(torch.bfloat16)
    ids = torch.arange(16)[None] % 24
    with torch.no_grad():
        expected, found = plain.decode(ids, (4, 4)), other.decode(ids, (4, 4))
        assert found.dtype == torch.float32
        assert 0 < (found - expected).abs().max() < 0.03 * expected.abs().max()
        assert torch.equal(plain.encode(expected), other.encode(expected))
    assert all(torch.equal(a, b) for a, b in zip(plain.state_dict().values(), other.state_dict().values(), strict=True))
    with torch.no_grad():
        torch.testing.assert_close(other.decode_in(torch.float32).decode(ids, (4, 4)), expected)


def machine(root, *, siblings, quota=None, running=1):
    """A made-up /proc and /sys."""
    for i, text in enumerate(siblings):
        path = root / f"sys/devices/system/cpu/cpu{i}/topology"
        path.mkdir(parents=True)
        (path / "thread_siblings_list").write_text(text + "\n")
    for name, text in (quota or {}).items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    (root / "proc").mkdir()
    (root / "proc/loadavg").write_text(f"0.50 0.40 0.30 {running}/500 12345\n")
    (root / "proc/cpuinfo").write_text("processor\t: 0\nmodel name\t: Some CPU @ 3 GHz\n")
    return root


@pytest.mark.parametrize(
    ("quota", "running", "expected"),
    [
        ({}, 1, 4),  # four cores with two threads each
        ({"cpu.max": "max 100000"}, 1, 4),
        ({"cpu.max": "250000 100000"}, 1, 2),  # a container with 2.5 CPUs
        ({"cpu.max": "50000 100000"}, 1, 1),
        ({"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 1, 3),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 1, 4),
        ({}, 7, 2),  # six of eight logical CPUs are busy with something else
        ({}, 40, 1),
    ],
)
def test_threads_are_free_cores(tmp_path, monkeypatch, quota, running, expected):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    root = machine(tmp_path, siblings=["0,4", "1,5", "2,6", "3,7"] * 2, quota=quota, running=running)
    assert cpu.good_threads(root) == expected
    assert cpu.cpu_name(root) == "Some CPU @ 3 GHz"


def test_threads_where_nothing_is_known(tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2}, raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 6)
    assert cpu.good_threads(tmp_path) == 3


def test_the_user_decides_on_threads(monkeypatch):
    before = torch.get_num_threads()
    try:
        monkeypatch.setenv("ARPG_THREADS", "1")
        assert cpu.set_threads() == 1
        assert cpu.set_threads(2) == 2
        monkeypatch.delenv("ARPG_THREADS")
        monkeypatch.setenv("OMP_NUM_THREADS", "7")
        monkeypatch.setattr(cpu, "good_threads", lambda: 5)
        assert cpu.set_threads() == 2  # torch has read it itself, once
        monkeypatch.delenv("OMP_NUM_THREADS")
        assert cpu.set_threads() == 5
        for bad in ("0", "many", "-1", ""):
            monkeypatch.setenv("ARPG_THREADS", bad)
            with pytest.raises(InputError, match="number of threads"):
                cpu.set_threads()
    finally:
        torch.set_num_threads(before)


def test_times_that_a_user_sees_are_of_a_new_process_and_of_whole_images(pipeline, folder, monkeypatch):
    from benchmarks.cpu_speed import time_image, time_loading

    found = time_loading(str(folder), "float32", rounds=1)
    assert set(found) == {"import", "load"}
    assert all(seconds > 0 for times in found.values() for seconds in times.values())
    seeds = []
    generate = Pipeline.generate
    monkeypatch.setattr(
        Pipeline, "generate", lambda self, *a, seed: seeds.append(seed) or generate(self, *a, seed=seed)
    )
    assert time_image(pipeline, rounds=2)["CPU"] >= 0
    assert seeds == [0, 0, 1]
