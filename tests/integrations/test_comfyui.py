"""The ComfyUI nodes: their schemas against the documented contract, their images against the pipeline."""

import asyncio
import copy
import importlib.util
import inspect
import sys
import tomllib

import numpy as np
import pytest
import torch

from arpg import ControlInput, Pipeline
from arpg.lora import AdapterConfig, add_adapters, trained_weights, write_adapter
from arpg.settings import SETTINGS
from support import comfy_contract
from support.paths import ROOT
from support.small import controlled_model, noise, small_model, small_tokenizer

PACK = ROOT / "integrations" / "comfyui"
INPUTS = {"prompt": "class 2", "negative": "", "seed": 3, "num_images": 2, "steps": 3, "guidance": 0.0}
OURS = {"seed": 3, "num_images": 2, "steps": 3}


@pytest.fixture
def reported():
    return []


@pytest.fixture
def nodes(monkeypatch, reported):
    """The nodes by their ids, loaded as ComfyUI loads a folder of custom nodes."""
    comfy_contract.install(monkeypatch, reported)
    spec = importlib.util.spec_from_file_location(
        "arpg_nodes", PACK / "__init__.py", submodule_search_locations=[str(PACK)]
    )
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "arpg_nodes", module)
    monkeypatch.delitem(sys.modules, "arpg_nodes.nodes", raising=False)
    spec.loader.exec_module(module)
    extension = asyncio.run(module.comfy_entrypoint())
    found = {node.GET_SCHEMA().node_id: node for node in asyncio.run(extension.get_node_list())}
    yield found
    sys.modules.pop("arpg_nodes.nodes", None)


def batch(*images):
    return torch.from_numpy(np.stack([np.asarray(image) for image in images]).astype(np.float32) / 255)


def check(output, expected):
    (images,) = output.result
    assert images.dtype == torch.float32
    assert torch.equal(images, batch(*expected))


def test_the_schemas(nodes):
    assert set(nodes) == {f"ARPG{name}" for name in (
        "Loader", "LoRA", "Settings", "Generate", "Inpaint", "Outpaint", "Control")}  # fmt: skip
    for node in nodes.values():
        schema = node.GET_SCHEMA()
        assert schema.category == "ARPG"
        assert schema.description
        parameters = inspect.signature(node.execute).parameters
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            assert set(parameters) == {each.id for each in schema.inputs}
        for each in schema.inputs:
            assert not each.optional or each.io_type in ("STRING", "ARPG_SETTINGS")
    settings = {each.id: each for each in nodes["ARPGSettings"].GET_SCHEMA().inputs}
    assert set(settings) == set(SETTINGS) - {"steps", "guidance"}
    assert settings["order"].arguments["options"] == list(SETTINGS["order"].names)


def test_generate(nodes, pipeline, reported):
    generate = nodes["ARPGGenerate"].execute
    check(generate(pipeline=pipeline, **INPUTS), pipeline.generate(2, **OURS))
    assert [value for value, _, _ in reported] == [1, 2, 3]
    assert {most for _, most, _ in reported} == {3}
    assert reported[-1][2].size == pipeline.image_size
    settings = {each.id: each.arguments.get("default") for each in nodes["ARPGSettings"].GET_SCHEMA().inputs}
    given = {name: value if value is not None else SETTINGS[name].default for name, value in settings.items()}
    (settings,) = nodes["ARPGSettings"].execute(**{**given, "order": "raster", "top_k": 3}).result
    output = generate(pipeline=pipeline, settings=settings, **{**INPUTS, "guidance": 2.0})
    check(output, pipeline.generate(2, order="raster", top_k=3, guidance=2.0, **OURS))
    (settings,) = nodes["ARPGSettings"].execute(**{**given, "decode": "exact", "top_k": 0}).result
    output = generate(pipeline=pipeline, settings=settings, **{**INPUTS, "steps": 0})
    check(output, pipeline.generate(2, decode="exact", **{**OURS, "steps": None}))
    check(generate(pipeline=pipeline, **{**INPUTS, "prompt": " "}), pipeline.generate(**OURS))


def test_inpaint_and_outpaint_take_batches(nodes, pipeline):
    first, second, hole = noise(8, 8), noise(8, 8, seed=1), torch.zeros(1, 8, 8)
    hole[:, 2:6, 2:] = 1
    shared = {"pipeline": pipeline, "image": batch(first, second), **INPUTS}
    later = {**OURS, "seed": 5}
    expected = [
        *pipeline.inpaint(first, hole[0].numpy(), 2, feather=1, **OURS),
        *pipeline.inpaint(second, hole[0].numpy(), 2, feather=1, **later),
    ]
    check(nodes["ARPGInpaint"].execute(mask=hole, feather=1, **shared), expected)
    sides = {"left": 0, "top": 2, "right": 4, "bottom": 0}
    expected = [*pipeline.outpaint(first, 2, **sides, **OURS), *pipeline.outpaint(second, 2, **sides, **later)]
    check(nodes["ARPGOutpaint"].execute(**sides, **shared), expected)


def test_control(nodes):
    pipe = Pipeline(controlled_model(), small_tokenizer())
    edges = noise(8, 8)
    inputs = {"pipeline": pipe, "image": batch(edges), "kind": "depth", "strength": 0.5, **INPUTS}
    expected = pipe.generate(2, control=ControlInput(edges, "depth", 0.5), **OURS)
    check(nodes["ARPGControl"].execute(from_image=False, **inputs), expected)


def test_loading_and_lora_leave_the_shared_pipeline_alone(nodes, folder, tmp_path):
    (pipe,) = nodes["ARPGLoader"].execute(model=str(folder), device="cpu", precision="auto").result
    before = pipe.generate(2, **OURS)
    config = AdapterConfig(rank=2, alpha=4.0)
    trained = trained_weights(add_adapters(small_model(), config))
    path = str(write_adapter(tmp_path / "mine", config, {name: torch.full_like(w, 0.1) for name, w in trained.items()}))
    (merged,) = nodes["ARPGLoRA"].execute(pipeline=pipe, path=path, scale=0.5).result
    check(nodes["ARPGGenerate"].execute(pipeline=pipe, **INPUTS), before)
    expected = Pipeline.from_pretrained(folder, device="cpu")
    expected.load_lora(path, 0.5)
    after = expected.generate(2, **OURS)
    assert any(np.any(np.asarray(a) != np.asarray(b)) for a, b in zip(before, after, strict=True))
    check(nodes["ARPGGenerate"].execute(pipeline=merged, **INPUTS), after)
    check(nodes["ARPGGenerate"].execute(pipeline=copy.deepcopy(merged), **INPUTS), after)


def test_an_interrupt_stops_the_decoding(nodes, pipeline, monkeypatch):
    def stop():
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["arpg_nodes.nodes"], "throw_exception_if_processing_interrupted", stop)
    with pytest.raises(KeyboardInterrupt):
        nodes["ARPGGenerate"].execute(pipeline=pipeline, **INPUTS)


def test_the_metadata_of_the_pack():
    data = tomllib.loads((PACK / "pyproject.toml").read_text())
    assert {"PublisherId", "DisplayName", "Icon"} <= set(data["tool"]["comfy"])
    assert "comfyui" not in data["project"]["name"].lower(), "the registry asks for names without it"
    assert len(data["project"]["version"].split(".")) == 3
    assert data["project"]["dependencies"] == ["arpg>=0.1"]
