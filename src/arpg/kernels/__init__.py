"""Kernels: `ops.py` has one function per operation of the network; other modules hold the kernels it chooses."""
