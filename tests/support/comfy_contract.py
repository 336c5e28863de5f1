"""The documented contract of ComfyUI's V3 nodes (`comfy_api.latest`), for machines without ComfyUI.

Each input takes exactly the keyword arguments that the documentation lists; anything else is a TypeError, as there.
"""

import sys
import types
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

SHARED = {"display_name", "optional", "tooltip", "lazy", "extra_dict", "raw_link"}
WIDGET = SHARED | {"default", "socketless", "force_input"}
ARGUMENTS = {
    "IMAGE": SHARED,
    "MASK": SHARED,
    "BOOLEAN": WIDGET | {"label_on", "label_off"},
    "INT": WIDGET | {"min", "max", "step", "control_after_generate", "display_mode"},
    "FLOAT": WIDGET | {"min", "max", "step", "round", "display_mode"},
    "STRING": WIDGET | {"multiline", "placeholder", "dynamic_prompts"},
    "COMBO": (WIDGET | {"options", "control_after_generate", "upload", "image_folder", "remote"}) - {"force_input"},
}


def comfy_type(io_type):
    """A type with `Input` and `Output`."""

    class Input:
        def __init__(self, id, **arguments):
            unknown = set(arguments) - ARGUMENTS.get(io_type, SHARED)
            if unknown:
                raise TypeError(f"unexpected keyword arguments {unknown} of an input of type {io_type}")
            self.id, self.io_type, self.optional = id, io_type, arguments.pop("optional", False)
            self.arguments = arguments

    class Output:
        def __init__(self, id=None, display_name=None, tooltip=None, is_output_list=False):
            self.id, self.io_type, self.display_name = id, io_type, display_name

    return type(io_type, (), {"Input": Input, "Output": Output, "io_type": io_type})


@dataclass
class Schema:
    """What `define_schema` returns."""

    node_id: str
    display_name: str | None = None
    category: str = "sd"
    inputs: list = field(default_factory=list)
    outputs: list = field(default_factory=list)
    description: str = ""
    is_output_node: bool = False

    def validate(self):
        ids = [each.id for each in self.inputs]
        assert len(ids) == len(set(ids)), "input ids must be unique"


class ComfyNode(ABC):
    """The base class of nodes."""

    @classmethod
    @abstractmethod
    def define_schema(cls): ...

    @classmethod
    @abstractmethod
    def execute(cls, **inputs): ...

    @classmethod
    def GET_SCHEMA(cls):  # noqa: N802
        schema = cls.define_schema()
        schema.validate()
        return schema


class NodeOutput:
    """What `execute` returns."""

    def __init__(self, *args, ui=None, expand=None, block_execution=None):
        self.args = args

    @property
    def result(self):
        return self.args or None


class ComfyExtension(ABC):
    """What the entry point returns."""

    @abstractmethod
    async def get_node_list(self): ...


def install(monkeypatch, reported, interrupted=lambda: None):
    """Make `comfy_api.latest` and `comfy.model_management` importable; `reported` receives progress and previews."""

    class Execution:
        def set_progress(self, value, max_value, node_id=None, preview_image=None, ignore_size_limit=False):
            reported.append((value, max_value, preview_image))

    io = types.SimpleNamespace(
        Schema=Schema, ComfyNode=ComfyNode, NodeOutput=NodeOutput, Custom=comfy_type,
        **{name: comfy_type(name.upper()) for name in ("Image", "Mask", "Boolean", "Int", "Float", "String", "Combo")},
    )  # fmt: skip
    latest = types.ModuleType("comfy_api.latest")
    latest.io, latest.ComfyExtension = io, ComfyExtension
    latest.ComfyAPISync = type("ComfyAPISync", (), {"execution": Execution()})
    management = types.ModuleType("comfy.model_management")
    management.throw_exception_if_processing_interrupted = lambda: interrupted()
    for name, module in (
        ("comfy_api", types.ModuleType("comfy_api")),
        ("comfy_api.latest", latest),
        ("comfy", types.ModuleType("comfy")),
        ("comfy.model_management", management),
    ):
        monkeypatch.setitem(sys.modules, name, module)
