"""HF transformers' continuous batching as one side of `run.py`. Runs in an environment without this package."""

import os

from hf import load
from protocol import serve
from transformers import ContinuousBatchingConfig, GenerationConfig


def start(setup: dict):
    batch, longest = setup["batch"], setup["prompt"] + setup["output"] + 1
    page_size = 32
    manager = load(setup).init_continuous_batching(
        generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=page_size,
            num_blocks=batch * -(-longest // page_size) + 1,
            max_batch_tokens=max(setup["prompt"], batch),
            allow_block_sharing=False,  # the same prompts come again
        ),
    )
    manager.start()

    def generate(prompts: list[list[int]], count: int) -> list[list[int]]:
        ids = manager.add_requests(prompts, max_new_tokens=count)
        results = {}
        while len(results) < len(ids):
            result = manager.get_result(timeout=1)
            if result is not None:
                results[result.request_id] = result
            elif not manager.is_running():
                raise RuntimeError(f"its generation thread has ended: {manager.background_thread_status.fatal_error}")
        return [list(results[id].generated_tokens) for id in ids]

    return generate


if __name__ == "__main__":
    serve(start, ("torch", "transformers"))
    os._exit(0)  # the manager's thread does not end by itself
