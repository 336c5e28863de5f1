"""Benchmarks: how fast generation is, where the time goes, and how far that is from what the hardware allows."""
