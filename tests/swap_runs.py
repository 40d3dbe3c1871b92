"""Memory of `swap_weights` from a checkpoint, JSON. `python -m tests.swap_runs DIRECTORY`.

A process of its own, because the peak of a process is of all that it has done.
"""

import json
import sys
from pathlib import Path

SIZES = {"vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 3,
         "num_attention_heads": 16, "num_key_value_heads": 8}  # fmt: skip
"""206 MB in float32. The largest parameters are embeddings, head and the three maps of the MLPs: 34 MB each."""


def peak_above(before: int) -> int:
    from levanter_infer.runtime.memory import process_bytes

    return process_bytes()[1] - before


def forget_peak() -> int:
    """Let the peak begin anew. Returns: resident bytes now."""
    from levanter_infer.runtime.memory import process_bytes, return_free_memory

    return_free_memory()
    Path("/proc/self/clear_refs").write_text("5")  # man 5 proc
    return process_bytes()[0]


def main(directory: Path) -> dict:
    import jax
    import numpy as np

    from levanter_infer import EngineConfig, InferenceEngine, Request, SamplingParams
    from levanter_infer.checkpoints.load import open_model
    from levanter_infer.checkpoints.save import save_model
    from levanter_infer.checkpoints.source import resolve_source
    from tests.tiny_models import tiny_model

    for seed in range(2):
        save_model(tiny_model(seed, **SIZES), directory / str(seed))
        tiny_model.cache_clear()
    asked = Request(prompt_token_ids=[1, 2, 3], sampling=SamplingParams(max_tokens=4, temperature=0.0))
    config = EngineConfig(max_seqs=2, max_seq_len=32, page_size=4, max_pages=32)
    engine = InferenceEngine(open_model(resolve_source(directory / "1")), config=config)
    expected = engine.generate(asked)[0].completions[0].token_ids
    engine.swap_weights(directory / "0")
    first = engine.generate(asked)[0].completions[0].token_ids
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(engine.model))
    begin, above = forget_peak(), []
    for seed in (1, 0, 1):
        engine.swap_weights(directory / str(seed))
        jax.block_until_ready(engine.model)
        above.append(peak_above(begin))
    found = engine.generate(asked)[0].completions[0].token_ids
    # What a second copy would be: the same, with the old weights held
    held, begin = engine.model, forget_peak()
    engine.swap_weights(directory / "0")
    jax.block_until_ready(engine.model)
    return {
        "weights": weights,
        "largest": max(leaf.nbytes for leaf in jax.tree.leaves(held)),
        "above": above,
        "above_with_a_copy": peak_above(begin),
        "right": found == expected != first,
        "version": engine.version,
        "backend": str(engine.describe().get("matmul")),
        "dtype": str(np.dtype(jax.tree.leaves(held)[0].dtype)),
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
