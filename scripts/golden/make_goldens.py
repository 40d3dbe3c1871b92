"""Write tests/golden: what HF transformers answers on small random checkpoints.

Run from the repository root in an environment of its own (scripts/golden/requirements.txt):

    python -m venv .venv-hf && .venv-hf/bin/pip install torch==2.13.0
    .venv-hf/bin/pip install -r scripts/golden/requirements.txt
    .venv-hf/bin/python scripts/golden/make_goldens.py [case ...]

The weights come from `tests/golden_cases.py`; here they are put into the HF model, which runs in float32 with eager
attention and without a cache. For each case the script also proves that the golden can fail: with the case's
feature switched off (`without`), the logits must move by at least 50 times the bound that the tests allow, and with
any option neutralised (`changes`), by more than a hundredth of their scale. Cases of Llama, Mistral and Qwen were
written by transformers 4.57.6, the others by 5.23.0, which gives the same for those too.
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.golden_cases import (
    GOLDEN_DIR,
    NUM_GREEDY,
    RELATIVE_BOUND,
    GoldenPrompt,
    make_weights,
    save_case,
    unit_noise,
    weights_sha256,
)

VISIBLE = 50  # times the bound: how far a switched-off feature must move a logit

BASE = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-5,
    "use_cache": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "attention_dropout": 0.0,
    "torch_dtype": "float32",
    "transformers_version": "4.57.6",
}
LLAMA = {
    **BASE,
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "pretraining_tp": 1,
    "attention_bias": False,
    "mlp_bias": False,
    "rope_scaling": None,
}
MISTRAL = {**BASE, "model_type": "mistral", "architectures": ["MistralForCausalLM"], "head_dim": 16}
QWEN = {**BASE, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "rope_scaling": None}
QWEN2 = {**QWEN, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
QWEN3_MOE = {
    **QWEN,
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "head_dim": 16,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "router_aux_loss_coef": 0.001,
    "output_router_logits": False,
    "use_sliding_window": False,
    "sliding_window": None,
}
QWEN3 = {**QWEN, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "attention_bias": False}
NO_WINDOW = {"use_sliding_window": False, "sliding_window": 4, "max_window_layers": 0}  # a window that must not act
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
YARN_ALL_KEYS = {
    **YARN,
    "beta_fast": 16.0,
    "beta_slow": 0.5,
    "mscale": 1.3,
    "mscale_all_dim": 0.6,
    "truncate": False,
}
SHORT_FACTOR = [1.0, 1.02, 1.05, 1.1, 1.2, 1.35, 1.5, 1.75]
LONG_FACTOR = [1.05, 1.3, 1.8, 2.6, 4.0, 5.5, 7.0, 8.0]


@dataclass(frozen=True)
class Case:
    config: dict
    prompt_lens: tuple[int, ...]
    without: dict = field(default_factory=dict)  # config keys that switch the case's feature off
    changes: tuple[dict, ...] = ()  # config keys that neutralise one option each, with the same tensors
    length_threshold: int | None = None  # the rope changes when a sequence grows beyond this
    changes_beyond: bool = False  # and keeps changing with every token after it


def longrope(**keys) -> dict:
    return {"rope_type": "longrope", "short_factor": SHORT_FACTOR, "long_factor": LONG_FACTOR, **keys}


CASES = {
    "llama1": Case({**LLAMA, "num_key_value_heads": 4, "rms_norm_eps": 1e-6}, (1, 7, 40), {"rope_theta": 100.0}),
    "llama2_bias": Case(
        {**LLAMA, "num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True, "rms_norm_eps": 0.03},
        (6, 33),
        {"attention_bias": False},
    ),
    "llama_mlp_bias": Case({**LLAMA, "mlp_bias": True, "rms_norm_eps": 0.03}, (9, 26), {"rms_norm_eps": 1e-5}),
    "llama3": Case({**LLAMA, "rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE}, (8, 120), {"rope_scaling": None}),
    "llama_linear": Case({**LLAMA, "rope_scaling": {"type": "linear", "factor": 4.0}}, (9, 70), {"rope_scaling": None}),
    "llama_dynamic": Case(
        {**LLAMA, "max_position_embeddings": 64, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        (9, 32, 64, 100),
        {"rope_scaling": None},
        length_threshold=64,
        changes_beyond=True,
    ),
    "llama_yarn": Case(
        {**LLAMA, "max_position_embeddings": 128, "rope_scaling": YARN}, (10, 90), {"rope_scaling": None}
    ),
    "llama_yarn_keys": Case(
        {**LLAMA, "max_position_embeddings": 128, "rope_scaling": YARN_ALL_KEYS}, (10, 90), {"rope_scaling": YARN}
    ),
    "llama_yarn_factor": Case(
        {**LLAMA, "max_position_embeddings": 128, "rope_scaling": {**YARN, "attention_factor": 1.4}},
        (12, 70),
        {"rope_scaling": YARN},
    ),
    "llama_longrope": Case(
        {
            **LLAMA,
            "max_position_embeddings": 256,
            "original_max_position_embeddings": 48,
            "rope_scaling": longrope(),
        },
        (14, 48, 49, 100),
        {"rope_scaling": longrope(long_factor=SHORT_FACTOR)},
        length_threshold=48,
    ),
    "llama_longrope_factor": Case(
        {**LLAMA, "max_position_embeddings": 64, "rope_scaling": longrope(factor=4.0)},
        (16, 80),
        {"rope_scaling": longrope(factor=1.0)},
        length_threshold=64,
    ),
    "llama_tied": Case({**LLAMA, "tie_word_embeddings": True, "num_hidden_layers": 3}, (5, 30), {"rope_theta": 100.0}),
    "llama_head_dim": Case(
        {**LLAMA, "hidden_size": 48, "head_dim": 32, "num_key_value_heads": 1}, (5, 30), {"rope_theta": 100.0}
    ),
    "mistral_window": Case({**MISTRAL, "sliding_window": 8}, (5, 8, 9, 96), {"sliding_window": 9}),
    "mistral": Case({**MISTRAL, "sliding_window": None, "head_dim": 24}, (5, 60), {"sliding_window": 40}),
    "qwen2": Case({**QWEN2, **NO_WINDOW}, (6, 40), {"rope_theta": 1e4}),
    "qwen2_window": Case(
        {**QWEN2, "num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        (7, 80),
        {"max_window_layers": 0},
    ),
    "qwen3": Case({**QWEN3, **NO_WINDOW, "head_dim": 32, "tie_word_embeddings": True}, (6, 40), {"rope_theta": 1e4}),
    "qwen3_moe": Case(QWEN3_MOE, (7, 60), {"num_experts_per_tok": 2}),
    "qwen3_moe_shares": Case({**QWEN3_MOE, "norm_topk_prob": False}, (9, 40), {"norm_topk_prob": True}),
    "qwen3_layer_types": Case(
        {
            **QWEN3,
            "head_dim": 16,
            "attention_bias": True,
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        (7, 80),
        {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
    ),
}


EVERY = {**BASE, "hidden_size": 56, "intermediate_size": 88, "num_hidden_layers": 4, "head_dim": 16}
"""Sizes that differ from each other."""
OLMO2 = {**{k: v for k, v in EVERY.items() if k != "head_dim"}, "model_type": "olmo2", "num_attention_heads": 14}
OLMO2["architectures"] = ["Olmo2ForCausalLM"]
OLMO3 = {**{k: v for k, v in OLMO2.items() if k != "rope_theta"}, "model_type": "olmo3", "sliding_window": 6}
OLMO3 |= {"architectures": ["Olmo3ForCausalLM"], "num_hidden_layers": 5}
GEMMA = {**EVERY, "model_type": "gemma", "architectures": ["GemmaForCausalLM"], "hidden_act": "gelu"}
GEMMA["tie_word_embeddings"] = True
GEMMA2 = {
    **GEMMA,
    "model_type": "gemma2",
    "architectures": ["Gemma2ForCausalLM"],
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 4,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 0.5,
    "sliding_window": 6,
}
GEMMA3 = {
    **{k: v for k, v in GEMMA2.items() if k not in ("attn_logit_softcapping", "rope_theta")},
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "num_hidden_layers": 8,
}
PHI3 = {**{k: v for k, v in EVERY.items() if k != "head_dim"}, "model_type": "phi3", "hidden_size": 64}
PHI3 |= {"architectures": ["Phi3ForCausalLM"], "original_max_position_embeddings": 48, "pad_token_id": 0}
SMOLLM3 = {**EVERY, "model_type": "smollm3", "architectures": ["SmolLM3ForCausalLM"], "tie_word_embeddings": True}
SMOLLM3["pad_token_id"] = 0
GRANITE = {
    **{k: v for k, v in EVERY.items() if k != "head_dim"},
    "model_type": "granite",
    "architectures": ["GraniteForCausalLM"],
    "hidden_size": 64,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.5,
    "residual_multiplier": 0.6,
    "logits_scaling": 2.5,
}
GRANITE_CHANGES = tuple(
    {key: 1.0} for key in ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
)
BY_KIND = {
    "full_attention": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 2e4},
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
}
SAME_ROPES = {"rope_parameters": dict.fromkeys(BY_KIND, BY_KIND["sliding_attention"])}
NO_WINDOWS = {"sliding_window": 500}
CASES |= {
    "olmo2": Case(OLMO2, (6, 40), {"rope_theta": 100.0}, changes=({"rope_theta": 100.0},)),
    "olmo2_tied": Case(
        {**OLMO2, "num_attention_heads": 10, "hidden_size": 40, "attention_bias": True, "tie_word_embeddings": True}
        | {"num_hidden_layers": 6},
        (9, 35),
        {"attention_bias": False},
    ),
    "olmo3": Case(
        {**OLMO3, "rope_theta": 5e5, "rope_scaling": YARN},
        (7, 60),
        {"rope_scaling": None},
        changes=({"rope_scaling": None}, NO_WINDOWS, {"layer_types": ["full_attention"] * 5}),
    ),
    "olmo3_tied": Case(
        {**OLMO3, "rope_parameters": BY_KIND, "tie_word_embeddings": True, "attention_bias": True},
        (9, 50),
        {"attention_bias": False},
        changes=(SAME_ROPES, NO_WINDOWS),
    ),
    "gemma": Case(GEMMA, (6, 40), {"rope_theta": 100.0}, changes=({"rope_theta": 100.0},)),
    "gemma_untied": Case(
        {**GEMMA, "tie_word_embeddings": False, "attention_bias": True, "num_key_value_heads": 1},
        (5, 31),
        {"attention_bias": False},
    ),
    "gemma2": Case(
        GEMMA2,
        (7, 60),
        {"sliding_window": 7},
        changes=(
            {"query_pre_attn_scalar": 16},
            {"attn_logit_softcapping": None},
            {"final_logit_softcapping": None},
            NO_WINDOWS,
        ),
    ),
    "gemma2_untied": Case(
        {
            **GEMMA2,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "layer_types": ["full_attention", "full_attention", "sliding_attention", "sliding_attention"],
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
        (8, 45),
        {"attention_bias": False},
        changes=({"layer_types": None}, {"query_pre_attn_scalar": 16}, NO_WINDOWS),
    ),
    "gemma3": Case(
        {
            **GEMMA3,
            "rope_theta": 1e4,
            "rope_local_base_freq": 100.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        (7, 60),
        {"rope_local_base_freq": 1e4},
        changes=(
            {"query_pre_attn_scalar": 16},
            {"rope_local_base_freq": 1e4},
            {"rope_scaling": None},
            {"final_logit_softcapping": None},
            {"sliding_window_pattern": 4},
            NO_WINDOWS,
        ),
    ),
    "gemma3_untied": Case(
        {
            **GEMMA3,
            "rope_parameters": BY_KIND,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "final_logit_softcapping": None,
            "sliding_window_pattern": 3,
        },
        (9, 50),
        {"attention_bias": False},
        changes=(SAME_ROPES, {"sliding_window_pattern": 6}),
    ),
    "phi3": Case(
        {**PHI3, "rope_scaling": None, "sliding_window": 8, "partial_rotary_factor": 0.5},
        (7, 60),
        {"sliding_window": 9},
        changes=({"partial_rotary_factor": 1.0}, {"sliding_window": None}),
    ),
    "phi3_tied": Case(
        {
            **PHI3,
            "max_position_embeddings": 192,
            "tie_word_embeddings": True,
            "partial_rotary_factor": 0.75,
            "rope_scaling": longrope(short_factor=SHORT_FACTOR[:6], long_factor=LONG_FACTOR[:6]),
        },
        (14, 48, 49, 100),
        {"rope_scaling": longrope(short_factor=SHORT_FACTOR[:6], long_factor=SHORT_FACTOR[:6])},
        length_threshold=48,
    ),
    "smollm3": Case(
        {
            **SMOLLM3,
            "num_hidden_layers": 6,
            "no_rope_layer_interval": 3,
            "use_sliding_window": True,
            "sliding_window": 6,
        },
        (7, 60),
        {"sliding_window": 7},
        changes=({"no_rope_layers": [1] * 6}, NO_WINDOWS, {"use_sliding_window": False}),
    ),
    "smollm3_untied": Case(
        {
            **SMOLLM3,
            "tie_word_embeddings": False,
            "no_rope_layers": [1, 0, 1, 0],
            "attention_bias": True,
            "mlp_bias": True,
        },
        (6, 40),
        {"mlp_bias": False},
        changes=({"no_rope_layers": [0, 1, 0, 1]},),
    ),
    "granite": Case(GRANITE, (7, 41), {"residual_multiplier": 1.0}, changes=GRANITE_CHANGES),
    "granite_tied": Case(
        {**GRANITE, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "rms_norm_eps": 0.02},
        (10, 36),
        {"mlp_bias": False},
        changes=GRANITE_CHANGES,
    ),
}


def build_model(name: str, config: dict, *, strict: bool = True) -> torch.nn.Module:
    """The HF model with the case's weights; `strict=False` leaves out tensors that a changed config has no use for."""
    hf_config = AutoConfig.for_model(**json.loads(json.dumps(config)))
    model = AutoModelForCausalLM.from_config(hf_config, attn_implementation="eager", dtype=torch.float32).eval()
    weights = make_weights(name, CASES[name].config, SHAPES.get(name))
    weights = {key: torch.from_numpy(value) for key, value in weights.items()}
    missing, unexpected = model.load_state_dict(fused(weights, model.state_dict()), strict=False)
    tied = {"lm_head.weight"} if config["tie_word_embeddings"] else set()
    if set(missing) - tied or (strict and unexpected):
        raise ValueError(
            f"{name}: HF misses {missing} and has no use for {unexpected}; mend golden_cases.tensor_shapes"
        )
    model.tie_weights()
    return model


SHAPES: dict[str, dict[str, tuple[int, ...]]] = {}
"""Tensors of HF's own models, for families whose tensors `golden_cases.tensor_shapes` does not know."""


def found_shapes(name: str) -> dict[str, tuple[int, ...]] | None:
    config = CASES[name].config
    if config["model_type"] in ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe"):
        return None
    hf_config = AutoConfig.for_model(**json.loads(json.dumps(config)))
    state = AutoModelForCausalLM.from_config(hf_config).state_dict()
    tied = {"lm_head.weight"} if config["tie_word_embeddings"] else set()
    return {key: tuple(value.shape) for key, value in state.items() if key not in tied}


def fused(weights: dict, wanted: dict) -> dict:
    """The weights with those of experts in one tensor a layer, where the installed transformers has them so."""
    weights = dict(weights)
    for name in wanted:
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            prefix, kind = name.rsplit(".", 1)
            kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
            each = [
                torch.cat([weights.pop(f"{prefix}.{expert}.{part}.weight") for part in kinds])
                for expert in range(wanted[name].shape[0])
            ]
            weights[name] = torch.stack(each)
    return weights


@torch.no_grad()
def full_logits(name: str, config: dict, tokens: np.ndarray, *, strict: bool = True) -> np.ndarray:
    """f32[len(tokens), vocab] of a fresh model: a dynamic rope remembers the longest sequence that it has seen."""
    model = build_model(name, config, strict=strict)
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


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide = wide - wide.max(axis=-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))


def golden_prompt(name: str, case: Case, length: int) -> GoldenPrompt:
    noise = unit_noise(name, f"prompt {length}", (length,))
    tokens = ((noise / np.sqrt(3.0) + 1.0) / 2.0 * case.config["vocab_size"]).astype(np.int32)
    limit = case.length_threshold
    stays = limit is None or length + NUM_GREEDY <= limit or (length > limit and not case.changes_beyond)
    greedy = greedy_tokens(name, case.config, tokens) if stays else np.zeros(0, np.int32)
    logits = full_logits(name, case.config, np.concatenate([tokens, greedy[:-1]]))
    positions = np.unique(np.array([0, length // 3, length // 2, length - 2, length - 1]).clip(0))
    logprobs = log_softmax(logits)
    steps = np.arange(len(greedy)) + length - 1
    best = np.sort(logits[steps], axis=-1)[:, -2:] if len(greedy) else np.zeros((0, 2), np.float32)
    return GoldenPrompt(
        tokens=tokens,
        positions=positions.astype(np.int32),
        logits=logits[positions],
        prompt_logprobs=logprobs[np.arange(length - 1), tokens[1:]].astype(np.float32),
        scale=float(np.abs(logits).max()),
        greedy=greedy,
        greedy_gaps=best[:, 1] - best[:, 0],
        greedy_logprobs=logprobs[steps, greedy].astype(np.float32),
    )


def check_case(name: str, case: Case, prompts: list[GoldenPrompt]) -> str:
    """Refuse a golden that proves little: an invisible feature, a dull continuation, a close call."""
    longest = max(prompts, key=lambda p: len(p.tokens))
    changed = full_logits(name, {**case.config, **case.without}, longest.tokens, strict=False)
    moved = float(np.abs(changed[longest.positions] - longest.logits).max()) / longest.bound
    distinct = min((len(set(p.greedy.tolist())) for p in prompts if len(p.greedy)), default=0)
    gap = min((float(p.greedy_gaps.min()) / p.bound for p in prompts if len(p.greedy)), default=np.inf)
    for change in case.changes:
        other = full_logits(name, {**case.config, **change}, longest.tokens)
        share = float(np.abs(other[longest.positions] - longest.logits).max()) / longest.scale
        if share < 0.01:
            raise ValueError(f"{name}: {change} moves the logits by {share:.2g} of their scale only")
    line = f"{name:22s} moved {moved:8.0f}x  distinct {distinct:2d}  gap {gap:7.1f}x  scale {longest.scale:5.1f}"
    if moved < VISIBLE:
        raise ValueError(f"{line}: without={case.without} moves no logit by {VISIBLE}x the bound")
    if gap < 1.0:
        raise ValueError(f"{line}: a greedy choice closer than the bound; change the prompt lengths")
    if distinct < 6:
        raise ValueError(f"{line}: fewer than 6 distinct greedy tokens; change the gains or the prompt lengths")
    return line


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    GOLDEN_DIR.mkdir(exist_ok=True)
    print(f"bound {RELATIVE_BOUND} of the logit scale, {NUM_GREEDY} greedy tokens")
    entries = json.loads((GOLDEN_DIR / "cases.json").read_text()) if names else {}
    for name in names or CASES:
        case = CASES[name]
        shapes = found_shapes(name)
        if shapes is not None:
            SHAPES[name] = shapes
        prompts = [golden_prompt(name, case, length) for length in case.prompt_lens]
        print(check_case(name, case, prompts), flush=True)
        save_case(GOLDEN_DIR, name, prompts)
        # The config keys as given, not as HF completes them: older checkpoints have no head_dim and no layer_types.
        entries[name] = {
            "config": case.config,
            **({"changes": case.changes} if case.changes else {}),
            **({"tensors": [f"{key} {' '.join(map(str, shape))}" for key, shape in shapes.items()]} if shapes else {}),
            "weights_sha256": weights_sha256(make_weights(name, case.config, shapes)),
        }
    entries = {name: entries[name] for name in CASES if name in entries}
    (GOLDEN_DIR / "cases.json").write_text(json.dumps(entries, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
