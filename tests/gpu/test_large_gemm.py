"""The GEMMs for large batches on Hopper: which one a step takes, in the network, and against plain PyTorch on a GPU."""

import dataclasses
import importlib.util
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from arpg import SamplingSettings, decode, make_plan, tasks
from arpg.decode import Engine
from arpg.decode.continuous import ContinuousBatch
from arpg.kernels import dispatch
from arpg.kernels.dispatch import KernelPolicy, kernel_policy
from arpg.model.layers import ResidualNorm, next_norms
from support.fused import fuse_everywhere
from support.paths import ROOT
from support.small import SMALL, small_model

QUACK = importlib.util.find_spec("quack") is not None
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
EPS = 1e-5


def draw(*shape, seed=0, dtype=torch.float32, device="cpu"):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def off(made, exact):
    return float((made.float() - exact.float()).norm() / exact.float().norm())


def normed_linear(x, weight_ND, *, eps, squares_PM, swiglu=False):
    """`large_gemm.linear` in plain PyTorch."""
    out = x.float() @ weight_ND.float().t()
    out = out * torch.rsqrt(squares_PM.sum(0).view(*x.shape[:-1], 1) / x.shape[-1] + eps)
    if swiglu:
        gate, up = out.chunk(2, -1)
        out = F.silu(gate) * up
    return out.to(x.dtype)


def add_linear(x, weight_ND, add, norm_D):
    """`large_gemm.add_linear` in plain PyTorch."""
    total = x.float() @ weight_ND.float().t() + add.float()
    return total.to(x.dtype), (total * norm_D.float()).to(x.dtype), total.square().flatten(0, -2).sum(-1)[None]


@pytest.fixture
def plain_kernels(monkeypatch):
    """The network chooses the kernel as on a Hopper GPU with QuACK, and gets it in plain PyTorch; calls are counted."""
    calls = []

    def counted(function):
        return lambda *a, **k: calls.append(function.__name__) or function(*a, **k)

    plain = SimpleNamespace(SCALES_STREAM=True, linear=counted(normed_linear), add_linear=counted(add_linear))
    for name in ("supports_pdl", "has_wgmma"):
        monkeypatch.setattr(dispatch, name, lambda x: True)
    monkeypatch.setattr(dispatch, "kernel_works", lambda device, kernel: kernel == "large_gemm")
    monkeypatch.setattr(dispatch, "QUACK_AVAILABLE", True)
    monkeypatch.setattr(dispatch, "_import", lambda kernel: plain)
    monkeypatch.setattr(dispatch, "LARGE_GEMM_ROWS", 1)
    monkeypatch.setattr(dispatch, "can_fuse_inference", lambda x: not torch.is_grad_enabled())
    return calls


@torch.no_grad()
@pytest.mark.parametrize("guided", [False, True])
def test_the_network_computes_the_same(guided, plain_kernels):
    """Every product but those behind the first norm of a pass and the guided head is one of `large_gemm`."""
    model = small_model()
    with torch.no_grad():
        for i, module in enumerate(m for m in model.modules() if isinstance(m, ResidualNorm)):
            module.weight.copy_(1 + 0.3 * draw(model.config.width, seed=i))  # a norm of the wrong layer would show
    pos, x = draw(4, 5, 2, seed=1).abs(), draw(4, 5, model.config.width)
    scale = torch.full((1, 1), 3.0) if guided else None

    def logits():
        cache = model.allocate_cache(4, 20)
        model.encode(x, pos, cache, causal=False)
        return model.predict(pos, None, cache, scale_BS=scale)

    with kernel_policy(KernelPolicy(large_gemm=False)):
        expected = logits()
    assert plain_kernels == []
    made = logits()
    torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-4)
    # 4 layers: queries, keys and values of all but the first of a pass, gates and ups; those of Pass 2; the head.
    assert plain_kernels.count("normed_linear") == 2 + 4 + 1 + (not guided)
    assert plain_kernels.count("add_linear") == 8


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"shared_kv": False},
        {"pass1_layers": 0, "pass2_layers": 3},
        {"positions": "cosine"},
        {"guidance_input": True},
    ],
)
@pytest.mark.parametrize("decode_with", ["steps", "exact", "continuous"])
def test_generations_get_the_same_tokens(change, decode_with, plain_kernels):
    """Samples with and without known tokens, guided and not, in any design of the network and way of decoding."""
    model = small_model(dataclasses.replace(SMALL, **change))
    known = torch.zeros(3, 16, dtype=torch.bool)
    known[0, :5] = True
    request = tasks.fill(model, [0, 2, 4], [5, 6, 7], ids_N=torch.arange(16) % 24, known_N=known)

    def tokens(guidance):
        exact = {"decode": "exact", "attention": "causal", "draft": 3} if decode_with == "exact" else {}
        settings = SamplingSettings(steps=4, guidance=guidance, **exact)
        plan = make_plan(request.grid, request.known_BN, request.seeds, settings)
        if decode_with != "continuous":
            *_, step = decode(model, request, plan, settings)
            return step.ids_BN
        batch = ContinuousBatch(model, request, plan, settings)
        while not all(row.finished for row in batch.rows):
            batch.step()
        return batch.fetch(range(3)).wait()[0]

    for guidance in (3.0, 1.0):
        with kernel_policy(KernelPolicy(large_gemm=False)):
            expected = tokens(guidance)
        assert plain_kernels == []
        assert torch.equal(tokens(guidance), expected)
        assert {"normed_linear", "add_linear"} == set(plain_kernels)
        plain_kernels.clear()


class Sharded(torch.Tensor):
    """A weight of another type, as those of FSDP are outside their block."""


def test_norms_that_another_block_may_read():
    """Not in training, where a block may only take its own weights, nor where they are sharded."""
    model = small_model()
    assert next_norms(model.pass2, model.norm) == [None, None]
    with torch.no_grad():
        first, second = next_norms(model.pass2, model.norm)
        assert first is model.pass2[1].attn_norm.weight
        assert second is model.norm.weight
        model.norm.weight = nn.Parameter(model.norm.weight.as_subclass(Sharded))
        assert next_norms(model.pass2, model.norm)[1] is None


@torch.no_grad()
def test_which_gemm_is_chosen(monkeypatch):
    """From so many rows on, on Hopper, with QuACK."""
    fuse_everywhere(monkeypatch)
    monkeypatch.setattr(dispatch, "_import", lambda kernel: kernel)

    def chosen(rows, width=64):
        return dispatch.fused_gemm(torch.zeros(1, rows, width), nn.Linear(width, 16, bias=False))

    first = dispatch.LARGE_GEMM_ROWS
    assert chosen(first) is None  # a CPU
    for name in ("supports_pdl", "has_wgmma"):
        monkeypatch.setattr(dispatch, name, lambda x: True)
    monkeypatch.setattr(dispatch, "kernel_works", lambda device, kernel: True)
    monkeypatch.setattr(dispatch, "QUACK_AVAILABLE", False)
    assert chosen(first) is None
    monkeypatch.setattr(dispatch, "QUACK_AVAILABLE", True)
    assert [chosen(rows) for rows in (first - 1, first, 10_000)] == ["wgmma_gemm", "large_gemm", "large_gemm"]
    assert chosen(first, 24) is None  # no whole loads
    with kernel_policy(KernelPolicy(large_gemm=False)):
        assert chosen(first) is None
    with kernel_policy(KernelPolicy(small_gemm=False)):
        assert (chosen(first - 1), chosen(first)) == (None, "large_gemm")
    monkeypatch.setattr(dispatch, "kernel_works", lambda device, kernel: kernel != "large_gemm")
    assert chosen(first) is None
    monkeypatch.setattr(dispatch, "kernel_works", lambda device, kernel: True)
    monkeypatch.setattr(dispatch, "has_wgmma", lambda x: False)
    assert chosen(10_000) is None


def test_which_gemms_a_record_names(monkeypatch):
    """Those that the device has and that compile there."""
    device = torch.device("cpu")
    assert dispatch.working_gemms(device) == []
    for name in ("has_kernels", "supports_pdl"):
        monkeypatch.setattr(dispatch, name, lambda x: True)
    monkeypatch.setattr(dispatch, "QUACK_AVAILABLE", True)
    monkeypatch.setattr(dispatch, "kernel_works", lambda device, kernel: True)
    assert dispatch.working_gemms(device) == ["small_gemm"]  # Blackwell
    monkeypatch.setattr(dispatch, "has_wgmma", lambda x: True)
    assert dispatch.working_gemms(device) == ["small_gemm", "wgmma_gemm", "large_gemm"]
    monkeypatch.setattr(dispatch, "kernel_works", lambda device, kernel: kernel != "large_gemm")
    assert dispatch.working_gemms(device) == ["small_gemm", "wgmma_gemm"]


needs_quack = pytest.mark.skipif(not QUACK, reason="QuACK is not installed")
gpu = [pytest.mark.gpu, pytest.mark.skipif(not (HOPPER and QUACK), reason="needs a Hopper GPU and QuACK")]


@needs_quack
def test_the_tile_of_least_cost():
    """A GPU of 132 processors: whole waves, and large tiles where a wave is full anyway."""
    from arpg.kernels.large_gemm import best_tile

    sizes = [(256, 1024), (768, 1024), (640, 3072), (640, 5632), (768, 3072), (5120, 3072)]
    tiles = [(64, 64), (64, 128), (128, 128), (128, 128), (128, 160), (128, 192)]
    assert [best_tile(*size, 132)[:2] for size in sizes] == tiles


@needs_quack
def test_the_search_of_tiles(monkeypatch, capsys):
    """Every product of a layer with every tile, held to float32: one that computes something else is left out."""
    import benchmarks.fused_gemm as search
    from arpg.kernels import large_gemm
    from arpg.kernels.large_gemm import Tile

    def wrong_in_clusters(function):
        return lambda *a, **k: function(*a, **k) if large_gemm.best_tile(1, 1, 1).cluster == 1 else -function(*a, **k)

    randn = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *shape, device: randn(*shape))
    monkeypatch.setattr(search, "SHAPES", {name: (kind, 64, 48) for name, (kind, _, _) in search.SHAPES.items()})
    monkeypatch.setattr(search, "graph_microseconds", lambda work: (240.0, work()))
    monkeypatch.setattr(large_gemm, "linear", wrong_in_clusters(normed_linear))
    monkeypatch.setattr(large_gemm, "add_linear", add_linear)
    found = search.time_large_tiles(65, float("inf"))
    tiles = {name: {Tile(**row["tile"]) for row in found if row["product"] == name} for name in ("qkv", "out")}
    assert tiles["out"] == {*large_gemm.TILES, *search.more_large_tiles()}
    assert tiles["qkv"] == {tile for tile in tiles["out"] if tile.cluster == 1}
    assert {row["us"] for row in found} == {10.0}
    out = capsys.readouterr().out
    assert "65 rows, qkv, Tile(rows=64, outputs=128, pingpong=True, cluster=2, split=1): ValueError: error 2" in out
    assert "256 x 128 c2 10.00" in out
    assert search.time_large_tiles(65, 0.0) == []


@needs_quack
def test_costs_of_tiles_from_their_times(capsys):
    """Times that follow the model give back its costs; tiles that no shape chooses are left out."""
    import benchmarks.fused_gemm as search
    from arpg.kernels.large_gemm import Tile, cheapest_tile, wave_outputs

    costs = {Tile(64, 64): 1.5, Tile(128, 128): 1.0, Tile(128, 192, cluster=2): 1.1, Tile(256, 64): 4.0}
    shapes = [(rows, name) for rows in (65, 256, 640, 1024, 2176) for name in ("q", "qkv", "down")]

    def us(tile, rows, name):
        _, inputs, outputs = search.SHAPES[name]
        return 1e-6 * costs[tile] * inputs * wave_outputs(tile, rows, outputs, 132)

    record = [
        {"rows": rows, "product": name, "tile": tile._asdict(), "us": us(tile, rows, name), "library us": 1.0}
        for rows, name in shapes
        for tile in costs
    ]
    found = search.fit_tile_costs(record, gain=0.0001)
    assert found.items() <= costs.items()
    assert found.keys() >= {cheapest_tile(costs, rows, search.SHAPES[name][2], 132) for rows, name in shapes}
    assert Tile(256, 64) not in found
    assert "library 15" in capsys.readouterr().out
    assert len(search.fit_tile_costs(record, most=1)) == 1


@needs_quack
def test_compiled_kernels_are_kept_where_only_this_user_writes(tmp_path, monkeypatch):
    from arpg.kernels.large_gemm import kernel_folder

    monkeypatch.setenv("ARPG_HOME", str(tmp_path / "home"))
    assert kernel_folder() == str(tmp_path / "home" / "kernels")
    (tmp_path / "file").touch()
    monkeypatch.setenv("ARPG_HOME", str(tmp_path / "file"))  # no folder can be made there
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = kernel_folder()
    assert os.path.dirname(folder) == str(tmp_path)
    assert os.stat(folder).st_mode & 0o077 == 0


@needs_quack
@pytest.mark.slow
def test_the_kernels_compile_for_hopper(tmp_path):
    """Without a GPU; in a process of its own, which QuACK takes for one with a GPU. They are kept in ARPG_HOME."""
    environment = {name: value for name, value in os.environ.items() if name != "QUACK_CACHE_DIR"}
    environment |= {"QUACK_ARCH": "90", "CUTE_DSL_ARCH": "sm_90a", "ARPG_HOME": str(tmp_path)}
    program = [sys.executable, "-m", "support.compile_quack"]
    run = subprocess.run(program, cwd=ROOT / "tests", env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.split() == ["compiled"] * 14
    assert len(list((tmp_path / "kernels").glob("*/*.o"))) == 14


@pytest.mark.parametrize("dtype", [pytest.param(dtype, marks=gpu) for dtype in (torch.bfloat16, torch.float16)])
@pytest.mark.parametrize("rows", [65, 256, 640, 768, 1024, 2176, 5120])
@torch.no_grad()
def test_a_layer_as_it_is_used(rows, dtype):
    """The sizes of ARPG-L, with early launch and without."""
    from arpg.kernels import large_gemm

    options = {"dtype": dtype, "device": "cuda"}
    x, norm, after = draw(2, rows, 1024, **options)[:1], 1 + 0.3 * draw(1024, **options), draw(1024, seed=1, **options)
    out, gate_up, down, qkv = (
        draw(*size, seed=2 + i, **options) / size[1] ** 0.5
        for i, size in enumerate([(1024, 1024), (5632, 1024), (1024, 2816), (3072, 1024)])
    )

    def layer(linear, add):
        stream, scaled, sums = add(x, out, x, norm)
        hidden = linear(scaled, gate_up, eps=EPS, squares_PM=sums, swiglu=True)
        total, scaled, sums = add(hidden, down, stream, after)
        return stream, hidden, total, scaled, linear(scaled, qkv, eps=EPS, squares_PM=sums)

    made = layer(large_gemm.linear, large_gemm.add_linear)
    for one, exact in zip(made, layer(normed_linear, add_linear), strict=True):
        assert off(one, exact) < 4e-3
    with kernel_policy(KernelPolicy(pdl=False)):
        for one, late in zip(made, layer(large_gemm.linear, large_gemm.add_linear), strict=True):
            assert torch.equal(one, late)
    expanded = large_gemm.add_linear(x, out, x[:, :1].expand(-1, rows, -1), norm)
    assert off(expanded[0], add_linear(x, out, x[:, :1], norm)[0]) < 4e-3


@pytest.mark.parametrize("dtype", [pytest.param(dtype, marks=gpu) for dtype in (torch.bfloat16, torch.float16)])
@torch.no_grad()
def test_whole_generations(dtype):
    """Captured or not, with early launch or not: the same tokens; logits as exact as without these kernels."""
    config = dataclasses.replace(
        SMALL, width=256, num_heads=4, grid=(16, 16), vocab_size=512, pass1_layers=3, pass2_layers=3
    )
    exact = small_model(config).cuda()
    for module in exact.modules():
        if isinstance(module, nn.Linear):
            module.weight.data /= 3
    model = small_model(config).cuda()
    model.load_state_dict(exact.state_dict())
    model = model.to(dtype)
    request = tasks.generate(model, [i % 5 for i in range(48)], list(range(48)))
    settings = SamplingSettings(steps=8, guidance=3.0)
    plan = make_plan(request.grid, request.known_BN, request.seeds, settings)

    def tokens(engine, **policy):
        with kernel_policy(KernelPolicy(**policy)):
            return list(Engine(model, engine).decode(request, plan, settings, every_step=False))[-1].ids_BN.cpu()

    first = tokens("eager")
    for engine, policy in [("graph", {}), ("graph", {"pdl": False}), ("eager", {"pdl": False})]:
        assert torch.equal(tokens(engine, **policy), first)
    pos, x = draw(48, 11, 2, seed=1, device="cuda").abs(), draw(48, 11, 256, device="cuda")

    def logits(network, **policy):
        with kernel_policy(KernelPolicy(**policy)):
            cache = network.allocate_cache(48, 20)
            network.encode(x.to(network.dtype), pos, cache, causal=False)
            return network.predict(pos, None, cache, scale_BS=torch.full((1, 1), 3.0, device="cuda"))

    want = logits(exact)
    assert off(logits(model), want) < 1.2 * off(logits(model, large_gemm=False), want)
