"""Write tests/golden/adapters/*.safetensors: LoRA adapters of golden cases as PEFT saves them, and its logits.

Run from the repository root, in an environment with torch, transformers 5 and peft==0.21.2. A file has the adapter's
tensors, `tokens` and `logits` in float32, and as metadata adapter_config.json and the name of the case.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.golden_cases import load_case, write_checkpoint

OUT = Path(__file__).parents[2] / "tests" / "golden" / "adapters"
ADAPTERS = {
    "plain": ("llama3", {"target_modules": ["q_proj", "v_proj", "down_proj"], "r": 2, "lora_alpha": 8}),
    "patterns": (
        "qwen3",
        {
            **{"target_modules": "all-linear", "r": 3, "lora_alpha": 5, "use_rslora": True},
            **{"rank_pattern": {"k_proj": 1}, "alpha_pattern": {"layers.1.mlp.up_proj": 20, "o_proj": 2}},
        },
    ),
    "tables": ("llama3", {"target_modules": ["embed_tokens", "up_proj"], "r": 2, "modules_to_save": ["lm_head"]}),
    "fused": ("phi3", {"target_modules": ["qkv_proj", "gate_up_proj"], "r": 2, "lora_alpha": 8}),
    "transposed": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "r": 2, "lora_alpha": 8, "fan_in_fan_out": True}),
    "mixed": ("gpt2_untied", {"target_modules": ["attn.c_proj", "lm_head"], "r": 2, "lora_alpha": 8}),
    "tied": (
        "llama_tied",
        {"target_modules": ["q_proj"], "r": 2, "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ),
    "tied_lora": (
        "llama_tied",
        {"target_modules": ["q_proj", "embed_tokens"], "r": 2, "lora_alpha": 6, "ensure_weight_tying": True},
    ),
    "experts": ("qwen3_moe", {"target_modules": "all-linear", "r": 1, "lora_alpha": 3}),
    "experts_renamed": ("mixtral", {"target_modules": "all-linear", "r": 1, "lora_alpha": 3}),
    "experts_stacked": (
        "gpt_oss",
        {
            **{"target_modules": ["q_proj"], "r": 2, "lora_alpha": 6, "use_rslora": True},
            "target_parameters": ["layers.1.mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        },
    ),
    "experts_in_out": (
        "llama4",
        {
            **{"target_modules": ["k_proj"], "r": 1, "lora_alpha": 3},
            "target_parameters": ["feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"],
        },
    ),
    "renamed": ("kimi_linear", {"target_modules": "all-linear", "r": 1, "lora_alpha": 3}),
    "biases": ("qwen2", {"target_modules": ["k_proj", "up_proj"], "r": 2, "bias": "lora_only"}),
}


def main() -> None:
    """Arguments choose adapters by name; without any, all are written."""
    OUT.mkdir(exist_ok=True)
    for name in sys.argv[1:] or ADAPTERS:
        case_name, options = ADAPTERS[name]
        case = load_case(case_name)
        with tempfile.TemporaryDirectory() as folder:
            base, saved = Path(folder, "base"), Path(folder, "adapter")
            base.mkdir()
            write_checkpoint(base, case)
            model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
            peft = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options)).eval()
            torch.manual_seed(0)
            for parameter in peft.parameters():
                if parameter.requires_grad:
                    parameter.data += 0.3 * torch.randn_like(parameter)
            peft.save_pretrained(saved)
            tokens = torch.from_numpy(np.arange(12) * 7 % case.config["vocab_size"])
            with torch.no_grad():
                logits = peft(tokens[None]).logits[0]
            config = json.loads((saved / "adapter_config.json").read_text()) | {"base_model_name_or_path": "base"}
            metadata = {"case": case_name, "config": json.dumps(config)}
            tensors = load_file(saved / "adapter_model.safetensors")
            save_file({**tensors, "tokens": tokens, "logits": logits}, OUT / f"{name}.safetensors", metadata)
            print(name, len(tensors), "tensors")


if __name__ == "__main__":
    main()
