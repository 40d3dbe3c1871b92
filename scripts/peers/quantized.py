"""Logits of small quantized models, of transformers and of this engine, in float32.

    python scripts/peers/quantized.py make DIR       # torch, transformers 5, compressed-tensors 0.17 or later
    python scripts/peers/quantized.py compare DIR    # levanter_infer

`make` quantizes a random Qwen3 with compressed-tensors, saves it as llm-compressor does, and lets transformers read it
again. `compare` prints the largest difference of a logit, as a part of the largest logit, and fails above 1e-5.
"""

import sys
from pathlib import Path

import numpy as np

TOKENS = np.arange(5, 45) * 7 % 256
SCHEMES = {
    "w4_groups": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
    "w8_channels": {"num_bits": 8, "type": "int", "strategy": "channel"},
    "fp8_channels": {"num_bits": 8, "type": "float", "strategy": "channel"},
}


def make(directory: Path) -> None:
    import torch
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "vocab_size": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    config = Qwen3Config(**sizes, **heads, max_position_embeddings=128, tie_word_embeddings=False)
    for name, args in SCHEMES.items():
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config).float().eval()
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.data.normal_(0, 1.2 / parameter.shape[1] ** 0.5)
        scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args))
        groups = {"group_0": scheme}
        apply_quantization_config(
            model, QuantizationConfig(config_groups=groups, ignore=["lm_head"], quantization_status="frozen")
        )
        largest = 448 if args["type"] == "float" else 2 ** (args["num_bits"] - 1) - 1
        for module in model.modules():
            if hasattr(module, "weight_scale"):
                weight = module.weight
                parts = weight.reshape(weight.shape[0], -1, args.get("group_size", weight.shape[1]))
                module.weight_scale.data = (parts.abs().amax(-1) / largest).to(module.weight_scale.dtype)
        compressor = ModelCompressor.from_pretrained_model(model)
        compressor.compress_model(model)
        model.save_pretrained(directory / name)
        compressor.update_config(directory / name)
        read = AutoModelForCausalLM.from_pretrained(directory / name, dtype=torch.float32).eval()
        with torch.no_grad():
            np.save(directory / f"{name}.npy", read(torch.from_numpy(TOKENS)[None]).logits[0].numpy())


def compare(directory: Path) -> bool:
    import equinox as eqx
    import haliax as hax

    from levanter_infer import load_model
    from levanter_infer.axes import POSITION

    ok = True
    for name in SCHEMES:
        model, _ = load_model(directory / name, dtype="float32")
        found = eqx.filter_jit(lambda model, tokens: model(tokens).array)(model, hax.named(TOKENS, POSITION))
        expected = np.load(directory / f"{name}.npy")
        error = float(np.abs(np.asarray(found) - expected).max() / np.abs(expected).max())
        print(f"{name}: {error:.2g}")
        ok &= error < 1e-5
    return ok


if __name__ == "__main__":
    command, where = sys.argv[1:]
    if command == "make":
        make(Path(where))
    else:
        sys.exit(not compare(Path(where)))
