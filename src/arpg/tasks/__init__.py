"""Image tasks: each one builds the requests that the decode loop fills."""

from arpg.tasks.requests import ControlMap, Label, Prompt, add_control, fill, generate, label_condition

__all__ = ["ControlMap", "Label", "Prompt", "add_control", "fill", "generate", "label_condition"]
