"""vLLM's CPU build as one side of `run.py`. Runs in an environment without this package."""

import os

import vllm_llm
from protocol import Generate, serve


def start(setup: dict) -> Generate:
    cores = f"0-{setup['threads'] - 1}"  # its default leaves one core to the scheduler
    os.environ.update(VLLM_CPU_OMP_THREADS_BIND=cores, VLLM_CPU_KVCACHE_SPACE="2")
    return vllm_llm.start(setup)


if __name__ == "__main__":
    serve(start, ("torch", "vllm-cpu"))
