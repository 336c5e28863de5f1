"""Measurements of the garden models: ablations, exact decoding, metrics."""
