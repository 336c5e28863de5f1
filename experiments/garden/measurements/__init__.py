"""Measurements of the bundled models: ablations, zero-shot tasks, exact decoding, metrics, the model card."""
