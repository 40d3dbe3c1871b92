"""Families that Levanter has beside those taken live: exported by it as HF checkpoints, read by us, sampled.

Run by `scripts/compat.sh` in an environment with Levanter, as levanter_models.py; the comparison is the same.

    python tests/compat/levanter_families.py [PART OF A NAME ...]
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
from haliax.state_dict import to_torch_compatible_state_dict
from levanter.layers.rotary import DefaultRotaryEmbeddingsConfig
from levanter.models.apertus import ApertusConfig
from levanter.models.gemma import Gemma2Config, Gemma3Config, GemmaConfig
from levanter.models.gpt2 import Gpt2Config
from levanter.models.olmo import Olmo2Config
from levanter.models.olmo3 import Olmo3Config
from safetensors.numpy import save_file

sys.path.insert(0, str(Path(__file__).parent))
from levanter_models import MAX_LOGPROB_DIFFERENCE, SIZES, VOCAB, Results, _decisive, compare, ours

from levanter_infer import load_model
from levanter_infer.models.registry import FAMILIES

OLMO = dict(SIZES, use_flash_attention=False)
GEMMA = dict(SIZES, head_dim=SIZES["hidden_dim"] // SIZES["num_heads"], vocab_size=VOCAB.size)
"""Levanter's Gemmas export `head_dim`, `query_pre_attn_scalar` and `final_logit_softcapping`, and compute with the
quotient of the sizes and without a cap: they are compared where this is the same."""
GEMMA_2 = dict(GEMMA, query_pre_attn_scalar=GEMMA["head_dim"], final_logit_softcapping=None)
GPT2 = {key: SIZES[key] for key in ("max_seq_len", "hidden_dim", "num_layers", "num_heads", "attn_backend")}


def models() -> Iterator[tuple[str, eqx.Module, dict]]:
    configs = {
        "OLMo 2": Olmo2Config(**OLMO),
        "OLMo 3": Olmo3Config(**{**OLMO, "num_layers": 4}, sliding_window=24),
        "OLMo 3, tied": Olmo3Config(**OLMO, sliding_window=24, tie_word_embeddings=True),
        "Gemma": GemmaConfig(**GEMMA),
        "Gemma 2": Gemma2Config(**GEMMA_2),
        "Gemma 3": Gemma3Config(**GEMMA_2, rope=DefaultRotaryEmbeddingsConfig(theta=1e4)),
        "Apertus": ApertusConfig(**SIZES),
        "GPT-2": Gpt2Config(**GPT2),
    }
    for number, (name, config) in enumerate(configs.items()):
        model = config.model_type.init(VOCAB, config, key=jax.random.key(number))
        yield name, _decisive(model), config.to_hf_config(VOCAB.size).to_dict()


def exported(model, config: dict):
    """Our model of the checkpoint that Levanter exports."""
    with tempfile.TemporaryDirectory() as folder:
        state = {key: np.asarray(value) for key, value in to_torch_compatible_state_dict(model).items()}
        save_file({key: np.ascontiguousarray(value) for key, value in state.items()}, f"{folder}/model.safetensors")
        Path(folder, "config.json").write_text(json.dumps(config))
        return load_model(folder, dtype="float32")[0]


def main() -> int:
    results = Results()
    for name, model, config in models():
        if not any(wanted in name for wanted in sys.argv[1:] or [""]):
            continue
        if config["model_type"] not in FAMILIES:
            print(f"{name:58s} {config['model_type']} is not served")
            continue
        results.add(name, compare(model, ours(exported(model, config), matmul="xla")), f", {config['model_type']}")
    print(f"in all: {results.tokens - results.wrong}/{results.tokens} tokens, {results.worst:.1e}")
    return int(results.wrong > 0 or results.worst > MAX_LOGPROB_DIFFERENCE or not results.tokens)


if __name__ == "__main__":
    sys.exit(main())
