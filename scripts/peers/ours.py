"""This engine as one side of `run.py`."""

from protocol import serve

from levanter_infer import EngineConfig, InferenceEngine, Request, SamplingParams
from levanter_infer.checkpoints.load import load_model


def start(setup: dict, **kernels: str):
    """`kernels`: engine.matmul and engine.attention, where they are not to be chosen."""
    asked = setup.get("sampling", {})
    is_narrow = setup["dtype"] == "int8"
    model, _ = load_model(setup["checkpoint"], dtype=None if is_narrow else setup["dtype"])
    longest = -(-(setup["prompt"] + setup["output"] + 1) // 16) * 16
    engine = InferenceEngine(
        model,
        config=EngineConfig(
            max_seqs=setup["batch"],
            max_seq_len=longest,
            prefix_cache=setup.get("prefix_cache", False),
            weight_dtype="int8" if is_narrow else None,
            **kernels,
        ),
        donate_model=True,
    )
    engine.warmup()

    def generate(prompts: list[list[int]], count: int) -> list[list[int]]:
        sampling = SamplingParams(**{"temperature": 0.0, **asked}, max_tokens=count, ignore_eos=True)
        outputs = engine.generate([Request(prompt_token_ids=prompt, sampling=sampling) for prompt in prompts])
        return [list(output.completions[0].token_ids) for output in outputs]

    return generate


if __name__ == "__main__":
    serve(start, ("jax", "jaxlib"))
