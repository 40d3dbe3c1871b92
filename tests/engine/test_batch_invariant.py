"""With `numerics: batch_invariant` a result depends on its request alone, to the bit."""

import numpy as np
import pytest

from levanter_infer.decode.invariants import check_invariants
from levanter_infer.engine.config import EngineConfig
from levanter_infer.engine.engine import InferenceEngine
from levanter_infer.engine.params import SamplingParams
from levanter_infer.engine.request import Request
from levanter_infer.kernels import cpu
from tests.tiny_models import tiny_model

built = pytest.mark.skipif(not cpu.available(), reason="the C++ kernels were not built")


EXPERTS = dict(
    model_type="qwen3_moe", num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24, norm_topk_prob=True
)


def make_engine(dtype: str = "float32", **config) -> InferenceEngine:
    sizes = dict(max_seq_len=96, numerics="batch_invariant", prefix_cache=True)
    changes = EXPERTS if dtype == "experts" else dict(dtype=dtype)
    return InferenceEngine(tiny_model(**changes), config=EngineConfig(**{**sizes, **config}))


def random_requests(count: int, seed: int) -> list[Request]:
    rng = np.random.default_rng(seed)
    common = rng.integers(0, 61, 40).tolist()
    requests = []
    for i in range(count):
        begin = common[: int(rng.integers(0, 40))] if rng.random() < 0.6 else []
        sampling = SamplingParams(
            max_tokens=int(rng.integers(1, 24)),
            temperature=float(rng.choice([0, 0.7, 1.0])),
            top_p=float(rng.choice([1, 0.9])),
            top_k=int(rng.choice([0, 5])),
            frequency_penalty=float(rng.choice([0, 0, 0.5])),
            n=int(rng.choice([1, 1, 3])),
            seed=int(rng.integers(2**30)),
        )
        ids = begin + rng.integers(0, 61, int(rng.integers(1, 20))).tolist()
        requests.append(Request(prompt_token_ids=ids, sampling=sampling, id=str(i)))
    return requests


def bits(outputs) -> list:
    """Tokens, and the bits of both logprobs, of every completion."""
    return [
        [(c.token_ids, c.logprobs.tobytes(), c.processed_logprobs.tobytes()) for c in output.completions]
        for output in outputs
    ]


@built
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_bits_are_those_of_the_request_alone(dtype):
    """In company, in another order, in chunks, on pages of another size, preempted, cached and cold."""
    requests = random_requests(24, seed=5)
    alone = make_engine(dtype, max_seqs=3, page_size=8, max_step_tokens=256, prefix_cache=False)
    expected = [bits(alone.generate([request]))[0] for request in requests]
    preemptions = hits = 0
    for config in (
        dict(max_seqs=8, page_size=4, max_step_tokens=16, max_pages=40),
        dict(max_seqs=32, page_size=16, max_step_tokens=300),
    ):
        engine = make_engine(dtype, **config)
        for order in (range(24), np.random.default_rng(0).permutation(24)):
            found = bits(engine.generate([requests[i] for i in order]))
            assert found == [expected[i] for i in order]
            check_invariants(engine.state.decode)
        preemptions += engine.stats()["preemptions"]
        hits += engine.stats()["prefix_hits"]
    assert preemptions > 0 and hits > 0


@pytest.mark.parametrize("config", [{"products": "xla"}, {"attention": "xla"}, {"kv_dtype": "float16"}])
def test_it_is_refused_where_the_kernels_do_not_give_it(config):
    with pytest.raises(ValueError, match="batch_invariant.*needs the kernels for CPUs"):
        make_engine(**config)


def test_it_is_refused_for_a_model_with_experts():
    with pytest.raises(ValueError, match="batch_invariant.*not possible for a model with experts"):
        make_engine("experts")
