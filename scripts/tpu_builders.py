"""Programs to compile for a TPU and look at, for scripts/tpu_schedule.py and tools of its kind.

`sampling` is each of the kernels that sample: rows=, vocab=, parts=devices that share the vocabulary.
`write` stores the keys and values of new tokens: tokens=, and heads, page, kv_dtype and pool_pages as below.
`experts` is one matrix of a layer of experts for all tokens of a step: tokens=, num_experts=, chosen=experts of a
token, ins= and outs= (defaults: the gate of Qwen3-30B-A3B at 64 tokens), impl=backend. `decode`, `prefill` and `mixed`
are one call of the attention entry; `program` is the engine's own round, without sinks and attention_chunk. These take

    heads=(query heads, kv heads, head size) of one chip, page=tokens of a page, seqs=sequences, context=tokens of each,
    tokens=query tokens of the step, kv_dtype=, window=, sinks=whether the heads have attention sinks,
    attention_chunk=positions of a chunk of chunked attention, soft_cap=bound of scores, value_dim=numbers of a latent
    that are its value, index_dim=numbers of an index key, chosen=whether an indexer has chosen the keys,
    pool_pages=pages of the pool (default: as many as the page tables can name, at most 2 GiB worth; the tables keep
    their full shape), impl=attention implementation, invariant=whether as with `numerics: batch_invariant`, and
    tiles=`kernels.tpu.tiling.Tiles`, or what differs from those of the table, such as dict(decode=dict(pages=8),
    prefill=dict(queries=128)) (default: those of the table).

A pool has LAYERS layers, of which a call reads one.
"""

import dataclasses
import functools
import math
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "src")]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from levanter_infer.decode.sampling_draw import level_widths, num_words  # noqa: E402
from levanter_infer.engine.backend_choice import BackendChoice  # noqa: E402
from levanter_infer.engine.config import EngineConfig  # noqa: E402
from levanter_infer.engine.mesh import make_mesh  # noqa: E402
from levanter_infer.engine.runner import programs_for, round_types, shapes_for  # noqa: E402
from levanter_infer.kernels.call import AttentionCall, GroupedCall, PoolShape, Rotation  # noqa: E402
from levanter_infer.kernels.registry import make_backend  # noqa: E402
from levanter_infer.kernels.rules import ScoreRules  # noqa: E402
from levanter_infer.kernels.tpu import sampling as tpu_sampling  # noqa: E402
from levanter_infer.kernels.tpu.kv_write import WritePlan, rotate_and_write, write_kv  # noqa: E402
from levanter_infer.kernels.tpu.pool import TpuPool  # noqa: E402
from levanter_infer.kernels.tpu.tiling import Tiles, TileShape, choose, generation  # noqa: E402
from levanter_infer.layers.layout import Layout  # noqa: E402
from levanter_infer.layers.shard_axis import ShardAxis, Vocabulary  # noqa: E402
from levanter_infer.models.decoder import DecoderModel  # noqa: E402
from levanter_infer.models.registry import family_for  # noqa: E402

LLAMA = {
    "model_type": "llama",
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
MODELS = {
    "8b": dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32),
    "70b": dict(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64),
    "30b-a3b": dict(
        model_type="qwen3_moe",
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
    ),
}
LAYERS = 2
MIN_POOL_BYTES = 2**28
"""More than the VMEM of any generation: XLA would put a smaller pool there, and a copy from it is a loop."""
MAX_POOL_BYTES = 2**31


def decode(mesh, *, heads=(32, 8, 128), page=64, seqs=64, context=8192, tokens=None, **options):
    """Every sequence has one query."""
    return _call(heads=heads, page=page, seqs=seqs, context=context, tokens=tokens or seqs, **options)


def prefill(mesh, *, heads=(32, 8, 128), page=64, seqs=1, context=8192, tokens=256, **options):
    """Few sequences have many queries each."""
    return _call(heads=heads, page=page, seqs=seqs, context=context, tokens=tokens, **options)


def mixed(mesh, *, heads=(32, 8, 128), page=64, seqs=64, context=8192, tokens=512, **options):
    """Many sequences, some with one query and some with many."""
    return _call(heads=heads, page=page, seqs=seqs, context=context, tokens=tokens, **options)


def write(mesh, *, heads=(32, 8, 128), page=64, tokens=256, kv_dtype="bfloat16", pool_pages=16384, rotated=False):
    """New keys and values of one layer; rotated: with the rotation of queries and keys."""
    dtype, pool = jnp.dtype(kv_dtype), TpuPool(*heads[1:], scaled=kv_dtype == "int8")

    def call(pages, layer, dests, keys, values):
        return write_kv(pages, layer, pool.pack(keys, values).astype(dtype), WritePlan.of(pages, dests))

    def rotating_call(pages, layer, dests, keys, values, queries, cos, sin):
        # Tokens come with their heads side by side, as matmuls give them.
        sides = tuple(side.reshape(tokens, -1, heads[2]) for side in (queries, keys, values))
        return rotate_and_write(pages, layer, sides, Rotation(cos, sin), WritePlan.of(pages, dests))

    shape = pool.shape(num_layers=LAYERS, num_pages=pool_pages, page_size=page)
    i32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    first = jax.ShapeDtypeStruct(shape, dtype), i32(()), i32((tokens,))
    if not rotated:
        sides = [jax.ShapeDtypeStruct((tokens, *heads[1:]), jnp.bfloat16)] * 2
        return call, (*first, *sides), {"donate_argnums": (0,)}
    sides = [jax.ShapeDtypeStruct((tokens, count * heads[2]), jnp.bfloat16) for count in (heads[1], heads[1], heads[0])]
    angles = [jax.ShapeDtypeStruct((tokens, heads[2] // 2), jnp.float32)] * 2
    return rotating_call, (*first, *sides, *angles), {"donate_argnums": (0,)}


def experts(mesh, *, tokens=64, num_experts=128, chosen=8, ins=2048, outs=768, dtype="bfloat16", impl="tpu"):
    """A grouped matmul out of a stack of LAYERS layers."""

    def call(x, weight, counts, rows, layer):
        arguments = GroupedCall(x, counts, [weight], [outs], rows=rows, layer=layer)
        return make_backend(impl, "tpu").grouped_linear(arguments)

    i32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    return call, (
        jax.ShapeDtypeStruct((tokens, ins), dtype),
        jax.ShapeDtypeStruct((LAYERS, num_experts, outs, ins), dtype),
        i32((num_experts,)),
        i32((tokens * chosen,)),
        i32(()),
    )


def sampling(mesh, *, rows=256, vocab=128256, parts=4):
    """Each of the kernels that sample from a device's part of the logits."""
    numbers = Vocabulary(vocab, ShardAxis("model", parts))
    own, widths = numbers.part_size, level_widths(vocab)

    def call(logits, terms, rules, clocks, pivots, num_rows):
        values, bound = tpu_sampling.candidates(logits, parts, num_rows)
        together = jnp.concatenate([values] * parts, axis=1)  # instead of what other devices send
        upper, lower = tpu_sampling.weight_sums(logits, terms, widths, num_rows)
        total = tpu_sampling.total_weights(logits, terms, num_rows)
        used = jnp.arange(rows) < num_rows
        return (
            tpu_sampling.logit_stats(logits, num_rows),
            tpu_sampling.thresholds(together, rules, num_rows),
            tpu_sampling.reached(logits, terms, pivots, used),
            tpu_sampling.descend(upper, lower, clocks, widths[:-1], num_rows),
            (bound, total),
        )

    f32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    i32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    return call, (
        f32((rows, own)),
        f32((rows, 4)),
        f32((rows, 7)),
        f32((rows, num_words(vocab))),
        i32((rows, 15)),
        i32(()),
    )


def _call(
    *,
    heads,
    page,
    seqs,
    context,
    tokens,
    kv_dtype="bfloat16",
    window=None,
    sinks=False,
    attention_chunk=None,
    soft_cap=None,
    value_dim=None,
    index_dim=0,
    chosen=False,
    pool_pages=None,
    impl="tpu",
    tiles=None,
    invariant=False,
):
    num_q_heads, num_kv_heads, head_dim = heads
    kv_dtype = jnp.dtype(kv_dtype)
    seq_pages = -(-context // page)
    sizes = PoolShape(LAYERS, 1, page, num_kv_heads, head_dim + index_dim, kv_dtype, value_dim is not None, index_dim)

    def pool_shape(num_pages: int) -> tuple[int, ...]:
        return make_backend(impl).pool_shape(dataclasses.replace(sizes, num_pages=num_pages))

    page_bytes = math.prod(pool_shape(1)) * kv_dtype.itemsize
    pool_pages = pool_pages or max(
        -(-MIN_POOL_BYTES // page_bytes), min(seqs * seq_pages, MAX_POOL_BYTES // page_bytes)
    )

    def call(*arrays):
        *arrays, choice = arrays if chosen else (*arrays, None)
        own = dict(sliding_window=window, attention_chunk=attention_chunk, soft_cap=soft_cap)
        latent = value_dim, index_dim, chosen
        options = dict(tiles=_tiles(tiles, heads, page, kv_dtype, *latent), rows_apart=invariant)
        backend, rules = make_backend(impl).configured(**options), ScoreRules(scale=head_dim**-0.5, **own)
        if value_dim is None:  # heads that are rotated hold the scale
            _, rules = backend.scale_in_queries(rules)
        latents = dict(value_dim=value_dim, index_dim=index_dim, chosen=choice)
        return backend.attend(AttentionCall(*arrays[:7], rules, kv_dtype, num_kv_heads, page, *arrays[7:], **latents))

    i32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    arguments = (
        jax.ShapeDtypeStruct((tokens, num_q_heads, head_dim), jnp.bfloat16),
        jax.ShapeDtypeStruct(pool_shape(pool_pages), kv_dtype),
        i32(()),
        i32((seqs, seq_pages)),
        i32((seqs,)),
        i32((seqs + 1,)),
        i32(()),
    )
    if sinks:
        arguments = (*arguments, jax.ShapeDtypeStruct((num_q_heads,), jnp.float32))
    if chosen:
        arguments = (*arguments, make_backend(impl).choice_type(tokens, seq_pages, page, 2048, kv_dtype))
    return call, arguments


def _tiles(changes, heads, page: int, kv_dtype, *latent) -> Tiles | None:
    """Those of the table with `changes`, a mapping; what is given, if it is none. While tracing: they depend on the
    device."""
    if not isinstance(changes, dict):
        return changes
    num_q_heads, num_kv_heads, head_dim = heads
    sizes = num_kv_heads, head_dim, num_q_heads // num_kv_heads, page, kv_dtype.name
    shape = TileShape(generation(), *sizes, *latent)
    tiles = choose(shape)
    return dataclasses.replace(
        tiles, **{path: dataclasses.replace(getattr(tiles, path), **sizes) for path, sizes in changes.items()}
    )


def program(
    mesh,
    *,
    model="8b",
    layers=None,
    heads=None,
    page=64,
    seqs=64,
    context=8192,
    tokens=512,
    kv_dtype="bfloat16",
    window=None,
    pool_pages=None,
    impl="tpu",
    tiles=None,
    numerics="default",
):
    """The round that an engine on these devices runs, over the mesh axes `data`, `model` and `expert`.

    Backends, sizes and programs are chosen as the engine chooses them.

    Args:
        model: 8b or 70b, of the shapes of Llama 3; 30b-a3b, of Qwen3-MoE's.
        layers: instead of the model's.
        heads: instead of the model's, of the whole model.
        tokens: of a step with prompts, at most.
        window: of all layers.
        tiles: `kernels.tpu.tiling.Tiles`; None for those of the table.
        numerics: as of the engine's configuration.
    """
    sizes = MODELS[model] | ({} if layers is None else {"num_hidden_layers": layers})
    if heads is not None:
        names = ("num_attention_heads", "num_key_value_heads", "head_dim")
        sizes = sizes | dict(zip(names, heads, strict=True))
    raw = LLAMA | sizes
    if window is not None:
        raw |= {"model_type": "mistral", "sliding_window": window}
    config = family_for(raw).config_from_hf(raw)
    types = DecoderModel.types(config, jnp.bfloat16)
    made = make_mesh(mesh)
    num_heads = Layout.of(made, config).kv_heads
    page_bytes = config.num_layers * page * 2 * num_heads * config.head_dim * jnp.dtype(kv_dtype).itemsize
    engine_config = EngineConfig(
        page_size=page,
        max_seqs=seqs,
        max_seq_len=context,
        max_step_tokens=max(tokens, seqs),
        max_pages=pool_pages or max(seqs, min(seqs * -(-context // page), MAX_POOL_BYTES // page_bytes)),
        kv_dtype=kv_dtype,
        attention=impl,
        tiles=tiles,
        numerics=numerics,
    )
    backend = BackendChoice.choose(engine_config, types, has_mods=False, mesh=made, device=mesh.devices.flat[0])
    shapes = shapes_for(engine_config, types, backend, num_eos=1, is_loaded=True)
    programs = programs_for(engine_config, types, backend, shapes, backend.attention_spec(shapes, None, None))
    return programs.round_function, round_types(types, backend, shapes, programs), {"donate_argnums": (1,)}
