"""Kernels for TPUs (Pallas through Mosaic)."""
