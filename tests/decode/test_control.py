"""Condition images in the network: queries against the oracle, strength, dropping, gradients, encoders, folders."""

import dataclasses
import json

import pytest
import torch

from arpg import InputError, Pipeline, Request, SamplingSettings, checkpoint, decode, make_plan
from arpg.checkpoint import FolderConfig, installed_folder, load_model, load_tokenizer, read_folder, write_folder
from arpg.config import DEFAULT_MODEL, ControlConfig, ModelConfig, from_dict, to_dict
from arpg.convert import model_to_published
from arpg.decode.likelihood import fill_bits
from arpg.model import ControlMap, class_condition, control_condition, text_condition
from arpg.model.condition import training_control
from arpg.quantization.storage import BITS, pack, unpack
from support import oracle
from support.small import CONTROL, SMALL, TEXT, controlled_model, small_model, small_tokenizer, text_states

GRID = (4, 4)


def maps(number, seed=0, size=(8, 8)):
    """Random condition images."""
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randint(256, (number, *size), generator=generator, dtype=torch.uint8))


def controlled(model, labels, images, strengths=None, kinds=None):
    plain = class_condition(model, torch.tensor(labels))
    kinds, strengths = kinds or ["canny"] * len(images), strengths or [1.0] * len(images)
    return control_condition(model, plain, list(map(ControlMap, images, kinds, strengths)))


def forced(model, condition, seed=1):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(24, (len(condition), 16), generator=generator)
    order = torch.stack([torch.randperm(16, generator=generator) for _ in range(len(condition))])
    with torch.no_grad():
        return model(ids, order, condition)


@pytest.fixture(scope="module")
def model():
    return controlled_model()


def record(model, request, settings):
    raw = []
    plan = make_plan(request.grid, request.known_BN, request.seeds, settings)
    steps = decode(model, request, plan, settings, hook=lambda state, step, logits, sampled: raw.append(logits))
    last = list(steps)[-1]
    return plan, last.ids_BN, raw


@pytest.mark.parametrize("attention", ["block", "causal"])
@pytest.mark.parametrize("order", ["random", "local"])
def test_decoding_equals_the_oracle(model, attention, order):
    """Guided, ragged, on another grid: the conditional rows ask with the image, the others with [MASK]."""
    grid, seeds = (3, 5), (7, 8)
    ids = torch.randint(24, (2, 15), generator=torch.Generator().manual_seed(3))
    known = torch.zeros(2, 15, dtype=torch.bool)
    known[1, [2, 5, 8]] = True
    with torch.no_grad():
        condition = controlled(model, [1, 4], maps(2, size=(6, 10)), [1.0, 0.5], ["canny", "depth"])
    request = Request(condition, grid, ids, known, seeds)
    settings = SamplingSettings(steps=4, guidance=2.0, order=order, attention=attention)
    plan, drawn, raw = record(model, request, settings)
    base = dataclasses.replace(model.config, control=None)
    weights = {key: t for key, t in model.state_dict().items() if not key.startswith("control.")}
    published = model_to_published(base, weights)
    for b, sample in enumerate(plan.samples):
        cond, uncond = (
            oracle.decoding_logits(
                published,
                base.num_heads,
                label=label,
                ids=drawn[b].tolist(),
                known=known[b].nonzero().flatten().tolist(),
                order=list(sample.order),
                sizes=sample.sizes,
                width=grid[1],
                causal=attention == "causal",
                queries=queries,
            )
            for label, queries in (([1, 4][b], condition.query_BND[b]), (None, None))
        )
        ours = torch.cat([raw[s][b, :size] for s, size in enumerate(sample.sizes)])
        assert (ours - oracle.guided(cond, uncond, sample)).abs().max() < 1e-4


def test_strength_zero_is_the_model_without_control(model):
    plain = class_condition(model, torch.tensor([1, 2]))
    base = small_model()
    base.load_state_dict({k: t for k, t in model.state_dict().items() if not k.startswith("control.")})
    without = forced(base, class_condition(base, torch.tensor([1, 2])))
    assert torch.equal(forced(model, controlled(model, [1, 2], maps(2), [0.0, 0.0])), without)
    assert torch.equal(forced(model, plain), without)
    mixed = forced(model, controlled(model, [1, 2], maps(2), [0.0, 1.0]))
    assert torch.equal(mixed[0], without[0])
    assert (mixed[1] - without[1]).abs().max() > 0.01


def test_strength_scales_the_difference_from_mask(model):
    mask = model.embedding.weight[model.config.mask_id]
    whole, half = (controlled(model, [1], maps(1), [s]).query_BND - mask for s in (1.0, 0.5))
    assert torch.allclose(half, whole / 2, atol=1e-6)


def test_a_fresh_encoder_changes_nothing():
    """Training starts from what the pre-trained model does."""
    fresh = dataclasses.replace(SMALL, control=CONTROL)
    model = small_model(fresh)
    plain = class_condition(model, torch.tensor([1, 2]))
    assert torch.equal(forced(model, controlled(model, [1, 2], maps(2))), forced(model, plain))
    base = small_model()  # and the other weights are what they are without it
    assert all(torch.equal(t, model.state_dict()[k]) for k, t in base.state_dict().items())


def test_dropped_images_are_plain_masks(model):
    plain = class_condition(model, torch.tensor([1, 5]))
    pixels, kind = torch.stack(maps(2)), torch.tensor([0, 1])
    both = training_control(model, plain, pixels, kind, torch.tensor([False, True]))
    assert torch.equal(forced(model, both)[1], forced(model, plain)[1])
    assert (forced(model, both)[0] - forced(model, plain)[0]).abs().max() > 0.01
    alone = controlled(model, [1, 5], list(pixels), kinds=["canny", "depth"])
    none = training_control(model, plain, pixels, kind, torch.tensor([False, False]))
    assert torch.allclose(none.query_BND, alone.query_BND, atol=1e-5)


def test_gradients_reach_every_new_parameter(model):
    model = controlled_model(seed=3)
    pixels, kind = torch.stack(maps(2)), torch.tensor([0, 1])
    dropped = torch.tensor([False, False])
    condition = training_control(model, class_condition(model, torch.tensor([1, 2])), pixels, kind, dropped)
    model(torch.zeros(2, 16, dtype=torch.long), torch.arange(16).expand(2, 16), condition).square().sum().backward()
    new = dict(model.control.named_parameters())
    assert len(new) > 10
    for name, parameter in new.items():
        assert parameter.grad is not None, name
        assert (parameter.grad.abs() > 0).any(), name
    assert all((row.abs() > 0).any() for row in model.control.encoder.kind.weight.grad)


def test_each_position_asks_with_its_own_patch(model):
    """Without blocks the encoder sees a patch alone: another patch changes its own query and no other."""
    config = dataclasses.replace(CONTROL, layers=1)
    model = controlled_model(dataclasses.replace(SMALL, control=config))
    model.control.encoder.blocks = torch.nn.ModuleList()
    model.control.encoder.norm.forward = lambda stream: (stream, stream.x_BSD)
    (image,) = maps(1, size=(8, 12))
    other = image.clone()
    other[2:4, 8:10] += 9  # row 1, column 4 of 4 x 6 patches of 2 x 2 pixels
    one, two = (controlled(model, [1], [picture]).query_BND[0] for picture in (image, other))
    assert (one - two).abs().amax(1).nonzero().flatten().tolist() == [10]


def test_kinds_are_told_apart(model):
    canny, depth = (controlled(model, [1], maps(1), kinds=[kind]).query_BND for kind in ("canny", "depth"))
    assert (canny - depth).abs().max() > 0.01
    with pytest.raises(InputError, match="'soft'; the model takes canny, depth"):
        controlled(model, [1], maps(1), kinds=["soft"])


def test_an_image_is_encoded_alike_in_every_batch(model):
    images = maps(3)
    together = controlled(model, [0, 1, 2], images).query_BND
    alone = torch.cat([controlled(model, [i], [image]).query_BND for i, image in enumerate(images)])
    assert torch.equal(together, alone)


def test_below_float32_images_are_encoded_together(model, monkeypatch):
    """One call of the encoder for a batch of samples, which may share images; close to that of float32."""
    low, images = controlled_model().to(torch.bfloat16), maps(3)
    images, kinds, strengths = [*images, images[0]], ["canny", "depth", "canny", "canny"], [1.0, 0.5, 1.0, 0.0]
    expected = controlled(model, range(4), images, strengths, kinds).query_BND
    sizes, encode = [], low.control.encoder.forward
    monkeypatch.setattr(low.control.encoder, "forward", lambda x, *rest: sizes.append(len(x)) or encode(x, *rest))
    with torch.no_grad():
        found = controlled(low, range(4), images, strengths, kinds).query_BND
    assert sizes == [3]
    assert (found.float() - expected).norm() < 0.02 * expected.norm()
    monkeypatch.setattr("arpg.model.condition.ENCODED_TOGETHER", 2)
    with torch.no_grad():
        assert controlled(low, range(4), images, strengths, kinds).query_BND.shape == found.shape
    assert sizes == [3, 2, 1]


def test_prompts_and_images_together():
    model = controlled_model(dataclasses.replace(TEXT, control=CONTROL))
    plain = text_condition(model, text_states(3, 5))
    both = control_condition(model, plain, list(map(ControlMap, maps(2), ["canny", "depth"], [1.0, 1.0])))
    assert (forced(model, both) - forced(model, plain)).abs().max() > 0.01


def test_the_bits_of_a_filling_know_the_image(model):
    seeds, ids = (1, 2), torch.randint(24, (2, 16), generator=torch.Generator().manual_seed(0))
    plain = class_condition(model, torch.tensor([1, 2]))
    with torch.no_grad():
        steered = controlled(model, [1, 2], maps(2))
    bits = [fill_bits(model, Request.from_nothing(c, GRID, seeds), ids) for c in (plain, steered)]
    assert (bits[0] - bits[1]).abs().min() > 0.01


def test_folders_keep_the_encoder(model, tmp_path):
    write_folder(tmp_path, FolderConfig(model=model.config), model=model.state_dict())
    again = load_model(tmp_path)
    assert again.config == model.config
    assert torch.equal(controlled(again, [1], maps(1)).query_BND, controlled(model, [1], maps(1)).query_BND)
    assert from_dict(ModelConfig, to_dict(model.config), where="here") == model.config


def test_bad_input(model):
    plain = small_model()
    with pytest.raises(InputError, match="takes no condition images"):
        controlled(plain, [1], maps(1))
    with pytest.raises(InputError, match="strength is -1"):
        controlled(model, [1], maps(1), [-1])
    with pytest.raises(InputError, match="9x8 pixels; expected multiples of 2"):
        controlled(model, [1], maps(1, size=(8, 9)))
    with pytest.raises(InputError, match="20 patches; a grid of 4x4 needs 16"):
        Request.from_nothing(controlled(model, [1], maps(1, size=(8, 10))), GRID, (1,))
    with pytest.raises(InputError, match="no place for condition images"):
        model_to_published(model.config, model.state_dict())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kinds": ()}, "kinds are"),
        ({"kinds": ("canny", "canny")}, "expected different"),
        ({"kinds": ("sketch",)}, "'sketch'"),
        ({"patch": 0}, "patch is 0"),
        ({"layers": 0}, "layers is 0"),
        ({"width": 10}, "width 10"),
        ({"encoder": ""}, "encoder is empty"),
    ],
)
def test_bad_configurations(change, message):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(ControlConfig(), **change)


@pytest.mark.parametrize("family", ["vit", "dinov2", "dinov2_with_registers"])
def test_a_vit_of_transformers(family, tmp_path, monkeypatch):
    """A tiny one from a folder: it starts from its own weights, has a state for each position, and learns."""
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    torch.manual_seed(0)
    described = transformers.AutoConfig.for_model(family, **shape, image_size=12, patch_size=3, num_register_tokens=2)
    network = transformers.AutoModel.from_config(described)
    network.save_pretrained(tmp_path / "encoder")
    control = dataclasses.replace(CONTROL, encoder=str(tmp_path / "encoder"))
    model = controlled_model(dataclasses.replace(SMALL, control=control))
    theirs = model.control.encoder.network.state_dict()
    assert all(torch.equal(t, theirs[k]) for k, t in network.state_dict().items() if "pooler" not in k)
    pixels = torch.stack(maps(2, size=(8, 12)))
    added = model.control(pixels, torch.tensor([0, 1]))
    assert added.shape == (2, 24, 32)
    added.square().sum().backward()
    for name, parameter in model.control.named_parameters():
        assert not parameter.requires_grad or (parameter.grad.abs() > 0).any() or "mask_token" in name, name
    write_folder(tmp_path / "model", FolderConfig(model=model.config), model=model.state_dict())
    again = load_model(tmp_path / "model")
    with torch.no_grad():
        assert torch.allclose(again.control(pixels, torch.tensor([0, 1])), model.control(pixels, torch.tensor([0, 1])))
        # A state stands where its query is: what changes in one corner changes most there.
        other = pixels.clone()
        other[:, :2, :2] = 255 - other[:, :2, :2]
        change = (model.control(other, torch.tensor([0, 1])) - added).abs().amax(2)
        assert (change.argmax(1) == 0).all()
    with pytest.raises(InputError, match="could not be loaded"):
        small_model(dataclasses.replace(SMALL, control=dataclasses.replace(CONTROL, encoder=str(tmp_path / "no"))))


def test_a_tokenizer_is_shared(tmp_path):
    """A folder may name an installed model instead of holding a tokenizer; its own takes its place."""
    write_folder(tmp_path, FolderConfig(model=SMALL, tokenizer_of=DEFAULT_MODEL), model=small_model().state_dict())
    assert not (tmp_path / "tokenizer.safetensors").exists()
    ours, theirs = load_tokenizer(tmp_path).state_dict(), load_tokenizer(installed_folder(DEFAULT_MODEL)).state_dict()
    assert all(torch.equal(t, theirs[k]) for k, t in ours.items())
    write_folder(tmp_path, FolderConfig(license="MIT"))  # what is not given stays
    assert read_folder(tmp_path).tokenizer_of == DEFAULT_MODEL
    own = small_tokenizer()
    write_folder(tmp_path, FolderConfig(tokenizer=own.config), tokenizer=own.state_dict())
    assert read_folder(tmp_path).tokenizer_of is None
    assert load_tokenizer(tmp_path).config == own.config
    data = json.loads((tmp_path / "config.json").read_text())
    for change, message in (({"tokenizer_of": "other"}, "take one of them out"), ({"base": 3}, "base is 3; expected")):
        (tmp_path / "config.json").write_text(json.dumps(data | change))
        with pytest.raises(InputError, match=message):
            read_folder(tmp_path)


@pytest.mark.parametrize(("form", "most"), [("int8", 127), ("int6", 31), ("int4", 7)])
def test_few_bits(form, most):
    """Rows no farther off than by rounding to their largest number; as small as the bits say; any shape."""
    generator = torch.Generator().manual_seed(0)
    state = {"a": torch.randn(5, 13, generator=generator), "b": torch.randn(4, 3, 3, 2, generator=generator)}
    packed = pack({**state, "c": torch.ones(3)}, form)
    again = unpack(packed, where="here")
    for key, tensor in state.items():
        rows = tensor.flatten(1)
        step = rows.abs().amax(1, keepdim=True) / most
        plain = ((rows / step).round() * step - rows).square().sum(1)
        assert again[key].shape == tensor.shape
        assert ((again[key].flatten(1) - rows).square().sum(1) <= 1.001 * plain).all()
        assert all(torch.equal(stored, packed[name]) for name, stored in pack(again, form).items() if name != "c")
        assert packed[key].nbytes <= tensor.numel() * BITS[form] / 8 + 3 * len(tensor)
    if form == "int4":  # one large number does not make the others coarse
        odd = torch.cat([torch.randn(1, 500, generator=generator), torch.tensor([[6.0]])], 1)
        assert (unpack(pack({"a": odd}, form), where="here")["a"] - odd).square().mean() < 0.6 * (6 / 7) ** 2 / 12
    if form != "int8":
        packed["a"] = packed["a"][:, :-1]
        with pytest.raises(InputError, match="a does not hold"):
            unpack(packed, where="here")


def test_differences_from_an_installed_model(tmp_path, monkeypatch):
    """Only what differs is stored; the folder loads like any other, and can be stored whole again."""
    box = tmp_path / "box"
    monkeypatch.setattr(checkpoint, "installed_folder", lambda name, **_: box)
    base, tokenizer = small_model(), small_tokenizer()
    parts = {"model": pack(base.state_dict(), "int8"), "tokenizer": tokenizer.state_dict()}
    write_folder(box, FolderConfig(model=SMALL, tokenizer=tokenizer.config), **parts)
    tuned = controlled_model()
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if not name.startswith("control."):
                parameter += 0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
    whole = tmp_path / "whole"
    write_folder(
        whole,
        FolderConfig(model=tuned.config, tokenizer=tokenizer.config, license="MIT"),
        model=tuned.state_dict(),
        tokenizer=tokenizer.state_dict(),
    )
    checkpoint.write_difference(whole, tmp_path / "small", base="box", form="int6")
    described = read_folder(tmp_path / "small")
    assert (described.base, described.tokenizer_of, described.license) == ("box", "box", "MIT")
    again = load_model(tmp_path / "small").state_dict()
    for key, tensor in tuned.state_dict().items():
        close = 0.05 if key.startswith("control.") else 0.002  # a 31st of a difference, a 127th of a weight
        assert (again[key] - tensor).abs().max() < close, key
    assert Pipeline.from_pretrained(tmp_path / "small", device="cpu").generate(1, steps=2)[0].size == (8, 8)
    write_folder(tmp_path / "small", FolderConfig(), model=tuned.state_dict())
    assert read_folder(tmp_path / "small").base is None
    other = small_model(dataclasses.replace(SMALL, width=64))
    write_folder(tmp_path / "other", FolderConfig(model=other.config), model=other.state_dict())
    with pytest.raises(InputError, match="has another shape"):
        checkpoint.write_difference(tmp_path / "other", tmp_path / "no", base="box", form="int6")
    foreign = {key: t + 1 for key, t in tokenizer.state_dict().items()}
    write_folder(whole, FolderConfig(tokenizer=tokenizer.config), tokenizer=foreign)
    with pytest.raises(InputError, match="is not that of box"):
        checkpoint.write_difference(whole, tmp_path / "no", base="box", form="int6")
