"""`generate`: sampling as a pure function, for use inside `jit`, `scan` or a training step."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any, TypeVar, cast

import equinox as eqx
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax.custom_batching import custom_vmap

from levanter_infer.cache.page_math import pages_for
from levanter_infer.decode.generate import GenerateOutput, generate_all
from levanter_infer.decode.sampling_table import SamplingTable
from levanter_infer.decode.shapes import Shapes
from levanter_infer.decode.state import empty_cache
from levanter_infer.engine.admission import SamplingColumns
from levanter_infer.engine.backend_choice import BackendChoice
from levanter_infer.engine.config import EngineConfig
from levanter_infer.engine.params import SamplingParams, brief
from levanter_infer.engine.sizes import kv_dtype, resolve_shapes
from levanter_infer.engine.tile_search import check_given_tiles
from levanter_infer.engine.validation import RequestLimits, validate_sampling
from levanter_infer.models.decoder import DecoderModel
from levanter_infer.models.live import from_levanter
from levanter_infer.policies import PreemptionPolicy

Function = TypeVar("Function", bound=Callable[..., Any])


def _in_32_bits(function: Function) -> Function:
    """The function, traced as if its caller had not enabled `jax_enable_x64`: the loop is written for 32 bits."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        with jax.enable_x64(False):
            return function(*args, **kwargs)

    return cast(Function, call)


@_in_32_bits
def generate(
    model,
    prompt_token_ids,
    prompt_lens,
    sampling: SamplingParams | None = None,
    *,
    config: EngineConfig | None = None,
    seeds=None,
    eos_token_ids: tuple[int, ...] = (),
    score_mod=None,
    mask_mod=None,
) -> GenerateOutput:
    """Sample continuations of a batch of prompts; pure, and traceable by `jit`, `scan` and `shard_map`.

    Nothing is differentiated: gradients see a constant. Under `shard_map` each shard runs a loop of its own over its
    prompts, with `check_vma=False`, and with `seeds` that differ where its prompts are not other ones.

    Args:
        model: a `DecoderModel`, or a live model of Levanter's shape (`from_levanter`); its arrays may be traced. Under
            `shard_map` every device has all of it.
        prompt_token_ids: i32[batch, length], padded on the right with anything.
        prompt_lens: i32[batch], from 1 to `length`.
        sampling: one for all prompts. Text stops need a host and are refused.
        config: sizes; `max_seq_len` defaults to what the call needs and `max_pages` to enough for all that run.
        seeds: u32[batch, 2], the high and low word of each prompt's seed, may be traced. Default: `sampling.seed`
            plus the prompt's place in this call, or the place alone.
        eos_token_ids: tokens that end a sequence, unless `sampling.ignore_eos`. Default: none, because a model does not
            know its tokenizer's.
        score_mod, mask_mod: as in `InferenceEngine`.
    Raises: ValueError for sizes that contradict each other, for parameters that need a host, under `vmap`, and under a
        `shard_map` that checks which arrays vary. Values inside traced arrays are not checked: a token id out of range
        gives an undefined continuation of that prompt; lengths are clipped to 1 … `length`.
    """
    _refuse_sharded(model)
    params, config, model = sampling or SamplingParams(), config or EngineConfig(), from_levanter(model)
    prompts, lens = jnp.asarray(prompt_token_ids, jnp.int32), jnp.asarray(prompt_lens, jnp.int32)
    varying = _varying_axes((model, prompts, lens, seeds))
    if varying:
        raise ValueError(
            f"generate in a shard_map over {', '.join(sorted(varying))} that checks which arrays vary: its loops begin "
            "with constants; call jax.shard_map(..., check_vma=False)"
        )
    model, prompts, lens, seeds = _refuse_vmap(jax.lax.stop_gradient((model, prompts, lens, seeds)))
    if prompts.ndim != 2 or lens.shape != prompts.shape[:1]:
        raise ValueError(
            f"prompt_token_ids has shape {prompts.shape} and prompt_lens {lens.shape}; expected [batch, length] "
            "and [batch]"
        )
    if 0 in prompts.shape:
        raise ValueError(f"prompt_token_ids has shape {prompts.shape}: expected prompts, of at least one token each")
    eos_token_ids = _checked_eos(eos_token_ids, model.vocab.size)
    _refuse_what_needs_a_host(params, config)
    needed = dataclasses.replace(config, max_seq_len=prompts.shape[1] + params.max_tokens)
    backend = BackendChoice.choose(needed, model, has_mods=score_mod is not None or mask_mod is not None)
    if backend.required_options:
        raise ValueError(
            f'engine.numerics="batch_invariant" of {model.config.model_type} depends on how XLA compiles, and '
            "generate leaves that to the caller's jit; use InferenceEngine, or default"
        )
    step_tokens = backend.matmul_backend.step_tokens
    shapes = backend.adapt(_shapes(config, model, params, prompts.shape, len(eos_token_ids), step_tokens))
    validate_sampling(params, RequestLimits.of(shapes, config))
    batch, n = prompts.shape[0], params.n
    table = _sampling_table(params, batch, shapes, eos_token_ids, seeds)
    pool_dtype = kv_dtype(config, model)
    check_given_tiles(config.tiles, model.config, backend.layout, shapes, pool_dtype)
    cache = empty_cache(model.config, shapes, backend.attention_backend, dtype=pool_dtype)
    result = generate_all(
        backend.as_read(model),
        cache,
        prompts,
        lens,
        table,
        n=n,
        max_tokens=params.max_tokens,
        shapes=shapes,
        attention=backend.attention_spec(shapes, score_mod, mask_mod),
    )
    return jax.tree.map(lambda per_slot: per_slot.reshape(batch, n, *per_slot.shape[1:]), result)


@custom_vmap
def _refuse_vmap(arrays: Any) -> Any:
    """`arrays`, a pytree, as they are.

    Raises: ValueError where `vmap` batches any of them, also from outside of a `jit` that this is traced in.
    """
    return arrays


@_refuse_vmap.def_vmap
def _raise(axis_size: int, in_batched, arrays):
    raise ValueError(
        f"generate under vmap (axis of {axis_size}): the sequences of one call share a pool of pages and run in one "
        "loop, which vmap would run in lockstep with a pool for each; give all prompts to one call, as a batch of "
        "prompt_token_ids with seeds of their own, and reshape the result"
    )


def _varying_axes(tree: Any) -> set[str]:
    """Names of the mesh axes along which arrays differ, where a `shard_map` checks that (`check_vma`); else none."""
    found: set[str] = set()
    for leaf in jax.tree.leaves(tree):
        kind = jax.typeof(leaf)
        found |= set(getattr(kind, "vma", ())) | set(getattr(getattr(kind, "mat", None), "varying", ()))
    return found


def _refuse_sharded(model) -> None:
    """Raises: ValueError where a device has only parts of the parameters, for which nothing here is written."""
    if getattr(model, "is_sharded", False):
        raise ValueError("generate was given the model of an engine on a mesh; give it the model as it was loaded")
    wanted = {}
    if isinstance(model, DecoderModel):
        types = DecoderModel.types(model.config)
        wanted = {jax.tree_util.keystr(path): named.array.shape for path, named in _named_arrays(types)}
    for path, leaf in _named_arrays(model):
        shape = getattr(leaf.array, "shape", None)
        whole = wanted.get(jax.tree_util.keystr(path)) or _declared_shape(model, path, leaf)
        if shape is not None and shape != whole:
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            raise ValueError(
                f"generate was given a part of the model: {name} is {list(shape)} here and {list(whole)} as a whole; "
                "in a shard_map give every device all parameters (in_specs of PartitionSpec()), or use "
                "InferenceEngine with a mesh, which shards them itself"
            )


def _named_arrays(tree) -> list[tuple[tuple, NamedArray]]:
    """The named arrays of a tree, with their paths."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda leaf: isinstance(leaf, NamedArray))
    return [(path, leaf) for path, leaf in leaves if isinstance(leaf, NamedArray)]


def _declared_shape(model, path: tuple, named: NamedArray) -> tuple[int, ...]:
    """The shape that the modules around an array say it has (`In` and `Out` of haliax' `Linear`, `Block` of `Stacked`).

    The array's own axes do not say it: newer releases of haliax take their sizes from the array that is there.
    """
    sizes, owner = {axis.name: axis.size for axis in named.axes}, model
    for key in path:
        values = (getattr(owner, name, None) for name in getattr(owner, "__dataclass_fields__", ()))
        declared = (axis for value in values for axis in (value if isinstance(value, tuple) else (value,)))
        sizes |= {axis.name: axis.size for axis in declared if isinstance(axis, Axis) and axis.name in sizes}
        if isinstance(key, jax.tree_util.GetAttrKey):
            owner = getattr(owner, key.name)
        elif isinstance(key, jax.tree_util.DictKey | jax.tree_util.SequenceKey):
            owner = owner[key.key if isinstance(key, jax.tree_util.DictKey) else key.idx]
        else:
            break
    return tuple(sizes.values())


def _refuse_what_needs_a_host(params: SamplingParams, config: EngineConfig) -> None:
    if params.num_beams > 1:
        raise ValueError(f"num_beams={params.num_beams}: beam search is for InferenceEngine; leave it out here")
    if params.best_of is not None:
        raise ValueError(f"best_of={params.best_of} is for InferenceEngine; sample n={params.best_of} and choose")
    if params.stop:
        raise ValueError("stop strings need a host; use stop_token_ids, or InferenceEngine")
    if params.logprobs:
        raise ValueError(
            f"logprobs={params.logprobs}: the likeliest tokens come from InferenceEngine only; use 0, which gives the "
            "log probabilities of the sampled tokens"
        )
    if params.prompt_logprobs is not None:
        raise ValueError("prompt_logprobs come from InferenceEngine only; leave it out, or use InferenceEngine.score")
    if params.is_constrained:
        raise ValueError(
            "regex, json_schema, choice, grammar, allowed_token_ids and bad_words are for InferenceEngine; leave them "
            "out"
        )
    if params.return_routed_experts:
        raise ValueError("return_routed_experts is for InferenceEngine; leave it out here")
    if config.preempt == PreemptionPolicy.OFFLOAD:
        raise ValueError('engine.preempt="offload" needs a host; use "recompute", or InferenceEngine')


def _checked_eos(given, vocab_size: int) -> tuple[int, ...]:
    ids = tuple(given) if isinstance(given, Sequence) and not isinstance(given, str | bytes) else (given,)
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, Integral) or not 0 <= int(token) < vocab_size:
            raise ValueError(
                f"eos_token_ids={brief(given)}: expected token ids below the model's vocabulary size of {vocab_size}"
            )
    return tuple(int(token) for token in ids)


def _shapes(
    config: EngineConfig, model, params: SamplingParams, shape: tuple[int, ...], num_eos: int, step_tokens: int
) -> Shapes:
    """Sizes for exactly this call: a slot for every sequence, and a ring for all that they can generate."""
    batch, length = shape
    slots = batch * params.n
    needed = length + params.max_tokens
    if config.max_seq_len is not None and needed > config.max_seq_len:
        raise ValueError(
            f"prompts of up to {length} tokens and max_tokens={params.max_tokens} need {needed} positions but "
            f"max_seq_len={config.max_seq_len}; raise it or lower max_tokens"
        )
    max_seqs = min(config.max_seqs, slots)
    page_size = config.page_size or 16
    pages_each = pages_for(needed, page_size)
    max_pages = config.max_pages or max_seqs * pages_each
    if max_pages < pages_each:
        raise ValueError(
            f"one sequence may need {pages_each} pages and max_pages={max_pages}; raise max_pages or lower max_tokens"
        )
    sized = dataclasses.replace(
        config,
        max_seqs=max_seqs,
        max_seq_len=needed,
        page_size=page_size,
        max_pages=max_pages,
    )
    return dataclasses.replace(
        resolve_shapes(sized, model, num_eos, step_tokens=step_tokens),
        num_slots=slots,
        max_round_steps=-(-slots * params.max_tokens // max_seqs) + 1,
    )


def _sampling_table(params: SamplingParams, batch: int, shapes: Shapes, eos_token_ids: tuple[int, ...], seeds):
    columns = SamplingColumns(shapes.num_slots, shapes.limits)
    for slot in range(shapes.num_slots):
        place, index = divmod(slot, params.n)
        seed = ((params.seed or 0) + place) % 2**64
        columns.set(slot, params, seed=seed, sample_index=index, eos_token_ids=eos_token_ids)
    table = jax.tree.map(jnp.asarray, SamplingTable(**columns.columns, limits=columns.limits))
    if seeds is None:
        return table
    words = jnp.asarray(seeds, jnp.uint32)
    if words.shape != (batch, 2):
        raise ValueError(f"seeds has shape {words.shape}; expected [batch, 2], the high and low word of each seed")
    words = jnp.repeat(words, params.n, axis=0)
    return eqx.tree_at(lambda t: t.seed, table, words)
