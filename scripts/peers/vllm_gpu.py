"""vLLM on a GPU as one side of `scripts/gpu_roofline.py`, with random weights. Runs in an environment without this
package."""

import functools

import vllm_llm
from protocol import serve

if __name__ == "__main__":
    serve(functools.partial(vllm_llm.start, load_format="dummy"), ("torch", "vllm"))
