"""Kernels for NVIDIA GPUs (Pallas through Triton)."""
