"""Write tests/golden: what HF transformers answers on small random checkpoints.

Run from the repository root in an environment of its own (scripts/golden/requirements.txt):

    python -m venv .venv-hf && .venv-hf/bin/pip install torch==2.13.0
    .venv-hf/bin/pip install -r scripts/golden/requirements.txt
    .venv-hf/bin/python scripts/golden/make_goldens.py [case ...]

The weights come from `tests/golden_cases.py`; here they are put into the HF model, which runs in float32 with eager
attention and without a cache. `golden_files.py` checks that each golden can fail. Cases of Llama, Mistral and Qwen were
written by transformers 4.57.6, the others by 5.23.0 or 5.24.0, which writes the same files for all.
"""

import json
import re
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Mistral4Config, Mistral4ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2]))
from scripts.golden.cases import CASES
from scripts.golden.golden_files import write_goldens
from tests.golden_cases import NUM_GREEDY, make_weights

AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)
"""transformers 5.23 leaves it out."""

ALIASES = {"kimi_k2": "deepseek_v3"}
"""Families that transformers has under another name."""


def known_to_hf(config: dict) -> dict:
    """A copy of the config with a `model_type` that transformers knows."""
    config = json.loads(json.dumps(config))
    return {**config, "model_type": ALIASES.get(config["model_type"], config["model_type"])}


def hf_config(config: dict):
    """transformers' own configuration object."""
    return AutoConfig.for_model(**known_to_hf(config))


def build_model(name: str, config: dict, *, strict: bool = True, zeroed: str | None = None) -> torch.nn.Module:
    """The HF model with the case's weights; `strict=False` leaves out tensors that a changed config has no use for,
    and tensors whose names end with `zeroed` are zeros."""
    weights = make_weights(name, CASES[name].config, SHAPES.get(name))
    if zeroed is not None:
        found = [key for key in weights if key.endswith(zeroed)]
        if not found:
            raise ValueError(f"{name}: no tensor is named ...{zeroed}")
        weights |= {key: np.zeros_like(weights[key]) for key in found}
    if config["model_type"] in READ_FROM_FILES:
        return read_model(name, config, weights, strict=strict)
    model = AutoModelForCausalLM.from_config(hf_config(config), attn_implementation="eager", dtype=torch.float32).eval()
    weights = {key: torch.from_numpy(value) for key, value in weights.items()}
    missing, unexpected = model.load_state_dict(fused(weights, model.state_dict()), strict=False)
    tied = {"lm_head.weight"} if config["tie_word_embeddings"] else set()
    if set(missing) - tied or (strict and unexpected):
        raise ValueError(
            f"{name}: HF misses {missing} and has no use for {unexpected}; mend golden_cases.tensor_shapes"
        )
    model.tie_weights()
    return model


READ_FROM_FILES = (
    *("mixtral", "granitemoe", "olmoe", "qwen2_moe", "glm4_moe", "minimax_m2", "ernie4_5_moe", "hunyuan_v1_moe"),
    "phimoe",
    *("granitemoeshared", "deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite", "deepseek_v32", "glm_moe_dsa"),
    *("qwen3_next", "qwen3_5_moe_text", "granitemoehybrid", "nemotron_h", "kimi_linear"),
    *("lfm2_moe", "olmo_hybrid"),
)
"""Families whose experts are other tensors in transformers' memory than in its files."""


def read_model(name: str, config: dict, weights: dict[str, np.ndarray], *, strict: bool) -> torch.nn.Module:
    """As `build_model`, by way of a checkpoint that transformers reads."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(known_to_hf(config)))
        save_file(weights, Path(directory) / "model.safetensors", metadata={"format": "pt"})
        model, info = AutoModelForCausalLM.from_pretrained(
            directory, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
        )
    unexpected = info["unexpected_keys"] if strict else ()
    if info["missing_keys"] or info["mismatched_keys"] or unexpected:
        raise ValueError(f"{name}: HF read {info}")
    return model.eval()


def _in_memory(name: str) -> str:
    """The name of a tensor of OLMo Hybrid in memory: in files, transformers writes some norms of attention layers under
    the names of those of others."""
    name = name.replace(".attention_layer_norm.", ".input_layernorm.")
    return name.replace(".feedforward_layer_norm.", ".post_attention_layernorm.")


def _published(name: str, shape: tuple[int, ...], config: dict) -> tuple[int, ...]:
    """The shape of a tensor of OLMo Hybrid: transformers writes three equal parts of the convolutions' channels."""
    kind = re.search(r"\.([qkv])_conv1d\.", name)
    if kind is None:
        return shape
    size = config["linear_value_head_dim" if kind[1] == "v" else "linear_key_head_dim"]
    return (config["linear_num_key_heads"] * size, *shape[1:])


_DENSE = re.compile(r"\.block_sparse_moe\.((gate|up|down)_proj)")
SHAPES: dict[str, dict[str, tuple[int, ...]]] = {}
"""Tensors of HF's own models, for families whose tensors `golden_cases.tensor_shapes` does not know."""


def found_shapes(name: str) -> dict[str, tuple[int, ...]] | None:
    config = CASES[name].config
    if config["model_type"] in ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe"):
        return None
    model = AutoModelForCausalLM.from_config(hf_config(config))
    if config["model_type"] in READ_FROM_FILES:
        with tempfile.TemporaryDirectory() as directory:
            model.save_pretrained(directory)
            found = load_file(Path(directory) / "model.safetensors")
        if config["model_type"] == "olmo_hybrid":
            return {_in_memory(name): _published(name, value.shape, config) for name, value in found.items()}
        # transformers writes the dense blocks of Kimi-Linear under the name of its experts
        names = {name: _DENSE.sub(r".mlp.\1", name) for name in found}
        return {names[name]: value.shape for name, value in found.items()}
    state = model.state_dict()
    tied = {"lm_head.weight"} if config["tie_word_embeddings"] else set()
    return {key: tuple(value.shape) for key, value in state.items() if key not in tied}


def fused(weights: dict, wanted: dict) -> dict:
    """The weights with those of experts in one tensor a layer, where the installed transformers has them so."""
    weights = dict(weights)
    for name in wanted:
        if name not in weights and name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            prefix, kind = name.rsplit(".", 1)
            kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
            each = [
                torch.cat([weights.pop(f"{prefix}.{expert}.{part}.weight") for part in kinds])
                for expert in range(wanted[name].shape[0])
            ]
            weights[name] = torch.stack(each)
    return weights


@torch.no_grad()
def full_logits(name: str, config: dict, tokens: np.ndarray, **options) -> np.ndarray:
    """f32[len(tokens), vocab] of a fresh model: a dynamic rope remembers the longest sequence that it has seen."""
    model = build_model(name, config, **options)
    return model(input_ids=torch.from_numpy(tokens.astype(np.int64))[None], use_cache=False).logits[0].numpy()


def greedy_tokens(name: str, config: dict, prompt: np.ndarray) -> np.ndarray:
    """NUM_GREEDY tokens, each from a forward over the whole sequence, checked against HF's cached `generate`."""
    tokens = prompt
    model = build_model(name, config)
    with torch.no_grad():
        for _ in range(NUM_GREEDY):
            logits = model(input_ids=torch.from_numpy(tokens.astype(np.int64))[None], use_cache=False).logits
            tokens = np.append(tokens, np.int32(logits[0, -1].argmax()))
        model = build_model(name, config)
        model.generation_config.eos_token_id = None
        ids = torch.from_numpy(prompt.astype(np.int64))[None]
        mask = torch.ones_like(ids)
        cached = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=NUM_GREEDY, pad_token_id=0)
    if cached[0].tolist() != tokens.tolist():
        raise ValueError(f"{name}: HF's generate with a cache and its full forward disagree on a {len(prompt)} prompt")
    return tokens[len(prompt) :].astype(np.int32)


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    for name in names or [name for name, case in CASES.items() if case.reference == "transformers"]:
        shapes = found_shapes(name)
        if shapes is not None:
            SHAPES[name] = shapes
        write_goldens(name, shapes, full_logits, greedy_tokens)


if __name__ == "__main__":
    main(sys.argv[1:])
