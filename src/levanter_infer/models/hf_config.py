"""Strict reading of HF `config.json`: every key is read, neutral, informational, or refused by name."""

import dataclasses
import difflib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from levanter_infer.layers.rotary import ROPE_KINDS, RopeConfig

FULL, SLIDING = "full_attention", "sliding_attention"
"""Entries of `layer_types`."""

INFORMATIONAL = frozenset(
    # About the file, the tokenizer or the library.
    "_name_or_path _commit_hash architectures transformers_version model_type torch_dtype dtype use_cache "
    "cache_implementation "
    "bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id decoder_start_token_id tokenizer_class "
    "initializer_range return_dict output_hidden_states output_attentions torchscript use_bfloat16 "
    "tf_legacy_loss id2label label2id num_labels problem_type finetuning_task task_specific_params prefix "
    "_attn_implementation attn_implementation _attn_implementation_autoset _flash_attn_2_enabled "
    "model_max_length max_sequence_length "  # of Cohere's and Meta's own files; HF goes by max_position_embeddings
    "transformers.js_config unsloth_version unsloth_fixed gradient_checkpointing is_llama_config "
    # Of training only.
    "attention_dropout hidden_dropout residual_dropout embedding_dropout classifier_dropout attn_pdrop resid_pdrop "
    "embd_pdrop attention_probs_dropout_prob hidden_dropout_prob router_aux_loss_coef output_router_logits "
    "router_jitter_noise aux_loss_alpha seq_aux embedding_initializer_range "
    # Defaults of generation; the request says what holds.
    "max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature "
    "top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size "
    "bad_words_ids num_return_sequences output_scores return_dict_in_generate forced_bos_token_id "
    "forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens "
    "begin_suppress_tokens".split()
)
"""Keys that do not touch the mathematics of the forward pass."""

NEUTRAL: dict[str, tuple] = {
    "pretraining_tp": (1, None),
    "is_encoder_decoder": (False,),
    "is_decoder": (False, True),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": (False,),
    "chunk_size_feed_forward": (0,),
    "pruned_heads": (None, {}),
    "activation": ("swiglu", "silu", None),
    "partial_rotary_factor": (1, None),
    "attention_bias": (False, None),
    "rope_interleaved": (False, None),
    "use_mrope": (False, None),
    "quantization_config": (None,),
    "compression_config": (None,),
    "auto_map": (None, {}),
}
"""Keys that would change the mathematics, and the values at which they do not."""

_ROPE_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ("original_max_position_embeddings",)),
    "yarn": (
        ("factor",),
        (
            *("original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
            *("mscale", "mscale_all_dim", "truncate"),
        ),
    ),
    "longrope": (
        ("short_factor", "long_factor"),
        ("factor", "attention_factor", "original_max_position_embeddings"),
    ),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "proportional": ((), ("factor",)),
}
"""Keys that each kind of rope must have, and may have."""


_ROPE_NEUTRAL: dict[str, dict[str, tuple]] = {"yarn": {"attn_factor": (1, None), "extrapolation_factor": (1, None)}}
"""Keys of each kind of rope that HF ignores and vLLM applies, and the values at which they agree."""


class HfConfig:
    """A `config.json` that is read key by key, and that complains in the end about keys that were not read.

    Errors are `ValueError`s that name the key, what it held, and what was expected.
    """

    def __init__(self, raw: Mapping[str, Any], names: Mapping[str, str] = MappingProxyType({})):
        """Args: names: what the files of a family call a key, by the name that other families have for it."""
        self.raw = dict(raw)
        self._names = names
        self._read: set[str] = set()
        for key, own in names.items():
            if own in raw and key in raw and raw[key] != raw[own]:
                raise ValueError(f"config.json: {own}={raw[own]!r} but {key}={raw[key]!r}; leave one out")
            if own in raw:
                self.raw[key] = self.raw.pop(own)

    def _name(self, key: str) -> str:
        """The name of a key in error messages."""
        return self._names.get(key, key)

    def _get(self, key: str, default: Any) -> Any:
        self._read.add(key)
        return self.raw.get(key, default)

    def fail(self, key: str, expected: str) -> ValueError:
        return ValueError(f"config.json: {self._name(key)}={self.raw.get(key)!r}, expected {expected}")

    def count(self, key: str, default: int | None = None, *, null: int | None = None, most: int = 2**31 - 1) -> int:
        """A whole number from 1 to `most`. `null`: what an explicit null stands for."""
        value = self._get(key, default)
        if value is None and null is not None:
            return null
        if value is None and key not in self.raw:
            raise ValueError(f"config.json: {self._name(key)} is missing, expected a whole number of at least 1")
        if type(value) is not int or not 0 < value <= most:
            raise self.fail(key, f"a whole number from 1 to {most}")
        return value

    def optional_count(self, key: str, default: int | None = None) -> int | None:
        return None if self._get(key, default) is None else self.count(key, default)

    def size(self, key: str, default: int) -> int:
        """A whole number of at least 0."""
        value, most = self._get(key, default), 2**31 - 1
        if type(value) is not int or not 0 <= value <= most:
            raise self.fail(key, f"a whole number from 0 to {most}")
        return value

    def counts(self, key: str, num_layers: int, default: int) -> list[int]:
        """A whole number of at least 1 for every layer, or one for all of them."""
        value = self._get(key, default)
        if not isinstance(value, list):
            return [self.count(key, default)] * num_layers
        if len(value) != num_layers or any(type(each) is not int or each < 1 for each in value):
            raise self.fail(key, f"a whole number of at least 1, or one for each of num_hidden_layers={num_layers}")
        return value

    def number(self, key: str, default: float) -> float:
        """A finite number above 0."""
        return _number("config.json", self._name(key), self._get(key, default))

    def optional_number(self, key: str, default: float | None) -> float | None:
        return None if self._get(key, default) is None else self.number(key, default or 0.0)

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """A list of finite numbers above 0; ones where the key is absent or null."""
        value = self._get(key, None)
        if value is None:
            return (1.0,) * count
        if not isinstance(value, list) or len(value) != count:
            raise self.fail(key, f"a list of {count} numbers")
        return tuple(_number("config.json", key, each) for each in value)

    def flags(self, key: str, default: list[bool]) -> list[bool]:
        """True or false (or 1 or 0) for every entry of `default`, which stands for null. More entries are ignored."""
        value = self._get(key, None)
        if value is None:
            return default
        if not isinstance(value, list) or len(value) < len(default) or any(each not in (0, 1) for each in value):
            raise self.fail(key, f"a list of at least {len(default)} times true or false")
        return [bool(each) for each in value[: len(default)]]

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.fail(key, "true or false")
        return value

    def one_of(self, key: str, default: str, allowed: Sequence[str]) -> str:
        value = self._get(key, default)
        if value not in allowed:
            raise self.fail(key, f"one of {', '.join(allowed)}: nothing else is implemented")
        return value

    def layers(self, key: str, num_layers: int) -> frozenset[int]:
        """A list of numbers of layers; empty where the key is absent or null."""
        value = self._get(key, None) or []
        if not isinstance(value, list) or any(type(each) is not int or not 0 <= each < num_layers for each in value):
            raise self.fail(key, f"a list of numbers of layers, each less than num_hidden_layers={num_layers}")
        return frozenset(value)

    def names(self, key: str, allowed: Sequence[str]) -> tuple[str, ...] | None:
        """A list of names, or None where the key is absent or null."""
        value = self._get(key, None)
        if value is None:
            return None
        if not isinstance(value, list) or any(item not in allowed for item in value):
            raise self.fail(key, f"a list of {' and '.join(allowed)}")
        return tuple(value)

    def only(self, key: str, *allowed: Any) -> None:
        """Accept an absent key, or one of the values at which it changes nothing."""
        if self._get(key, allowed[0]) not in allowed:
            values = " or ".join(repr(value) for value in allowed)
            raise self.fail(key, f"{values}: this checkpoint needs something that is not implemented")

    def ignore(self, *keys: str) -> None:
        """Accept keys that change nothing in this family."""
        self._read.update(keys)

    def text_config(self, *others: str) -> dict[str, Any]:
        """The configuration of the text model within that of a multimodal parent.

        Where both say differently whether the head is the embeddings, it is not: transformers 5 writes its own default
        into parents whose files had none, and loads a head that is stored. `ties_differ` tells of it.

        Args: others: keys of other parts.
        """
        text = self._get("text_config", None)
        if not isinstance(text, dict):
            raise self.fail("text_config", "an object: the configuration of the text model")
        self._read.update(others)
        tied = self._get("tie_word_embeddings", None)
        if tied is None:
            return text
        return {**text, "tie_word_embeddings": False if ties_differ(self.raw) else tied}

    def own_code(self, *modules: str) -> None:
        """Accept an `auto_map` that names these modules alone: their mathematics is that of the class in HF."""
        names = self._get("auto_map", None) or {}
        named = (
            [str(name).split("--")[-1].rpartition(".")[0] for name in names.values()]
            if isinstance(names, dict)
            else [""]
        )
        if any(name not in modules for name in named):
            raise self.fail("auto_map", f"none, or classes of {' and '.join(modules)}: other code is not run")

    def rope(
        self,
        head_dim: int,
        max_position_embeddings: int,
        *,
        theta: float = 10000.0,
        partial: bool = False,
        default_partial: float = 1.0,
        interleaved: bool = False,
        query_beta: bool = False,
        original_len: int | None = None,
        aliases: Mapping[str, str] = MappingProxyType({}),
        fixed_alpha: bool = False,
    ) -> RopeConfig:
        """The rope, from `rope_theta` and `rope_scaling`, or from the newer `rope_parameters`.

        Args:
            theta: HF's default.
            partial: whether the family rotates a part of a head where `partial_rotary_factor` says so.
            default_partial: HF's default of that key.
            interleaved: whether the family's pairs are neighbours.
            query_beta: whether the family scales queries by their positions; `llama_4_scaling_beta` has to be there.
            original_len: HF's default of `original_max_position_embeddings`, for families that have this key even where
                their rope has no use for it.
            aliases: other names of rope types.
            fixed_alpha: whether a dynamic rope with an `alpha` is one of a larger theta, and nothing else (Hunyuan).
        """
        old, new = self._get("rope_scaling", None), self._get("rope_parameters", None)
        if old is not None and new is not None and old != new:
            raise ValueError("config.json: rope_scaling and rope_parameters contradict each other; leave one out")
        where = "rope_scaling" if new is None else "rope_parameters"
        scaling = old if new is None else new
        if scaling is not None and not isinstance(scaling, dict):
            raise self.fail(where, "null or an object")
        scaling = dict(scaling or {})
        theta = self._shared(scaling, where, "rope_theta", theta)
        original = self._shared(scaling, where, "original_max_position_embeddings", original_len)
        share = self._shared(scaling, where, "partial_rotary_factor", default_partial)
        beta = self._query_beta(scaling, where, original) if query_beta else None
        kind = _rope_kind(scaling, where, aliases)
        partial = partial or kind == "proportional"
        if share != 1 and not partial or share > 1:
            raise ValueError(
                f"config.json: partial_rotary_factor={share!r}, expected 1{' or less' if partial else ''}: this family "
                "rotates whole heads"
            )
        if original_len is not None and kind != "longrope":
            original = None
        elif kind != "longrope" and self.raw.get("original_max_position_embeddings") is not None:
            raise self.fail("original_max_position_embeddings", f"none with rope type {kind!r}")
        if original is not None:
            scaling["original_max_position_embeddings"] = original
        rotated = head_dim if kind == "proportional" else int(head_dim * share)
        if rotated < 2 or rotated % 2:
            raise ValueError(f"config.json: partial_rotary_factor={share!r} of head_dim={head_dim} is {rotated}, odd")
        if fixed_alpha and kind == "dynamic" and scaling.get("alpha"):
            stretch = _number(f"config.json: {where}", "alpha", scaling["alpha"])
            kind, theta, scaling = "default", theta * stretch ** (rotated / (rotated - 2)), {}
        rope = parse_rope(kind, float(theta), scaling, where, rotated, max_position_embeddings)
        return dataclasses.replace(rope, partial=share, interleaved=interleaved, query_beta=beta)

    def _query_beta(self, scaling: dict, where: str, original: float | None) -> float | None:
        """Take the keys of query scaling out of the rope object; None for a beta of 0, which scales nothing."""
        scaling.pop("max_position_embeddings", None)  # HF has no use for it here
        if scaling.get("llama_4_scaling_beta") is None or original is None:
            raise ValueError(
                f"config.json: {where}={scaling}, expected llama_4_scaling_beta and original_max_position_embeddings: "
                "this family scales queries by their positions"
            )
        beta = scaling.pop("llama_4_scaling_beta")
        return None if _is_zero(beta) else _number(f"config.json: {where}", "llama_4_scaling_beta", beta)

    def ropes_by_kind(
        self,
        head_dim: int,
        max_position_embeddings: int,
        *,
        theta: float,
        local_theta: float | None,
        full_head_dim: int | None = None,
    ) -> dict[str, RopeConfig]:
        """The ropes of full and of sliding layers, by the names of `layer_types`: from `rope_parameters` with an entry
        for each; or from `rope_theta` and `rope_scaling`, which then scales full layers only.

        Args:
            theta: HF's default of full layers.
            local_theta: HF's default of sliding layers, whose key is `rope_local_base_freq`; None: they have that of
                full layers.
            full_head_dim: head size of full layers; None: they have that of sliding ones.
        """
        new = self._get("rope_parameters", None)
        default_local = theta if local_theta is None else local_theta
        if isinstance(new, dict) and set(new) & {FULL, SLIDING}:
            for key in ("rope_theta", "rope_scaling", "rope_local_base_freq"):
                self.only(key, None)
            neutral = {"rope_type": "default", "rope_theta": None}  # what transformers adds beside the kinds
            for key in new:
                if key not in (FULL, SLIDING) and not (key in neutral and new[key] == neutral[key]):
                    raise _unknown(f"config.json: rope_parameters.{key}={new[key]!r}", key, (FULL, SLIDING))
            parts = {kind: HfConfig({"rope_parameters": new.get(kind)}) for kind in (FULL, SLIDING)}
            kinds = {FULL: (full_head_dim or head_dim, theta), SLIDING: (head_dim, default_local)}
            return {k: parts[k].rope(d, max_position_embeddings, theta=theta) for k, (d, theta) in kinds.items()}
        if new:
            raise self.fail("rope_parameters", f"an entry for each of {FULL} and {SLIDING}: HF ignores any other")
        full = self.rope(head_dim, max_position_embeddings, theta=theta)
        local = full.theta if local_theta is None else self.number("rope_local_base_freq", local_theta)
        return {FULL: full, SLIDING: RopeConfig(theta=local)}

    def windows(
        self, num_layers: int, window: int | None, pattern: Callable[[int], bool], needs: str = "a sliding_window"
    ) -> tuple[int | None, ...]:
        """The window of every layer, from `layer_types`, or where that is absent by a rule.

        Args:
            window: of sliding layers.
            pattern: whether layer i has a window.
            needs: the keys that give sliding layers a window, for the error.
        """
        kinds = self.names("layer_types", (FULL, SLIDING))
        if kinds is None:
            kinds = tuple(SLIDING if pattern(i) else FULL for i in range(num_layers))
        if len(kinds) != num_layers:
            raise self.fail("layer_types", f"one entry for each of num_hidden_layers={num_layers}")
        if window is None and SLIDING in kinds:
            raise self.fail("layer_types", f"no {SLIDING!r} without {needs}")
        return tuple(window if kind == SLIDING else None for kind in kinds)

    def _shared(self, scaling: dict, where: str, key: str, default):
        """Take a key out of the rope object or from beside it; in both it must be the same."""
        outer, inner = self._get(key, None), scaling.pop(key, None)
        if outer is not None and inner is not None and outer != inner:
            raise ValueError(
                f"config.json: {self._name(key)}={outer!r} but {where}.{key}={inner!r}; they must be equal"
            )
        value = inner if outer is None else outer
        return default if value is None else _number("config.json", self._name(key), value)

    def finish(self) -> None:
        """Refuse every key that is neither read, informational, nor at a neutral value."""
        for key, allowed in NEUTRAL.items():
            if key in self.raw and key not in self._read:
                self.only(key, *allowed)
        known = self._read | INFORMATIONAL | set(NEUTRAL)
        for key in self.raw:
            if key not in known:
                raise _unknown(f"config.json: key {key!r} (value {self.raw[key]!r})", key, known)


def parse_rope(
    kind: str, theta: float, scaling: Mapping[str, Any], where: str, head_dim: int, max_position_embeddings: int
) -> RopeConfig:
    """Check the keys of one rope kind and fill in what HF derives.

    Where the original length is not given, HF takes `max_position_embeddings` for it, and writes that when it saves.
    Where longrope gives another one, its factor is the ratio of the two, and a `factor` beside it must agree.
    """
    required, optional = _ROPE_KEYS[kind]
    for key in required:
        if scaling.get(key) is None:
            raise ValueError(f"config.json: {where} of type {kind!r} lacks {key}")
    neutral = _ROPE_NEUTRAL.get(kind, {})
    for key, allowed in neutral.items():
        if scaling.get(key) not in allowed:
            raise ValueError(
                f"config.json: {where}.{key}={scaling[key]!r}, expected {allowed[0]}: HF ignores this key and vLLM "
                "multiplies by it; say what holds with attention_factor"
            )
    scaling = {key: value for key, value in scaling.items() if key not in neutral}
    for key in scaling:
        if key not in (*required, *optional):
            raise _unknown(f"config.json: {where}.{key}={scaling[key]!r}", key, (*required, *optional))
    unset = {key for key in ("mscale", "mscale_all_dim") if _is_zero(scaling.get(key))}  # as HF takes a 0
    values: dict[str, Any] = {k: value for k, value in scaling.items() if value is not None and k not in unset}
    original = values.pop("original_max_position_embeddings", None)
    for key in ("short_factor", "long_factor"):
        if key in values:
            values[key] = _divisors(where, key, values[key], head_dim // 2)
    truncate = values.pop("truncate", None)
    if truncate is not None and not isinstance(truncate, bool):
        raise ValueError(f"config.json: {where}.truncate={truncate!r}, expected true or false")
    values = {k: v if isinstance(v, tuple) else _number(f"config.json: {where}", k, v) for k, v in values.items()}
    if values.get("factor", 1.0) < 1:
        raise ValueError(f"config.json: {where}.factor={values['factor']!r}, expected at least 1")
    original = _original_len(kind, original, where, max_position_embeddings)
    if kind == "longrope":
        values["factor"] = _longrope_factor(values.get("factor"), scaling, where, original, max_position_embeddings)
    if kind == "llama3" and values["high_freq_factor"] <= values["low_freq_factor"]:
        raise ValueError(f"config.json: {where}.high_freq_factor must exceed low_freq_factor, got {dict(scaling)}")
    return RopeConfig(kind=kind, theta=theta, original_len=original, truncate=truncate, **values)


def _original_len(kind: str, given, where: str, max_position_embeddings: int) -> int | None:
    if kind in ("default", "linear", "proportional"):
        return None
    if given is None:
        return max_position_embeddings
    if given != int(given):
        raise ValueError(f"config.json: {where}.original_max_position_embeddings={given!r}, expected a whole number")
    if kind == "dynamic" and given != max_position_embeddings:
        raise ValueError(
            f"config.json: {where}.original_max_position_embeddings={given} with rope type 'dynamic', expected "
            f"max_position_embeddings={max_position_embeddings}: HF scales from the latter"
        )
    return int(given)


def _longrope_factor(given, scaling: Mapping, where: str, original: int | None, max_positions: int) -> float:
    if scaling.get("original_max_position_embeddings") is None:
        if given is None and scaling.get("attention_factor") is None:
            raise ValueError(
                f"config.json: {where} of type 'longrope' needs factor, attention_factor or "
                "original_max_position_embeddings"
            )
        return 1.0 if given is None else given
    assert original is not None
    ratio = max_positions / original
    if given is not None and ratio == 1:
        return given
    if given is not None and given != ratio:
        raise ValueError(
            f"config.json: {where}.factor={given} but max_position_embeddings / original_max_position_embeddings is "
            f"{ratio}; make them agree"
        )
    return ratio


def ties_differ(raw: Mapping[str, Any]) -> bool:
    """Whether a multimodal parent and its text model say differently whether the head is the embeddings."""
    text = raw.get("text_config")
    both = [each.get("tie_word_embeddings") for each in (raw, text if isinstance(text, Mapping) else {})]
    return None not in both and both[0] != both[1]


def _rope_kind(scaling: dict, where: str, aliases: Mapping[str, str]) -> str:
    given = [value for value in (scaling.pop("rope_type", None), scaling.pop("type", None)) if value is not None]
    if not all(isinstance(value, str) for value in given):
        raise ValueError(f"config.json: {where}.rope_type is no name; expected one of {', '.join(ROPE_KINDS)}")
    kinds = {aliases.get(value, value) for value in given}
    if len(kinds) > 1:
        raise ValueError(f"config.json: {where} has type and rope_type, which differ: {sorted(kinds)}")
    if not kinds and scaling:
        raise ValueError(f"config.json: {where} has no rope_type; expected one of {', '.join(ROPE_KINDS)}")
    kind = kinds.pop() if kinds else "default"
    if kind not in ROPE_KINDS:
        raise ValueError(f"config.json: {where}.rope_type={kind!r}, expected one of {', '.join(ROPE_KINDS)}")
    return kind


def _divisors(where: str, key: str, value, count: int) -> tuple[float, ...]:
    if not isinstance(value, list) or len(value) != count:
        got = f"{len(value)} entries" if isinstance(value, list) else repr(value)
        raise ValueError(f"config.json: {where}.{key} has {got}, expected a list of head_dim / 2 = {count} numbers")
    return tuple(_number(f"config.json: {where}", key, item) for item in value)


def _is_zero(value) -> bool:
    return type(value) in (int, float) and value == 0


def _number(where: str, key: str, value) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < 1e308:
        raise ValueError(f"{where}: {key}={_short(value)}, expected a finite number above 0")
    return float(value)


def _short(value) -> str:
    """A value as error messages show it. Python refuses to print an integer of thousands of digits."""
    return "a number of hundreds of digits" if type(value) is int and abs(value) > 10**100 else repr(value)[:100]


def _unknown(what: str, key: str, known) -> ValueError:
    nearest = difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.0)
    hint = f"; the nearest known key is {nearest[0]!r}" if nearest else ""
    return ValueError(f"{what} is not known here, and it may change what the model computes{hint}")
