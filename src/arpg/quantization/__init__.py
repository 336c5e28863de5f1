"""Quantization: fp8 and int8 weights, packed CPU weights, and how weights are stored in files."""
