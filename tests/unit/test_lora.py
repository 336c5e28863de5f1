"""LoRA adapters: merged weights are what was trained, several add up, and removing them leaves nothing behind."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from arpg import ARPG, InputError, Pipeline
from arpg.checkpoint import MODEL
from arpg.files import hash_file
from arpg.lora import (
    AdapterConfig,
    LoraLinear,
    add_adapters,
    merged_weights,
    parse_lora,
    read_adapter,
    target_layers,
    trained_weights,
)
from arpg.model import class_condition
from support.adapters import NAMES, adapted, save, write_base
from support.small import SMALL, small_model


@pytest.fixture
def base(tmp_path):
    """A model folder with named classes."""
    return write_base(tmp_path / "base")


def logits(model, class_id=1):
    ids, order = torch.arange(16)[None] % 24, torch.arange(16)[None]
    with torch.no_grad():
        return model(ids, order, class_condition(model, torch.tensor([class_id])))


def test_a_new_adapter_changes_nothing_and_trains_little():
    plain, model = small_model(), add_adapters(small_model(), AdapterConfig(rank=2, alpha=4.0), [1])
    assert torch.equal(logits(plain), logits(model))
    layers = [m for m in model.modules() if isinstance(m, LoraLinear)]
    assert len(layers) == 2 * 4 + 2 * 4 + 1  # qkv or q, out, gate_up, down of each block; memory_kv
    trained = trained_weights(model)
    assert {name.rpartition(".lora_")[2] for name in trained} == {"A.weight", "B.weight", "embedding.class_rows"}
    model.train()
    ids, order = torch.zeros(1, 16, dtype=torch.long), torch.arange(16)[None]
    model(ids, order, class_condition(model, torch.tensor([1]))).logsumexp(-1).sum().backward()
    for name, p in model.named_parameters():
        assert (p.grad is not None) == (name in trained), name
    assert model.embedding.class_rows.grad.any()


def test_merged_weights_compute_what_was_trained():
    model = adapted(AdapterConfig(rank=3, alpha=6.0), [1, 4])
    plain = ARPG(SMALL).eval()
    plain.load_state_dict(merged_weights(model, trained_weights(model)))
    for class_id in (0, 1, 4):
        assert torch.allclose(logits(plain, class_id), logits(model, class_id), atol=1e-5)
    assert not torch.allclose(logits(plain), logits(small_model(seed=3)), atol=0.1)


def test_a_pipeline_loads_and_unloads_adapters(base, tmp_path):
    names = (*NAMES, "zebra")
    path, trained = save(tmp_path / "mine", classes=("cat", "zebra"), names=names, base_hash=hash_file(base / MODEL))
    pipe = Pipeline.from_pretrained(base, device="cpu")
    before = {key: tensor.clone() for key, tensor in pipe.model.state_dict().items()}
    layers = dict(pipe.model.named_modules())
    first = pipe.generate("cat", steps=4, seed=1)[0].tobytes()
    pipe.load_lora(path)
    assert pipe.classes.lines == names
    assert pipe.model.config.num_classes == 6
    for class_id in range(6):
        assert torch.allclose(logits(pipe.model, class_id), logits(trained, class_id), atol=1e-4)
    assert pipe.generate("zebra", steps=4)[0].size == (8, 8)
    # Saved, it is a model of its own.
    pipe.save_pretrained(tmp_path / "merged")
    again = Pipeline.from_pretrained(tmp_path / "merged", device="cpu")
    assert again.classes.lines == names
    assert torch.allclose(logits(again.model, 5), logits(pipe.model, 5), atol=1e-5)
    pipe.unload_lora("mine")
    after = pipe.model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[key]) for key, tensor in before.items())
    assert dict(pipe.model.named_modules()) == layers
    assert pipe.classes.lines == NAMES
    assert pipe.generate("cat", steps=4, seed=1)[0].tobytes() == first


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_several_adapters_add_up(base, tmp_path, precision):
    a, _ = save(tmp_path / "a", classes=("cat",), seed=1)
    b, _ = save(tmp_path / "b", classes=("cat", "zebra"), names=(*NAMES, "zebra"), seed=2)
    pipe = Pipeline.from_pretrained(base, device="cpu", precision=precision)
    plain, path = pipe.model.state_dict(), "pass1.0.attn.qkv"
    pipe.load_lora(a, 0.5)
    pipe.load_lora(tmp_path / "b", scale=-2.0)
    expected = plain[f"{path}.weight"].clone()
    for adapter, scale in ((read_adapter(a), 0.5), (read_adapter(b), -2.0)):
        low, high = adapter.layers[path]
        expected += scale * 2.0 * high @ low
    found = pipe.model.state_dict()
    tolerance = expected.abs().max().item() / 120 if precision == "int8" else 1e-5
    assert torch.allclose(found[f"{path}.weight"], expected, atol=tolerance)
    # Rows move from the base's own, or from the null class, by the scale.
    first, null = SMALL.first_class_id, plain["embedding.weight"][SMALL.null_class_id]
    cat, rows_a, rows_b = plain["embedding.weight"][first + 2], read_adapter(a).rows_CD, read_adapter(b).rows_CD
    rows = found["embedding.weight"][first:]
    assert torch.allclose(rows[2], cat + 0.5 * (rows_a[0] - cat) - 2 * (rows_b[0] - cat), atol=1e-5)
    assert torch.allclose(rows[5], null - 2 * (rows_b[1] - null), atol=1e-5)
    assert torch.equal(rows[6], null)
    # One of them goes, or gets another scale: what remains does not depend on the order.
    pipe.unload_lora("b")
    alone = {key: tensor.clone() for key, tensor in pipe.model.state_dict().items()}
    pipe.load_lora(a, 3.0)
    pipe.load_lora(a, 0.5)
    assert all(torch.equal(tensor, alone[key]) for key, tensor in pipe.model.state_dict().items())
    pipe.unload_lora()
    assert all(torch.equal(tensor, plain[key]) for key, tensor in pipe.model.state_dict().items())


def test_adapters_move_with_the_pipeline(base, tmp_path):
    path, _ = save(tmp_path / "a", classes=("cat", "zebra"), names=(*NAMES, "zebra"))
    pipe = Pipeline.from_pretrained(base, device="cpu", precision="bfloat16")
    pipe.load_lora(path)
    moved = Pipeline.from_pretrained(base, device="cpu")
    moved.load_lora(path)
    moved.to(torch.bfloat16)
    for _ in range(2):  # with the adapter, then without
        expected, found = pipe.model.state_dict(), moved.model.state_dict()
        assert all(torch.equal(tensor, found[key]) for key, tensor in expected.items())
        assert pipe.classes == moved.classes
        pipe.unload_lora()
        moved.unload_lora()
    assert moved.model.config == SMALL


def test_adapters_stay_when_a_move_fails(base, tmp_path, monkeypatch):
    path, _ = save(tmp_path / "a", classes=("cat", "zebra"), names=(*NAMES, "zebra"))
    pipe = Pipeline.from_pretrained(base, device="cpu")
    pipe.load_lora(path)
    before = {key: tensor.clone() for key, tensor in pipe.model.state_dict().items()}
    monkeypatch.setattr(pipe.model, "to", lambda *_, **__: (_ for _ in ()).throw(torch.OutOfMemoryError("no memory")))
    with pytest.raises(torch.OutOfMemoryError):
        pipe.to(torch.bfloat16)
    assert all(torch.equal(tensor, before[key]) for key, tensor in pipe.model.state_dict().items())


def test_files_have_the_names_of_peft(base, tmp_path):
    path, _ = save(tmp_path / "mine", classes=("cat",))
    with safe_open(path, "pt") as file:
        keys, metadata = set(file.keys()), file.metadata()
    layers = target_layers(small_model(), AdapterConfig(2, 4.0).targets)
    expected = {f"base_model.model.{layer}.lora_{part}.weight" for layer in layers for part in "AB"}
    assert keys == expected | {"base_model.model.embedding.class_rows"}
    assert json.loads(metadata["arpg_lora"])["classes"] == ["cat"]
    peft = json.loads((tmp_path / "mine" / "adapter_config.json").read_text())
    assert (peft["peft_type"], peft["r"], peft["lora_alpha"]) == ("LORA", 2, 4.0)
    assert set(peft["target_modules"]) == set(layers)
    # A folder as peft writes it, without our metadata.
    tensors = {key: tensor for key, tensor in _tensors(path).items() if "lora_" in key}
    (tmp_path / "peft").mkdir()
    save_file(tensors, tmp_path / "peft" / "adapter_model.safetensors")
    (tmp_path / "peft" / "adapter_config.json").write_text(json.dumps(peft))
    read = read_adapter(tmp_path / "peft")
    assert (read.config.rank, read.config.scaling, read.config.classes) == (2, 2.0, ())
    for option, value in (("use_rslora", True), ("alpha_pattern", {"out": 8})):
        (tmp_path / "peft" / "adapter_config.json").write_text(json.dumps(peft | {option: value}))
        with pytest.raises(InputError, match=f"has {option}, which is not supported"):
            read_adapter(tmp_path / "peft")


def _tensors(path):
    with safe_open(path, "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118


def test_parse_lora():
    assert parse_lora("mine.safetensors") == ("mine.safetensors", 1.0)
    assert parse_lora("mine.safetensors:0.5") == ("mine.safetensors", 0.5)
    assert parse_lora("C:/mine:-1") == ("C:/mine", -1.0)
    assert parse_lora("C:/mine") == ("C:/mine", 1.0)


def test_bad_adapters_are_explained(base, tmp_path):
    pipe = Pipeline.from_pretrained(base, device="cpu")
    before = logits(pipe.model)
    path, _ = save(tmp_path / "mine", classes=("cat",), base_hash="0" * 64)

    def fails(given, message, **options):
        with pytest.raises(InputError, match=message):
            pipe.load_lora(given, **options)
        assert torch.equal(logits(pipe.model), before)

    fails(tmp_path / "none.safetensors", "adapter .*none.safetensors does not exist")
    fails(path, r"was trained for base \(weights 000000000000\.\.\.\), not for this model.*--model base")
    good, _ = save(tmp_path / "good", classes=())
    fails(good, "scale is nan", scale=float("nan"))
    fails(base / MODEL, "is no LoRA adapter: it holds")
    (tmp_path / "text.safetensors").write_text("hello")
    fails(tmp_path / "text.safetensors", "is a text file; expected a safetensors file")
    tensors = _tensors(good)
    wide = {key: torch.zeros(t.shape[0] + 2 * ("lora_B" in key), t.shape[1]) for key, t in tensors.items()}
    with safe_open(good, "pt") as file:
        metadata = file.metadata()
    save_file(wide, tmp_path / "wide.safetensors", metadata)
    fails(tmp_path / "wide.safetensors", r"is \d+ x \d+ of rank 2 and 2; the model has \d+ x \d+")
    other = {key.replace("pass1.0", "pass1.7"): t for key, t in tensors.items()}
    save_file(other, tmp_path / "other.safetensors", metadata)
    fails(tmp_path / "other.safetensors", r"adds to pass1\.7\..*, which the model does not have")
    save_file(tensors, tmp_path / "bare.safetensors")
    fails(tmp_path / "bare.safetensors", "no metadata")
    pipe.load_lora(good)
    with pytest.raises(InputError, match="no adapter is named 'bad'; loaded are good"):
        pipe.unload_lora("bad")
    with pytest.raises(InputError, match="no layer is named 'nothing'"):
        add_adapters(small_model(), AdapterConfig(2, 4.0, ("nothing",)))
