"""Results of an engine on a mesh of forced CPU devices, as JSON. `python -m tests.mesh_runs CASE…`

A process of its own, because the number of devices is decided before JAX starts. A case is a kind and a mesh, such as
`many_data2_model4`, or `many_one` for one device without a mesh; or samples of parts and a vocabulary, `sample_4_61`.
"""

import dataclasses
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from levanter_infer.axes import DATA, MODEL
from levanter_infer.check import compare_stored, keys_and_values_of
from levanter_infer.checkpoints import load as load_module
from levanter_infer.checkpoints.load import open_model
from levanter_infer.checkpoints.save import save_model
from levanter_infer.checkpoints.source import resolve_source
from levanter_infer.decode.programs import Programs
from levanter_infer.decode.sampling import History, LogitStats, choose, likeliest
from levanter_infer.decode.shapes import SamplingLimits
from levanter_infer.engine.admission import SamplingColumns
from levanter_infer.engine.config import EngineConfig
from levanter_infer.engine.engine import InferenceEngine
from levanter_infer.engine.mesh import MeshConfig, make_mesh
from levanter_infer.engine.params import SamplingParams
from levanter_infer.engine.request import Request
from levanter_infer.kernels.backend import Backend
from levanter_infer.kernels.registry import make_backend
from levanter_infer.kernels.tpu import sampling as tpu_sampling
from levanter_infer.kernels.tpu.backend import TpuBackend
from levanter_infer.kernels.xla.backend import XlaBackend
from levanter_infer.layers.layout import Layout
from levanter_infer.layers.shard_axis import ShardAxis, Vocabulary
from levanter_infer.models import decoder as decoder_module
from levanter_infer.models.uncached import next_token
from levanter_infer.runtime.hosts import Hosts
from tests.decode.sampling_oracle import sampling_table

Place = Mapping[str, Any]
"""Where an engine runs: its arguments `mesh` and `hosts`."""
SIZES: dict[str, Any] = {
    **{"max_seqs": 4, "max_seq_len": 64, "page_size": 4, "max_pages": 60, "max_step_tokens": 4},
    **{"attention": "xla", "matmul": "xla"},
}
LATENTS = {"model_type": "youtu", "num_attention_heads": 6, "num_key_value_heads": 6, "q_lora_rank": 12,
           "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8}  # fmt: skip
EIGHT_HEADS = {"num_attention_heads": 12, "num_key_value_heads": 2, "hidden_size": 48, "head_dim": 8}
"""Groups of 6 query heads that 4 devices share unevenly: 2 copies of each head of keys and values, of 3 query heads."""
WHOLE_NORM = {"model_type": "olmo2", "num_attention_heads": 12, "num_key_value_heads": 2, "hidden_size": 48}
"""Queries and keys are normed over all heads, of all devices."""
EXPERTS = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
           "norm_topk_prob": True}  # fmt: skip

BIASED = {"model_type": "glm4_moe", "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
          "n_group": 4, "topk_group": 2, "first_k_dense_replace": 0, "attention_bias": True}  # fmt: skip
"""The choice of experts has a bias and groups; and there is a shared expert."""
SINKS = {"model_type": "gpt_oss", "num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 5, "head_dim": 8,
         "intermediate_size": 24, "rope_theta": 1e4}  # fmt: skip
"""Maps of experts and the router have biases, and query heads have sinks."""

BIASES = {"model_type": "qwen2", "hidden_size": 64}
"""Queries, keys and values have biases."""

TWO_SIZES = {"model_type": "gemma4_text", "num_hidden_layers": 6, "head_dim": 16, "global_head_dim": 24,
             "num_global_key_value_heads": 1, "attention_k_eq_v": True, "sliding_window": 5, "rope_theta": None,
             "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}  # fmt: skip
"""Layers with heads of two sizes."""


def requests(count: int) -> list[Request]:
    """Prompts that partly begin alike, with parameters of every kind."""
    rng = np.random.default_rng(5)
    common = rng.integers(0, 61, 9).tolist()
    made = []
    for i in range(count):
        own = rng.integers(0, 61, int(rng.integers(1, 12))).tolist()
        sampling = SamplingParams(
            max_tokens=int(rng.integers(1, 14)),
            temperature=float(rng.choice([0.0, 0.7, 1.0, 1.5])),
            top_k=int(rng.choice([0, 0, 5])),
            top_p=float(rng.choice([1.0, 0.9, 0.5])),
            min_p=float(rng.choice([0.0, 0.0, 0.05])),
            frequency_penalty=float(rng.choice([0.0, 0.5])),
            repetition_penalty=float(rng.choice([1.0, 1.2])),
            logit_bias={3: 2.0, 60: 1.0} if i % 5 == 0 else None,
            stop_token_ids=[7, 8] if i % 4 == 0 else [],
            min_tokens=i % 3 and 1,
            n=1 + i % 2,
            logprobs=2,
        )
        made.append(Request(prompt_token_ids=(common if i % 2 else []) + own, sampling=sampling))
    return made


def run(place: Place, count: int, model_changes: Mapping[str, Any] | None = None, score_mod=None) -> dict:
    """Tokens and log probabilities of `requests`, and what the engine says."""
    from tests.tiny_models import tiny_model

    model = without_zeros(tiny_model(**model_changes or {}))
    engine = InferenceEngine(model, config=EngineConfig(**SIZES), score_mod=score_mod, **place)
    return results(engine, count)


def narrow(place: Place, model_changes: Mapping[str, Any], *, is_stored: bool = False) -> dict:
    """As `run`, with weights of int8 and some that are filled up. Args: is_stored: the model is read from a file."""
    from tests.tiny_models import tiny_model

    model = without_zeros(tiny_model(**model_changes))
    with tempfile.TemporaryDirectory() as directory:
        if is_stored:
            save_model(model, Path(directory))
            model = open_model(resolve_source(directory))
        engine = InferenceEngine(model, config=EngineConfig(**SIZES, weight_dtype="int8"), **place)
    dtypes = sorted({str(leaf.dtype) for leaf in jax.tree.leaves(engine.model.layers)})
    return {**results(engine, 8), "weight_dtypes": dtypes}


def filled(place: Place) -> dict:
    """As `sinks`, stored as a TPU's backend does: the inputs of experts filled up on each device, several input axes
    merged."""
    before = XlaBackend.grouped_ins, XlaBackend.merges_ins
    XlaBackend.grouped_ins, XlaBackend.merges_ins = 20, True
    try:
        return run(place, 16, SINKS)
    finally:
        XlaBackend.grouped_ins, XlaBackend.merges_ins = before


def routed(place: Place) -> dict:
    """Tokens, and the experts that they went through."""
    from tests.tiny_models import tiny_model

    engine = InferenceEngine(tiny_model(**EXPERTS), config=EngineConfig(**SIZES), **place)
    sampling = SamplingParams(max_tokens=7, n=2, return_routed_experts=True)
    outputs = engine.generate([dataclasses.replace(request, sampling=sampling) for request in requests(8)])
    completions = [completion for output in outputs for completion in output.completions]
    return {
        "tokens": [completion.token_ids for completion in completions],
        "experts": [completion.routed_experts.tolist() for completion in completions],
    }


def without_zeros(model):
    """The model with random numbers for parameters that are zero in new models, such as biases."""
    rng = np.random.default_rng(9)
    return jax.tree.map(
        lambda leaf: leaf if leaf.any() else jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype), model
    )


def results(engine: InferenceEngine, count: int) -> dict:
    outputs = engine.generate(requests(count))
    completions = [completion for output in outputs for completion in output.completions]
    stats = engine.stats()
    assert all(count == 1 for count in stats["programs"].values()), stats["programs"]
    return {
        "errors": [output.error for output in outputs if output.error],
        "tokens": [completion.token_ids for completion in completions],
        "logprobs": [completion.logprobs.tolist() for completion in completions],
        "top": [[list(top) for top in completion.top_logprobs or []] for completion in completions],
        "reasons": [completion.finish_reason for completion in completions],
        "free": [stats["pages_free"], stats["pages_total"]],
        "idle_share": stats.get("idle_share"),
        **({} if engine.backend.spans_hosts else {"live_bytes": engine.memory()["live_bytes"]}),
        "hits": stats["prefix_hits"],
        "shards": len(engine._scheduler._ranks),
        "pool": sorted({str(shard.data.shape) for shard in engine.state.cache.pools[0].pages.array.addressable_shards}),
        "weights": [
            str(linear.weight.array.addressable_shards[0].data.shape)
            for linear in (engine.model.layers.attention.o_proj, engine.model.layers.mlp.gate_proj)
        ],
    }


def studied(place: Place) -> dict:
    """Scores of prompts, searches with beams, and samples that go on from one another, all on one engine."""
    from tests.tiny_models import tiny_model

    sizes = {**SIZES, "max_seqs": 8, "max_step_tokens": 8, "max_prompt_logprobs": 2}
    engine = InferenceEngine(tiny_model(), config=EngineConfig(**sizes), **place)
    before = engine.generate(requests(6))  # with programs that know nothing of all this yet
    plain = [list(request.prompt_token_ids or []) for request in requests(24)]
    kinds = [
        SamplingParams(max_tokens=6, temperature=0.0, prompt_logprobs=2),
        SamplingParams(max_tokens=9, temperature=0.0, num_beams=3, n=2),
        SamplingParams(max_tokens=5, temperature=0.8, n=2),
    ]
    mixed = [Request(prompt_token_ids=ids, sampling=kinds[i % 3]) for i, ids in enumerate(plain)]
    outputs = engine.generate(mixed)
    completions = [completion for output in (*before, *outputs) for completion in output.completions]
    return {
        "errors": [output.error for output in (*before, *outputs) if output.error],
        "tokens": [completion.token_ids for completion in completions],
        "beams": [c.score for output in outputs[1::3] for c in output.completions],
        "prompts": [output.prompt_logprobs.tolist() for output in outputs[::3]],
        "prompt_tops": [[list(top) for top in output.prompt_top_logprobs] for output in outputs[::3]],
        "scores": [scores.tolist() for scores in engine.score([ids + [1] for ids in plain])],
        **forked(engine),
        "free": [engine.stats()["pages_free"], engine.stats()["pages_total"]],
        "programs": engine.stats()["programs"],
    }


def forked(engine: InferenceEngine) -> dict:
    """Groups whose samples all go on from the first one's third token, or in which a further sample does."""
    rng = np.random.default_rng(3)
    groups = [
        engine.submit(
            Request(
                prompt_token_ids=rng.integers(0, 61, 7 + i).tolist(),
                sampling=SamplingParams(max_tokens=12, n=1 + i % 2, seed=i),
            )
        )
        for i in range(4)
    ]
    waiting = list(groups)
    while not all(group.is_done for group in groups):
        engine.step_round(max_steps=1)
        engine.flush()
        for group in [group for group in waiting if len(group.sequences[0].token_ids) == 3]:
            waiting.remove(group)
            if len(group.sequences) == 1:
                engine.fork(group, 0)
            else:
                engine.resample(group, [0, 0])
    engine.drain()
    assert not waiting
    return {
        "forked": [[sequence.token_ids for sequence in group.sequences] for group in groups],
        "fork_shards": sorted({group.rank or 0 for group in groups}),
    }


def levelled(place: Place) -> dict:
    """Mixed lengths, known and not: every other request may generate much more than it does."""
    from tests.tiny_models import tiny_model

    sizes = {**SIZES, "max_seqs": 8, "max_step_tokens": 16, "max_pages": 200, "max_round_steps": 16}
    engine = InferenceEngine(tiny_model(), config=EngineConfig(**sizes), **place)
    rng = np.random.default_rng(8)
    made = []
    for i in range(3000):
        sampling = SamplingParams(
            max_tokens=int(rng.integers(2, 30)),
            seed=i,
            stop_token_ids=rng.integers(0, 61, 3).tolist() if i % 2 else [],
        )
        made.append(Request(prompt_token_ids=rng.integers(0, 61, int(rng.integers(1, 30))).tolist(), sampling=sampling))
    outputs = engine.generate(made)
    assert not any(output.error for output in outputs)
    stats = engine.stats()
    return {"idle_share": stats["idle_share"], "free": [stats["pages_free"], stats["pages_total"]]}


def invariant(place: Place, *, is_live: bool = False) -> dict:
    """Tokens and the bits of log probabilities with the C++ kernels. `is_live`: of a model sharded over `data`."""
    from tests.tiny_models import tiny_model

    sizes = {**SIZES, "attention": "auto", "matmul": "auto", "numerics": "batch_invariant"}
    model = tiny_model()
    if is_live:
        mesh = make_mesh(place["mesh"])
        model = jax.tree.map(lambda leaf: spread_over(mesh, leaf), model)
        assert not all(leaf.is_fully_replicated for leaf in jax.tree.leaves(model))
    engine = InferenceEngine(model, config=EngineConfig(**sizes), **place)
    assert engine.backend.matmul == engine.backend.attention == "cpu"
    completions = [completion for output in engine.generate(requests(100)) for completion in output.completions]
    return {
        "tokens": [completion.token_ids for completion in completions],
        "bits": [completion.logprobs.view(np.int32).tolist() for completion in completions],
        "shards": engine.backend.num_ranks,
        "given_up": given_up(engine, model) if is_live else [],
    }


def blocks(place: Place) -> dict:
    """Requests whose bits are not those of the request alone on the same mesh, as on a TPU: in blocks, with sums over
    devices in one order."""
    from tests.engine.comparisons import Blocks, expected, make_engine, random_requests, serve
    from tests.tiny_models import tiny_model

    kept = {"model": tiny_model(), "blocks": Blocks(), "mesh": place["mesh"]}
    alone = make_engine(**kept, max_seqs=4, page_size=4, max_step_tokens=64, prefix_cache=False)
    engine = make_engine(**kept, max_seqs=6, page_size=4, max_step_tokens=24, max_pages=30)
    cases = random_requests(12, seed=5)
    plain = [expected(alone, case, None) for case in cases]
    found = [each for each, _ in serve(engine, cases)]
    return {"differing": sum(a != b for a, b in zip(plain, found, strict=True)), "compared": len(cases)}


def given_up(engine: InferenceEngine, model) -> list[bool]:
    """Whether projections are deleted of a model that replaces the engine's with `donate`."""
    given = jax.tree.map(lambda leaf: leaf + 0, model)
    engine.swap_weights(given, donate=True)
    mlp, attention = given.layers.mlp, given.layers.attention
    return [part.weight.array.is_deleted() for part in (mlp.gate_proj, mlp.down_proj, attention.q_proj)]


def stored(place: Place) -> dict:
    """Results with a checkpoint read into its parts, and how often its weights are there as the pool is made."""
    from tests.tiny_models import tiny_model

    with tempfile.TemporaryDirectory() as directory:
        save_model(tiny_model(vocab_size=20000, hidden_size=64), Path(directory))
        tiny_model.cache_clear()
        model = open_model(resolve_source(directory))
        before, counts, init = live_bytes(), [], Programs.__init__

        def noted(programs: Programs, *arguments, **named) -> None:
            init(programs, *arguments, **named)
            own = programs.init
            programs.init = lambda: counts.append(live_bytes() - before) or own()

        Programs.__init__ = noted
        engine = InferenceEngine(model, config=EngineConfig(**SIZES), **place)
        Programs.__init__ = init
    weights = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(model.types))
    return {**results(engine, 16), "copies": [count / weights for count in counts]}


def looked(place: Place, model_changes: Mapping[str, Any]) -> dict:
    """What `check` says of the keys and values that an engine has stored, beside those of its own model and those of
    another. The request is the second, so that a second rank serves it."""
    from tests.tiny_models import tiny_model

    model = tiny_model(**model_changes)
    engine = InferenceEngine(model, config=EngineConfig(**SIZES, window_cache=False), **place)
    first, second = requests(2)
    engine.submit(first)
    found = keys_and_values_of(engine, second, 0, stored=len(second.prompt_token_ids or ()) + 1)
    other = tiny_model(1, **model_changes)
    return {name: compare_stored(m, found, 4, 64) for name, m in (("own", model), ("other", other))}


def live_bytes() -> int:
    """Bytes of all arrays of this process's devices, each buffer once."""
    shards = [shard.data for array in jax.live_arrays() for shard in array.addressable_shards]
    return sum({shard.unsafe_buffer_pointer(): shard.nbytes for shard in shards}.values())


def spread_over(mesh, leaf: jax.Array) -> jax.Array:
    """A part for each device along `data` where the first axis can be divided."""
    whole, parts = np.asarray(leaf), mesh.shape[DATA]
    sharding = NamedSharding(mesh, PartitionSpec(DATA if whole.ndim and whole.shape[0] % parts == 0 else None))
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


@dataclasses.dataclass(frozen=True)
class Interpreted(TpuBackend):
    """A TPU's kernels for sampling, run by Pallas' interpreter."""

    def logit_stats(self, logits, num_rows):
        return tpu_sampling.logit_stats(logits, num_rows, interpret=True)

    def sampling_kernels(self, logits):
        return tpu_sampling.TpuSampling(True)


def sampled(parts: int, vocab_size: int, backend: Backend | None = None) -> dict:
    """Samples of many rows by one device, in XLA, and by `parts` with a part of the logits each.

    Args:
        backend: whose kernels the parts have, if it has some for a part of the logits; None: they have none.
    """
    rows, rng = 64, np.random.default_rng(vocab_size)
    limits = SamplingLimits(vocab_size, max_logprobs=3, max_logit_bias=2, max_stop_sequences=2, max_stop_tokens=2)
    columns = SamplingColumns(rows, limits)
    for row in range(rows):
        params = SamplingParams(
            temperature=float(rng.choice([0.0, 0.5, 1.0, 2.0])),
            top_k=int(rng.choice([0, 1, 3, vocab_size // 2, vocab_size - 1])),
            top_p=float(rng.choice([1.0, 0.95, 0.5, 0.999])),
            min_p=float(rng.choice([0.0, 0.1])),
            presence_penalty=float(rng.choice([0.0, 0.7])),
            repetition_penalty=float(rng.choice([1.0, 1.5])),
            logit_bias={int(rng.integers(vocab_size)): 3.0} if row % 3 == 0 else None,
            stop_token_ids=[int(rng.integers(vocab_size))],
            min_tokens=row % 2 and 5,
            logprobs=3,
        )
        columns.set(row, params, seed=row, sample_index=row % 3, eos_token_ids=())
    table = sampling_table(columns)
    logits = rng.normal(0, 3, (rows, vocab_size)).astype(np.float32)
    logits[1, :] = logits[1, 0]  # all alike
    logits[2, ::2] = -np.inf
    logits[3, vocab_size // 2] = np.nan
    logits[4, -1] = np.inf
    logits[5] = -np.inf
    history = History(
        positions=jnp.full(rows, 9, jnp.int32),
        tokens=jnp.asarray(rng.integers(0, vocab_size, (rows, 8)), jnp.int32),
        slot_ids=jnp.arange(rows, dtype=jnp.int32),
        prompt_lens=jnp.full(rows, 4, jnp.int32),
        seq_lens=jnp.full(rows, 8, jnp.int32),
    )

    def both(logits, vocab, backend=None):
        stats = LogitStats.of(logits, vocab)
        if backend is not None:
            stats = LogitStats.of_kernel(backend, logits, jnp.int32(rows), vocab)
        sampled = choose(logits, table, history, max_top=3, stats=stats, vocab=vocab, backend=backend).sampled()
        best, _ = likeliest(logits, stats, 1, vocab)
        return sampled, jnp.where(sampled.finite[:, None], best, 0)  # of rows that are not finite, anything

    vocab = Vocabulary(vocab_size, ShardAxis(MODEL, parts))
    padded = np.pad(logits, ((0, 0), (0, vocab.padded_size - vocab_size)), constant_values=9)
    mesh = Mesh(np.asarray(jax.devices()[:parts]), (MODEL,))
    sharded = jax.shard_map(
        lambda part: both(vocab.without_padding(part), vocab, backend),
        mesh=mesh,
        in_specs=PartitionSpec(None, MODEL),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    results = [jax.jit(lambda a: both(a, None))(jnp.asarray(logits)), jax.jit(sharded)(jnp.asarray(padded))]
    whole, parted = [[np.asarray(leaf) for leaf in jax.tree.leaves(result)] for result in results]
    return {
        "equal_ids": [bool((a == b).all()) for a, b in zip(whole, parted, strict=True) if a.dtype != np.float32],
        "largest_difference": max(
            float(np.abs(a - b)[np.isfinite(a)].max())
            for a, b in zip(whole, parted, strict=True)
            if a.dtype == np.float32
        ),
        "finite_rows": int(whole[5].sum()) if whole[5].dtype == bool else None,
        "distinct_tokens": len(set(whole[0].tolist())),
    }


def swapped(place: Place) -> dict:
    """Tokens under weights that change while they are sampled, and how many are not the likeliest of their version."""
    from tests.tiny_models import tiny_model

    length, oracle = 64, jax.jit(next_token)
    head = jnp.roll(tiny_model(1).lm_head.weight.array, 7, axis=0)
    other_head = eqx.tree_at(lambda m: m.lm_head.weight.array, tiny_model(1), head)  # the same keys and values
    models = [tiny_model(0), tiny_model(1), other_head, tiny_model(2), tiny_model(0)]
    config = EngineConfig(
        max_seqs=4, max_seq_len=length, page_size=4, max_pages=60, max_step_tokens=4, attention="xla", matmul="xla"
    )
    engine = InferenceEngine(models[0], config=config, **place)
    before = [str(leaf.sharding) for leaf in jax.tree.leaves((engine.model, engine.state.cache))]
    wrong, versions, tokens = 0, [], 0
    for version, policy in enumerate(("drain", "keep_kv", "recompute", "drain"), 1):
        prompts = ([version, *range(10)], [version, *range(10), 5], [3, version], [60 - version] * 9, [version] * 4)
        params = SamplingParams(max_tokens=12, temperature=0.0)
        groups = [engine.submit(Request(prompt_token_ids=ids, sampling=params)) for ids in prompts]
        for _ in range(8):
            engine.step_round(max_steps=1)
        engine.swap_weights(models[version], policy=policy)
        while not all(group.is_done for group in groups):
            engine.step_round()
        engine.drain()
        for sequence in (sequence for group in groups for sequence in group.sequences):
            ids = list(sequence.request.prompt_token_ids)
            for token, number in zip(sequence.token_ids, sequence.versions, strict=True):
                padded = jnp.asarray(ids + [0] * (length - len(ids)), jnp.int32)
                wrong += token != int(oracle(models[number], padded, jnp.int32(len(ids))))
                ids.append(token)
            versions.append(sequence.versions)
            tokens += len(sequence.token_ids)
    stats = engine.stats()
    assert all(count == 1 for count in stats["programs"].values()), stats["programs"]
    return {
        "wrong": wrong,
        "tokens": tokens,
        "versions": sorted({number for numbers in versions for number in numbers}),
        "mixed": sum(len(set(numbers)) > 1 for numbers in versions),
        "moved": before != [str(leaf.sharding) for leaf in jax.tree.leaves((engine.model, engine.state.cache))],
        "free": [stats["pages_free"], stats["pages_total"]],
    }


def loaded(place: Place, model_changes: Mapping[str, Any]) -> dict:
    """Whether a checkpoint read into its parts is what the whole one would be, and what was read for it."""
    from tests.tiny_models import tiny_model

    mesh = make_mesh(place["mesh"])
    assert isinstance(mesh, Mesh)
    read: list[str] = []
    read_tensors = load_module.read_tensors

    def noted(pieces) -> None:
        read.extend(tensor.name for tensor, _ in pieces)
        read_tensors(pieces)

    with tempfile.TemporaryDirectory() as directory:
        model = tiny_model(**model_changes)
        save_model(model, Path(directory))
        stored = open_model(resolve_source(directory))
        layout = Layout.of(mesh, stored.types.config)
        load_module.read_tensors = noted
        found = stored.read(layout)
        load_module.read_tensors = read_tensors
    expected = layout.fit_model(model)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    both = [jax.tree.leaves(each) for each in (found, expected)]
    return {
        "same_places": all(a.sharding == b.sharding and a.shape == b.shape for a, b in zip(*both, strict=True)),
        "same_bits": all(
            x.index == y.index and np.array_equal(np.asarray(x.data), np.asarray(y.data))
            for a, b in zip(*both, strict=True)
            for x, y in zip(a.addressable_shards, b.addressable_shards, strict=True)
        ),
        "twice": len(read) - len(set(read)),
        "experts": sorted({int(name.split("experts.")[1].split(".")[0]) for name in read if "experts." in name}),
    }


def by_head(score, q_pos, kv_pos, head):
    """Every head looks at other distances."""
    return score - 0.1 * (head + 1).astype(jnp.float32) * (q_pos - kv_pos).astype(jnp.float32)


def on_ring(kind: str) -> Callable[[Place], dict]:
    """Another kind, with the columns of the residual stream on a ring of devices, and the devices of the rings."""

    def compute(place: Place) -> dict:
        before, seen = decoder_module.ring_of, []

        def noted(*arguments):
            found = before(*arguments)
            seen.append(found.parts)
            return found

        XlaBackend.ring_bytes, decoder_module.ring_of = 1, noted
        try:
            return {**KINDS[kind](place), "ring_parts": sorted(set(seen))}
        finally:
            XlaBackend.ring_bytes, decoder_module.ring_of = None, before

    return compute


KINDS: dict[str, Callable[[Place], dict]] = {
    "some": lambda place: run(place, 16),
    "many": lambda place: run(place, 200),
    "heads": lambda place: run(place, 8, EIGHT_HEADS, by_head),
    "wholenorm": lambda place: run(place, 8, WHOLE_NORM),
    "experts": lambda place: run(place, 16, EXPERTS),
    "routed": routed,
    "int8": lambda place: narrow(place, EIGHT_HEADS),
    "int8loaded": lambda place: narrow(place, EIGHT_HEADS, is_stored=True),
    "int8tied": lambda place: narrow(place, {**EIGHT_HEADS, "tie_word_embeddings": True}, is_stored=True),
    "int8experts": lambda place: narrow(place, EXPERTS),
    "latents": lambda place: run(place, 8, LATENTS, by_head),
    "biased": lambda place: run(place, 16, BIASED),
    "sinks": lambda place: run(place, 16, SINKS),
    "filled": filled,
    "loadedsinks": lambda place: loaded(place, SINKS),
    "loaded": lambda place: loaded(place, EIGHT_HEADS),
    "loadedlatents": lambda place: loaded(place, LATENTS),
    "loadedexperts": lambda place: loaded(place, EXPERTS),
    "tied": lambda place: run(place, 8, {"tie_word_embeddings": True, "dtype": "bfloat16"}),
    "biases": lambda place: run(place, 8, BIASES),
    "swapped": swapped,
    "studied": studied,
    "blocks": blocks,
    "levelled": levelled,
    "invariant": invariant,
    "stored": stored,
    "live": lambda place: invariant(place, is_live=True),
    "looked": lambda place: looked(place, EIGHT_HEADS),
    "lookedlatents": lambda place: looked(place, LATENTS),
    "lookedtwosizes": lambda place: looked(place, TWO_SIZES),
}


def slept(place: Place) -> dict:
    """Tokens of an engine that sleeps while they are sampled, and then gets weights that are on other devices."""
    from tests.tiny_models import tiny_model, uncached_greedy

    engine = InferenceEngine(tiny_model(), config=EngineConfig(**SIZES), **place)
    engine.warmup(weight_updates=True)
    prompts = ([1, *range(10)], [2, *range(10), 5], [3, 4], [9] * 9, [7] * 4)
    asked = [Request(prompt_token_ids=ids, sampling=SamplingParams(max_tokens=12, seed=4)) for ids in prompts]
    expected = [output.completions[0].token_ids for output in engine.generate(asked)]
    shardings = [str(leaf.sharding) for leaf in jax.tree.leaves((engine.model, engine.state))]
    groups = [engine.submit(each) for each in asked]
    for _ in range(8):
        engine.step_round(max_steps=1)
    pool = engine.state.cache.pools[0]
    engine.sleep()
    freed = all(leaf.is_deleted() for leaf in jax.tree.leaves(pool))
    engine.wake()
    while not all(group.is_done for group in groups):
        engine.step_round()
    engine.drain()
    mesh = Mesh(np.array(jax.local_devices()[-2:]), ("trainer",))
    spec = NamedSharding(mesh, PartitionSpec())
    trained = jax.device_put(tiny_model(1), spec)
    halves = NamedSharding(mesh, PartitionSpec(None, "trainer"))
    trained = jax.tree.map(
        lambda leaf: jax.device_put(leaf, halves) if leaf.ndim > 1 and leaf.shape[1] % 2 == 0 else leaf, trained
    )
    engine.swap_weights(trained if place["hosts"] is None else tiny_model(1))
    greedy = Request(prompt_token_ids=[1, 2, 3], sampling=SamplingParams(max_tokens=6, temperature=0.0))
    return {
        "expected": expected,
        "tokens": [group.sequences[0].token_ids for group in groups],
        "swapped": engine.generate(greedy)[0].completions[0].token_ids,
        "swapped_expected": uncached_greedy(tiny_model(1), [1, 2, 3], 6),
        "freed": freed,
        "moved": shardings != [str(leaf.sharding) for leaf in jax.tree.leaves((engine.model, engine.state))],
        "programs": engine.stats()["programs"],
        "free": [engine.stats()["pages_free"], engine.stats()["pages_total"]],
    }


SAMPLERS: dict[str, Callable[[], Backend | None]] = {
    "sample": lambda: None,
    "kernels": Interpreted,
    "rowkernels": lambda: make_backend("gpu_interpret"),
}
KINDS["slept"] = slept
KINDS |= {f"ring{kind}": on_ring(kind) for kind in ("some", "heads", "tied", "biases", "experts", "int8")}


def case(name: str, hosts: Hosts | None = None) -> dict:
    """Args: hosts: the processes that have the devices; None: this one alone."""
    kind, _, where = name.partition("_")
    if kind in SAMPLERS:
        return sampled(*map(int, where.split("_")), SAMPLERS[kind]())
    return KINDS[kind]({"mesh": mesh_of(where), "hosts": hosts})


def mesh_of(name: str) -> MeshConfig | None:
    """`data2_model4`; `one` is none."""
    sizes = {axis: int(size) for axis, size in re.findall(r"([a-z]+)(\d+)", name)}
    return MeshConfig(**sizes) if sizes else None


def main(names: list[str]) -> None:
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=16"
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_disable_most_optimizations", True)
    print(json.dumps({name: case(name) for name in names}))


if __name__ == "__main__":
    main(sys.argv[1:])
