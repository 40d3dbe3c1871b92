"""Sizes of compiled forwards: options that a block leaves out cost nothing, and many layers compile like few."""

import collections

import jax
import pytest

from levanter_infer.kernels.backend import Backend
from levanter_infer.kernels.cpu import bindings as cpu
from levanter_infer.kernels.cpu.backend import CpuBackend
from levanter_infer.kernels.xla.backend import XLA
from levanter_infer.models.blocks import Block
from levanter_infer.plan.compiled import compile_programs
from levanter_infer.plan.spec import EngineSpec
from tests.jaxprs import LOOPS, body, equations
from tests.models.test_blocks import BLOCK, block, model_of
from tests.models.test_decoder import PAGES, PLAIN, SEQUENCES, batch_of, empty_cache

MOVES = {
    "reshape", "transpose", "squeeze", "slice", "dynamic_slice", "broadcast_in_dim", "convert_element_type",
    "concatenate", "iota", "jit",
}  # fmt: skip
INDEXING = {"add", "sub", "and", "min", "max", "lt", "shift_right_arithmetic"}
"""Integer arithmetic about layers and rows."""


def loop_bodies(blocks: list[Block], backend: Backend) -> list[collections.Counter]:
    """Operations in each loop over layers of the paged forward, by name."""
    model = model_of(*blocks).prepare(backend)
    traced = jax.make_jaxpr(lambda batch, cache: model.hidden(batch, cache, PLAIN))(
        batch_of(SEQUENCES, [0, 0], PAGES), empty_cache(model, backend)
    )
    loops = [eqn for eqn in equations(traced.jaxpr, into_loops=False) if eqn.primitive.name in LOOPS]
    return [collections.Counter(eqn.primitive.name for eqn in equations(body(loop))) for loop in loops]


@pytest.mark.skipif(not cpu.available(), reason="the C++ kernels were not built")
def test_a_layer_of_llama_is_five_kernels_and_no_arithmetic():
    (layer,) = loop_bodies([BLOCK] * 48, CpuBackend())
    assert {name: count for name, count in layer.items() if name not in MOVES | INDEXING} == {"ffi_call": 5}


def test_a_layer_of_llama_has_no_operation_of_another_family():
    (layer,) = loop_bodies([BLOCK] * 48, XLA)
    # q, k, v, o, gate, up, down; scores and their sum with values, of the path for few tokens and of that for many
    assert layer["dot_general"] == 7 + 2 * 2
    assert (layer["rsqrt"], layer["logistic"], layer["exp"]) == (2, 1, 2 * 2)
    assert not {"tanh", "erf", "pow", "log", "clamp", "top_k", "sort"} & set(layer)
    assert layer.total() <= 746


def test_a_loop_has_one_body_per_layer_of_its_period():
    (one,) = loop_bodies([BLOCK] * 48, XLA)
    (four,) = loop_bodies([*[block(window=3)] * 3, block()] * 12, XLA)
    assert four["rsqrt"] == 4 * one["rsqrt"] and four["logistic"] == 4


LAYERS_48 = {
    **{"num_hidden_layers": 48, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 512, "head_dim": 64},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    **{"rope_theta": 10000.0, "tie_word_embeddings": False},
}
WITH_PERIOD_4 = {
    "a layer without a rope": {"model_type": "smollm3", "no_rope_layer_interval": 4},
    "windows": {
        **{"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 48},
        "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 12,
    },
}


@pytest.mark.slow
def test_a_round_of_48_layers_with_a_period_of_four_compiles_in_twice_the_time_of_llama():
    def seconds(**keys) -> float:
        engine = {"max_seqs": 8, "max_seq_len": 512, "max_pages": 64, "max_step_tokens": 64}
        round_, *_ = compile_programs(EngineSpec("cpu", LAYERS_48 | keys, "bfloat16", engine, {}), timeout_s=300)
        assert round_.name == "round" and round_.error is None
        return round_.trace_s + round_.compile_s

    llama = seconds(model_type="llama")
    ratios = {name: seconds(**keys) / llama for name, keys in WITH_PERIOD_4.items()}
    assert max(ratios.values()) <= 2, ratios
