"""Kernels for paged attention and matmuls, on plain arrays, in a folder for each platform.

`backend.py` has the interface, `registry.py` the list, `call.py` the arguments. Imports nothing of this package's other
parts.
"""

from levanter_infer.kernels.backend import Backend as Backend
from levanter_infer.kernels.call import AttentionCall as AttentionCall
from levanter_infer.kernels.registry import BACKENDS as BACKENDS
from levanter_infer.kernels.registry import IMPLEMENTATIONS as IMPLEMENTATIONS
from levanter_infer.kernels.registry import make_backend as make_backend
