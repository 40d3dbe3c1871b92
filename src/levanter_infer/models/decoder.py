"""The decoder that all families share: loops over stacked layers, each of which computes what its `Block` says."""

import collections
import dataclasses
import functools
from collections.abc import Callable, Sequence

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax import Array

from levanter_infer.axes import (
    DEPTH,
    EMBED,
    HEAD_SIZE,
    KV_HEADS,
    LAYERS,
    PERIOD,
    POSITION,
    SEQ_PAGE,
    VOCAB,
)
from levanter_infer.cache.batch_info import PageBatchInfo
from levanter_infer.cache.cache import Cache
from levanter_infer.cache.kv_pages import KvPages
from levanter_infer.cache.slot_state import SlotState
from levanter_infer.kernels.backend import Backend
from levanter_infer.layers.attention import AttentionBlock, AttentionInputs, AttentionSpec
from levanter_infer.layers.branch_conv import Convolve
from levanter_infer.layers.gated_norm import init_norm
from levanter_infer.layers.indexer import Choice
from levanter_infer.layers.layer_input import LayerInputs
from levanter_infer.layers.layout import Layout
from levanter_infer.layers.linear import (
    Linear,
    apply,
    by_rows,
    fold_key,
    prepare_tables,
    random_weight,
    split_key,
)
from levanter_infer.layers.moe import ExpertsBlock, Moe
from levanter_infer.layers.norm import RMSNorm
from levanter_infer.layers.rotary import Rope, RopeConfig, rope_at
from levanter_infer.layers.rows import RaggedRows
from levanter_infer.layers.shard_axis import REPLICATED, ShardAxis, Vocabulary
from levanter_infer.layers.stack import pick_layer
from levanter_infer.models.blocks import Block, Stack
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.layer import DecoderLayer
from levanter_infer.models.mixing import mixer_of, with_convolution
from levanter_infer.models.periods import Body, Group
from levanter_infer.models.ring import columns_of, ring_of, squares_of, with_ring

PLAIN = AttentionSpec()
"""Attention as the model alone defines it."""


class DecoderModel(eqx.Module):
    """Token ids in, logits out: over plain sequences (`__call__`) and over pages (`hidden`, then `logits`)."""

    embeddings: Linear
    """[vocab, embed]: its rows are the embeddings; as head it maps hidden states to logits."""
    stacks: tuple[DecoderLayer, ...]
    """As `DecoderConfig.stacks`: every parameter with a leading `layers` axis."""
    norm: RMSNorm
    lm_head: Linear | None
    """[vocab, embed]; None where the embeddings serve as head."""
    position_embeddings: Linear | None
    """[position, embed]: its rows are added to the embeddings; None: positions are not learnt."""
    embedding_norm: RMSNorm | None
    """Norm of the embeddings."""
    layer_inputs: LayerInputs | None = eqx.field(kw_only=True, default=None)
    """Inputs of the single layers; None: they have none."""
    config: DecoderConfig = eqx.field(static=True)
    shard_axis: ShardAxis = eqx.field(static=True, default=REPLICATED)
    """How the vocabulary is sharded."""

    @staticmethod
    def types(config: DecoderConfig, dtype=jnp.float32) -> "DecoderModel":
        """The model of `config` with `jax.ShapeDtypeStruct`s for arrays."""
        return eqx.filter_eval_shape(DecoderModel.init, config, key=None, dtype=dtype)

    @staticmethod
    def init(config: DecoderConfig, *, key: Array | None, dtype=jnp.float32) -> "DecoderModel":
        """Random parameters: embeddings and head of standard deviation 0.02, the rest as in `Linear.init`.

        Args: key: None for zeros.
        """
        embed_key, layers_key, head_key = split_key(key, 3)
        vocab, embed = Axis(VOCAB, config.vocab_size), Axis(EMBED, config.hidden_size)
        positions = Axis(POSITION, config.max_position_embeddings)

        def table(key: Array | None, rows: Axis = vocab, bias: bool = False) -> Linear:
            zeros = hax.zeros(rows, dtype=dtype) if bias else None
            return Linear(weight=random_weight(key, (rows, embed), 0.02, dtype), bias=zeros, num_in=1)

        def stacked(index: int, stack: Stack) -> DecoderLayer:
            key = layers_key if index == 0 else fold_key(layers_key, index)
            return DecoderLayer.init((Axis(LAYERS, len(stack.layers)),), embed, stack.block, key=key, dtype=dtype)

        return DecoderModel(
            embeddings=table(embed_key, bias=config.head_bias and config.tie_word_embeddings),
            stacks=tuple(stacked(i, stack) for i, stack in enumerate(config.stacks)),
            norm=init_norm((), embed, config.norm, key=head_key, dtype=dtype),
            lm_head=None if config.tie_word_embeddings else table(head_key, bias=config.head_bias),
            position_embeddings=table(layers_key, positions) if config.learnt_positions else None,
            embedding_norm=config.embedding_norm
            and init_norm((), embed, config.embedding_norm, key=embed_key, dtype=dtype),
            layer_inputs=LayerInputs.init(
                vocab, config.num_layers, config.layer_input_width, embed, config.norm, key=embed_key, dtype=dtype
            )
            if config.layer_input_width
            else None,
            config=config,
        )

    @property
    def layers(self) -> DecoderLayer:
        """The stack of a model whose layers all have parameters of the same shapes. Raises: ValueError for others."""
        if len(self.stacks) != 1:
            raise ValueError(f"the layers are stored in {len(self.stacks)} stacks, expected one; use `stacks`")
        return self.stacks[0]

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the parameters, in whatever form they are stored."""
        return self.embeddings.dtype

    @property
    def activation_dtype(self) -> jnp.dtype:
        """Dtype of the residual stream."""
        return self.backend.activation_dtype(self.dtype)

    @property
    def embed(self) -> Axis:
        """Axis of the hidden states."""
        return self.embeddings.ins[0]

    @property
    def vocab(self) -> Vocabulary:
        """The part of the vocabulary whose embeddings and logits this device has."""
        return Vocabulary(self.config.vocab_size, self.shard_axis)

    @property
    def is_sharded(self) -> bool:
        """Whether the arrays are those of a mesh."""
        return self.shard_axis != REPLICATED

    @property
    def is_packed(self) -> bool:
        """Whether `prepare` has packed the weights, in an order that only their backend knows."""
        return self.head.packed_axes is not None

    @property
    def backend(self) -> Backend:
        """Backend that computes the matmuls."""
        return self.head.backend

    @property
    def head(self) -> Linear:
        """The map from hidden states to logits."""
        return self.embeddings if self.lm_head is None else self.lm_head

    def shard_as(self, layout: Layout) -> "DecoderModel":
        """The same model with sharded arrays, as `Layout.fit_model` shards them."""

        def sharded(part):
            if isinstance(part, Moe):
                shared, several = jax.tree.map(
                    sharded, (part.shared, part.shared_experts), is_leaf=lambda each: isinstance(each, Linear)
                )
                axes = {"experts": layout.experts, "sums": layout.expert_sums}
                down = dataclasses.replace(part.down_proj, shard_axis=layout.model)
                return dataclasses.replace(part, **axes, shared=shared, shared_experts=several, down_proj=down)
            if isinstance(part, RMSNorm) and part.weight is not None:
                width = layout.normed_width(part.normed(part.weight.axes))
                return part if width is None else dataclasses.replace(part, shard_axis=layout.model, width=width)
            is_sharded = isinstance(part, Linear) and layout.is_sharded(part.ins)
            return dataclasses.replace(part, shard_axis=layout.model) if is_sharded else part

        stacks = jax.tree.map(sharded, self.stacks, is_leaf=lambda part: isinstance(part, Linear | Moe | RMSNorm))
        return dataclasses.replace(self, stacks=stacks, shard_axis=layout.model)

    def prepare(self, backend: Backend, *, donate: bool = False, quantizes: bool = False) -> "DecoderModel":
        """The same model with its weights stored as `backend` reads them.

        Args: as in `Linear.prepare`. With `donate` weights are freed one after the other; there are never two copies of
            all.
        Raises: ValueError if the backend cannot read weights of this dtype, or the model is prepared already.
        """
        if self.is_packed:
            raise ValueError("the weights are packed already; give the model as it was loaded")
        how = {"donate": donate, "quantizes": quantizes}
        embeddings, head = prepare_tables(self.embeddings, self.lm_head, backend, **how)
        parts = {"stacks": self.stacks, "norm": self.norm, "embedding_norm": self.embedding_norm}  # with gates of norms
        stored = jax.tree.map(
            lambda part: part.prepare(backend, **how) if isinstance(part, Linear) else part,
            parts,
            is_leaf=lambda part: isinstance(part, Linear),
        )
        inputs = self.layer_inputs and self.layer_inputs.prepare(backend, donate=donate)
        return dataclasses.replace(self, embeddings=embeddings, lm_head=head, layer_inputs=inputs, **stored)

    def __call__(self, tokens: NamedArray, attention: AttentionSpec = PLAIN) -> NamedArray:
        """The plain causal forward, without a cache: for training, and as the oracle.

        Args: as in `plain_hidden`.
        Returns: f32[..., position, vocab].
        Raises: ValueError for more positions than a model with learnt ones has.
        """
        num_positions = tokens.axis_size(POSITION)
        self.config.check_length(num_positions, f"a sequence of {num_positions} tokens")
        return self.logits(self.plain_hidden(tokens, attention))

    def plain_hidden(self, tokens: NamedArray, attention: AttentionSpec = PLAIN) -> NamedArray:
        """The plain causal forward up to the last hidden states, for `logits`.

        Args:
            tokens: i32[..., position], position 0 first.
            attention: `score_mod` and `mask_mod` act as in the paged forward. `max_seq_len` None is the size of the
                position axis; only length-dependent ropes look at it (layers/rotary.py).
        Returns: [..., position, embed]; meaningless beyond learnt positions.
        """
        tokens = tokens.rearrange((..., POSITION))
        num_positions = tokens.axis_size(POSITION)
        positions = hax.arange(tokens.resolve_axis(POSITION), dtype=jnp.int32)
        inputs = self._inputs(positions, attention, attention.max_seq_len or num_positions, None)
        x = self._embed(tokens, positions, None)
        own_inputs = self._layer_inputs(tokens, x, None)
        sizes = (*(axis.size for axis in tokens.axes), num_positions)
        keys = jnp.zeros(sizes, bool) if self.config.chooses_keys(num_positions) else None
        carry = x, self._unshared_kv(tokens), keys
        for group in self.config.groups:
            places = [self.config.stored_at(group.first + offset) for offset in range(len(group.period))]
            period = functools.partial(_plain_period, group=group, places=places, inputs=inputs, config=self.config)
            own = None if own_inputs is None else _by_period(own_inputs, group)
            carry = hax.fold(period, LAYERS)(carry, self._periods(group, places), own)
        return carry[0]

    def _unshared_kv(self, tokens: NamedArray) -> dict[int, tuple[NamedArray, NamedArray]]:
        """For each pool of which layers share keys and values, zeros in the stead of those."""
        found = {}
        for pool in self.config.shared_pools:
            block = next(block for i, block in enumerate(self.config.blocks) if i in self.config.pools[pool].layers)
            assert isinstance(block.mixer, AttentionBlock)
            heads, size = Axis(KV_HEADS, block.mixer.num_kv_heads), Axis(HEAD_SIZE, block.mixer.head_dim)
            zeros = hax.zeros((*tokens.axes, heads, size), dtype=self.activation_dtype)
            found[pool] = zeros, zeros
        return found

    def _periods(self, group: Group[Block], places: Sequence[tuple[int, int]]) -> dict[int, DecoderLayer]:
        """The layers that a group runs, by stack, with an axis of repeats and, where a period has several layers of the
        stack, one of those. Args: places: the stack and the index of each layer of the first period."""
        strides = collections.Counter(stack for stack, _ in places)

        def part(first: int, stride: int, named: NamedArray) -> NamedArray:
            array, repeats = named.array, group.repeats
            if array.shape[0] != repeats * stride:
                array = array[first : first + repeats * stride]
            if stride == 1:
                return NamedArray(array, (Axis(LAYERS, repeats), *named.axes[1:]))
            array = array.reshape(repeats, stride, *array.shape[1:])
            return NamedArray(array, (Axis(LAYERS, repeats), Axis(PERIOD, stride), *named.axes[1:]))

        found: dict[int, DecoderLayer] = {}
        for stack, first in places:
            if stack not in found:
                found[stack] = _map_arrays(functools.partial(part, first, strides[stack]), self.stacks[stack])
        return found

    def hidden(self, batch: PageBatchInfo, cache: Cache, attention: AttentionSpec = PLAIN) -> tuple[NamedArray, Cache]:
        """The paged forward: write the K/V of the step's tokens and compute their last hidden states.

        Args:
            batch: the step's packed tokens.
            cache: pools as `DecoderConfig.pools`; they are carried through the scan over layers whole, never sliced.
        Returns: [token, embed] for `logits`, meaningless for padding; and the cache.
        Raises: ValueError where the rope depends on the length of sequences that may outgrow the original context
            and `attention.max_seq_len` does not say how long they get.
        """
        return self._paged(batch, cache, attention, None)[:2]

    def routed(
        self, batch: PageBatchInfo, cache: Cache, attention: AttentionSpec = PLAIN
    ) -> tuple[NamedArray, Cache, Array]:
        """As `hidden`, and the experts of each token, i32[expert layer, token, chosen]. Requires: all layers with
        experts choose the same number."""
        blocks = self.config.expert_blocks
        chosen = jnp.zeros((len(blocks), batch.tokens.array.shape[0], blocks[0].num_chosen), jnp.int32)
        x, cache, chosen = self._paged(batch, cache, attention, chosen)
        assert chosen is not None
        return x, cache, chosen

    def _paged(self, batch: PageBatchInfo, cache: Cache, attention: AttentionSpec, chosen: Array | None):
        """`hidden` and, into the array `chosen` unless it is None, `routed`."""
        num_tokens, max_seq_len = batch.cu_q_lens.array[-1], self._max_seq_len(batch, attention)
        inputs = self._inputs(batch.positions, attention, max_seq_len, num_tokens)
        rows = RaggedRows.of(batch) if cache.has_slots else None
        batches = [cache.batch_of(pool, batch) for pool in range(len(cache.pools))]

        def run(group: Group[Block], trip: Array, carry):
            """One trip of a group's loop."""
            for body in group.bodies:
                compute = functools.partial(one_layer, body, trip)
                # Equal layers that share a body follow one another in their stack and in their pools
                counts = set(body.counts)
                count = _index(body.counts, trip) if len(counts) > 1 else body.counts[0]
                carry = compute(0, carry) if counts == {1} else jax.lax.fori_loop(0, count, compute, carry)
            return carry

        def one_layer(body: Body[Block], trip: Array, further: Array | int, carry):
            """The layer `further` behind the first one of a trip."""

            def at(place: Callable[[int], tuple[int, int]], further: Array | int = further) -> tuple[int, Array]:
                """The stack or pool, and the index in it."""
                parts, indices = zip(*map(place, body.starts), strict=True)
                return parts[0], _index(indices, trip, further)

            x, squares, cache, chosen, keys = carry
            choice, seen, pools, mixers, convolve = Choice(keys), list[Array](), [], [], None
            on_choice, block = None if chosen is None else seen.append, body.item
            stack, index = at(self.config.stored_at)
            layer = with_ring(self.stacks[stack].at(index, num_tokens), ring, squares)
            if layer.convs is not None:
                slots, number = at(functools.partial(self.config.remembered_at, is_paged=False))
                state = cache.pools[slots]
                assert isinstance(state, SlotState) and rows is not None
                convolve = Convolve(layer.convs, state.read(number, rows.slots, rows.is_new), rows, layer.some_map)
                remember = functools.partial(state.write, number, rows.slots)
            if layer.attention is not None:
                # Neighbours that share keys and values share those of one layer
                place = functools.partial(self.config.remembered_at, is_paged=True)
                pool, index = at(place, 0 if block.shares_kv else further)
                attend = functools.partial(
                    layer.attention.paged,
                    inputs=with_convolution(inputs(block, choice), convolve),
                    kv=cache.pools[pool],  # type: ignore[arg-type]
                    layer=index,
                    batch=batches[pool],
                )
                pools, mixers = [*pools, pool], [*mixers, attend]
            if layer.recurrent is not None:
                pool, index = at(functools.partial(self.config.remembered_at, is_paged=False))
                recur = functools.partial(
                    layer.recurrent.paged,
                    block=block.recurrent,  # type: ignore[arg-type]
                    state=cache.pools[pool],  # type: ignore[arg-type]
                    layer=index,
                    rows=rows,  # type: ignore[arg-type]
                )
                pools, mixers = [*pools, pool], [*mixers, recur]
            own = None if own_inputs is None else pick_layer(own_inputs, _index(body.starts, trip, further))
            x, remembered = layer(x, block, mixer_of(block, mixers, layer.some_map), on_choice, own, convolve)
            for pool, new in zip(pools, remembered, strict=True):
                cache = cache.with_pool(pool, new)
            if convolve is not None:
                cache = cache.with_pool(slots, remember(convolve.state))
            if chosen is not None and isinstance(block.feed_forward, ExpertsBlock):
                numbers = [self.config.expert_layers.index(layer) for layer in body.starts]
                chosen = chosen.at[_index(numbers, trip, further)].set(seen.pop())
            return x, squares_of(x, ring), cache, chosen, choice.keys

        ring = ring_of(self.config, self.backend, self.shard_axis, batch.tokens.array.shape[0], self.activation_dtype)
        x = self._embed(batch.tokens, batch.positions, num_tokens, ring)
        own_inputs = self._layer_inputs(batch.tokens, x, num_tokens)
        carry = x, squares_of(x, ring), cache, chosen, self._first_keys(batch, cache, max_seq_len)
        for group in self.config.groups:
            trip = functools.partial(run, group)
            if group.trips > 1:
                carry = jax.lax.fori_loop(0, group.trips, trip, carry)
            else:  # of an index that XLA knows it would copy the layer's weights, once and for all steps
                carry = trip(jnp.minimum(num_tokens, 0), carry)
        x, _, cache, chosen, _ = carry
        return columns_of(x.axes, ring.all_gather(x.array, 1)), cache, chosen

    def logits(self, hidden: NamedArray, num_rows: Array | None = None) -> NamedArray:
        """Final norm and head.

        Args:
            hidden: [..., embed]
            num_rows: i32[], how many rows count; the others may give anything. None: all.
        Returns: f32[..., vocab], of this device's part of the vocabulary.
        """
        head, config = self.head.at(None, num_rows), self.config
        (logits,) = apply(hidden, head, norm=self.norm.at(None, num_rows), dtype=jnp.float32)

        def scaled(logits: NamedArray) -> NamedArray:
            values = logits.array
            if config.logits_multiplier != 1:
                values = values * jnp.float32(config.logits_multiplier)
            if config.logits_divisor != 1:
                values = values / jnp.float32(config.logits_divisor)
            if config.logits_soft_cap is not None:
                cap = jnp.float32(config.logits_soft_cap)
                values = cap * jnp.tanh(values / cap)
            return NamedArray(values, logits.axes)

        if (config.logits_multiplier, config.logits_divisor, config.logits_soft_cap) != (1, 1, None):
            logits = head.by_rows(scaled, logits)
        return NamedArray(self.vocab.without_padding(logits.array), logits.axes)

    def _take_rows(self, table: Linear, tokens: NamedArray, ring: ShardAxis = REPLICATED) -> Array:
        """Rows of a table of the vocabulary, [..., in], as the residual stream; on a ring this device's columns."""
        rows = table.take_rows(self.vocab.local(tokens.array), self.dtype)
        rows = self.shard_axis.sum(rows) if ring.parts == 1 else ring.own_sum(rows, 1)
        return rows.astype(self.activation_dtype)

    def _layer_inputs(self, tokens: NamedArray, embedded: NamedArray, num_rows: Array | None) -> NamedArray | None:
        """The own inputs of all layers, [depth, ..., layer_input]; None: they have none."""
        if self.layer_inputs is None:
            return None
        return self.layer_inputs(embedded, lambda table: self._take_rows(table, tokens), num_rows)

    def _embed(self, tokens: NamedArray, positions: NamedArray, num_rows: Array | None, ring=REPLICATED) -> NamedArray:
        """[..., embed]; on a ring this device's columns."""
        rows = functools.partial(by_rows, self.backend, num_rows)
        norm, learnt = self.embedding_norm, self.position_embeddings
        summed = ring if norm is None and learnt is None else REPLICATED  # these need all columns
        embedded = columns_of((*tokens.axes, self.embed), self._take_rows(self.embeddings, tokens, summed))
        if self.config.embedding_multiplier != 1:
            factor = jnp.asarray(self.config.embedding_multiplier, self.dtype).astype(embedded.dtype)
            embedded = rows(lambda embedded: embedded * factor, embedded)
        if learnt is not None:
            added = learnt.take_rows(positions.array, self.dtype).astype(embedded.dtype)
            embedded = embedded + NamedArray(added, (*positions.axes, self.embed))
        if norm is not None:
            embedded = norm.at(None, num_rows).by_rows(embedded, rows)
        return embedded if summed == ring else columns_of(embedded.axes, ring.own(embedded.array, 1))

    def _inputs(
        self, positions: NamedArray, spec: AttentionSpec, rope_len: int, num_rows: Array | None
    ) -> Callable[[Block, Choice], AttentionInputs]:
        """Inputs of attention in a layer, with the angles of each rope computed once."""
        kinds = dict.fromkeys((mixer.rope, mixer.rope_dim) for mixer in self.config.attention)

        def rope_of(rope: RopeConfig, size: int) -> Rope:
            angles = lambda positions: rope_at(rope, size, positions, rope_len).angles  # noqa: E731
            return Rope(rope, *by_rows(self.backend, num_rows, angles, positions))

        ropes: dict[tuple[RopeConfig | None, int], Rope] = {
            (rope, size): rope_of(rope, size) for rope, size in kinds if rope is not None
        }

        def inputs(block: Block, choice: Choice) -> AttentionInputs:
            mixer = block.attention
            assert mixer is not None
            return AttentionInputs(mixer, ropes.get((mixer.rope, mixer.rope_dim)), spec, choice=choice)

        return inputs

    def _first_keys(self, batch: PageBatchInfo, cache: Cache, max_seq_len: int) -> Array | None:
        """The chosen keys before the first layer; None: no layer chooses, be it that sequences are too short."""
        num_chosen = self.config.num_chosen
        if num_chosen is None or not self.config.chooses_keys(max_seq_len):
            return None
        pool = next(pool for pool in cache.pools if isinstance(pool, KvPages))
        return pool.no_choice(batch, num_chosen)

    def _max_seq_len(self, batch: PageBatchInfo, attention: AttentionSpec) -> int:
        capacity = batch.page_indices.axis_size(SEQ_PAGE) * batch.page_size
        if attention.max_seq_len is not None:
            return attention.max_seq_len
        for rope in self.config.ropes:
            if rope.depends_on_length and rope.original_len is not None and capacity > rope.original_len:
                raise ValueError(
                    f"rope_scaling {rope.kind!r} depends on how long sequences get: up to {capacity} tokens here, "
                    f"beyond the original {rope.original_len}; give AttentionSpec(max_seq_len=...)"
                )
        return capacity


def _by_period(own_inputs: NamedArray, group: Group[Block]) -> NamedArray:
    """The own inputs of a group's layers, [layers, period, ..., layer_input]. Args: own_inputs: [depth, ...]."""
    part = own_inputs[DEPTH, group.first : group.first + group.num_layers]
    return part.unflatten_axis(DEPTH, (Axis(LAYERS, group.repeats), Axis(PERIOD, len(group.period))))


def _index(indices: Sequence[int], trip: Array, further: Array | int = 0) -> Array:
    """`indices[trip] + further`, i32[]."""
    first, stride = indices[0], indices[1] - indices[0] if len(indices) > 1 else 1
    if any(index != first + stride * i for i, index in enumerate(indices)):
        index = jnp.asarray(indices, jnp.int32)[trip]
    else:
        index = trip if stride == 1 else trip * jnp.int32(stride)
        index = index if first == 0 else index + jnp.int32(first)
    return index if isinstance(further, int) and further == 0 else index + further


PlainCarry = tuple[NamedArray, dict[int, tuple[NamedArray, NamedArray]], Array | None]
"""The residual stream, by pool the keys and values that later layers share, and the keys of their `Choice`."""


def _plain_period(
    carry: PlainCarry,
    stacks: dict[int, DecoderLayer],
    own_inputs: NamedArray | None,
    *,
    group: Group[Block],
    places: Sequence[tuple[int, int]],
    inputs: Callable[[Block, Choice], AttentionInputs],
    config: DecoderConfig,
) -> PlainCarry:
    """One period of the plain forward, of what `DecoderModel._periods` gives for one repeat."""
    x, shared, keys = carry
    choice = Choice(keys)
    seen: collections.Counter[int] = collections.Counter()
    strides = collections.Counter(stack for stack, _ in places)
    for offset, (block, (stack, _)) in enumerate(zip(group.period, places, strict=True)):
        number, several = group.first + offset, strides[stack] > 1
        layer = _map_arrays(functools.partial(_entry, seen[stack]), stacks[stack]) if several else stacks[stack]
        seen[stack] += 1
        mixers, convolve = [], None if layer.convs is None else Convolve(layer.convs)
        if layer.attention is not None:
            attend = functools.partial(layer.attention.dense, inputs=with_convolution(inputs(block, choice), convolve))
            if block.shares_kv:
                attend = functools.partial(attend, shared=shared[config.remembered_at(number, is_paged=True)[0]])
            mixers.append(attend)
        if layer.recurrent is not None:
            mixers.append(functools.partial(layer.recurrent.dense, block=block.recurrent))  # type: ignore[arg-type]
        own = None if own_inputs is None else own_inputs[PERIOD, offset]
        x, states = layer(x, block, mixer_of(block, mixers, layer.some_map), own_input=own, convolve=convolve)
        if shared and block.attention is not None and not block.shares_kv:
            pool = config.remembered_at(number, is_paged=True)[0]
            shared = {**shared, pool: states[0]} if pool in shared else shared
    return x, shared, choice.keys


def _map_arrays(function: Callable[[NamedArray], NamedArray], tree):
    return jax.tree.map(function, tree, is_leaf=lambda leaf: isinstance(leaf, NamedArray))


def _entry(index: int, named: NamedArray) -> NamedArray:
    """One of the leading axis."""
    return NamedArray(named.array[index], named.axes[1:])
