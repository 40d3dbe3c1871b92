"""The formats of quantized weights: which tensors hold a matrix, and how it is computed from them.

A format is a function from the tensors of one module to its weight. Layouts: compressed-tensors 0.20 (`compressors/`),
transformers 5.23 (`integrations/finegrained_fp8.py`, `mxfp4.py`), AutoGPTQ and AutoAWQ, bitsandbytes 0.50
(`functional.py`), NVIDIA's ModelOpt, and the OCP Microscaling Formats 1.0.
"""

import math
import reprlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from levanter_infer.checkpoints.quantized import codes
from levanter_infer.checkpoints.quantized.tensors import Arrays, Decode, DequantizedTensor, Scales, numbers
from levanter_infer.checkpoints.source import parse_json
from levanter_infer.checkpoints.weights import StoredTensor

WORD_BITS = (2, 4, 8)
"""Bits per code, where words of 32 bits hold integers. Codes of 3, 5 or 6 bits would cross the ends of bytes."""
FLOATS = ("F32", "F16", "BF16", "F8_E4M3", "F8_E8M0")
"""Dtypes of scales; where they may be powers of two, U8 is one as well."""
UNUSED = (
    *("input_scale", "input_scale_ub", "input_zero_point", "input_global_scale", "activation_scale", "output_scale"),
    *("output_zero_point", "q_scale", "k_scale", "v_scale", "kv_scale", "prob_scale"),
    *("q_zero_point", "k_zero_point", "v_zero_point"),
)
"""Ends of the names of tensors that quantize activations, keys and values, which are computed as they are."""


@dataclass
class Module:
    """The tensors of one layer of a checkpoint; those that its weight is computed from are taken."""

    name: str
    """Without the dot and what comes behind it."""
    stored: Mapping[str, StoredTensor]
    """All tensors of the checkpoint."""
    contents: Mapping[str, np.ndarray]
    """Those that were read first (`Quantization.read_first`)."""
    taken: set[str] = field(default_factory=set)
    """Names of the tensors that were taken."""

    def find(self, suffix: str) -> StoredTensor | None:
        name = self.name + suffix
        found = self.stored.get(name)
        if found is not None:
            self.taken.add(name)
            if 0 in found.shape:
                raise self.fail("no empty tensor", found)
        return found

    def take(self, suffix: str) -> StoredTensor:
        """Raises: ValueError if there is none."""
        found = self.find(suffix)
        if found is None:
            raise ValueError(f"{self.path}: {self.name}{suffix} is missing; download the checkpoint again")
        return found

    @property
    def path(self):
        """The file of a tensor of the module."""
        return self.stored[min(name for name in self.stored if name.startswith(self.name))].path

    def fail(self, expected: str, *parts: StoredTensor | None) -> ValueError:
        got = ", ".join(f"{part.name} {list(part.shape)} of {part.dtype}" for part in parts if part is not None)
        return ValueError(f"{self.path}: got {got}, expected {expected}; config.json and the weights do not fit")

    def scales(
        self, part: StoredTensor, matrix: tuple[int, int], block: tuple[int, int] | None, *also: StoredTensor
    ) -> Scales:
        """How a part's values stand for a matrix [out, in]. Raises: ValueError if its shape fits in no way."""
        found = Scales.fit(part.shape, matrix, block)
        if found is None or part.dtype not in (*FLOATS, "U8"):
            each = "" if block is None else f", one per block of {block[0]} x {block[1]}"
            raise self.fail(f"floats: one scale, one per row{each}, of a matrix {list(matrix)}", part, *also)
        return found

    def weight(
        self,
        shape: tuple[int, ...],
        parts: Mapping[str, StoredTensor | None],
        by_row: Sequence[str],
        decode: Decode,
        suffix: str = ".weight",
    ) -> DequantizedTensor:
        """Args: as `DequantizedTensor` has them; `parts` that are None are not there."""
        given = {name: part for name, part in parts.items() if part is not None}
        return DequantizedTensor.of(self.name + suffix, shape, given, by_row, decode)


def scaled(module: Module, block: tuple[int, int] | None) -> DequantizedTensor:
    """float8_e4m3fn or int8, one code a number: `weight` [out, in] and `weight_scale` or `weight_scale_inv`; and, if
    there are any, `weight_zero_point` and `weight_g_idx`, the group of each input. Of DeepSeek, Qwen,
    compressed-tensors, FBGEMM and ModelOpt.

    Args: block: rows and columns that share a scale; None: scales are of the matrix, of rows or of parts of rows.
    """
    weight, scale = module.take(".weight"), module.find(".weight_scale_inv") or module.take(".weight_scale")
    zero, groups = module.find(".weight_zero_point"), module.find(".weight_g_idx")
    if len(weight.shape) != 2 or weight.dtype not in ("F8_E4M3", "I8"):
        raise module.fail("a matrix of F8_E4M3 or I8", weight)
    matrix = weight.shape[0], weight.shape[1]
    fit = module.scales(scale, matrix, block, weight)
    if zero is not None and (zero.dtype, zero.shape) != ("I8", scale.shape):
        raise module.fail("zero points of I8 in the shape of the scales", zero, scale)
    _check_groups(module, groups, matrix[1], weight)

    def decode(arrays: Arrays, start: int, stop: int) -> np.ndarray:
        values = arrays["weight"].astype(np.float32) if weight.dtype == "I8" else numbers(weight, arrays["weight"])
        zeros = None if zero is None else fit.part(arrays["zero"], start, stop)
        scales = numbers(scale, fit.part(arrays["scale"], start, stop))
        return fit.apply(values, start, scales, zeros, arrays.get("groups"))

    return module.weight(matrix, dict(weight=weight, scale=scale, zero=zero, groups=groups), ["weight"], decode)


def stacked(module: Module, block: tuple[int, int] | None) -> DequantizedTensor:
    """As `scaled`, of all experts of a layer in one tensor, [expert, ., .] (transformers 5): `gate_up_proj` or
    `down_proj`, and the same name with `_scale_inv` or `_scale`. Scales are of blocks, or there is one per expert."""
    weight, scale = module.take(""), module.find("_scale_inv") or module.take("_scale")
    module.find("_activation_scale")
    if len(weight.shape) != 3 or weight.dtype != "F8_E4M3":
        raise module.fail("matrices of F8_E4M3, one per expert", weight)
    experts, rows, columns = weight.shape
    each = scale.shape[1:] if scale.shape[:1] == (experts,) else (-1,)
    fit = Scales.fit(each, (rows, columns), block)
    if fit is None or (rows % fit.block[0] and fit.shape[0] > 1) or scale.dtype not in FLOATS:
        raise module.fail("floats: one scale per expert, per row, or per whole block", weight, scale)

    def decode(arrays: Arrays, start: int, stop: int) -> np.ndarray:
        values = numbers(weight, arrays["weight"]).reshape(-1, columns)
        together = Scales((fit.shape[0] * (stop - start), fit.shape[1]), fit.block)
        scales = numbers(scale, together.part(arrays["scale"], 0, len(values)))
        return together.apply(values, 0, scales).reshape(stop - start, rows, columns)

    return module.weight(weight.shape, dict(weight=weight, scale=scale), ["weight", "scale"], decode, suffix="")


def packed(module: Module, bits: Collection[int]) -> DequantizedTensor:
    """`weight_packed` of compressed-tensors. Of U8, see `four_bit_floats`. Of I32: integers [out, in * bits / 32],
    counted from -2^(bits - 1); `weight_shape`, which is [out, in]; `weight_scale`; and, if there are any,
    `weight_zero_point`, packed along `out`, and `weight_g_idx`, the group of each input.

    Args: bits: per integer, of all groups of layers. If there are several, `weight_shape` says which a layer has.
    """
    words, scale = module.take(".weight_packed"), module.take(".weight_scale")
    if words.dtype == "U8":
        return four_bit_floats(module, words, divisor=module.find(".weight_global_scale"))
    zero, groups = module.find(".weight_zero_point"), module.find(".weight_g_idx")
    shape = module.take(".weight_shape")
    if words.dtype != "I32" or len(words.shape) != 2:
        raise module.fail("words of I32", words)
    fitting = list(bits)
    if len(fitting) > 1:
        inputs = _matrix(module, shape)[1]
        fitting = [each for each in bits if words.shape[1] == -(-inputs * each // 32)]
    if len(fitting) != 1:
        raise module.fail(f"codes of {' or '.join(map(str, bits))} bits", words)
    own = fitting[0]
    matrix = words.shape[0], 32 * words.shape[1] // own
    fit = module.scales(scale, matrix, None, words)
    _check_groups(module, groups, matrix[1], words)
    middle, packed_shape = 1 << (own - 1), (-(-fit.shape[0] * own // 32), fit.shape[1])
    if zero is not None and (zero.dtype, zero.shape) not in (("I32", packed_shape), ("I8", fit.shape)):
        raise module.fail("zero points of I32, packed along the rows of the scales, or of I8", zero, scale)

    def decode(arrays: Arrays, start: int, stop: int) -> np.ndarray:
        values = codes.unpack(arrays["words"], own).astype(np.float32)
        zeros: np.ndarray | int = middle
        if zero is not None and zero.dtype == "I8":
            zeros = fit.part(arrays["zero"], start, stop).astype(np.int16) + middle
        elif zero is not None:
            needed = fit.rows(start, stop)
            zeros = _unpacked(arrays["zero"].T, own, needed.start, min(needed.stop, fit.shape[0])).T
        scales = numbers(scale, fit.part(arrays["scale"], start, stop))
        return fit.apply(values, start, scales, zeros, arrays.get("groups"))

    return module.weight(matrix, dict(words=words, scale=scale, zero=zero, groups=groups), ["words"], decode)


def _unpacked(words: np.ndarray, bits: int, start: int, stop: int) -> np.ndarray:
    """The codes from `start` to `stop` of each row of words."""
    per_word = 32 // bits
    first = start // per_word
    found = codes.unpack(np.ascontiguousarray(words[:, first : -(-stop // per_word)]), bits)
    return found[:, start - first * per_word :][:, : stop - start]


def _matrix(module: Module, part: StoredTensor) -> tuple[int, int]:
    """The shape that `weight_shape` holds."""
    if part.shape != (2,) or part.dtype not in ("I64", "I32"):
        raise module.fail("two integers", part)
    rows, columns = map(int, module.contents[part.name])
    if not (0 < rows < 2**31 and 0 < columns < 2**31):
        raise ValueError(f"{part.path}: {part.name} is [{rows}, {columns}]; download the checkpoint again")
    return rows, columns


def modelopt(module: Module, block: tuple[int, int]) -> DequantizedTensor:
    """`weight` of ModelOpt: of U8, two E2M1 a byte with `weight_scale` and `weight_scale_2`; else as `scaled`."""
    weight = module.take(".weight")
    if weight.dtype != "U8":
        return scaled(module, block)
    return four_bit_floats(module, weight, factor=module.take(".weight_scale_2"))


def four_bit_floats(
    module: Module, weight: StoredTensor, *, divisor: StoredTensor | None = None, factor: StoredTensor | None = None
) -> DequantizedTensor:
    """NVFP4 and MXFP4: two codes of E2M1 a byte, low half first, with a scale for 16 or 32 of them, and for NVFP4 a
    number for the whole matrix.

    Args:
        weight: u8 [out, in / 2].
        divisor, factor: that number, if scales are divided, or multiplied by it.
    """
    scale = module.take(".weight_scale")
    whole = divisor or factor
    if weight.dtype != "U8" or len(weight.shape) != 2:
        raise module.fail("a matrix of U8", weight)
    group, kinds = (32, ("U8", "F8_E8M0")) if whole is None else (16, ("F8_E4M3",))
    matrix = weight.shape[0], 2 * weight.shape[1]
    fit = Scales.fit(scale.shape, matrix, (1, group))
    if fit is None or fit.block != (1, min(group, matrix[1])) or scale.dtype not in kinds:
        raise module.fail(f"scales of {kinds[0]}, one for {group} inputs", scale, weight)
    if whole is not None and (whole.dtype != "F32" or whole.shape not in ((), (1,))):
        raise module.fail("one number of F32", whole)

    def decode(arrays: Arrays, start: int, stop: int) -> np.ndarray:
        values = np.take(codes.E2M1, codes.unpack_pairs(arrays["weight"]))
        scales = numbers(scale, fit.part(arrays["scale"], start, stop))
        if "whole" in arrays:
            number = arrays["whole"].reshape(())
            scales = scales * number if divisor is None else scales / number
        return fit.apply(values, start, scales)

    return module.weight(matrix, dict(weight=weight, scale=scale, whole=whole), ["weight"], decode)


def gptq(module: Module, group_size: int | None, *, plus_one: bool) -> DequantizedTensor:
    """GPTQ: `qweight` [in * bits / 32, out] and `qzeros` [groups, out * bits / 32], words of 32 bits; `scales`
    [groups, out]; and `g_idx` [in], the group of each input.

    Args:
        group_size: inputs per group, of layers that have as many groups as this makes; -1: all.
        plus_one: whether zero points are stored less one, without a sign.
    """
    words, zeros, scales = _words_zeros_scales(module)
    groups = module.find(".g_idx")
    outputs, count = words.shape[1], scales.shape[0]
    bits = 32 * zeros.shape[1] // outputs
    if bits not in WORD_BITS or zeros.shape != (count, outputs * bits // 32):
        raise module.fail("words with codes of 2, 4 or 8 bits", words, zeros, scales)
    inputs = 32 * words.shape[0] // bits
    group = _group_of(module, inputs, group_size, scales, groups)
    _check_groups(module, groups, inputs, words)
    if scales.shape != (count, outputs) or scales.dtype not in FLOATS:
        raise module.fail(f"scales of {outputs} outputs, as floats", scales, words)

    def decode(arrays: Arrays, start: int, stop: int) -> np.ndarray:
        values = codes.unpack(np.ascontiguousarray(arrays["words"][:, start:stop].T), bits).astype(np.float32)
        zero = _unpacked(arrays["zeros"], bits, start, stop)
        if plus_one:
            zero = (zero + np.uint8(1)) & np.uint8((1 << bits) - 1)
        scale = numbers(scales, arrays["scales"][:, start:stop])
        fit = Scales((stop - start, count), (1, group))
        return fit.apply(values, 0, scale.T, zero.T, arrays.get("groups"))

    parts = dict(words=words, zeros=zeros, scales=scales, groups=groups)
    return module.weight((outputs, inputs), parts, [], decode)


def _words_zeros_scales(module: Module) -> tuple[StoredTensor, StoredTensor, StoredTensor]:
    """`qweight`, `qzeros` and `scales`, which are matrices, the first two of words."""
    words, zeros, scales = (module.take(f".{kind}") for kind in ("qweight", "qzeros", "scales"))
    if any(len(part.shape) != 2 for part in (words, zeros, scales)) or (words.dtype, zeros.dtype) != ("I32", "I32"):
        raise module.fail("matrices, the first two of words of I32", words, zeros, scales)
    return words, zeros, scales


def _group_of(
    module: Module, inputs: int, group_size: int | None, scales: StoredTensor, groups: StoredTensor | None = None
) -> int:
    """Inputs per group of a layer whose groups follow each other."""
    count = scales.shape[0]
    group = inputs if group_size in (None, -1) else min(group_size, inputs)
    if -(-inputs // group) == count:
        return group
    if groups is None and inputs % count:
        raise module.fail(f"scales of groups of {group} of {inputs} inputs, or of equal ones", scales)
    return -(-inputs // count)


def awq(module: Module, group_size: int | None) -> DequantizedTensor:
    """AWQ ("gemm"): `qweight` [in, out / 8] and `qzeros` [groups, out / 8], words of eight codes; `scales`
    [groups, out]. Args: group_size: as in `gptq`."""
    words, zeros, scales = _words_zeros_scales(module)
    inputs, outputs, count = words.shape[0], 8 * words.shape[1], scales.shape[0]
    group = _group_of(module, inputs, group_size, scales)
    if scales.shape != (count, outputs) or zeros.shape != (count, words.shape[1]) or scales.dtype not in FLOATS:
        raise module.fail(f"scales and zero points of {outputs} outputs in groups of inputs", words, scales, zeros)

    def decode(arrays: Arrays, start: int, stop: int) -> np.ndarray:
        own = slice(start // 8, -(-stop // 8))
        values, zero = (
            codes.unpack_awq(arrays[name][:, own])[:, start % 8 :][:, : stop - start].T for name in ("words", "zeros")
        )
        fit = Scales((stop - start, count), (1, group))
        scale = numbers(scales, arrays["scales"][:, start:stop])
        return fit.apply(np.ascontiguousarray(values, np.float32), 0, scale.T, zero)

    return module.weight((outputs, inputs), dict(words=words, zeros=zeros, scales=scales), [], decode)


def bitsandbytes_int8(module: Module) -> DequantizedTensor:
    """`weight` i8 [out, in] and `SCB` f32 [out], 127 times the scale of each row."""
    weight, scale = module.take(".weight"), module.take(".SCB")
    module.find(".weight_format")
    if weight.dtype != "I8" or len(weight.shape) != 2 or (scale.dtype, scale.shape) != ("F32", weight.shape[:1]):
        raise module.fail("a matrix of I8 and a scale of F32 for each row", weight, scale)
    fit = Scales((weight.shape[0], 1), (1, weight.shape[1]))

    def decode(arrays: Arrays, start: int, stop: int) -> np.ndarray:
        scales = fit.part(arrays["scale"], start, stop) / np.float32(127)
        return fit.apply(arrays["weight"].astype(np.float32), start, scales)

    return module.weight(weight.shape, dict(weight=weight, scale=scale), ["weight"], decode)


@dataclass(frozen=True)
class _State:
    """The JSON that bitsandbytes stores beside a matrix."""

    shape: tuple[int, int]
    size: int
    """Numbers per scale."""
    outer_size: int
    """Scales per scale of their own."""
    offset: float
    """Added to the scales, if they are codes."""

    @staticmethod
    def read(module: Module, kind: str) -> "_State":
        part = module.take(f".weight.quant_state.bitsandbytes__{kind}")
        if part.dtype != "U8" or part.num_bytes > 2**16:
            raise module.fail("a JSON text of at most 64 KiB, as U8", part)
        found = parse_json(bytes(module.contents[part.name]), f"{part.path}: {part.name}")
        shape = found.get("shape")
        sizes = [*(shape if isinstance(shape, list) else []), found.get("blocksize"), found.get("nested_blocksize", 1)]
        offset = found.get("nested_offset", 0.0)
        if len(sizes) != 4 or not all(map(_is_size, sizes)) or not _is_small(offset):
            raise ValueError(
                f"{part.path}: {part.name} is {reprlib.repr(found)}, expected the shape of a matrix and sizes of "
                "blocks; download the checkpoint again"
            )
        return _State((sizes[0], sizes[1]), sizes[2], sizes[3], offset)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 < value < 2**31


def _is_small(value: Any) -> bool:
    return isinstance(value, (int, float)) and -1e6 < value < 1e6


def bitsandbytes_4bit(module: Module, kind: str) -> DequantizedTensor:
    """NF4 or FP4: `weight` u8 [n / 2, 1], two codes a byte, high half first, into a table `quant_map`; for each block
    of them a scale in `absmax`, which may be codes of 8 bits themselves. Args: kind: nf4 or fp4."""
    weight, state = module.take(".weight"), _State.read(module, kind)
    table, absmax = module.take(".weight.quant_map"), module.take(".weight.absmax")
    outer, outer_table = module.find(".weight.nested_absmax"), module.find(".weight.nested_quant_map")
    width, size = state.shape[1], state.size
    count = math.prod(state.shape)
    blocks = -(-count // size)
    if weight.dtype != "U8" or 2 * math.prod(weight.shape) != count + count % 2:
        raise module.fail(f"the codes of a matrix {list(state.shape)}, two a byte", weight)
    if table.shape != (16,) or table.dtype != "F32" or absmax.shape != (blocks,):
        raise module.fail(f"16 numbers of F32 and {blocks} scales", table, absmax)
    if outer is not None:
        fits = outer_table is not None and (outer_table.dtype, outer_table.shape) == ("F32", (256,))
        if not fits or absmax.dtype != "U8" or outer.shape != (-(-blocks // state.outer_size),):
            raise module.fail("scales of U8 with 256 numbers and scales of their own", absmax, outer, outer_table)
    elif absmax.dtype != "F32":
        raise module.fail("scales of F32", absmax)

    def decode(arrays: Arrays, start: int, stop: int) -> np.ndarray:
        first, end = start * width, stop * width
        first_block, end_block = first // size, -(-end // size)
        scales = arrays["absmax"][first_block:end_block]
        if "outer" in arrays:
            own = arrays["outer"][np.arange(first_block, end_block) // state.outer_size]
            scales = np.take(arrays["outer_table"], scales) * own + np.float32(state.offset)
        octets = arrays["weight"].reshape(-1)[first // 2 : -(-end // 2)]
        values = np.take(arrays["table"], codes.unpack_pairs(octets, high_first=True))
        values = values[first % 2 : first % 2 + end - first]
        values = values * np.repeat(scales, size)[first % size :][: end - first]
        return values.reshape(stop - start, width)

    parts = dict(weight=weight, table=table, absmax=absmax, outer=outer, outer_table=outer_table)
    return module.weight(state.shape, parts, [], decode)


def mxfp4_experts(module: Module) -> DequantizedTensor:
    """The experts of gpt-oss, [expert, in, out]: `_blocks` u8 [expert, out, in / 32, 16], two codes a byte, low half
    first, and `_scales` u8 [expert, out, in / 32], powers of two."""
    blocks, scales = module.take("_blocks"), module.take("_scales")
    is_pair = len(blocks.shape) == 4 and blocks.shape[3] == 16 and scales.shape == blocks.shape[:3]
    if not is_pair or (blocks.dtype, scales.dtype) != ("U8", "U8"):
        raise module.fail("[expert, out, in / 32, 16] and [expert, out, in / 32] of U8", blocks, scales)
    experts, outputs, groups, _ = blocks.shape

    def decode(arrays: Arrays, start: int, stop: int) -> np.ndarray:
        values = np.take(codes.E2M1, codes.unpack_pairs(arrays["blocks"]))
        values *= np.take(codes.E8M0, arrays["scales"])[..., None]
        return values.reshape(stop - start, outputs, -1).swapaxes(1, 2)

    parts = dict(blocks=blocks, scales=scales)
    return module.weight((experts, 32 * groups, outputs), parts, list(parts), decode, suffix="")


def _check_groups(module: Module, groups: StoredTensor | None, inputs: int, stored: StoredTensor) -> None:
    if groups is not None and (groups.dtype, groups.shape) != ("I32", (inputs,)):
        raise module.fail(f"the group of each of {inputs} inputs, of I32", stored, groups)
