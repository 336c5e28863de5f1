"""Image tasks: each one builds the requests that the decode loop fills."""

from arpg.tasks.requests import Label, Prompt, fill, generate, label_condition

__all__ = ["Label", "Prompt", "fill", "generate", "label_condition"]
