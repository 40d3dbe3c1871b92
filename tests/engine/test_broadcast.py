"""Weights from another process: a trainer and an engine in two processes of `jax.distributed`."""

import json
import statistics

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

from levanter_infer.engine.broadcast import received_weights
from levanter_infer.engine.config import EngineConfig
from levanter_infer.engine.engine import InferenceEngine
from levanter_infer.engine.params import SamplingParams
from tests.pairs import Processes, free_port
from tests.runtime.key_value_stores import several
from tests.tiny_models import SIZES, tiny_model

SWAPS, SETTLED = 100, 20
KEPT = 8 << 20
"""Bytes by which malloc's and XLA's own memory grows over 80 swaps, at most. One model has 13 MB."""


@pytest.mark.parametrize("weight_dtype", [None, "int8"])
def test_an_engine_samples_from_what_it_received_as_from_a_model_of_this_process(monkeypatch, weight_dtype):
    config = EngineConfig(**SIZES, matmul="xla", weight_dtype=weight_dtype)
    sent, sampling = tiny_model(1), SamplingParams(max_tokens=9, temperature=0.0)
    leaves = iter(jax.tree.leaves(sent))

    def receive(zeros):
        leaf = np.asarray(next(leaves))
        assert (leaf.shape, leaf.dtype) == (zeros.shape, zeros.dtype)
        return leaf

    monkeypatch.setattr(multihost_utils, "broadcast_one_to_all", receive)  # there is no other process
    engine = InferenceEngine(tiny_model(), config=config)
    found = []
    for weights in (received_weights(engine, several(1)[0]), sent):
        engine.swap_weights(weights)
        (completion,) = engine.generate([5, 6, 7], sampling)[0].completions
        found.append((completion.token_ids, completion.logprobs.tobytes()))
    assert next(leaves, None) is None and found[0] == found[1]


@pytest.mark.slow
def test_a_hundred_swaps_from_another_process_neither_compile_nor_grow(tmp_path):
    own = [str(free_port()), str(SWAPS)]
    with Processes(tmp_path, "tests.broadcast_runs", [["0", *own], ["1", *own]]) as processes:
        assert processes.wait(500) == [0, 0], "\n--\n".join(processes.said)
        trainer, engine = (json.loads(path.read_text().splitlines()[-1]) for path in processes.outputs)
    assert engine["wrong"] == 0 and engine["distinct"] == 3 and engine["version"] == SWAPS
    for found in (trainer, engine):
        assert found["compiled"] == found["compiled"][:1] * SWAPS  # the first swap compiles the broadcast of each shape
        # An array of a swap may live until the next one, and the engine keeps a few small uploads for many rounds. The
        # smallest parameter has 1 KiB: kept at each swap, it would be 60 of them.
        assert min(found["live"][-SETTLED:]) - min(found["live"][SETTLED : 2 * SETTLED]) < 1024
        # Medians: from one swap to the next resident memory goes up and down by up to 9 MB, on a level
        grown = statistics.median(found["resident"][-SETTLED:]) - statistics.median(
            found["resident"][SETTLED : 2 * SETTLED]
        )
        assert grown < KEPT
