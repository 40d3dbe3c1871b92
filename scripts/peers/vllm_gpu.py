"""vLLM on a GPU as one side of `scripts/gpu_roofline.py`, with random weights. Runs in an environment without this
package."""

import functools

import vllm_llm
from protocol import serve

MEMORY = 0.4
"""Share of the GPU's memory: JAX keeps its own while this runs."""

if __name__ == "__main__":
    serve(functools.partial(vllm_llm.start, load_format="dummy", gpu_memory_utilization=MEMORY), ("torch", "vllm"))
