"""Weights of 8 bits: the products are close to the plain ones, kernels to their plain twins, bad wishes are told."""

import copy
import json
import sys
import time

import pytest
import torch
from torch.nn import functional as F

from arpg import InputError, Pipeline, SamplingSettings, tasks
from arpg.decode import Engine, decode, make_plan
from arpg.kernels.dispatch import FLOAT8, FLOAT8_MAX
from arpg.kernels.ops import input_dtype
from arpg.quantization.packed import QuantizedLinear, unpack_linears
from arpg.quantization.precision import (
    Fp8Linear,
    Int8Linear,
    check_fp8,
    has_int8_product,
    precision_of,
    to_float8,
    to_precision,
)
from arpg.quantization.storage import pack, to_int8, unpack
from support.small import small_model, small_tokenizer

CPU = torch.device("cpu")


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layer(kind, inputs=64, outputs=48, dtype=torch.float32):
    plain = torch.nn.Linear(inputs, outputs, bias=False)
    with torch.no_grad():
        plain.weight.copy_(draw(outputs, inputs))
    made = kind.from_linear(plain)
    made.dtype = dtype
    return plain.requires_grad_(False), made


def error(found, expected):
    return float((found.float() - expected).norm() / expected.norm())


@pytest.fixture(params=[True, False], ids=["product", "no product"])
def int8_product(request, monkeypatch):
    """With and without the CPU's own product."""
    if request.param and not has_int8_product():
        pytest.skip("this CPU or torch has no product of 8-bit numbers")
    monkeypatch.setattr("arpg.quantization.precision.has_int8_product", lambda: request.param)


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 32, 24), (3, 7, 5), (130, 64, 100)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_products_of_any_size(rows, inputs, outputs, dtype, int8_product):
    plain, made = layer(Int8Linear, inputs, outputs, dtype)
    x = draw(2, rows, inputs, seed=1)
    x[0, 0] *= 1000  # a row of its own size does no harm to others
    found = made(x.to(dtype))
    assert found.dtype == dtype
    assert found.shape == (2, rows, outputs)
    expected = plain(x)
    for part in (slice(0, 1), slice(1, 2)):
        assert error(found[part], expected[part]) < 0.02
    assert error(made.weight, plain.weight) < 0.01


@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_an_int8_layer_in_compiled_code(int8_product):
    """A packed weight is no plain one to the compiler, which has no code for its product."""
    _, made = layer(Int8Linear)
    compiled = torch.compile(made, backend="eager", dynamic=True)
    for rows in (3, 5):
        assert torch.equal(compiled(draw(2, rows, 64, seed=1)), made(draw(2, rows, 64, seed=1)))


@pytest.mark.parametrize("kind", [Int8Linear, Fp8Linear])
def test_a_row_of_zeros_stays_zero(kind, int8_product):
    _, made = layer(kind)
    x = torch.zeros(3, 64)
    x[1] = 1.0
    found = made(x)
    assert torch.isfinite(found).all()
    assert (found[::2] == 0).all()


def test_float8_products():
    plain, made = layer(Fp8Linear, dtype=torch.bfloat16)
    x = draw(2, 5, 64, seed=1)
    found = made(x)
    assert found.dtype == torch.bfloat16
    assert error(found, plain(x)) < 0.05
    assert error(made.weight, plain.weight) < 0.04
    assert made.values_OI.float().abs().max() == FLOAT8_MAX
    assert torch.equal(made(to_float8(x)), found)
    with pytest.raises(InputError, match=r"7 inputs .* multiples of 16"):
        layer(Fp8Linear, inputs=7)


@pytest.mark.parametrize("size", [0.1, 10, 100])
def test_activations_need_no_scale(size):
    """Float8 is as precise for numbers a hundred times smaller or larger; past its largest it stays there."""
    plain, made = layer(Fp8Linear)
    x = draw(50, 64, seed=1)
    assert error(made(size * x), plain(size * x)) == pytest.approx(error(made(x), plain(x)), rel=0.1)
    far = torch.tensor([447.0, 500.0, 1e6, -1e6, float("inf")])
    assert to_float8(far).float().tolist() == [448, 448, 448, -448, 448]


@pytest.mark.parametrize("kind", [Int8Linear, Fp8Linear])
def test_a_quantised_layer_can_be_saved_copied_moved_and_trained_through(kind, int8_product):
    _, made = layer(kind)
    weight = made.weight
    assert not list(made.parameters())
    assert torch.equal(made.state_dict()["weight"], weight)
    twin = copy.deepcopy(made)
    x = draw(4, 64, seed=2).requires_grad_()
    with torch.no_grad():
        torch.testing.assert_close(twin(x), made(x))
    made(x).sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand(4, -1))
    assert made.double().weight.dtype == torch.float64
    torch.testing.assert_close(made.weight.float(), weight)
    back = unpack_linears(made)
    assert type(back) is torch.nn.Linear
    torch.testing.assert_close(back.weight.float(), weight)


def test_an_int8_file_keeps_its_numbers():
    weight = draw(40, 30)
    state = pack({"weight": weight}, "int8")
    values, scale = to_int8(unpack(state, where="here")["weight"])
    assert torch.equal(values, state["weight"])
    torch.testing.assert_close(scale, state["weight.scale"])


@pytest.mark.parametrize("head", [True, False])
def test_a_model_in_int8(head):
    plain, made = small_model(), to_precision(small_model(), "int8", CPU, head=head)
    quantised = {name for name, module in made.named_modules() if isinstance(module, QuantizedLinear)}
    others = {name for name, module in made.named_modules() if type(module) is torch.nn.Linear}
    assert others == (set() if head else {"head"})
    assert "pass1.0.attn.qkv" in quantised
    assert "memory_kv.0" in quantised
    assert precision_of(made) == "int8"
    assert precision_of(plain) == "float32"
    assert list(made.state_dict()) == list(plain.state_dict())
    settings = SamplingSettings(steps=5, guidance=3.0)
    request = tasks.generate(plain, [0, 3], [1, 2])
    plan = make_plan(request.grid, request.known_BN, request.seeds, settings)
    a, b = ([step.ids_BN for step in decode(model, request, plan, settings)][-1] for model in (plain, made))
    assert (a == b).float().mean() > 0.5
    again = unpack_linears(made)
    assert not [module for module in again.modules() if isinstance(module, QuantizedLinear)]


def test_a_model_in_float8_reads_float8(monkeypatch):
    monkeypatch.setattr("arpg.quantization.precision.check_fp8", lambda device: None)
    made = to_precision(small_model(), "fp8", CPU, head=False)
    assert precision_of(made) == "fp8"
    for layer in (made.pass1[0].attn.qkv, made.pass1[0].attn.out, made.pass2[0].ffn.down, made.memory_kv[0]):
        assert input_dtype(layer) == FLOAT8
    assert input_dtype(made.head) is None


def test_what_cannot_be_is_said(folder):
    with pytest.raises(InputError, match=r"fp8, which needs an NVIDIA GPU, not cpu; use one of auto, .*int8"):
        Pipeline.from_pretrained(folder, device="cpu", precision="fp8")
    with pytest.raises(InputError, match="precision is 'int3'; expected one of auto, float32"):
        Pipeline.from_pretrained(folder, device="cpu", precision="int3")


def test_an_old_gpu_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(InputError, match=r"NVIDIA A100 has compute capability 8.0; expected 8.9"):
        check_fp8(torch.device("cuda"))


def test_a_pipeline_in_int8(folder, tmp_path):
    pipe = Pipeline.from_pretrained(folder, device="cpu", precision="int8")
    assert precision_of(pipe.model) == "int8"
    assert len(pipe.generate(0, steps=2)) == 1
    pipe.save_pretrained(tmp_path / "again")  # as plain tensors
    assert precision_of(Pipeline.from_pretrained(tmp_path / "again", device="cpu", dtype="float32").model) == "float32"


def test_agreement_on_the_same_context(model):
    """By hand: logits twice as large are off by 100%; of four draws one differs."""
    from arpg.bench.case import Case
    from benchmarks.measures import agreement, on_context, tokens_of

    logits, drawn = torch.tensor([[[3.0, 4.0]]]), torch.tensor([[1, 2]])
    other = torch.tensor([[1, 3]])
    found = agreement([(2 * logits, drawn), (logits, other)], [(logits, drawn), (logits, drawn)])
    assert found == {"logit error": 0.5, "largest logit error": 1.0, "equal samples": 0.75}
    case = Case("small", 2, SamplingSettings(steps=5, guidance=3.0), model.config.grid)
    ids = tokens_of(Engine(model, "eager"), case)
    exact = on_context(model, case, ids)
    close = agreement(on_context(to_precision(small_model(), "int8", CPU), case, ids), exact)
    assert 0 < close["logit error"] <= close["largest logit error"] < 0.2
    assert close["equal samples"] > 0.7


gpu_engines = [
    pytest.param(mode, marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")])
    for mode in ("graph", "auto")
]


@pytest.mark.parametrize("mode", ["eager", *gpu_engines])
@pytest.mark.parametrize("batch", [2, 5])
def test_engines_on_the_same_context(mode, batch):
    """What they draw follows what they are told was drawn, not what they drew themselves."""
    from arpg.bench.case import Case
    from benchmarks.measures import equal_share, on_context, sampled_on_context, tokens_of

    model = small_model().to("cuda" if torch.cuda.is_available() else "cpu")
    case = Case("small", batch, SamplingSettings(steps=5, guidance=3.0), model.config.grid)
    engine = Engine(model, mode)
    if mode == "auto":
        tokens_of(engine, case)
    free = tokens_of(Engine(model, "eager"), case)
    other = (free + 3) % 24
    assert torch.equal(tokens_of(engine, case), free)
    for told in (free, other):
        expected = [drawn for _, drawn in on_context(model, case, told)]
        assert equal_share(sampled_on_context(engine, case, told), expected) == 1.0
    assert equal_share(sampled_on_context(engine, case, other), sampled_on_context(engine, case, free)) < 1.0


def test_the_benchmark_compares_engines(folder, tmp_path, monkeypatch):
    from benchmarks import precision

    out = tmp_path / "found.json"
    options = ["--model", str(folder), "--device", "cpu", "--steps", "3", "--batch", "2", "--rounds", "1"]
    options += ["--precisions", "bfloat16", "--engines", "eager", "graph", "--engine-precisions", "float32", "bfloat16"]
    monkeypatch.setattr(sys, "argv", ["precision.py", *options, "--out", str(out)])
    precision.main()
    found = json.loads(out.read_text())
    assert found["against float32"]["float32"]["equal samples"] == 1.0
    same = {"equal samples": 1.0, "equal tokens": 1.0}
    assert found["against eager"]["float32, eager"] == found["against eager"]["bfloat16, eager"] == same
    assert "CUDA graphs need a GPU" in found["against eager"]["float32, graph"]["left out"]
    assert precision.differs({"float32, graph": {"equal samples": 0.99, "equal tokens": 1.0}}) == ["float32, graph"]
    assert precision.differs(found["against eager"]) == []


def test_the_benchmark_keeps_what_it_has_measured(folder, tmp_path, monkeypatch):
    from benchmarks import precision

    def seconds(pipe, case, rounds):
        if pipe.model.dtype == torch.bfloat16:
            raise RuntimeError("out of memory")
        return 1.0

    out = tmp_path / "found.json"
    options = ["--model", str(folder), "--device", "cpu", "--steps", "3", "--batch", "2", "--precisions", "bfloat16"]
    monkeypatch.setattr(sys, "argv", ["precision.py", *options, "--engines", "eager", "--out", str(out)])
    monkeypatch.setattr(precision, "seconds", seconds)
    monkeypatch.setattr(precision, "engine_rows", lambda *_: sys.exit("the machine is gone"))
    with pytest.raises(SystemExit, match="the machine is gone"):
        precision.main()
    found = json.loads(out.read_text())["against float32"]
    assert found["float32"]["s of a batch"] == 1.0
    assert found["bfloat16"] == {"left out": "RuntimeError: out of memory"}


def test_the_benchmark_counts_products(folder):
    from arpg.bench.case import Case, open_pipeline
    from benchmarks.precision import count_products

    pipe = open_pipeline(str(folder), random=True, device="cpu", dtype="float32")
    counts = count_products(pipe, Case("small", 2, SamplingSettings(steps=3, guidance=3.0), pipe.model.config.grid))
    # The prefix, then two steps that are read; three that are asked: four products in a block, memory and head.
    assert counts.total() == 3 * (2 * 4 + 1) + 3 * (2 * 4 + 1)


def test_the_benchmark_of_pixels_goes_on_after_a_failure(monkeypatch, capsys):
    from benchmarks import pixels

    def fails():
        raise RuntimeError("no room\nfor more")

    tokenizer = small_tokenizer()
    made = {"bad": fails, "float32": lambda: tokenizer.decoder}
    monkeypatch.setattr(pixels, "variants", lambda tokenizer, z: made)
    rows = list(pixels.measure(tokenizer, draw(2, 8, 2, 2), 1))
    assert rows[0] == {"variant": "bad", "error": "RuntimeError: no room"}
    assert rows[1]["PSNR dB"] > 90
    with pytest.raises(TimeoutError, match=r"took more than 0\.05 s"), pixels.at_most(0.05):
        time.sleep(60)
    assert "| bad | RuntimeError: no room | | |" in capsys.readouterr().out


triton = pytest.importorskip("triton", reason="Triton is not installed")


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def same_float8(found, expected):
    """Equal but for sums in another order, which can put a number on the other side of a border. Triton's interpreter
    also forgets the carry where rounding up reaches the next power of two, and makes small numbers zero."""
    assert found.dtype == FLOAT8
    a, b = found.float(), to_float8(expected).float()
    wrong = ~torch.isclose(a, b, atol=0.01, rtol=0.13)
    if DEVICE == "cpu":
        wrong &= a != b / 2
    assert not wrong.any()
    assert (a != b).float().mean() < 0.1


@pytest.mark.parametrize("shape", [(1, 1, 16), (3, 5, 48), (2, 7, 100)])
def test_kernels_that_make_float8(shape):
    from arpg.kernels.ops import Stream, guide
    from arpg.kernels.residual_norm import guided_norm, residual_norm_float8
    from arpg.kernels.swiglu import swiglu_float8
    from arpg.model.layers import ResidualNorm

    x, delta = draw(*shape).to(DEVICE), draw(*shape, seed=1).to(DEVICE)
    gate, up = x.chunk(2, -1)
    same_float8(swiglu_float8(x), F.silu(gate) * up)
    norm = ResidualNorm(shape[-1], dropout=0.0).to(DEVICE)
    torch.nn.init.normal_(norm.weight)
    with torch.no_grad():
        total, normed = residual_norm_float8(x, delta, norm.weight, norm.EPS)
        stream, expected = norm(Stream(x, delta))
    torch.testing.assert_close(total, stream.x_BSD)
    same_float8(normed, expected)
    scale = torch.full((1, 1), 2.5, device=DEVICE)
    both = Stream(*(torch.cat((part, part.flip(1))) for part in (x, delta)))
    with torch.no_grad():
        guided = guide(norm(both)[1], scale)
    same_float8(guided_norm(*both[:2], norm.weight, scale, norm.EPS, dtype=FLOAT8), guided)


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 16, 8), (7, 130, 33), (64, 128, 70), (17, 300, 5)])
def test_the_int8_kernel(rows, inputs, outputs):
    from arpg.kernels.int8_gemm import int8_gemm

    values, scale = to_int8(draw(outputs, inputs))
    x = draw(rows, inputs, seed=1)
    found = int8_gemm(x.to(DEVICE), values.to(DEVICE), scale.to(DEVICE)).cpu()
    off = 1e-3 if DEVICE == "cpu" else 0.05  # a GPU multiplies float32 with fewer digits here
    torch.testing.assert_close(found, x @ (values.float() * scale[:, None]).T, atol=off, rtol=off)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_products_on_a_gpu(precision):
    """Few rows and many; the plain twin is on the CPU."""
    if precision == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs compute capability 8.9")
    kind = {"fp8": Fp8Linear, "int8": Int8Linear}[precision]
    plain, made = layer(kind, 256, 512, torch.bfloat16)
    made.store(plain.weight.cuda().bfloat16())
    for rows in (1, 64, 65, 300):
        x = draw(2, rows, 256, seed=rows)
        with torch.no_grad():
            assert error(made(x.cuda().bfloat16()).cpu(), plain(x)) < 0.05


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_eight_bits_in_compiled_code(precision):
    """What is handed from kernel to kernel in float8 goes through torch.compile, too, for any size."""
    from arpg.bench.case import Case
    from benchmarks.measures import agreement, on_context, tokens_of

    if precision == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs compute capability 8.9")
    exact, gpu = small_model().cuda(), torch.device("cuda")
    case = Case("small", 2, SamplingSettings(steps=5, guidance=3.0), exact.config.grid)
    told = tokens_of(Engine(exact, "eager"), case)
    model = to_precision(small_model(), precision, gpu, head=False)
    eager = on_context(model, case, told)
    model.compile_blocks(dynamic=True)
    compiled = on_context(model, case, told)
    # Sums are rounded in another order: that must matter less than 8 bits do.
    off = agreement(eager, on_context(exact, case, told))["logit error"]
    assert agreement(compiled, eager)["logit error"] < off
