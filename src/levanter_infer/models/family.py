"""`Family`: the parts of one model family, and those that families of the Llama kin share."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from levanter_infer.layers.activation import Activation
from levanter_infer.layers.attention import AttentionBlock
from levanter_infer.layers.mlp import DenseBlock
from levanter_infer.layers.norm import NormConfig
from levanter_infer.layers.rotary import RopeConfig
from levanter_infer.models.blocks import Block
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.hf_config import FULL, SLIDING, HfConfig
from levanter_infer.models.tensors import Tensor, replaced, tensor_table

MAX_LAYERS = 10_000
"""More is taken for a broken config.json."""


@dataclass(frozen=True)
class Family:
    """One `model_type` of HF."""

    model_type: str
    architecture: str
    """HF's class name, written to config.json."""
    config_from_hf: Callable[[Mapping[str, Any]], DecoderConfig]
    """Raises ValueError, naming the key, for whatever it cannot honour."""
    config_to_hf: Callable[[DecoderConfig], dict[str, Any]]
    """The inverse: `config_from_hf(config_to_hf(c)) == c`."""
    tensors: tuple[Tensor, ...]
    """Where a checkpoint has the parameters; lines of parameters that a model does not have are skipped."""
    prefixes: tuple[tuple[str, str], ...] = ()
    """Starts of tensor names in a checkpoint, and what stands for them in `tensors`; other names stay."""
    experts_in_out: bool = False
    """Whether transformers keeps all experts of a layer in one parameter [expert, in, out] without saying so
    (`is_transposed`), so that PEFT takes the inputs for outputs."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Parts of tensor names in some checkpoints, and what stands for them in `tensors`."""
    unused: tuple[str, ...] = ()
    """Starts of the names of tensors that belong to other parts of a multimodal model, and are not read."""
    derived: tuple[str, ...] = ("rotary_emb.inv_freq",)
    """Ends of the names of tensors that old checkpoints carry and that are computed here."""
    alternatives: tuple[Tensor, ...] = ()
    """Lines that a checkpoint may have instead of those of `tensors` with the same parameters."""
    extra_layers_key: str | None = None
    """Key of the number of layers behind the last one, for multi-token prediction, whose tensors are not read."""

    unread: Callable[[Mapping[str, Any]], tuple[str, ...]] = lambda raw: ()
    """Starts of names of `tensors` that a checkpoint with this config.json may have and that are not read."""

    def tensor_of(self, parameter: str) -> str | None:
        """The tensor that holds a parameter, by its line of `tensors`; None: the family does not have it."""
        return next((tensor.name for tensor in self.tensors if parameter in tensor.parameters), None)

    def table_for(self, names: Iterable[str]) -> tuple[Tensor, ...]:
        """The lines of a checkpoint with tensors of these names."""
        names = list(names) if self.alternatives else ()
        return replaced(self.tensors, *(line for line in self.alternatives if any(map(line.is_for, names))))

    def unused_names(self, raw: Mapping[str, Any]) -> tuple[str, ...]:
        """Starts of the names of tensors that are not read, with this config.json."""
        text = raw.get("text_config", raw)
        text = text if isinstance(text, Mapping) else {}
        extra = 0 if self.extra_layers_key is None else text.get(self.extra_layers_key) or 0
        if extra > MAX_LAYERS:
            raise ValueError(f"config.json: {self.extra_layers_key}={extra}, expected at most {MAX_LAYERS}")
        last = text.get("num_hidden_layers", 0)
        return (*self.unused, *(f"model.layers.{last + i}." for i in range(extra)))

    def own_names(self, names: Iterable[str], raw: Mapping[str, Any]) -> dict[str, str]:
        """The tensors of a checkpoint that this family reads, by the names of its table. Args: raw: its config.json.

        Raises: ValueError if two are the same one.
        """
        found, unused, unread = {}, self.unused_names(raw), self.unread(raw)
        for name in names:
            if not name.startswith(unused) and not name.endswith(self.derived):
                prefix, instead = next((pair for pair in self.prefixes if name.startswith(pair[0])), ("", ""))
                own = instead + name.removeprefix(prefix)
                for part, other in self.renamed:
                    own = own.replace(part, other)
                if own in found:
                    raise ValueError(f"tensors {found[own]!r} and {name!r} are both {own!r}; leave one out")
                if not own.startswith(unread):
                    found[own] = name
        return found


TENSOR_NAMES = {
    "embeddings.weight": "model.embed_tokens.weight",
    **{
        f"layers.attention.{name}_proj.{kind}": f"model.layers.{{layer}}.self_attn.{name}_proj.{kind}"
        for name in "qkvo"
        for kind in ("weight", "bias")
    },
    **{
        f"layers.{norm}.{kind}": f"model.layers.{{layer}}.{name}.{kind}"
        for norm, name in {
            "input_norm": "input_layernorm",
            "attention.q_norm": "self_attn.q_norm",
            "attention.k_norm": "self_attn.k_norm",
            "mlp_norm": "post_attention_layernorm",
        }.items()
        for kind in ("weight", "bias")
    },
    **{
        f"layers.mlp.{name}_proj.{kind}": f"model.layers.{{layer}}.mlp.{name}_proj.{kind}"
        for name in ("gate", "up", "down")
        for kind in ("weight", "bias")
    },
    "norm.weight": "model.norm.weight",
    "norm.bias": "model.norm.bias",
    "lm_head.weight": "lm_head.weight",
    "lm_head.bias": "lm_head.bias",
    "embeddings.bias": "lm_head.bias",
}
"""The names that Llama, Mistral, Qwen2 and Qwen3 share. A head that is the embeddings has a bias of its own."""
LLAMA_TENSORS = tensor_table(TENSOR_NAMES)


def renamed_tensors(names: Mapping[str, str]) -> dict[str, str]:
    """`TENSOR_NAMES` with parts of the tensors' names replaced. Args: names: what stands for each part."""

    def renamed(name: str) -> str:
        for part, instead in names.items():
            name = name.replace(part, instead)
        return name

    return {path: renamed(name) for path, name in TENSOR_NAMES.items()}


ACTIVATION_NAMES = {activation: (activation.value,) for activation in Activation} | {
    Activation.SILU: ("silu", "swish"),
    Activation.GELU_TANH: ("gelu_pytorch_tanh", "gelu_new", "gelu_fast"),
}
"""The values of `hidden_act` that name an activation."""
PLAIN_ACTIVATIONS = tuple(activation for activation in Activation if activation is not Activation.XIELU)
"""Those without parameters."""


@dataclass(frozen=True)
class Sizes:
    """Values that all families read alike from a config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    norm_eps: float
    rope: RopeConfig
    local_rope: RopeConfig
    """Rope of layers with a window; as a rule the same."""
    activation: Activation
    tie_word_embeddings: bool

    def attention(self, **changes) -> AttentionBlock:
        """Attention of these sizes; `changes`: fields of `AttentionBlock`."""
        sizes = (self.num_heads, self.num_kv_heads, self.head_dim)
        rope = self.rope if changes.get("window") is None else self.local_rope
        return AttentionBlock(*sizes, **{"rope": rope, **changes})

    def dense(self, **changes) -> DenseBlock:
        """A feed-forward block of these sizes; `changes`: fields of `DenseBlock`."""
        return DenseBlock(self.intermediate_size, self.activation, **changes)

    def norm(self, **changes) -> NormConfig:
        """An RMSNorm with the epsilon of these sizes."""
        return NormConfig(self.norm_eps, **changes)

    def decoder(self, model_type: str, blocks: Sequence[Block], **fields) -> DecoderConfig:
        """The decoder of these layers. `fields`: further ones of `DecoderConfig`."""
        return DecoderConfig(
            model_type=model_type,
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            max_position_embeddings=self.max_position_embeddings,
            blocks=tuple(blocks),
            norm=blocks[0].norm,
            tie_word_embeddings=self.tie_word_embeddings,
            **fields,
        )


def read_sizes(
    hf: HfConfig,
    *,
    kv_heads: int | None,
    head_dim: int | None,
    max_positions: int,
    tied: bool = False,
    norm_eps: float = 1e-6,
    norm_eps_key: str | None = "rms_norm_eps",
    width_key: str = "intermediate_size",
    theta: float = 10000.0,
    activation: Activation = Activation.SILU,
    activation_names: tuple[str, ...] = (),
    activations: tuple[Activation, ...] = (),
    inner_factor: int | None = None,
    ropes: Callable[[HfConfig, int, int], dict[str, RopeConfig]] | None = None,
) -> Sizes:
    """Read the keys that all families have.

    Args:
        kv_heads: HF's default where the key is absent; None for as many as query heads.
        head_dim: HF's default where the key is absent; None for hidden_size / num_attention_heads.
        max_positions, tied, norm_eps, theta: HF's defaults where the keys are absent.
        norm_eps_key: HF's name of the epsilon; None: it is `norm_eps`, whatever the file says.
        width_key: HF's name of the inner width of feed-forward blocks.
        activation: the one that the family has, or HF's default of several.
        activation_names: further values of `hidden_act` that mean it.
        activations: those that a file may choose from; empty: `activation` alone.
        inner_factor: intermediate_size is so many times hidden_size where the key is absent or null; None: it has to
            be there.
        ropes: reads the ropes of full and sliding layers, given head size and longest position; None: `HfConfig.rope`
            is both.
    """
    hidden, heads = hf.count("hidden_size"), hf.count("num_attention_heads")
    kv_heads = hf.count("num_key_value_heads", heads if kv_heads is None else kv_heads, null=heads)
    if head_dim is None or ("head_dim" in hf.raw and hf.raw["head_dim"] is None):
        if hf.raw.get("head_dim") is None and hidden % heads:
            raise hf.fail("hidden_size", f"a multiple of num_attention_heads={heads}, or an explicit head_dim")
        head_dim = hidden // heads
    head_dim = hf.count("head_dim", head_dim, null=head_dim)
    if heads % kv_heads:
        raise hf.fail("num_attention_heads", f"a multiple of num_key_value_heads={kv_heads}")
    if head_dim % 2:
        raise hf.fail("head_dim", f"an even number, got {head_dim}")
    named = {name: each for each in activations or (activation,) for name in ACTIVATION_NAMES[each]}
    named |= dict.fromkeys(activation_names, activation)
    inner = None if inner_factor is None else inner_factor * hidden
    max_positions = hf.count("max_position_embeddings", max_positions)
    by_kind = (ropes or functools.partial(one_rope, theta=theta))(hf, head_dim, max_positions)
    return Sizes(
        vocab_size=hf.count("vocab_size"),
        hidden_size=hidden,
        intermediate_size=hf.count(width_key, inner, null=inner),
        num_layers=hf.count("num_hidden_layers", most=MAX_LAYERS),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        norm_eps=norm_eps if norm_eps_key is None else hf.number(norm_eps_key, norm_eps),
        rope=by_kind[FULL],
        local_rope=by_kind[SLIDING],
        activation=named[hf.one_of("hidden_act", activation.value, tuple(named))],
        tie_word_embeddings=hf.flag("tie_word_embeddings", tied),
    )


def one_rope(hf: HfConfig, head_dim: int, max_positions: int, **options) -> dict[str, RopeConfig]:
    """The rope of full and of sliding layers. `options`: as in `HfConfig.rope`."""
    return dict.fromkeys((FULL, SLIDING), hf.rope(head_dim, max_positions, **options))


def common_to_hf(config: DecoderConfig, ropes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The keys of config.json that all families write alike.

    Args: ropes: the keys of the ropes, for families that have several.
    """
    feed_forward = config.feed_forward
    rope = config.ropes[0] if config.ropes else RopeConfig()
    return {
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": feed_forward.width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": feed_forward.activation.value,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.norm.eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        **(rope_to_hf(rope, config.max_position_embeddings) if ropes is None else ropes),
    }


def renamed_keys(config: DecoderConfig, names: Mapping[str, str], drop: Sequence[str] = ()) -> dict[str, Any]:
    """`common_to_hf` in the names of a family. Args: names: what stands for a key; drop: keys that it does not have."""
    return {names.get(key, key): value for key, value in common_to_hf(config).items() if key not in drop}


def rope_to_hf(rope: RopeConfig, max_position_embeddings: int) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`, in the spelling that every release of HF transformers reads."""
    if rope.partial != 1:
        whole = rope_to_hf(dataclasses.replace(rope, partial=1.0), max_position_embeddings)
        return {**whole, "partial_rotary_factor": rope.partial}
    if rope.kind == "default":
        return {"rope_theta": rope.theta, "rope_scaling": None}
    scaling: dict[str, Any] = {"rope_type": rope.kind}
    keys = "factor attention_factor beta_fast beta_slow mscale mscale_all_dim truncate low_freq_factor high_freq_factor"
    for key in keys.split():
        if getattr(rope, key) is not None:
            scaling[key] = getattr(rope, key)
    if rope.query_beta is not None:
        scaling["llama_4_scaling_beta"] = rope.query_beta
    for key in ("short_factor", "long_factor"):
        if getattr(rope, key) is not None:
            scaling[key] = list(getattr(rope, key))
    if rope.kind in ("yarn", "llama3"):
        scaling["original_max_position_embeddings"] = rope.original_len
    keys = {"rope_theta": rope.theta, "rope_scaling": scaling}
    if rope.kind == "longrope" and rope.original_len != max_position_embeddings:
        # Beside rope_scaling, where HF looks for it; it then derives the factor itself.
        del scaling["factor"]
        keys["original_max_position_embeddings"] = rope.original_len
    return keys


def windows_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """`sliding_window` and `layer_types`."""
    size = next((window for window in config.windows if window is not None), None)
    return {
        "sliding_window": size,
        "layer_types": [FULL if window is None else SLIDING for window in config.windows],
    }


def ropes_by_kind_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """`rope_parameters` with an entry for full and for sliding layers, as transformers 5 writes it."""
    ropes = {
        FULL if mixer.window is None else SLIDING: mixer.rope for mixer in config.kv_attention if mixer.rope is not None
    }
    longest = config.max_position_embeddings
    return {"rope_parameters": {kind: rope_parameters(rope, longest) for kind, rope in ropes.items()}}


def rope_parameters(rope: RopeConfig, max_position_embeddings: int) -> dict[str, Any]:
    """The object `rope_parameters` of one rope."""
    keys = rope_to_hf(rope, max_position_embeddings)
    return {**(keys.pop("rope_scaling") or {"rope_type": "default"}), **keys}
