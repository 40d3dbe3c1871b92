"""Golden cases: small random checkpoints that a seed rebuilds, and what HF transformers answered on them.

`scripts/golden/make_goldens.py` writes `tests/golden/cases.json` (the `config.json` of every case) and one
`tests/golden/<case>.npz` per case; tests read them here. Only numpy and safetensors are needed: the weights are
made from the raw bits of PCG64, whose stream numpy guarantees (the distributions of `Generator` it does not).
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

GOLDEN_DIR = Path(__file__).parent / "golden"
BFLOAT16_ERRORS = GOLDEN_DIR / "bfloat16.json"
"""Written by scripts/golden/make_bfloat16.py."""
RELATIVE_BOUND = 2e-4  # of the logit scale, the largest |logit| that HF gave for the prompt
NUM_GREEDY = 32

# Gains chosen so that attention is neither uniform nor one-hot (scores have a spread of about 2) and the layers
# outweigh the token's own embedding in the residual stream; the top two logits are then apart by 0.1 to 10.
_GAINS = {
    "q_proj": 1.4,
    "k_proj": 1.4,
    "v_proj": 1.0,
    "o_proj": 2.0,
    "gate_proj": 1.4,
    "up_proj": 1.4,
    "down_proj": 2.0,
    "qkv_proj": 1.4,
    "gate_up_proj": 1.4,
    **{"q_a_proj": 1.4, "q_b_proj": 1.4, "kv_a_proj_with_mqa": 1.4, "kv_b_proj": 1.0},
    **{"w1": 1.4, "w3": 1.4, "w2": 2.0, "input_linear": 1.4, "output_linear": 2.0},
    **{"in_proj": 1.4, "out_proj": 2.0, "in_proj_qkvz": 1.4, "in_proj_qkv": 1.4, "in_proj_z": 1.4},
    **{"in_proj_ba": 1.0, "in_proj_b": 1.0, "in_proj_a": 1.0},
    **{"latent_down_proj": 1.4, "latent_up_proj": 2.0},
    **{"b_proj": 1.4, "f_a_proj": 1.4, "f_b_proj": 1.4, "g_a_proj": 1.4, "g_b_proj": 1.4},
    **{"query_key_value": 1.4, "dense": 2.0, "dense_h_to_4h": 1.4, "dense_4h_to_h": 2.0},
    **{"c_attn": 1.4, "c_fc": 1.4, "c_proj": 2.0, "fc1": 1.4, "fc2": 2.0},
    **{"per_layer_input_gate": 1.4, "per_layer_projection": 2.0, "per_layer_model_projection": 1.0, "proj": 3.0},
}
_SPREADS = {
    "sinks": 1.5,
    "e_score_correction_bias": 0.1,
    "expert_bias": 0.1,
    "gate_up_proj_bias": 0.5,
    "down_proj_bias": 0.3,
}
"""Standard deviations of parameters that are no matrices."""
_FACTORS = {"layer_scalar": 0.3, "scale": 0.2, "per_expert_scale": 0.5}
"""Standard deviations of parameters that are factors, around one."""
_RECURRENCE = {"A_log": -2.0, "dt_bias": 0.5, "D": 0.5}
_PLUS_ONE = ("gemma", "nemotron", "qwen3_next", "qwen3_5")  # families whose norms multiply by 1 + weight
_PLAIN = ("gemma4", "nemotron_h")  # and those that begin alike, and do not

_TINY = {
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100.0,
    "attention_bias": False,
}
_EXPERTS = {
    "head_dim": 6,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 10,
    "norm_topk_prob": True,
}
LEVANTER_CHECKPOINTS = {
    "llama_tied_padded": {**_TINY, "model_type": "llama", "tie_word_embeddings": True},
    "qwen3_moe": {**_TINY, **_EXPERTS, "model_type": "qwen3_moe", "tie_word_embeddings": False},
}
"""config.json of the models in levanter_checkpoints.zip, which scripts/golden/make_levanter_checkpoint.py writes."""


@dataclass(frozen=True)
class GoldenPrompt:
    """HF's answer on one prompt of P tokens, in float32 with eager attention.

    logits[i] belongs to position positions[i]; prompt_logprobs[i] is the logprob of token i + 1.
    The greedy arrays have NUM_GREEDY entries, or none where the answer depends on how the sequence came about
    (a rope scaling that changes with the length of the sequence, crossed on the way).
    """

    tokens: np.ndarray  # i32[P]
    positions: np.ndarray  # i32[n]
    logits: np.ndarray  # f32[n, vocab]
    prompt_logprobs: np.ndarray  # f32[P - 1]
    scale: float  # the largest |logit| over all positions of prompt and continuation
    greedy: np.ndarray  # i32
    greedy_gaps: np.ndarray  # f32, best minus second logit at each greedy step
    greedy_logprobs: np.ndarray  # f32, of the chosen tokens

    @property
    def bound(self) -> float:
        """The largest difference in a logit that counts as equal."""
        return RELATIVE_BOUND * self.scale


@dataclass(frozen=True)
class GoldenCase:
    name: str
    config: dict  # what stands in config.json
    changes: tuple[dict, ...]  # keys that neutralise one option each
    zeroed: tuple[str, ...]  # ends of the names of tensors that are options of their own
    weights_sha256: str  # of the weights that HF was given
    prompts: tuple[GoldenPrompt, ...]

    @property
    def sequences(self) -> list[np.ndarray]:
        """The tokens of each prompt and of its greedy continuation, i32."""
        return [np.concatenate([p.tokens, p.greedy[:-1]]).astype(np.int32) for p in self.prompts]

    @property
    def depends_on_length(self) -> bool:
        """Whether rotary frequencies depend on the length of the whole sequence, so that it must not be padded."""
        return (self.config.get("rope_scaling") or {}).get("rope_type") in ("dynamic", "longrope")


def relative_errors(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """The differences of logits, as a part of the largest one, in one row."""
    return (np.abs(got - want) / np.abs(want).max()).ravel()


def case_names() -> list[str]:
    return list(json.loads((GOLDEN_DIR / "cases.json").read_text()))


def load_case(name: str) -> GoldenCase:
    entry = json.loads((GOLDEN_DIR / "cases.json").read_text())[name]
    with np.load(GOLDEN_DIR / f"{name}.npz") as arrays:
        fields = [f for f in GoldenPrompt.__dataclass_fields__ if f != "scale"]
        count = sum(key.startswith("tokens_") for key in arrays)
        prompts = tuple(
            GoldenPrompt(scale=float(arrays[f"scale_{i}"]), **{f: arrays[f"{f}_{i}"] for f in fields})
            for i in range(count)
        )
    options = (tuple(entry.get(key, ())) for key in ("changes", "zeroed"))
    return GoldenCase(name, entry["config"], *options, entry["weights_sha256"], prompts)


def save_case(directory: Path, name: str, prompts: list[GoldenPrompt]) -> None:
    arrays = {f"{f}_{i}": getattr(p, f) for i, p in enumerate(prompts) for f in GoldenPrompt.__dataclass_fields__}
    np.savez_compressed(directory / f"{name}.npz", **{key: np.asarray(value) for key, value in arrays.items()})


def unit_noise(case: str, tensor: str, shape: tuple[int, ...]) -> np.ndarray:
    """float64 of mean 0 and variance 1, uniform in ±sqrt(3): a pure function of its arguments."""
    seed = int.from_bytes(hashlib.sha256(f"{case}/{tensor}".encode()).digest(), "big")
    raw = np.random.PCG64(seed).random_raw(int(np.prod(shape)))
    unit = (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return ((unit * 2.0 - 1.0) * np.sqrt(3.0)).reshape(shape)


def tensor_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that HF would write for this config."""
    embed, mlp, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or embed // heads
    q, kv = heads * head_dim, config["num_key_value_heads"] * head_dim
    family = config["model_type"]
    attention_bias = config.get("attention_bias", False)
    biased = {
        "q_proj": attention_bias or family == "qwen2",
        "k_proj": attention_bias or family == "qwen2",
        "v_proj": attention_bias or family == "qwen2",
        "o_proj": attention_bias,
        **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), config.get("mlp_bias", False)),
    }
    linears = {
        "self_attn": {"q_proj": (q, embed), "k_proj": (kv, embed), "v_proj": (kv, embed), "o_proj": (embed, q)},
        "mlp": {"gate_proj": (mlp, embed), "up_proj": (mlp, embed), "down_proj": (embed, mlp)},
    }
    if family == "qwen3_moe":
        width = config["moe_intermediate_size"]
        linears["mlp"] = {"gate": (config["num_experts"], embed)}
        for expert in range(config["num_experts"]):
            shape = {"gate_proj": (width, embed), "up_proj": (width, embed), "down_proj": (embed, width)}
            linears["mlp"] |= {f"experts.{expert}.{name}": shape[name] for name in shape}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], embed)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes[f"{prefix}.input_layernorm.weight"] = (embed,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (embed,)
        if family in ("qwen3", "qwen3_moe"):
            shapes[f"{prefix}.self_attn.q_norm.weight"] = (head_dim,)
            shapes[f"{prefix}.self_attn.k_norm.weight"] = (head_dim,)
        for block, members in linears.items():
            for name, shape in members.items():
                shapes[f"{prefix}.{block}.{name}.weight"] = shape
                if biased.get(name):
                    shapes[f"{prefix}.{block}.{name}.bias"] = shape[:1]
    shapes["model.norm.weight"] = (embed,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], embed)
    return shapes


def make_weights(case: str, config: dict, shapes: dict[str, tuple[int, ...]] | None = None) -> dict[str, np.ndarray]:
    """Every tensor of the case's checkpoint, float32, in HF's names and layout.

    `shapes`: those of HF's model; by default the recorded ones, or for the families that have none, `tensor_shapes`.
    """
    if shapes is None:
        shapes = recorded_shapes(case) or tensor_shapes(config)
    return {name: _tensor(case, name, shape, config["model_type"]) for name, shape in shapes.items()}


NAMES_IN_FILES = {"gpt_neox": {"lm_head.weight": "embed_out.weight"}}
"""Tensors that transformers renames when it reads and writes files, by family."""


def checkpoint_weights(case: GoldenCase) -> dict[str, np.ndarray]:
    """`make_weights` of a case, by the names that its checkpoint has."""
    names = NAMES_IN_FILES.get(case.config["model_type"], {})
    return {names.get(name, name): value for name, value in make_weights(case.name, case.config).items()}


def recorded_shapes(case: str) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of HF's model, as make_goldens.py found them; empty for older cases."""
    lines = json.loads((GOLDEN_DIR / "cases.json").read_text()).get(case, {}).get("tensors", [])
    return {name: tuple(map(int, sizes)) for name, *sizes in map(str.split, lines)}


def weights_sha256(weights: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(weights[name].tobytes())
    return digest.hexdigest()


def _tensor(case: str, name: str, shape: tuple[int, ...], model_type: str) -> np.ndarray:
    noise = unit_noise(case, name, shape)
    module, kind = name.split(".")[-2:]
    if kind in _SPREADS:
        value = noise * _SPREADS[kind]
    elif kind in _FACTORS:
        value = 1.0 + noise * _FACTORS[kind]
    elif module == "embed_tokens_per_layer":
        value = 0.4 * noise
    elif kind in _RECURRENCE:  # decays of e^-0.1 a token: what is remembered matters over tens of tokens
        value = 0.5 * noise + _RECURRENCE[kind]
    elif module.startswith("sconv"):  # [tap, channel], the latest input first
        value = noise * np.array([1.0, 0.6, 0.5, 0.4])[: shape[0], None]
    elif len(shape) == 3 and "conv" in module:
        value = 0.8 * noise
    elif kind in ("gate_up_proj", "down_proj"):  # all experts of a layer, inputs first
        value = noise * (_GAINS[kind] / np.sqrt(shape[1]))
    elif kind == "bias":
        value = (0.1 if "norm" in module or module.startswith("ln_") else 0.3) * noise
    elif module.rstrip("_12f").endswith("norm") or module.startswith("ln_"):
        is_centred = model_type.startswith(_PLUS_ONE) and not name.endswith("linear_attn.norm.weight")
        is_centred = is_centred and not model_type.startswith(_PLAIN)
        value = 0.2 * noise + (0.0 if is_centred else 1.0)
    elif module == "act_fn":  # of xIELU
        value = {"beta": 0.5, "eps": -0.3}.get(kind, 0.0) + noise * {"eps": 0.1}.get(kind, 0.2)
    elif module in _GAINS:
        value = noise * (_GAINS[module] / np.sqrt(shape[0 if model_type == "gpt2" else -1]))  # GPT-2 has [in, out]
    else:  # embeddings and head: logits of spread 3 behind a norm of unit size
        value = noise * (3.0 / np.sqrt(shape[1]))
        if model_type.startswith("gemma") and "embed" in module:
            value = value * 0.1  # Gemma multiplies them by the root of their width
    return np.asarray(value, np.float32)


def write_checkpoint(directory: Path, case: GoldenCase) -> Path:
    """Write `config.json` and `model.safetensors` as HF would."""
    from safetensors.numpy import save_file

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(case.config))
    save_file(checkpoint_weights(case), directory / "model.safetensors", metadata={"format": "pt"})
    return directory
