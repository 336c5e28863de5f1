"""The parts of training: schedule, average, fused loss, keyed dropout, batches, warm starts, 8-bit storage."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from arpg import ARPG, InputError, ModelConfig, Pipeline, device
from arpg.checkpoint import FolderConfig, load_model, write_folder
from arpg.classes import ClassNames
from arpg.data.dataset import Dataset, TokenBatches
from arpg.data.tokens import TokenWriter, open_tokens
from arpg.kernels.ops import fold_key, fold_keys, grad_fanout
from arpg.model import class_condition
from arpg.model.layers import Dropout
from arpg.quantization.storage import pack, unpack
from arpg.train import cost
from arpg.train.loop import EMA, clip_gradients, learning_rate, make_adamw
from arpg.train.model import warm_start
from arpg.train.objective import linear_cross_entropy
from arpg.train.recipe import ModelRecipe, OptimRecipe, RunRecipe, TokenData
from support.small import SMALL, small_model

OPTIM = OptimRecipe(lr=1.0, min_lr=0.1, warmup=0.25)


def test_learning_rates():
    def rates(**change):
        recipe = dataclasses.replace(OPTIM, **change)
        return [learning_rate(recipe, step, 100) for step in range(100)]

    cosine = rates()
    assert cosine[:25] == pytest.approx([(i + 1) / 25 for i in range(25)])
    assert cosine[25] == 1.0
    assert cosine[-1] == pytest.approx(0.1)
    assert cosine[62] == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi * 37 / 74)))
    linear = rates(schedule="linear")
    assert linear[25:] == pytest.approx(np.linspace(1.0, 0.1, 75))
    assert rates(schedule="constant")[25:] == [1.0] * 75
    # The paper's 512 px fine-tune: a ramp over the whole run.
    assert rates(schedule="linear", warmup=1.0) == pytest.approx([(i + 1) / 100 for i in range(100)])
    assert rates(warmup=0.0)[0] == 1.0


def test_weight_decay_is_for_matrices_and_embeddings():
    optimizer = make_adamw(small_model(), OPTIM)
    decay, none = optimizer.param_groups
    assert (decay["weight_decay"], none["weight_decay"]) == (0.05, 0.0)
    assert all(p.dim() >= 2 for p in decay["params"])
    assert all(p.dim() < 2 for p in none["params"])
    assert sum(p.numel() for g in optimizer.param_groups for p in g["params"]) == sum(
        p.numel() for p in small_model().parameters()
    )


@pytest.mark.parametrize("most", [0.1, 1e6])
def test_clipping_is_left_to_the_optimizer(most):
    """The weights that `clip_grad_norm_` before a plain step gives, step by step."""
    ours, theirs = small_model(), small_model()
    optimizers = [make_adamw(model, OptimRecipe(lr=1e-3)) for model in (ours, theirs)]
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            a.grad = torch.randn(a.shape, generator=generator) * 1e-3
            b.grad = a.grad.clone()
        clip_gradients(optimizers[0], most)
        nn.utils.clip_grad_norm_(theirs.parameters(), most)
        for optimizer in optimizers:
            optimizer.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-7, rtol=1e-5)
    for a, b in zip(*(optimizer.state.values() for optimizer in optimizers), strict=True):
        torch.testing.assert_close(a["exp_avg"], b["exp_avg"], atol=1e-9, rtol=1e-4)  # scaled, not merely a ratio


def test_the_average_is_the_recursion_and_can_be_swapped_in():
    module = nn.Linear(3, 2)
    ema = EMA(module, 0.9)
    expected = module.weight.detach().clone()
    for step in range(200):
        with torch.no_grad():
            module.weight += 0.1
        ema.update(step)
        decay = min(0.9, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * module.weight.detach()
    assert torch.allclose(ema.state_dict()["weight"], expected, atol=1e-5)
    live = module.weight.detach().clone()
    with ema.swapped_in():
        assert torch.allclose(module.weight, expected, atol=1e-5)
    assert torch.equal(module.weight, live)
    assert torch.allclose(ema.state_dict()["weight"], expected, atol=1e-5)


@pytest.mark.parametrize("chunk", [7, 64, 1000])
def test_fused_cross_entropy(chunk):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 16, generator=generator, requires_grad=True)
    weight = torch.randn(50, 16, generator=generator, requires_grad=True)
    target = torch.randint(50, (64,), generator=generator)
    (3 * linear_cross_entropy(x, weight, target, chunk=chunk)).backward()
    fused = x.grad.clone(), weight.grad.clone()
    x.grad = weight.grad = None
    loss = F.cross_entropy(x @ weight.T, target)
    (3 * loss).backward()
    assert torch.allclose(linear_cross_entropy(x, weight, target, chunk=chunk), loss, atol=1e-6)
    assert torch.allclose(fused[0], x.grad, atol=1e-6)
    assert torch.allclose(fused[1], weight.grad, atol=1e-6)


def hidden(model, rows, keys):
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(24, (4, 16), generator=generator)[rows]
    order = torch.stack([torch.randperm(16, generator=generator) for _ in range(4)])[rows]
    condition = class_condition(model, torch.tensor([0, 1, 2, 3])[rows])
    with torch.no_grad():
        return model.hidden(ids, order, condition, dropout_key_B=keys[rows])


def test_dropout_depends_on_the_sample_not_on_the_batch():
    model = small_model().train()
    keys = torch.tensor([11, -22, 33, 44], dtype=torch.int32)
    whole = hidden(model, [0, 1, 2, 3], keys)
    for rows in ([0], [3, 1], [2, 3]):
        assert torch.allclose(hidden(model, rows, keys), whole[rows], atol=1e-5)
    assert not torch.allclose(hidden(model, [0], keys + 1), whole[[0]], atol=1e-2)
    assert torch.allclose(hidden(model.eval(), [0], keys), hidden(model, [0], keys + 1))


def test_dropout_has_the_right_rate_and_is_independent_between_sites():
    key = torch.arange(64, dtype=torch.int32) * 7919
    ones = torch.ones(64, 100, 32)
    masks = [
        Dropout(0.1, site).train()(ones, fold_key(key, layer)) == 0 for layer, site in ((0, 0), (0, 1), (1, 0), (5, 1))
    ]
    for mask in masks:
        assert mask.float().mean().item() == pytest.approx(0.1, abs=0.002)
        assert mask.float().mean((0, 1)).std().item() < 0.01
        halves = mask.chunk(2, dim=-1)  # they share random words
        assert (halves[0] & halves[1]).float().mean().item() == pytest.approx(0.01, abs=0.001)
    for i, a in enumerate(masks):
        for b in masks[i + 1 :]:
            assert (a & b).float().mean().item() == pytest.approx(0.01, abs=0.001)
    assert Dropout(0.1, 0).train()(ones, key).mean().item() == pytest.approx(1.0, abs=0.01)


def test_keys_of_all_layers_at_once():
    key = torch.arange(-8, 8, dtype=torch.int32) * 123456789
    for number, folded in enumerate(fold_keys(key, 50)):
        assert torch.equal(folded, fold_key(key, number))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_copies_are_summed_at_once(dtype):
    generator = torch.Generator().manual_seed(0)
    x, *weights = (torch.randn(6, 5, generator=generator).to(dtype) for _ in range(13))
    x.requires_grad_()
    copies = grad_fanout(x, 12)
    assert all(torch.equal(copy, x) for copy in copies)
    sum((copy * weight).sum().float() for copy, weight in zip(copies, weights, strict=True)).backward()
    assert x.grad.dtype == dtype
    torch.testing.assert_close(x.grad, sum(w.double() for w in weights).to(dtype))
    x.grad = None
    grad_fanout(x, 3)[1].sum().backward()  # readers that give no gradient
    assert torch.equal(x.grad, torch.ones_like(x))


@pytest.fixture
def tokens(tmp_path):
    rng = np.random.default_rng(0)
    writer = TokenWriter(tmp_path / "tokens", grid=(4, 4), vocab_size=24, classes=tuple("abcde"), views=3)
    writer.add(rng.integers(24, size=(20, 3, 16)).astype(np.uint16), np.arange(20) % 5)
    writer.close()
    return open_tokens(tmp_path / "tokens")


def batches(tokens, parts, **change):
    options = {"batch_size": 8, "num_classes": 5, "label_drop": 0.3, "seed": 1, "device": torch.device("cpu"), **change}
    return TokenBatches(Dataset(tokens), parts=parts, **options)


def test_a_batch_does_not_depend_on_how_it_is_cut(tokens):
    for step in (0, 3, 1000):
        whole = batches(tokens, 1).batch(step, 0)
        for parts in (2, 4):
            cut = [batches(tokens, parts).batch(step, part) for part in range(parts)]
            for name in ("ids_BN", "labels_B", "order_BN", "dropout_key_B"):
                assert torch.equal(torch.cat([getattr(b, name) for b in cut]), getattr(whole, name)), name
    with pytest.raises(InputError, match="8 cannot be cut into 3"):
        batches(tokens, 3)


def test_an_epoch_sees_every_image_once(tokens):
    source = batches(tokens, 1)
    indices = np.concatenate([source.indices(step, 0) for step in range(10)])  # 80 samples: 4 epochs of 20
    for epoch in range(4):
        assert sorted(indices[20 * epoch : 20 * epoch + 20]) == list(range(20))
    assert indices[:20].tolist() != indices[20:40].tolist()


def test_batches_hold_what_they_should(tokens):
    source = batches(tokens, 1, batch_size=1000, label_drop=0.25)
    batch, index = source.batch(0, 0), source.indices(0, 0)
    dropped = batch.labels_B == 5
    assert dropped.float().mean().item() == pytest.approx(0.25, abs=0.05)
    assert torch.equal(batch.labels_B[~dropped], torch.from_numpy(tokens.labels[index].astype(np.int64))[~dropped])
    assert torch.equal(batch.order_BN.sort().values, torch.arange(16).expand(1000, 16))
    assert batch.order_BN.unique(dim=0).shape[0] == 1000
    views = torch.stack([torch.from_numpy(tokens.gather(index, np.full(1000, v))) for v in range(3)])
    match = (views == batch.ids_BN).all(-1)
    assert match.any(0).all()
    assert match.float().mean(1).min() > 0.25
    # The same sample in another epoch has another order.
    assert not torch.equal(source.batch(1, 0).order_BN, batch.order_BN)


def test_warm_start_takes_what_fits(tmp_path):
    other = small_model(seed=3)
    write_folder(tmp_path, FolderConfig(model=SMALL), model=other.state_dict())
    # Another grid: everything fits.
    model = ARPG(dataclasses.replace(SMALL, grid=(8, 8))).init_weights(seed=0)
    lines = warm_start(model, str(tmp_path))
    assert len(lines) == 1
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))
    # Other classes: codes, [MASK] and the null class are taken; classes without a name there start as the null class.
    config = dataclasses.replace(SMALL, num_classes=9, pass2_layers=3)
    model = ARPG(config).init_weights(seed=0)
    lines = warm_start(model, str(tmp_path))
    assert "new: 9 of 9 classes, like class 0" in lines
    assert any("pass2.2.attn.q.weight" in line for line in lines)
    new, old = model.embedding.weight, other.embedding.weight
    assert torch.equal(new[: config.mask_id + 1], old[: SMALL.mask_id + 1])
    assert torch.equal(new[config.null_class_id], old[SMALL.null_class_id])
    assert (new[config.first_class_id : config.null_class_id] == old[SMALL.null_class_id]).all()
    assert torch.equal(model.pass2[1].ffn.down.weight, other.pass2[1].ffn.down.weight)


def test_warm_start_takes_class_rows_by_name(tmp_path):
    names = ClassNames(tuple(f"{name}, {name}us" for name in ("apple", "bear", "cat", "dog", "egg")))
    other = small_model(seed=3)
    write_folder(tmp_path, FolderConfig(model=SMALL, classes=names), model=other.state_dict())
    # As many classes as there, in another order, one by its synonym, one that is new and one that looks like an id.
    model = ARPG(SMALL).init_weights(seed=0)
    lines = warm_start(model, str(tmp_path), ["cat", "Apple", "zebra", "bearus", "1"])
    rows = model.embedding.weight[SMALL.first_class_id : SMALL.null_class_id]
    assert torch.equal(rows, other.embedding.weight[[SMALL.first_class_id + i for i in (2, 0, 5, 1, 5)]])
    assert "new: 2 of 5 classes, like zebra" in lines


def test_auto_precision_asks_the_device(tmp_path, monkeypatch):
    cpu = torch.device("cpu")
    (tmp_path / "proc").mkdir()
    has_bfloat16 = device.has_bfloat16
    for flags, expected in (("fpu avx2 avx512f", False), ("avx512f avx512_bf16", True), ("asimd bf16", True)):
        (tmp_path / "proc" / "cpuinfo").write_text(f"flags\t\t: {flags}\n")
        assert has_bfloat16(tmp_path) is expected
        monkeypatch.setattr(device, "has_bfloat16", lambda found=expected: found)
        assert device.training_precision("auto", cpu) == ("bf16" if expected else "float32")
        assert device.training_precision("float32", cpu) == "float32"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda on: (7, 0))
    assert device.training_precision("auto", torch.device("cuda")) == "float32"


def test_free_memory_within_the_limit_of_a_container(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:  4000 kB\n")
    assert device.available_bytes(torch.device("cpu"), tmp_path) == 4000 * 1024
    cgroup = tmp_path / "sys" / "fs" / "cgroup"
    cgroup.mkdir(parents=True)
    (cgroup / "memory.current").write_text("1000\n")
    for limit, expected in (("3000", 2000), ("max", 4000 * 1024), ("500", 0)):
        (cgroup / "memory.max").write_text(limit + "\n")
        assert device.available_bytes(torch.device("cpu"), tmp_path) == expected


def test_a_batch_that_does_not_fit_is_cut(monkeypatch):
    config = ModelConfig(width=384, num_heads=6, pass1_layers=5, pass2_layers=6, vocab_size=8192, num_classes=136)
    recipe = ModelRecipe(config, TokenData("t"), OptimRecipe(1e-3), RunRecipe(10, 512, precision="float32"))

    for parts in (1, 2, 16):
        budget = cost.training_bytes(config, 512 // parts, precision="float32")
        monkeypatch.setattr(cost, "budget_bytes", lambda on, budget=budget: budget)
        assert cost.fit_to_device(recipe, torch.device("cpu")).run.accumulate == parts
    monkeypatch.setattr(cost, "budget_bytes", lambda on: 1 << 20)
    with pytest.raises(InputError, match="GiB with one image at a time"):
        cost.fit_to_device(recipe, torch.device("cpu"))


def test_eight_bit_storage(tmp_path):
    model = ARPG(
        ModelConfig(width=64, num_heads=4, pass1_layers=2, pass2_layers=2, vocab_size=32, num_classes=3, grid=(4, 4))
    )
    model.init_weights(seed=0)
    nn.init.normal_(model.head.weight, std=0.1, generator=torch.Generator().manual_seed(0))
    model.eval()
    state = model.state_dict()
    packed = pack(state, "int8")
    assert sum(t.numel() * t.element_size() for t in packed.values()) < 0.3 * sum(4 * t.numel() for t in state.values())
    plain = unpack(packed, where="x")
    assert plain.keys() == state.keys()
    for key, tensor in state.items():
        step = tensor.abs().amax(1, keepdim=True) / 127 if tensor.dim() > 1 else tensor.abs() * 2**-11
        assert ((plain[key].float() - tensor).abs() <= step / 2 + 1e-7).all(), key
    write_folder(tmp_path, FolderConfig(model=model.config), model=packed)
    loaded = load_model(tmp_path, dtype=torch.float32)
    ids, order = torch.zeros(2, 16, dtype=torch.long), torch.arange(16).expand(2, 16)
    with torch.no_grad():
        a = model(ids, order, class_condition(model, torch.tensor([0, 1])))
        b = loaded(ids, order, class_condition(loaded, torch.tensor([0, 1])))
    assert (a - b).norm() / a.norm() < 0.02
    del packed["head.weight.scale"]
    with pytest.raises(InputError, match=r"head\.weight is stored in 8 bits without a scale"):
        unpack(packed, where="x")


def test_packed_pipelines_load(pipeline, tmp_path):
    config = FolderConfig(model=pipeline.model.config, tokenizer=pipeline.tokenizer.config)
    write_folder(
        tmp_path,
        config,
        model=pack(pipeline.model.state_dict(), "int8"),
        tokenizer=pack(pipeline.tokenizer.state_dict(), "float16"),
    )
    assert Pipeline.from_pretrained(tmp_path, device="cpu").generate(1, steps=3)[0].size == (8, 8)


def test_ablations_of_the_speed_benchmark(monkeypatch):
    """Each replaces something that the code has; an unknown one is refused in one line."""
    from benchmarks import train_speed

    def replace(module, **values):
        assert all(hasattr(module, name) for name in values), (module, values)

    monkeypatch.setattr(train_speed, "_replace", replace)
    train_speed.ablate(list(train_speed.ABLATIONS))
    with pytest.raises(SystemExit, match=r"--ablate attention turned does not exist; expected one of graph, .*stages$"):
        train_speed.ablate(["attention", "graph", "turned"])
