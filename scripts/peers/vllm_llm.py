"""vLLM's `LLM` as the engine of a side; `vllm_cpu.py` and `vllm_gpu.py` serve it. Runs in an environment without this
package."""

from protocol import Generate


def start(setup: dict, **options) -> Generate:
    """
    Args:
        setup: as in `protocol.serve`.
        options: further ones of `LLM`.
    """
    from vllm import LLM, SamplingParams

    engine = LLM(
        setup["checkpoint"],
        dtype=setup["dtype"],
        skip_tokenizer_init=True,
        max_model_len=setup["prompt"] + setup["output"] + 1,
        max_num_seqs=setup["batch"],
        enable_prefix_caching=setup.get("prefix_cache", False),
        **options,
    )

    def generate(prompts: list[list[int]], count: int) -> list[list[int]]:
        own = {"temperature": 0, **setup.get("sampling", {})}
        sampling = SamplingParams(**own, max_tokens=count, ignore_eos=True, detokenize=False)
        outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return generate
