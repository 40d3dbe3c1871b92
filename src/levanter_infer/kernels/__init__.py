"""Kernels for paged attention and matmuls, on plain arrays, in a folder for each platform.

`backend.py` has the interface, `registry.py` the list, `call.py` the arguments. Imports nothing of this package's other
parts; this file imports nothing at all, because the host's scheduler runs without JAX.
"""

MIN_ROWS = 4
"""Fewest rows of a matmul: on a CPU one row of bf16 is ten times slower than four, and a row keeps its bits at any
number of rows from four up."""

MIN_EXPONENT = -80.0
"""Tokens e^80 times less likely than the likeliest one have probability 0, which keeps weights out of the denormals."""
