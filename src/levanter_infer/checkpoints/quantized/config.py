"""Reading `quantization_config` of a config.json: the format of quantized weights.

It names the method. Bits, groups and shapes are those of the tensors of each layer, which may differ from each other;
what was done to choose the codes (`ignore`, `desc_act`, `damp_percent`, …) and how activations would be quantized
(`input_activations`, `kv_cache_scheme`, …) changes no weight, and is not read.
"""

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from levanter_infer.checkpoints.quantized import formats
from levanter_infer.checkpoints.quantized.formats import Module
from levanter_infer.checkpoints.quantized.tensors import DequantizedTensor
from levanter_infer.checkpoints.weights import DTYPES, RAW_DTYPES, StoredTensor, read_raw

KEYS = ("quantization_config", "compression_config")
"""Keys of config.json; the second is an older name."""
Formats = Mapping[str, Callable[[Module], DequantizedTensor]]
"""By the end of the name of the tensor that holds the codes."""


@dataclass(frozen=True)
class Quantization:
    """How the quantized weights of a checkpoint are stored."""

    formats: Formats
    read_first: tuple[str, ...] = ()
    """Ends of the names of small tensors that say what others hold."""

    def dequantized(self, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        """The tensors of a checkpoint, with one of floats for each weight that is codes and scales. Those that quantize
        activations or a KV cache are left out: nothing here reads them.

        Raises: ValueError for a weight whose parts are missing or do not fit each other, and for one that is there in
            two forms.
        """
        found = {name: each for name, each in stored.items() if not name.endswith(_UNUSED)}
        first = [
            each
            for name, each in stored.items()
            if name.endswith(self.read_first) and each.dtype in RAW_DTYPES and each.num_bytes <= _MAX_FIRST_BYTES
        ]
        contents = dict(zip((each.name for each in first), read_raw(first), strict=True)) if self.read_first else {}
        weights: list[DequantizedTensor] = []
        for name, tensor in stored.items():
            suffix = next((suffix for suffix in self.formats if name.endswith(suffix)), None)
            if suffix is None or tensor.dtype in DTYPES:
                continue
            module = Module(name if suffix[1:] in _STACKED else name.removesuffix(suffix), stored, contents)
            weights.append(self.formats[suffix](module))
            for part in module.taken:
                found.pop(part, None)
        # They count as what the largest of the others is stored as: the embeddings, which few formats quantize.
        plain = [each for each in found.values() if each.dtype in DTYPES]
        dtype = max(plain, key=lambda each: each.num_bytes).dtype if plain else "BF16"
        for weight in weights:
            if weight.name in found:
                parts = ", ".join(part.name for part in weight.parts.values())
                raise ValueError(f"{weight.path}: {weight.name} is there as it is and as {parts}; remove one of them")
            found[weight.name] = weight.counted_as(dtype)
        return found

    @staticmethod
    def without_zero_biases(tensors: Mapping[str, StoredTensor], expected: Collection[str]) -> dict[str, StoredTensor]:
        """The tensors without biases of zeros that the model does not have: AutoGPTQ writes one for each layer.

        Args:
            tensors: as `dequantized` gives them.
            expected: names of the model's tensors.
        """

        def is_extra(name: str) -> bool:
            weight = tensors.get(f"{name.removesuffix('.bias')}.weight")
            return name.endswith(".bias") and name not in expected and isinstance(weight, DequantizedTensor)

        names = [name for name, tensor in tensors.items() if is_extra(name) and tensor.dtype in DTYPES]
        arrays = read_raw([tensors[name] for name in names])
        zeros = {name for name, array in zip(names, arrays, strict=True) if not array.any()}
        return {name: tensor for name, tensor in tensors.items() if name not in zeros}


_MAX_FIRST_BYTES = 2**16
_STACKED = ("gate_up_proj", "down_proj")
"""Ends of the names of tensors that hold the matrices of all experts, which are no modules of their own."""
_UNUSED = tuple(f".{suffix}" for suffix in formats.UNUSED)


def without_quantization(hf_config: Mapping[str, Any]) -> tuple[dict[str, Any], Quantization | None]:
    """A config.json without the keys of quantization, and what they say; None where they say nothing.

    A multimodal parent has them beside its `text_config`, or within it.

    Raises: ValueError naming the key of a format that is not read.
    """
    plain, found = _take(hf_config, "")
    text = hf_config.get("text_config")
    if isinstance(text, Mapping):
        plain["text_config"], within = _take(text, "text_config.")
        if found and within and found[1] != within[1]:
            raise ValueError(f"config.json: {found[0]} and {within[0]} contradict each other; leave one out")
        found = found or within
    if found is None:
        return plain, None
    where, raw = found
    if not isinstance(raw, Mapping):
        raise ValueError(f"config.json: {where}={raw!r}, expected an object")
    entry = _Entry(where, raw)
    return plain, _METHODS[_method(entry)](entry)


def _take(hf_config: Mapping[str, Any], prefix: str) -> tuple[dict[str, Any], tuple[str, Any] | None]:
    given = [(prefix + key, hf_config[key]) for key in KEYS if hf_config.get(key) not in (None, {})]
    if len(given) > 1 and given[0][1] != given[1][1]:
        raise ValueError(f"config.json: {' and '.join(name for name, _ in given)} are both there; leave one out")
    return {key: value for key, value in hf_config.items() if key not in KEYS}, next(iter(given), None)


@dataclass(frozen=True)
class _Entry:
    """An object of config.json."""

    where: str
    raw: Mapping[str, Any]

    def get(self, key: str, default: Any = None) -> Any:
        value = self.raw.get(key)
        return default if value is None else value

    def fail(self, key: str, expected: str) -> ValueError:
        return ValueError(f"config.json: {self.where}.{key}={self.raw.get(key)!r}, expected {expected}")

    def one_of(self, key: str, *allowed: Any) -> Any:
        """A value of those that are implemented; the first where the key is absent."""
        value = self.get(key, allowed[0])
        value = value.lower() if isinstance(value, str) else value
        if type(value) not in map(type, allowed) or value not in allowed:
            raise self.fail(key, f"one of {', '.join(map(str, allowed))}: nothing else is implemented")
        return value

    def none(self, *keys: str) -> None:
        """Keys that change what the weights mean, in ways that are not implemented."""
        for key in keys:
            if _says_something(self.get(key)):
                raise self.fail(key, "nothing: this is not implemented")

    def group_size(self) -> int | None:
        """Inputs per group; -1: all; None: it is not said."""
        value = self.get("group_size")
        if value is not None and (type(value) is not int or value == 0 or not -1 <= value < 2**31):
            raise self.fail("group_size", "a whole number of at least 1, or -1")
        return value

    def block(self, key: str) -> tuple[int, int] | None:
        """Rows and columns; None where the key is absent."""
        value = self.get(key)
        if isinstance(value, str) and len(value) < 20:  # older files of compressed-tensors say "128x128"
            value = [int(each) for each in value.split("x") if each.isdecimal()]
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != 2 or any(type(n) is not int or n < 1 for n in value):
            raise self.fail(key, "two whole numbers of at least 1")
        return value[0], value[1]

    def object(self, key: str) -> "_Entry":
        value = self.get(key, {})
        if not isinstance(value, Mapping):
            raise self.fail(key, "an object")
        return _Entry(f"{self.where}.{key}", value)


def _says_something(value: Any) -> bool:
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else None
    return bool(value) if parts is None else any(map(_says_something, parts))


def _method(entry: _Entry) -> str:
    method = entry.get("quant_method")
    if method is None and "config_groups" in entry.raw:
        method = "compressed-tensors"
    if method is None and (entry.get("load_in_4bit") or entry.get("load_in_8bit")):
        method = "bitsandbytes"
    if not isinstance(method, str) or method not in _METHODS:
        raise ValueError(
            f"config.json: {entry.where}.quant_method={method!r}, expected one of {', '.join(sorted(_METHODS))}: no "
            "other quantized checkpoints are read; take the original weights, or dequantize them"
        )
    return method


def _matrices(block: tuple[int, int] | None) -> Formats:
    return {
        ".weight": functools.partial(formats.scaled, block=block),
        **{f".{name}": functools.partial(formats.stacked, block=block) for name in _STACKED},
    }


def _fp8(entry: _Entry) -> Quantization:
    entry.one_of("fmt", "e4m3", "float8_e4m3fn")
    return Quantization(_matrices(entry.block("weight_block_size")))


def _gptq(entry: _Entry) -> Quantization:
    version = entry.one_of("checkpoint_format" if entry.get("checkpoint_format") else "format", "gptq", "gptq_v2")
    entry.none("is_marlin_format")
    size = entry.group_size()
    return Quantization({".qweight": functools.partial(formats.gptq, group_size=size, plus_one=version == "gptq")})


def _awq(entry: _Entry) -> Quantization:
    entry.one_of("bits", 4)
    entry.one_of("zero_point", True)
    entry.one_of("version", "gemm")
    return Quantization({".qweight": functools.partial(formats.awq, group_size=entry.group_size())})


def _auto_round(entry: _Entry) -> Quantization:
    packing = entry.one_of("packing_format", None, "auto_round:auto_gptq", "auto_round:auto_awq")
    if packing is None:
        raise entry.fail("packing_format", "auto_round:auto_gptq or auto_round:auto_awq")
    return _gptq(entry) if packing == "auto_round:auto_gptq" else _awq(entry)


def _bitsandbytes(entry: _Entry) -> Quantization:
    if entry.get("load_in_8bit", entry.get("_load_in_8bit")):
        return Quantization({".weight": formats.bitsandbytes_int8})
    entry.one_of("bnb_4bit_quant_storage", "uint8")
    kind = entry.one_of("bnb_4bit_quant_type", "fp4", "nf4")
    read = functools.partial(formats.bitsandbytes_4bit, kind=kind)
    return Quantization({".weight": read}, (f".quant_state.bitsandbytes__{kind}",))


def _modelopt(entry: _Entry) -> Quantization:
    entry.one_of("quant_algo", *_MODELOPT)
    read = functools.partial(formats.modelopt, block=_MODELOPT_BLOCK)
    return Quantization({**_matrices(_MODELOPT_BLOCK), ".weight": read})


_MODELOPT = ("fp8", "nvfp4", "mixed_precision", "w4a16_nvfp4", "fp8_per_channel_per_token", "fp8_pb_wo")
_MODELOPT_BLOCK = 128, 128
"""Rows and columns of the blocks of `fp8_pb_wo`."""


def _mxfp4(entry: _Entry) -> Quantization:
    return Quantization({"_blocks": formats.mxfp4_experts})


def _compressed_tensors(entry: _Entry) -> Quantization:
    entry.one_of("quantization_status", "compressed", "frozen")
    entry.none("transform_config")
    if (sparsity := entry.object("sparsity_config")).raw:
        sparsity.one_of("format", "dense")
    groups = [entry.object("config_groups").object(name) for name in entry.object("config_groups").raw]
    for each in (entry, *groups):
        each.one_of("format", None, *_COMPRESSED)
    weights = [group.object("weights") for group in groups]
    blocks = {each.block("block_structure") for each in weights} - {None}
    if len(blocks) > 1:
        raise entry.fail("config_groups", "one block_structure for all groups: nothing else is implemented")
    of_integers = [each for each in weights if each.get("type", "int") == "int"]
    bits = sorted({each.one_of("num_bits", *formats.WORD_BITS) for each in of_integers})
    packed = functools.partial(formats.packed, bits=bits)
    read_first = (".weight_shape",) if len(bits) > 1 else ()
    return Quantization({**_matrices(next(iter(blocks), None)), ".weight_packed": packed}, read_first)


_COMPRESSED = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision", "dense"),
)
"""Formats of compressed-tensors."""
_METHODS: Mapping[str, Callable[[_Entry], Quantization]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    **dict.fromkeys(("modelopt", "modelopt_fp8", "modelopt_fp4"), _modelopt),
    "gptq": _gptq,
    "awq": _awq,
    **dict.fromkeys(("auto-round", "intel/auto-round"), _auto_round),
    "bitsandbytes": _bitsandbytes,
    "mxfp4": _mxfp4,
}
