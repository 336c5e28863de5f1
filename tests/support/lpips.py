"""LPIPS weights of a small network."""

CHANNELS = (4, 4, 8, 8, 12, 12, 12, 16, 16, 16, 20, 20, 20)
