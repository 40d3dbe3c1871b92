"""vLLM on a GPU as one side of `scripts/gpu_roofline.py`, with random weights. Runs in an environment without this
package."""

from protocol import serve


def start(setup: dict):
    from vllm import LLM, SamplingParams

    engine = LLM(
        setup["checkpoint"],
        dtype=setup["dtype"],
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=setup["prompt"] + setup["output"] + 1,
        max_num_seqs=setup["batch"],
        enable_prefix_caching=setup.get("prefix_cache", False),
    )

    def generate(prompts: list[list[int]], count: int) -> list[list[int]]:
        sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return generate


if __name__ == "__main__":
    serve(start, ("torch", "vllm"))
