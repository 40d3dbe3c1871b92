"""A trainer (0) and an engine (1), JSON. `python -m tests.broadcast_runs INDEX PORT SWAPS`, once for each.

Both say after each swap how many bytes are live on the device, how many are resident, and how many programs were
compiled. Their model has 13 MB, so that a copy that stays is many times what malloc keeps.
"""

import json
import sys

CHANGES = {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512}


class Growth:
    """What grows if a swap keeps something."""

    def __init__(self, jax):
        from levanter_infer.runtime.memory import process_bytes

        self._jax, self._process_bytes, self._compiled = jax, process_bytes, 0
        self.found: dict[str, list[int]] = {"live": [], "resident": [], "compiled": []}
        jax.monitoring.register_event_duration_secs_listener(self._note)

    def _note(self, name: str, *_, **__) -> None:
        self._compiled += "backend_compile" in name

    def look(self) -> None:
        self.found["live"].append(sum(leaf.nbytes for leaf in self._jax.live_arrays()))
        self.found["resident"].append(self._process_bytes()[0])
        self.found["compiled"].append(self._compiled)


def main(index: int, port: str, swaps: int) -> None:
    import jax

    from levanter_infer.runtime.multihost import MultihostConfig, joined
    from tests.tiny_models import tiny_model

    config = MultihostConfig(f"127.0.0.1:{port}", 2, index, layout="per_host", heartbeat_s=60)
    with joined(config) as hosts:
        models = [tiny_model(seed, **CHANGES) for seed in range(3)]
        print(json.dumps((train if index == 0 else serve)(jax, models, swaps, hosts)))


def train(jax, models, swaps: int, hosts) -> dict:
    from levanter_infer.engine.broadcast import send_weights

    growth = Growth(jax)
    for i in range(swaps):
        send_weights(jax.tree.map(jax.numpy.copy, models[i % 3]), hosts)  # a step's weights are new arrays
        growth.look()
    return growth.found


def serve(jax, models, swaps: int, hosts) -> dict:
    from levanter_infer.engine.broadcast import received_weights
    from levanter_infer.engine.config import EngineConfig
    from levanter_infer.engine.engine import InferenceEngine
    from levanter_infer.engine.params import SamplingParams
    from levanter_infer.engine.request import Request
    from tests.tiny_models import uncached_greedy

    asked = Request(prompt_token_ids=[1, 2, 3], sampling=SamplingParams(max_tokens=6, temperature=0.0))
    expected = [uncached_greedy(model, [1, 2, 3], 6) for model in models]
    sizes = EngineConfig(max_seqs=4, max_seq_len=64, page_size=4, max_step_tokens=16)
    engine = InferenceEngine(models[1], config=sizes)
    engine.warmup(weight_updates=True)
    growth, wrong = Growth(jax), 0
    for i in range(swaps):
        engine.swap_weights(received_weights(engine, hosts))
        done = engine.generate(asked)[0].completions[0]
        wrong += done.token_ids != expected[i % 3] or set(done.token_versions.tolist()) != {i + 1}
        growth.look()
    distinct = len({tuple(tokens) for tokens in expected})
    return {**growth.found, "wrong": wrong, "distinct": distinct, "version": engine.version}


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
