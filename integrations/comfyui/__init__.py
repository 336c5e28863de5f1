"""ARPG nodes for ComfyUI: put this folder into `custom_nodes` and install `arpg` into ComfyUI's environment."""

from .nodes import comfy_entrypoint

__all__ = ["comfy_entrypoint"]
