"""`DecoderConfig`: a whole decoder, without its parameters, in one form for all families."""

import bisect
import collections
import dataclasses
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from levanter_infer.cache.cache import PoolSpec
from levanter_infer.cache.memory import Memory
from levanter_infer.layers.attention import AttentionBlock
from levanter_infer.layers.branch_conv import KEYS
from levanter_infer.layers.latent_attention import LatentAttentionBlock
from levanter_infer.layers.mlp import DenseBlock
from levanter_infer.layers.moe import ExpertsBlock
from levanter_infer.layers.norm import NormConfig
from levanter_infer.layers.rotary import RopeConfig
from levanter_infer.models.blocks import Block, Stack, describe, find_stacks
from levanter_infer.models.periods import Group, find_periods


@dataclass(frozen=True, eq=False)
class DecoderConfig:
    """The mathematics that a checkpoint's `config.json` describes."""

    model_type: str
    """HF's name of the family."""
    vocab_size: int
    hidden_size: int
    """Width of the residual stream."""
    max_position_embeddings: int
    """Longest sequence that the checkpoint was made for, in tokens."""
    blocks: tuple[Block, ...]
    """One per layer."""
    norm: NormConfig
    """Norm of the last hidden states, before the head."""
    tie_word_embeddings: bool = False
    head_bias: bool = False
    """Whether the head has a bias, even where its weight is that of the embeddings."""
    learnt_positions: bool = False
    """Whether each of `max_position_embeddings` positions has an embedding, added to that of its token."""
    embedding_multiplier: float = 1.0
    """Factor of the embeddings, in the dtype of the parameters."""
    embedding_norm: NormConfig | None = None
    """Norm of the embeddings; None: there is none."""
    logits_divisor: float = 1.0
    logits_multiplier: float = 1.0
    logits_soft_cap: float | None = None
    """Logits become soft_cap · tanh(logit / soft_cap)."""

    def __post_init__(self):
        if not self.attention:
            raise ValueError("no layer attends, expected at least one with attention; others are not implemented")
        experts = {b.feed_forward.num_experts for b in self.blocks if isinstance(b.feed_forward, ExpertsBlock)}
        if len(experts) > 1:
            raise ValueError(f"layers have {' and '.join(map(str, sorted(experts)))} experts, expected one number")
        if len({block.layer_input for block in self.blocks}) > 1:
            raise ValueError("layers have different inputs of their own, expected the same; others are not implemented")
        for number, block in enumerate(self.blocks):
            if block.shares_kv and self.pools[self._shared_pool(block)].layers[0] > number:
                raise ValueError(f"layer {number} shares keys and values, expected an earlier layer that has them")
        sparse = [mixer for mixer in self._latent if mixer.is_sparse]
        if sparse and sparse[0].indexer is None:
            raise ValueError("the first layer with sparse attention shares a choice of keys, expected an indexer")
        if len({mixer.indexer.num_chosen for mixer in sparse if mixer.indexer is not None}) > 1:
            raise ValueError("indexers choose different numbers of keys, expected one; others are not implemented")
        _ = self.groups  # raises where the layers are of too many kinds

    # Both are asked for at every launch of a program, so neither looks at every layer.

    def __eq__(self, other) -> bool:
        if self is other:
            return True
        return self._key == other._key if isinstance(other, DecoderConfig) else NotImplemented

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _key(self) -> tuple:
        """All fields, with each distinct block once and the layers as numbers."""
        others = tuple(getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "blocks")
        kinds = {block: number for number, block in enumerate(dict.fromkeys(self.blocks))}
        return (*others, tuple(kinds), tuple(kinds[block] for block in self.blocks))

    @functools.cached_property
    def _hash(self) -> int:
        return hash(self._key)

    # Layers

    @functools.cached_property
    def groups(self) -> tuple[Group[Block], ...]:
        """The loops that run the layers. Raises: ValueError if they are of too many kinds."""
        return find_periods(self.blocks, describe)

    @functools.cached_property
    def stacks(self) -> tuple[Stack, ...]:
        """Stacks in which the parameters of the layers are stored."""
        return find_stacks(self.blocks)

    def stored_at(self, layer: int) -> tuple[int, int]:
        """The stack with the parameters of a layer, and the layer's index in it."""
        return self._stored[layer]

    @functools.cached_property
    def _stored(self) -> dict[int, tuple[int, int]]:
        return _places([stack.layers for stack in self.stacks])

    @functools.cached_property
    def part_numbers(self) -> tuple[tuple[int, int], ...]:
        """The numbers of each layer's mixer and feed-forward block, counted together through all layers: Nemotron-H
        calls each of them a layer."""
        ends = itertools.accumulate(len(block.parts) for block in self.blocks)
        return tuple((end - len(block.parts), end - 1) for end, block in zip(ends, self.blocks, strict=True))

    @functools.cached_property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The rotary embeddings of all layers, each once."""
        return tuple(dict.fromkeys(mixer.rope for mixer in self.attention if mixer.rope is not None))

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Sliding window of every layer; None sees everything, or does not attend."""
        return tuple(block.attention and block.attention.window for block in self.blocks)

    @property
    def position_limit(self) -> int | None:
        """Tokens of the longest sequence that the model can compute; None: there is no limit."""
        return self.max_position_embeddings if self.learnt_positions else None

    def check_length(self, tokens: int, what: str) -> None:
        """Refuse what the model cannot compute. Args: what: the start of the message. Raises: ValueError"""
        limit = self.position_limit
        if limit is not None and tokens > limit:
            raise ValueError(
                f"{what}: the model has learnt {limit} positions only; sequences of at most {limit} tokens are computed"
            )

    @functools.cached_property
    def num_chosen(self) -> int | None:
        """Keys that an indexer chooses for each token, at most; None: no layer has one."""
        return next((mixer.indexer.num_chosen for mixer in self._latent if mixer.indexer is not None), None)

    def chooses_keys(self, max_seq_len: int) -> bool:
        """Whether attention to sequences of up to `max_seq_len` tokens is sparse: shorter ones have no more tokens than
        an indexer may choose."""
        return self.num_chosen is not None and max_seq_len > self.num_chosen

    @property
    def num_layers(self) -> int:
        return len(self.blocks)

    @functools.cached_property
    def attention(self) -> tuple[AttentionBlock | LatentAttentionBlock, ...]:
        """The attention of the layers that have it, in order."""
        return tuple(block.attention for block in self.blocks if block.attention is not None)

    @property
    def _latent(self) -> list[LatentAttentionBlock]:
        """The attention to latents of the layers that have it, in order."""
        return [mixer for mixer in self.attention if isinstance(mixer, LatentAttentionBlock)]

    @functools.cached_property
    def kv_attention(self) -> tuple[AttentionBlock, ...]:
        """The attention with keys and values of the layers that have it, in order."""
        return tuple(mixer for mixer in self.attention if isinstance(mixer, AttentionBlock))

    @functools.cached_property
    def feed_forward(self) -> DenseBlock | ExpertsBlock:
        """The feed-forward block of the first layer that has one."""
        return next(block.feed_forward for block in self.blocks if block.feed_forward is not None)

    # What layers remember

    @functools.cached_property
    def pools(self) -> tuple[PoolSpec, ...]:
        """The distinct memories of all layers, in the order of their first layers, each with the layers that have it;
        those that share an earlier layer's keys and values have none."""
        layers: dict[Memory, list[int]] = {}
        for number, block in enumerate(self.blocks):
            for memory in block.memories:
                layers.setdefault(memory, []).append(number)
        return tuple(PoolSpec(memory, tuple(numbers)) for memory, numbers in layers.items())

    def remembered_at(self, layer: int, *, is_paged: bool) -> tuple[int, int]:
        """The pool with what a layer remembers in pages, or else in slots, and the layer's index in it; of a layer that
        shares keys and values, those of the last earlier layer that has them."""
        return self._remembered[is_paged][layer]

    @functools.cached_property
    def _remembered(self) -> tuple[dict[int, tuple[int, int]], ...]:
        kinds = (False, True)
        slots, pages = (_places([p.layers if p.memory.is_paged == kind else () for p in self.pools]) for kind in kinds)
        for number, block in enumerate(self.blocks):
            if block.shares_kv:
                pool = self._shared_pool(block)
                pages[number] = pool, bisect.bisect(self.pools[pool].layers, number) - 1
        return slots, pages

    def _shared_pool(self, block: Block) -> int:
        """The pool of keys and values that a block shares. Raises: ValueError if there is none."""
        assert block.attention is not None
        memory = block.attention.memory
        for number, pool in enumerate(self.pools):
            if pool.memory == memory:
                return number
        raise ValueError(f"a layer shares the keys and values of an earlier one with {memory}, and there is none")

    @functools.cached_property
    def shared_pools(self) -> tuple[int, ...]:
        """The pools that layers without keys and values of their own read."""
        return tuple(sorted({self._shared_pool(block) for block in self.blocks if block.shares_kv}))

    @property
    def head_counts(self) -> tuple[tuple[int, int], ...]:
        """(heads, key and value heads) of the layers, each pair once."""
        return tuple(dict.fromkeys((mixer.num_heads, mixer.num_kv_heads) for mixer in self.attention))

    @property
    def unsharded_heads(self) -> str | None:
        """Why the heads of keys and values cannot be sharded over devices; None: they can."""
        if any(KEYS in dict(block.convs.channels) for block in self.blocks if block.convs is not None):
            return "keys pass a short convolution"
        return "layers leave out some heads of keys" if any(a.unused_kv_heads for a in self.kv_attention) else None

    # Sizes of the first layer with attention

    @property
    def num_heads(self) -> int:
        return self.attention[0].num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.attention[0].num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.attention[0].head_dim

    @functools.cached_property
    def value_dim(self) -> int | None:
        """Numbers of a latent that are its value too (`AttentionCall.value_dim`); None: no layer has latents."""
        return next((mixer.latent_dim for mixer in self._latent), None)

    @functools.cached_property
    def index_dim(self) -> int:
        """Numbers of an index key; 0: no layer has an indexer."""
        return max((mixer.index_dim for mixer in self._latent), default=0)

    @functools.cached_property
    def expert_layers(self) -> tuple[int, ...]:
        """Numbers of the layers with experts."""
        return tuple(i for i, block in enumerate(self.blocks) if isinstance(block.feed_forward, ExpertsBlock))

    @property
    def expert_blocks(self) -> tuple[ExpertsBlock, ...]:
        """The feed-forward blocks of experts, one per layer that has one."""
        return tuple(self.blocks[layer].feed_forward for layer in self.expert_layers)  # type: ignore[return-value]

    @functools.cached_property
    def experts(self) -> ExpertsBlock | None:
        """The first feed-forward block of experts; None: no layer has one."""
        return next(iter(self.expert_blocks), None)

    @property
    def num_experts(self) -> int | None:
        """None: no layer has experts."""
        return None if self.experts is None else self.experts.num_experts

    # Counts

    @property
    def num_parameters(self) -> int:
        """Parameters of the model, from the sizes alone."""
        rows = (
            self.vocab_size * (1 if self.tie_word_embeddings else 2)
            + self.max_position_embeddings * self.learnt_positions
        )
        tables = rows * self.hidden_size + self.vocab_size * self.head_bias
        counts = collections.Counter(self.blocks).items()
        layers = sum(n * block.num_parameters(self.hidden_size) for block, n in counts)
        norms = (norm for norm in (self.embedding_norm, self.norm) if norm is not None)
        inputs = (self.vocab_size + self.hidden_size) * self.num_layers * self.layer_input_width
        of_inputs = inputs + self.norm.num_parameters(self.layer_input_width)
        return tables + layers + of_inputs + sum(norm.num_parameters(self.hidden_size) for norm in norms)

    @functools.cached_property
    def layer_input_width(self) -> int:
        """Numbers of each layer's own input; 0: layers have none."""
        own = self.blocks[0].layer_input
        return 0 if own is None else own.width

    @property
    def num_expert_parameters(self) -> int:
        """Those of them that belong to experts, without the routers."""
        blocks = (b.feed_forward for b in self.blocks)
        return sum(b.num_expert_parameters(self.hidden_size) for b in blocks if isinstance(b, ExpertsBlock))


def _places(parts: Sequence[tuple[int, ...]]) -> dict[int, tuple[int, int]]:
    """The part that each layer is in, and its index in that part. Args: parts: the layers of each."""
    return {layer: (number, index) for number, layers in enumerate(parts) for index, layer in enumerate(layers)}
