"""A float8 key-value cache: the tokens of rounded keys and values, in every kind of decoding; who may have it
(`test_kernels.py` has its kernels)."""

import pytest
import torch

from arpg import InputError, Pipeline, SamplingSettings, make_plan, tasks
from arpg.bench.case import Case
from arpg.config import ModelConfig
from arpg.decode import Engine, decode
from arpg.decode.continuous import start_batch
from arpg.evaluation.sample import fingerprint
from arpg.kernels import dispatch, ops
from arpg.kernels.dispatch import FLOAT8
from arpg.model import ARPG
from arpg.quantization.precision import check_kv_cache, kv_cache_dtype_of, to_precision
from benchmarks.measures import agreement, on_context, tokens_of
from support.small import small_model

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not GPU or torch.cuda.get_device_capability() < (8, 9), reason="needs a GPU with float8"),
]
KINDS = {
    "block": SamplingSettings(steps=5, guidance=3.0),
    "causal": SamplingSettings(steps=5, guidance=3.0, attention="causal"),
    "exact": SamplingSettings(steps=5, guidance=3.0, attention="causal", decode="exact", draft=3),
    "speculative": SamplingSettings(steps=5, guidance=3.0, attention="causal", decode="speculative", draft=3),
}


def fill(model, settings):
    """A ragged batch: rows with different numbers of known tokens."""
    known = torch.zeros(3, 16, dtype=torch.bool)
    known[0, :5], known[1, 3:5] = True, True
    request = tasks.fill(model, [0, 1, 2], [5, 6, 7], ids_N=torch.arange(16) % 24, known_N=known)
    return request, make_plan((4, 4), known, request.seeds, settings), settings


def last_ids(steps):
    *_, step = steps
    return step.ids_BN.tolist()


def continuous(model, settings):
    """Samples that join and leave: their rows of the cache are copied."""
    running = start_batch(model, *fill(model, settings))
    running.step()
    running.keep([0, 2])
    if settings.decode == "steps":
        request = tasks.generate(model, [3], [9])
        running.add(request, make_plan((4, 4), request.known_BN, request.seeds, settings))
    while not all(row.finished for row in running.rows):
        running.step()
    return running.fetch(range(len(running.rows))).wait()[0].tolist()


@pytest.fixture
def rounded(monkeypatch):
    """Round keys and values to float8 where they are written, whatever the type of the cache."""
    store = ops._store

    def store_rounded(key, value, *cache):
        store(*(ops.to_float8(x).type_as(x) for x in (key, value)), *cache)

    def use(active):
        monkeypatch.setattr(ops, "_store", store_rounded if active else store)

    return use


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("run", [lambda m, s: last_ids(decode(m, *fill(m, s))), continuous], ids=["loop", "continuous"])
def test_every_kind_of_decoding(rounded, kind, run):
    """In float32 a float8 cache is exactly a cache of rounded keys and values."""
    model, settings = small_model().to(DEVICE), KINDS[kind]
    plain = run(model, settings)
    rounded(True)
    expected = run(model, settings)
    rounded(False)
    model.kv_cache_dtype = FLOAT8
    assert run(model, settings) == expected
    assert expected != plain  # otherwise the samples show nothing


def test_half_of_sixteen_bits_and_close():
    model = small_model().to(DEVICE)
    case = Case("small", 2, SamplingSettings(steps=5, guidance=3.0), model.config.grid)
    told = tokens_of(Engine(model, "eager"), case)
    exact = on_context(model, case, told)
    sixteen = to_precision(small_model(), "bfloat16", DEVICE).allocate_cache(2, 9)
    eight = to_precision(model, "float32", DEVICE, kv_cache_dtype="fp8").allocate_cache(2, 9)
    assert eight.key_LBTHK.dtype == eight.value_LBTHK.dtype == FLOAT8
    assert 2 * eight.key_LBTHK.nbytes == sixteen.key_LBTHK.nbytes
    found = agreement(on_context(model, case, told), exact)
    assert 0 < found["logit error"] < 0.1


def test_a_pipeline_keeps_it(folder):
    plain, pipe = (Pipeline.from_pretrained(folder, device="cpu", kv_cache_dtype=name) for name in ("auto", "fp8"))
    assert len(pipe.generate(0, steps=2)) == 1
    assert fingerprint(plain) != fingerprint(pipe)  # samples of one are not continued with the other
    pipe.to(torch.bfloat16)
    assert kv_cache_dtype_of(pipe.model) == "fp8"
    assert kv_cache_dtype_of(plain.to(torch.bfloat16).model) == "auto"


def test_who_may_not_have_it(folder, monkeypatch):
    with pytest.raises(InputError, match="kv_cache_dtype is 'int4'; expected one of auto, fp8"):
        Pipeline.from_pretrained(folder, device="cpu", kv_cache_dtype="int4")
    with pytest.raises(InputError, match="kv_cache_dtype is fp8, which needs an NVIDIA GPU, not mps; use auto"):
        check_kv_cache("fp8", torch.device("mps"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(
        InputError, match=r"kv_cache_dtype is fp8, but NVIDIA A100 has .* 8\.0; expected 8\.9 .*; use auto"
    ):
        check_kv_cache("fp8", torch.device("cuda"))
    check_kv_cache("auto", torch.device("cuda"))


@pytest.fixture
def large():
    """A model and a batch whose cache is much larger than the pieces in which memory is reserved."""
    config = ModelConfig(width=512, num_heads=8, pass1_layers=4, pass2_layers=4, vocab_size=64, num_classes=5)
    model = ARPG(config).init_weights(seed=0).eval()
    torch.nn.init.normal_(model.head.weight, std=0.02, generator=torch.Generator().manual_seed(1))
    return model, Case("large", 64, SamplingSettings(steps=32, guidance=3.0), config.grid)


@pytest.mark.parametrize("kind", [pytest.param("fp8", marks=gpu), pytest.param("auto", marks=gpu)])
def test_captured_graphs_are_all_that_is_reserved(large, kind):
    """What the run before a capture took is returned; with a float8 cache the graphs take half a cache less."""
    model, case = large
    to_precision(model, "bfloat16", DEVICE, kv_cache_dtype=kind)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    engine = Engine(model, "graph")
    for seed in (0, 64):
        for _ in engine.decode(*case.request(model, seed), case.settings, every_step=False):
            pass
    torch.cuda.synchronize()
    (graphs,) = engine.graphs.captured.values()
    assert torch.cuda.memory_reserved() - before <= graphs.bytes + 64 * 2**20
    held = 1 + case.tokens - case.request(model, 0)[1].samples[0].sizes[-1]
    cache_bytes = 2 * 5 * 128 * held * 512 * (1 if kind == "fp8" else 2)
    assert cache_bytes < graphs.bytes < cache_bytes + 160 * 2**20


@pytest.mark.parametrize("batch", [pytest.param(1, marks=gpu), pytest.param(64, marks=gpu)])
def test_kernels_that_read_float8(large, batch, monkeypatch):
    """Few and many programs, eagerly and from graphs: as close to float32 as the plain code with the same cache."""
    model, case = large
    case = Case("large", batch, case.settings, case.grid)
    told = tokens_of(Engine(model.to(DEVICE), "eager"), case)
    exact = on_context(model, case, told)
    half = to_precision(model, "bfloat16", DEVICE, kv_cache_dtype="fp8")
    found = agreement(on_context(half, case, told), exact)
    graphed, request = Engine(half, "graph"), case.request(half, 7)
    assert last_ids(graphed.decode(*request, case.settings)) == last_ids(decode(half, *request, case.settings))
    for module in (ops, dispatch):
        monkeypatch.setattr(module, "can_fuse_inference", lambda x: False)
    plain = agreement(on_context(half, case, told), exact)
    assert found["logit error"] < 1.25 * plain["logit error"]
