"""A trainer (0) and an engine (1), JSON. `python -m tests.broadcast_runs INDEX PORT SWAPS`, once for each."""

import json
import sys


def main(index: int, port: str, swaps: int) -> None:
    import jax

    from levanter_infer.runtime.multihost import MultihostConfig, joined
    from tests.tiny_models import tiny_model

    config = MultihostConfig(f"127.0.0.1:{port}", 2, index, layout="per_host", heartbeat_s=60)
    with joined(config) as hosts:
        models = [tiny_model(seed) for seed in range(3)]
        if index == 0:
            from levanter_infer.engine.broadcast import send_weights

            for i in range(swaps):
                send_weights(models[i % 3], hosts)
            print(json.dumps({}))
        else:
            print(json.dumps(serve(jax, models, swaps, hosts)))


def serve(jax, models, swaps: int, hosts) -> dict:
    from levanter_infer.engine.broadcast import received_weights
    from levanter_infer.engine.config import EngineConfig
    from levanter_infer.engine.engine import InferenceEngine
    from levanter_infer.engine.params import SamplingParams
    from levanter_infer.engine.request import Request
    from levanter_infer.runtime.memory import process_bytes

    compiled: list[str] = []

    def note(name, *_, **__):
        if "backend_compile" in name:
            compiled.append(name)

    sizes = EngineConfig(max_seqs=4, max_seq_len=64, page_size=4, max_step_tokens=16)
    asked = Request(prompt_token_ids=[1, 2, 3], sampling=SamplingParams(max_tokens=6, temperature=0.0))
    expected = [InferenceEngine(m, config=sizes).generate(asked)[0].completions[0].token_ids for m in models]
    engine = InferenceEngine(models[1], config=sizes)
    engine.warmup(weight_updates=True)
    jax.monitoring.register_event_duration_secs_listener(note)
    wrong, counts, live, resident = 0, [], [], []
    for i in range(swaps):
        engine.swap_weights(received_weights(engine, hosts))
        found = engine.generate(asked)[0].completions[0]
        wrong += found.token_ids != expected[i % 3] or set(found.token_versions.tolist()) != {i + 1}
        counts.append(len(compiled))
        live.append(sum(leaf.nbytes for leaf in jax.live_arrays()))
        resident.append(process_bytes()[0])
    return {"wrong": wrong, "compiled": counts, "live": live, "resident": resident, "version": engine.version}


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
