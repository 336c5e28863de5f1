"""How garden, garden-text and garden-control were made and measured: `python -m experiments.garden`."""
