"""One engine over the devices of several processes, JSON. `python -m tests.host_runs INDEX COUNT PORT DEVICES CASE…`,
once for each. DEVICES are of each process. Cases are those of `mesh_runs`, and `disturbed`.

Process 1 has a clock that began elsewhere and goes three times as fast.
"""

import json
import os
import sys
import time


def skew_clocks() -> None:
    """Before anybody has taken a clock."""
    for name in ("perf_counter", "monotonic", "time"):
        real = getattr(time, name)
        setattr(time, name, lambda real=real: 1e6 + 3 * real())


def main(index: int, count: int, port: str, devices: str, cases: list[str]) -> None:
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + f" --xla_force_host_platform_device_count={devices}"
    if index == 1:
        skew_clocks()
    import jax

    from levanter_infer.runtime.multihost import MultihostConfig, joined

    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_disable_most_optimizations", True)
    config = MultihostConfig(f"127.0.0.1:{port}", count, index, layout="one_mesh", heartbeat_s=30)
    with joined(config) as hosts:
        print(json.dumps({name: run(name, hosts, index) for name in cases}))


def run(name: str, hosts, index: int) -> dict:
    from tests.mesh_runs import case

    if name.startswith("differing_"):
        return differing(hosts, index, name.removeprefix("differing_"))
    return sized_and_disturbed(hosts, index) if name == "disturbed" else case(name, hosts)


def differing(hosts, index: int, call: str) -> dict:
    """The processes do not call the same, as they must."""
    from levanter_infer.engine.config import EngineConfig
    from levanter_infer.engine.engine import InferenceEngine
    from levanter_infer.engine.mesh import MeshConfig
    from levanter_infer.engine.params import SamplingParams
    from levanter_infer.engine.request import Request
    from tests.mesh_runs import SIZES
    from tests.tiny_models import tiny_model

    engine = InferenceEngine(tiny_model(), config=EngineConfig(**SIZES), mesh=MeshConfig(model=2), hosts=hosts)
    group = engine.submit(Request(prompt_token_ids=[1, 2, 3], sampling=SamplingParams(max_tokens=30, n=3)))
    while len(group.sequences[0].token_ids) < 3:
        engine.step_round(max_steps=1)
        engine.flush()
    if call == "resample":
        engine.resample(group, [0, 0, 1] if index == 0 else [2, 1, 0])
    else:
        engine.swap_weights(tiny_model(1), version=5 + index, policy="keep_kv")
    while not group.is_done:
        engine.step_round(max_steps=1)
    return {"tokens": [sequence.token_ids for sequence in group.sequences]}


def sized_and_disturbed(hosts, index: int) -> dict:
    from levanter_infer.engine.config import EngineConfig
    from levanter_infer.engine.engine import InferenceEngine
    from levanter_infer.engine.mesh import MeshConfig
    from tests.mesh_runs import SIZES, results
    from tests.tiny_models import tiny_model

    sizes = {**SIZES, "max_pages": SIZES["max_pages"] + 7 * index}  # process 1 could afford more
    engine = InferenceEngine(tiny_model(), config=EngineConfig(**sizes), mesh=MeshConfig(data=2, model=2), hosts=hosts)
    found = results(engine, 16)
    found |= {"max_pages": engine.describe()["max_pages"], "refused": refusal(engine)}
    return {**found, **disturbed(engine, index)}


def refusal(engine) -> str:
    """The message of a call that is not there yet for several processes."""
    try:
        engine.memory()
    except ValueError as e:
        return str(e)
    return "nothing"


def disturbed(engine, index: int) -> dict:
    """A cancellation by process 1 alone, a deadline that has passed, and one that passes somewhere on the way."""
    from levanter_infer.engine.params import SamplingParams
    from levanter_infer.engine.request import Request

    def request(i: int, timeout_s: float | None = None) -> Request:
        sampling = SamplingParams(max_tokens=50, seed=i, ignore_eos=True)
        return Request(prompt_token_ids=[i + 1, 2, 3], sampling=sampling, timeout_s=timeout_s)

    groups = [engine.submit(request(i, {4: 1e-6, 5: 0.05, 6: 1e5}.get(i))) for i in range(8)]
    known, rounds = [], 0
    while not all(group.is_done for group in groups):
        if rounds == 3 and index == 1:
            engine.cancel(groups[2])
        known += [(rounds, groups.index(sequence.request)) for sequence in engine.step_round(max_steps=2)]
        rounds += 1
    engine.drain()
    return {
        "disturbed": [group.sequences[0].token_ids for group in groups],
        "disturbed_reasons": [group.sequences[0].finish_reason for group in groups],
        "known": known,
        "rounds": rounds,
        "free_at_the_end": engine.stats()["pages_free"],
    }


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:5], cases=sys.argv[5:])
