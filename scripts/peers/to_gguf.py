"""A Llama checkpoint of random weights as a GGUF file for llama.cpp. Runs in an environment without this package."""

import json
from pathlib import Path

import numpy as np

LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
OTHER_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}


def gguf_name(name: str) -> str:
    """`model.layers.3.self_attn.q_proj.weight` -> `blk.3.attn_q.weight`."""
    stem = name.removesuffix(".weight")
    if stem in OTHER_NAMES:
        return f"{OTHER_NAMES[stem]}.weight"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{LAYER_NAMES[part]}.weight"


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k in the order of llama.cpp, which rotates neighbours where HF rotates halves of a head.

    Args:
        weight: [heads * head size, in]
    """
    size = weight.shape[0] // heads
    return weight.reshape(heads, 2, size // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Every tensor of a file as float32, read when it is looked at; bfloat16 comes as its bits, in uint16."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    dtypes = {"F32": np.float32, "BF16": np.uint16}
    return {
        name: np.memmap(path, dtypes[entry["dtype"]], "r", 8 + size + entry["data_offsets"][0], tuple(entry["shape"]))
        for name, entry in header.items()
        if name != "__metadata__"
    }


def widen(tensor: np.ndarray) -> np.ndarray:
    """Bits of bfloat16 as float32."""
    return tensor if tensor.dtype == np.float32 else (tensor.astype(np.uint32) << 16).view(np.float32)


def convert(checkpoint: Path, target: Path, dtype: str) -> None:
    """Write `target` with matrices in `dtype` (float32, bfloat16, float16, or int8: Q8_0) and vectors in float32."""
    import gguf

    config = json.loads((checkpoint / "config.json").read_text())
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads["q_proj"])
    writer.add_head_count_kv(heads["k_proj"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    for name, tensor in read_safetensors(checkpoint / "model.safetensors").items():
        part = name.split(".")[-2]
        if part in heads:
            tensor = permute(tensor, heads[part])
        if tensor.ndim == 1 or dtype == "float32":
            writer.add_tensor(gguf_name(name), widen(tensor))
        elif dtype == "int8":
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(widen(tensor), kind), raw_dtype=kind)
        elif dtype == "float16":
            writer.add_tensor(gguf_name(name), widen(tensor).astype(np.float16))
        else:
            bits = np.ascontiguousarray(tensor).view(np.uint8)
            writer.add_tensor(gguf_name(name), bits, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
