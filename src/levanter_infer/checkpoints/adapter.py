"""LoRA adapters of PEFT, merged into the weights when these are read.

A matrix W [out, in] becomes W + s · B · A, with A [r, in] and B [out, r], computed in float32 and rounded once; s is
alpha / r, or alpha / sqrt(r) with `use_rslora`. Source: Hu et al. 2021, "LoRA", section 4.1; names and keys are those
of PEFT 0.21 (`tuners/lora`).
"""

import functools
import math
import re
import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from levanter_infer.checkpoints.source import ADAPTER_CONFIG, ADAPTER_WEIGHTS, Source
from levanter_infer.checkpoints.weights import (
    DTYPES,
    StoredTensor,
    enumerate_names,
    read_header,
    read_raw,
    read_tensors,
)

_PREFIX = "base_model.model."
_SUFFIXES = (".lora_A.weight", ".lora_B.weight", ".lora_embedding_A", ".lora_embedding_B")
_REFUSED = (
    *("use_dora", "lora_bias", "layer_replication", "alora_invocation_tokens", "use_qalora"),
    *("trainable_token_indices", "use_bdlora", "arrow_config", "kasa_config", "monteclora_config"),
)
"""Keys with which a weight is not W + s · B · A."""
_NOTHING = (None, False, [], {})
"""Values of a key that is not used."""
_SCALES = ("r", "rank_pattern", "lora_alpha", "alpha_pattern", "target_parameters")
EXPERT_PARAMETERS = ("gate_up_proj", "down_proj")
"""Parameters of all experts of a layer, [expert, ., .], in the order in which transformers has them: where
`target_parameters` names both, PEFT puts the second around the first (`base_layer`)."""
_EXPERTS = re.compile(r"(.*\.experts)((?:\.base_layer)*)")
_UNUSED = (
    *("peft_version", "auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save", "bias"),
    *("lora_dropout", "fan_in_fan_out", "ensure_weight_tying", "megatron_config", "megatron_core", "runtime_config"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "velora_config", "qalora_group_size"),
)
"""Keys of training, and of what the tensors or other keys say."""
_ANY_MODULE = r".*\."
"""Start of keys of patterns for ends of names, as PEFT writes them for experts."""
_INITS = (True, False, "gaussian", "orthogonal", "eva")
"""Initialisations after which the base is as it was. With others (PiSSA, OLoRA, CorDA, LoftQ) the adapter belongs to a
base that was changed."""


@dataclass(frozen=True)
class AdaptedTensor(StoredTensor):
    """A tensor with the change that an adapter makes to it."""

    base: StoredTensor
    """The tensor, or the one that the adapter has in its stead."""
    change: "Change | ExpertsChange | None"
    start: int
    stop: int
    """The rows of the whole tensor that this one is."""

    def rows(self, start: int, stop: int) -> "AdaptedTensor":
        """As `StoredTensor.rows`."""
        found, whole = self.base.rows(start, stop), (self.start + start, self.start + stop)
        num_bytes = self.num_bytes // self.shape[0] * (stop - start)
        shape = (stop - start, *self.shape[1:])
        return replace(self, base=found, start=whole[0], stop=whole[1], shape=shape, num_bytes=num_bytes)

    def entry(self, index: int) -> "AdaptedTensor":
        """As `StoredTensor.entry`."""
        change = self.change.of(index) if isinstance(self.change, ExpertsChange) else None
        assert change is not None or self.change is None, "an entry of a matrix"
        shape = self.shape[1:]
        num_bytes = self.num_bytes // self.shape[0]
        found = self.base.entry(index)
        return replace(self, base=found, change=change, start=0, stop=shape[0], shape=shape, num_bytes=num_bytes)

    @staticmethod
    def read_all(pieces: "Sequence[tuple[AdaptedTensor, np.ndarray]]") -> None:
        """As `read_tensors`, one at a time: each has a copy in float32."""
        for tensor, out in pieces:
            wide = np.empty(tensor.base.shape, np.float32)
            read_tensors([(tensor.base, wide)])
            if tensor.change is not None:
                assert isinstance(tensor.change, Change), "experts are read one by one"
                wide += tensor.change.rows(tensor.start, tensor.stop)
            out[...] = wide.astype(out.dtype, copy=False).reshape(out.shape)


@dataclass(frozen=True)
class Change:
    """s · B · A, or its transpose."""

    down: StoredTensor
    """A, [r, in]"""
    up: StoredTensor
    """B, [out, r]"""
    scale: float
    transposed: bool
    expert: tuple[int, int] | None = None
    """Number e of an expert, and of experts E, of which PEFT stores A [E * r, in] and B [out, r * E] together: those of
    the expert are A[e * r : (e + 1) * r] and B[:, e::E]. None: there are no experts."""
    outs: tuple[int, int] | None = None
    """Rows of B that the matrix has; None: all."""

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the matrix that is changed."""
        outs = self.up.shape[0] if self.outs is None else self.outs[1] - self.outs[0]
        return (self.down.shape[1], outs) if self.transposed else (outs, self.down.shape[1])

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Some rows, f32[stop - start, .]."""
        left, right = self._factors()
        return np.float32(self.scale) * (left[start:stop] @ right)

    def is_equal(self, other: "Change") -> bool:
        """Whether both have the same factors."""
        pairs = zip(self._factors(), other._factors(), strict=True)
        return self.scale == other.scale and all(np.array_equal(one, two) for one, two in pairs)

    def _factors(self) -> tuple[np.ndarray, np.ndarray]:
        """f32: the change of each row, times the scale, is its row of the first, times the second."""
        if self.expert is None:
            down, up = (array.astype(np.float32) for array in read_raw([self.down, self.up]))
        else:
            number, count = self.expert
            rank = self.down.shape[0] // count
            down, up = _floats(self.down)[number * rank : (number + 1) * rank], _floats(self.up)[:, number::count]
        up = up if self.outs is None else up[slice(*self.outs)]
        return (down.T, up.T) if self.transposed else (up, down)


@functools.lru_cache(maxsize=2)
def _floats(tensor: StoredTensor) -> np.ndarray:
    """A tensor in float32. Those of one layer's experts are asked for by one expert after the other."""
    return read_raw([tensor])[0].astype(np.float32)


@dataclass(frozen=True)
class ExpertsChange:
    """The changes of all experts of a layer; `Change` is that of one."""

    down: StoredTensor
    up: StoredTensor
    scale: float
    transposed: bool
    num_experts: int

    def of(self, expert: int, outs: tuple[int, int] | None = None) -> Change:
        """The change of one expert. Args: outs: as in `Change`."""
        return Change(self.down, self.up, self.scale, self.transposed, (expert, self.num_experts), outs)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor that is changed."""
        return (self.num_experts, *self.of(0).shape)


@dataclass(frozen=True)
class ExpertPlace:
    """A tensor that has (a part of) `EXPERT_PARAMETERS` of a layer."""

    tensor: str
    num_experts: int
    transposed: bool
    expert: int | None = None
    """The expert whose matrix it is; None: it has those of all."""
    outs: tuple[int, int] | None = None
    """As in `Change`."""


@dataclass(frozen=True)
class Place:
    """Where the tensors of an adapter belong in a model."""

    own_names: Callable[[Iterable[str]], Mapping[str, str]]
    """As `Family.own_names`, for this config.json."""
    transposed: Collection[str]
    """Names of the matrices that are stored [in, out]."""
    tied: tuple[str, str] | None
    """Names of a head and of the embeddings that it is; None: the head is of its own."""
    experts: Mapping[tuple[int, str], Sequence[ExpertPlace]] = field(default_factory=dict)
    """By layer, and name in `EXPERT_PARAMETERS`."""


def adapted(tensors: Mapping[str, StoredTensor], adapter: Source, place: Place) -> dict[str, StoredTensor]:
    """The tensors of a model with the changes of an adapter. Args: tensors: by the names of the family's table.

    Raises: ValueError naming the key of a method that is not LoRA, or the tensor of the adapter that fits none.
    """
    config = _Config.read(adapter)
    header = read_header(adapter.file(ADAPTER_WEIGHTS))
    if not header:
        raise ValueError(f"{adapter.where(ADAPTER_WEIGHTS)} holds no tensors; save the adapter again")
    odd = sorted(name for name in header if not name.startswith(_PREFIX))
    if odd:
        where = adapter.where(ADAPTER_WEIGHTS)
        raise ValueError(f"{where}: got tensors {enumerate_names(odd)}, expected names that begin with {_PREFIX}")
    stored = {name.removeprefix(_PREFIX): tensor for name, tensor in header.items()}
    modules = {name.removesuffix(suffix) for name in stored for suffix in _SUFFIXES if name.endswith(suffix)}
    experts = {module for module in modules if config.parameters and _EXPERTS.fullmatch(module)}
    modules -= experts
    # Whole tensors: of `modules_to_save`, biases, and the embeddings that an adapter of them is saved with.
    whole = {name.replace(".base_layer.", "."): each for name, each in stored.items() if not name.endswith(_SUFFIXES)}
    named = {f"{module}.weight" for module in modules} | set(whole)
    # Without those of other parts of a multimodal model, as its own tensors of these are not read either
    by_name = {name: own for own, name in place.own_names(named).items()}
    instead = {by_name[name]: tensor for name, tensor in whole.items() if name in by_name}
    changed = {by_name[f"{module}.weight"]: module for module in modules if f"{module}.weight" in by_name}
    changes = _of_experts(experts, stored, config, place)
    if not changed and not instead and not changes:
        raise ValueError(f"{adapter.name} changes nothing that is read of the model: {enumerate_names(sorted(named))}")
    if place.tied is not None:
        head, embeddings = place.tied
        both = [
            _change(changed[n], stored, config, is_transposed=n in place.transposed) for n in place.tied if n in changed
        ]
        is_both = len(both) == 2 and both[0].is_equal(both[1])  # with PEFT's `ensure_weight_tying`
        if is_both:
            del changed[head]
        _check_tied(head, embeddings, changed, instead, tensors, adapter, is_both=is_both)
    unknown = sorted(name for name in {*changed, *instead, *changes} if name not in tensors)
    if unknown:
        raise ValueError(
            f"{adapter.name} changes tensors that the model does not have: {enumerate_names(unknown)}; it belongs to "
            "another model"
        )
    found = dict(tensors)
    for name in {*changed, *instead, *changes}:
        change = changes.get(name)
        if name in changed:
            change = _change(changed[name], stored, config, is_transposed=name in place.transposed)
        found[name] = _with_change(tensors[name], instead.get(name, tensors[name]), change)
    return found


def _of_experts(
    modules: Collection[str], stored: Mapping[str, StoredTensor], config: "_Config", place: Place
) -> dict[str, Change | ExpertsChange]:
    """Changes of the parameters of experts, by the tensors that hold these. Args: modules: their names in the adapter.

    Raises: ValueError if the adapter has others than `target_parameters` says.
    """
    found: dict[str, Change | ExpertsChange] = {}
    by_base: dict[str, list[str]] = {}
    for module in sorted(modules, key=len, reverse=True):  # the innermost first
        match = _EXPERTS.fullmatch(module)
        assert match is not None
        by_base.setdefault(match[1], []).append(module)
    own_names = {name: own for own, name in place.own_names(by_base).items()}
    for base, wrappers in by_base.items():
        if base not in own_names:
            continue  # of another part of the model
        names = [name for name in EXPERT_PARAMETERS if config.targets(f"{base}.{name}")]
        layer = re.match(r"model\.layers\.(\d+)\.", own_names[base])
        places = [place.experts.get((int(layer[1]), name), ()) if layer else () for name in names]
        if len(names) != len(wrappers) or not all(places):
            raise ValueError(
                f"{ADAPTER_CONFIG}: target_parameters={reprlib.repr(list(config.parameters))} and the tensors "
                f"{enumerate_names(sorted(wrappers))} do not fit together, or not the experts of the model, of which "
                f"{' and '.join(EXPERT_PARAMETERS)} are merged; merge the adapter with PEFT's merge_and_unload"
            )
        for name, wrapper, tensors in zip(names, wrappers, places, strict=True):
            for each in tensors:
                whole = _change(
                    wrapper,
                    stored,
                    config,
                    is_transposed=each.transposed,
                    named=f"{base}.{name}",
                    experts=each.num_experts,
                )
                of_all = ExpertsChange(whole.down, whole.up, whole.scale, each.transposed, each.num_experts)
                found[each.tensor] = of_all if each.expert is None else of_all.of(each.expert, each.outs)
    return found


def _check_tied(
    head: str,
    embeddings: str,
    changed: Collection[str],
    instead: dict[str, StoredTensor],
    tensors: Mapping[str, StoredTensor],
    adapter: Source,
    *,
    is_both: bool,
) -> None:
    """Take a head that is the embeddings out of `instead`.

    Args: is_both: whether the head is changed as the embeddings are; `changed` has these alone then.
    Raises: ValueError unless both stay equal.
    """
    if head not in {*changed, *instead} and embeddings not in {*changed, *instead}:
        return
    both = [instead.pop(head, None), instead.get(embeddings)]
    sides = [tensors[embeddings] if side is None else side for side in both]
    if head in changed or (embeddings in changed and not is_both) or not _are_equal(*sides):
        raise ValueError(
            f"{adapter.name} changes {head!r} or {embeddings!r} so that they differ, and in this model they are one "
            "tensor (tie_word_embeddings); merge it with PEFT's merge_and_unload into a model that has both"
        )


def _are_equal(one: StoredTensor, other: StoredTensor) -> bool:
    if one is other:
        return True
    if one.shape != other.shape or other.dtype not in DTYPES or one.dtype not in DTYPES:
        return False
    arrays = [np.empty(tensor.shape, np.float32) for tensor in (one, other)]
    for tensor, array in zip((one, other), arrays, strict=True):
        tensor.read_into(array)
    return np.array_equal(arrays[0], arrays[1])


def _with_change(plain: StoredTensor, base: StoredTensor, change: Change | ExpertsChange | None) -> AdaptedTensor:
    if base.shape != plain.shape or (base is not plain and base.dtype not in DTYPES):
        raise ValueError(
            f"{base.path}: tensor {base.name!r} is {list(base.shape)} of {base.dtype}, and that of the model is "
            f"{list(plain.shape)}; the adapter belongs to another model, or to one with more tokens"
        )
    if change is not None and plain.shape != change.shape:
        raise ValueError(
            f"{change.up.path}: {change.down.name!r} {list(change.down.shape)} and {change.up.name!r} "
            f"{list(change.up.shape)} change a matrix {list(change.shape)}, and the model's is {list(plain.shape)}; "
            "the adapter belongs to another model"
        )
    size = base.path, plain.name, plain.dtype, plain.shape, base.offset, plain.num_bytes
    return AdaptedTensor(*size, base, change, 0, plain.shape[0] if plain.shape else 0)


def _change(
    module: str,
    stored: Mapping[str, StoredTensor],
    config: "_Config",
    *,
    is_transposed: bool,
    named: str | None = None,
    experts: int = 1,
) -> Change:
    """The change of a module. Args: named: its name in patterns, if it has another; experts: whose ranks A has."""
    is_table = f"{module}.lora_embedding_A" in stored or f"{module}.lora_embedding_B" in stored
    ends = _SUFFIXES[2:] if is_table else _SUFFIXES[:2]
    down, up = (stored.get(module + end) for end in ends)
    if down is None or up is None:
        missing = module + ends[0 if down is None else 1]
        raise ValueError(f"{(down or up).path}: {_PREFIX}{missing} is missing")  # type: ignore[union-attr]
    if len(down.shape) != 2 or len(up.shape) != 2 or down.shape[0] != up.shape[1] or down.shape[0] == 0:
        raise ValueError(
            f"{down.path}: {down.name!r} is {list(down.shape)} and {up.name!r} is {list(up.shape)}, expected [r, in] "
            "and [out, r]"
        )
    if down.dtype not in DTYPES or up.dtype not in DTYPES:
        raise ValueError(f"{down.path}: {down.name!r} is {down.dtype} and {up.name!r} {up.dtype}, expected floats")
    rank = down.shape[0] / experts
    if rank not in config.ranks:
        of_experts = f" for {experts} experts" if experts > 1 else ""
        raise ValueError(
            f"{down.path}: {down.name!r} is {list(down.shape)}, of rank {rank:g}{of_experts}, and {ADAPTER_CONFIG} has "
            f"ranks {', '.join(map(str, sorted(config.ranks)))} (r, rank_pattern); they are of two adapters"
        )
    # A table [vocab, embed] is changed by the transpose: PEFT's A is [r, vocab] then, and B [embed, r].
    return Change(down, up, config.scale(named or module, int(rank)), is_table or is_transposed)


@dataclass(frozen=True)
class _Config:
    """adapter_config.json."""

    ranks: frozenset[int]
    """Those of the tensors: `r` and the values of `rank_pattern`."""
    alpha: float
    alphas: Mapping[str, float]
    """Alpha of the modules whose name, or its end after a dot, is the key."""
    by_root: bool
    """Whether s is alpha / sqrt(r)."""
    parameters: tuple[str, ...] = ()
    """`target_parameters`: ends of the names of parameters."""

    def targets(self, parameter: str) -> bool:
        """Whether a parameter is one of `parameters`."""
        return any(parameter == each or parameter.endswith(f".{each}") for each in self.parameters)

    def scale(self, module: str, rank: int) -> float:
        named = (value for key, value in self.alphas.items() if module == key or module.endswith(f".{key}"))
        return next(named, self.alpha) / (math.sqrt(rank) if self.by_root else rank)

    @staticmethod
    def read(adapter: Source) -> "_Config":
        where, raw = adapter.where(ADAPTER_CONFIG), adapter.read_json(ADAPTER_CONFIG)

        def fail(key: str, expected: str) -> ValueError:
            return ValueError(f"{where}: {key}={reprlib.repr(raw.get(key))}, expected {expected}")

        if raw.get("peft_type") != "LORA":
            raise fail("peft_type", "LORA: no other adapters are read; merge it with PEFT's merge_and_unload")
        for key in _REFUSED:
            if raw.get(key) not in _NOTHING:
                raise fail(key, "nothing: this is not implemented; merge the adapter with PEFT's merge_and_unload")
        init = raw.get("init_lora_weights", True)
        if init not in _INITS:
            raise fail(
                "init_lora_weights",
                "an initialisation that leaves the base as it was; save the adapter as one of the original model "
                "(path_initial_model_for_weight_conversion)",
            )
        rank, ranks = raw.get("r", 8), raw.get("rank_pattern") or {}
        if type(rank) is not int or rank < 1:
            raise fail("r", "a whole number of at least 1")
        if not isinstance(ranks, dict) or not all(type(value) is int and value > 0 for value in ranks.values()):
            raise fail("rank_pattern", "an object of whole numbers of at least 1")
        alpha, alphas = raw.get("lora_alpha", 8), raw.get("alpha_pattern") or {}
        if not _is_number(alpha):
            raise fail("lora_alpha", "a number")
        if not isinstance(alphas, dict) or not all(map(_is_number, alphas.values())):
            raise fail("alpha_pattern", "an object of numbers")
        ends = {key.removeprefix(_ANY_MODULE): value for key, value in alphas.items()}
        for key in ends:
            if not re.fullmatch(r"[\w.]+", key):
                raise fail("alpha_pattern", f"names of modules; {key!r} is a pattern, which is not implemented")
        parameters = raw.get("target_parameters") or []
        if not isinstance(parameters, list) or not all(isinstance(each, str) for each in parameters):
            raise fail("target_parameters", "a list of names of parameters")
        by_root = raw.get("use_rslora", False) or False
        if not isinstance(by_root, bool):
            raise fail("use_rslora", "true or false")
        for key in sorted(set(raw) - {"peft_type", "init_lora_weights", "use_rslora", *_SCALES, *_REFUSED, *_UNUSED}):
            if raw[key] not in _NOTHING:
                raise fail(
                    key, "no such key: it may change what the weights become; merge it with PEFT's merge_and_unload"
                )
        return _Config(frozenset({rank, *ranks.values()}), alpha, ends, by_root, tuple(parameters))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -1e9 < value < 1e9
