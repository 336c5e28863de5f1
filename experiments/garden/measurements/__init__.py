"""Measurements of the bundled models: ablations, exact decoding, metrics."""
