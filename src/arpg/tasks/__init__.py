"""Tasks: each image task builds the requests that the decode loop fills."""

from arpg.tasks.requests import ControlMap, Label, Prompt, condition, fill, generate, steered

__all__ = ["ControlMap", "Label", "Prompt", "condition", "fill", "generate", "steered"]
