"""Live models of the real Levanter package: our tokens and log probabilities against its own forward.

Run by `scripts/compat.sh` in an environment with Levanter. Levanter generates nothing here: its forward over the prompt
and our tokens must choose the same token at every position, and give it the same log probability.

    XLA_FLAGS=--xla_force_host_platform_device_count=2 python tests/compat/levanter_models.py [PART OF A NAME ...]
"""

import dataclasses
import importlib.metadata
import sys
import tempfile
from collections.abc import Iterator

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis
from levanter.checkpoint import save_checkpoint
from levanter.grug.sharding import compact_grug_mesh
from levanter.layers.attention import AttentionBackend, AttentionMask
from levanter.layers.rotary import (
    DefaultRotaryEmbeddingsConfig,
    Llama3RotaryEmbeddingsConfig,
    YarnRotaryEmbeddingsConfig,
)
from levanter.models.llama import LlamaConfig
from levanter.models.mistral import MistralConfig
from levanter.models.mixtral import MixtralConfig
from levanter.models.qwen import Qwen3Config, QwenConfig
from levanter.models.qwen3_moe import Qwen3MoeConfig
from levanter.models.snowball import SnowballConfig
from levanter.utils.mesh import MeshConfig, create_mesh_from_axis_specs

from levanter_infer import EngineConfig, InferenceEngine, Request, SamplingParams, from_levanter, load_model
from levanter_infer.kernels.cpu import bindings as cpu
from levanter_infer.models.registry import FAMILIES

VOCAB = Axis("vocab", 211)
LENGTHS = (3, 17, 40, 70)
MAX_TOKENS = 20
SIZES = dict(
    max_seq_len=128, hidden_dim=64, intermediate_dim=96, num_layers=2, num_heads=8, num_kv_heads=2,
    attn_backend=AttentionBackend.VANILLA, gradient_checkpointing=False,
)  # fmt: skip
MOE = dict(SIZES, head_dim=16, moe_intermediate_dim=48, num_experts=8, num_experts_per_tok=3)
ENGINE = EngineConfig(page_size=8, max_pages=96, max_seqs=4, max_seq_len=128, max_step_tokens=48)
MAX_LOGPROB_DIFFERENCE = 1e-4
"""Attention scores of these models are large, and their roundings with them."""
WITH_CPU_KERNELS = ("Llama", "Qwen2", "Qwen3, YaRN", "Mistral, sliding_window=8 applied", "Qwen3-MoE", "Mixtral")
ON_MESHES = ("Llama", "Qwen3, YaRN", "Qwen3-MoE")


@dataclasses.dataclass(frozen=True)
class WindowedConfig(MistralConfig):
    """A Mistral whose attention layers apply its window, which Levanter's own do not."""

    def attention_config(self):
        return dataclasses.replace(super().attention_config(), sliding_window=self.sliding_window)


def models() -> Iterator[tuple[str, eqx.Module]]:
    yarn = YarnRotaryEmbeddingsConfig(theta=1e4, factor=8.0, original_max_position_embeddings=16, mscale=1.3)
    llama3 = Llama3RotaryEmbeddingsConfig(theta=1e4, factor=8.0, original_max_position_embeddings=32)
    configs = {
        "Llama": LlamaConfig(**SIZES),
        "Llama, tied, head size 32": LlamaConfig(**SIZES, tie_word_embeddings=True, head_dim=32),
        "Llama, llama3 rope": LlamaConfig(**SIZES, rope=llama3),
        "Llama, linear rope": LlamaConfig(**SIZES, rope=DefaultRotaryEmbeddingsConfig(theta=1e4, factor=4.0)),
        "Llama, YaRN": LlamaConfig(**SIZES, rope=yarn),
        "Qwen2": QwenConfig(**SIZES),
        "Qwen2, YaRN": QwenConfig(**SIZES, rope=yarn),
        "Qwen3": Qwen3Config(**SIZES, head_dim=16),
        "Qwen3, YaRN": Qwen3Config(**SIZES, head_dim=16, rope=yarn),
        "Mistral": MistralConfig(**SIZES),
        "Mistral, sliding_window=8 declared": MistralConfig(**SIZES, sliding_window=8),
        "Mistral, sliding_window=8 applied": WindowedConfig(**SIZES, sliding_window=8),
        "Mixtral": MixtralConfig(**SIZES, n_routed_experts=8, num_experts_per_tok=3),
        "Qwen3-MoE": Qwen3MoeConfig(**MOE),
        "Qwen3-MoE, plain weights, tied": Qwen3MoeConfig(**MOE, norm_topk_prob=False, tie_word_embeddings=True),
    }
    for number, (name, config) in enumerate(configs.items()):
        model = config.model_type.init(VOCAB, config, key=jax.random.key(number))
        yield name, _decisive(model)


def _decisive(model):
    """Larger projections than those of a new model, so that attention and its positions decide what comes next."""

    def larger(path, leaf):
        name = jax.tree_util.keystr(path)
        return leaf * 3 if "_proj" in name and "mlp" not in name else leaf + 0.1 if ".bias" in name else leaf

    return jax.tree_util.tree_map_with_path(larger, model)


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCAB.size, length).tolist() for length in LENGTHS]


def ours(model, **options) -> list[tuple[list[int], np.ndarray]]:
    engine = InferenceEngine(model, config=dataclasses.replace(ENGINE, **options))
    sampling = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    outputs = engine.generate([Request(prompt_token_ids=prompt, sampling=sampling) for prompt in prompts()])
    return [(output.completions[0].token_ids, output.completions[0].logprobs) for output in outputs]


@eqx.filter_jit
def _forward(model, tokens):
    return model(hax.named(tokens, "position"), attn_mask=AttentionMask.causal()).array


def compare(model, sampled) -> tuple[int, int, float]:
    """Tokens; how many of them Levanter's forward would not have chosen; largest difference of log probabilities."""
    count, wrong, worst = 0, 0, 0.0
    one_device = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))  # Levanter's experts need some mesh
    for prompt, (tokens, logprobs) in zip(prompts(), sampled, strict=True):
        assert len(tokens) == MAX_TOKENS, tokens
        padded = np.zeros(max(LENGTHS) + MAX_TOKENS, np.int32)  # one program for all; what follows changes nothing
        padded[: len(prompt) + len(tokens)] = prompt + tokens
        with hax.partitioning.set_mesh(one_device):
            logits = _forward(model, jnp.asarray(padded)).astype(jnp.float32)
        logits = logits[len(prompt) - 1 : len(prompt) - 1 + len(tokens)]
        wrong += int((np.asarray(logits.argmax(-1)) != tokens).sum())
        theirs = np.asarray(jax.nn.log_softmax(logits))[np.arange(len(tokens)), tokens]
        worst = max(worst, float(np.abs(theirs - logprobs).max()))
        count += len(tokens)
    return count, wrong, worst


def shared(model, adopted) -> str:
    def pointers(tree) -> set[int]:
        return {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)}

    own = pointers(model)
    return f"{len(own & pointers(adopted))}/{len(own)}"


class Results:
    def __init__(self):
        self.tokens, self.wrong, self.worst = 0, 0, 0.0

    def add(self, what: str, figures: tuple[int, int, float], note: str = "") -> None:
        tokens, wrong, worst = figures
        self.tokens, self.wrong, self.worst = self.tokens + tokens, self.wrong + wrong, max(self.worst, worst)
        print(f"{what:58s} {tokens - wrong}/{tokens} tokens, max difference of logprobs {worst:.1e}{note}", flush=True)


def on_meshes(name: str, model, results: Results) -> None:
    """The parameters as a trainer holds them: sharded over two devices, by Levanter's own mesh and mapping."""
    expected = [tokens for tokens, _ in ours(model, matmul="xla")]
    for kind in jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit:
        for axes in {"data": 2, "model": 1}, {"data": 1, "model": 2}:
            config = MeshConfig(axes={**axes, "replica": 1})
            ici, dcn = config.axis_shapes(jax.device_count(), 1)
            mesh = create_mesh_from_axis_specs(ici_axes=ici, dcn_axes=dcn, axis_types=(kind,) * len({**ici, **dcn}))
            with hax.partitioning.set_mesh(mesh):
                sharded = hax.shard(model, config.resolved_param_mapping)
                parts = sum(
                    not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(eqx.filter(sharded, eqx.is_array))
                )
                assert parts, "nothing is sharded"
                inside = ours(sharded, matmul="xla") if kind == jax.sharding.AxisType.Auto else None
                with jax.set_mesh(jax.sharding.Mesh(np.empty((), object), ())):
                    inside = inside or ours(sharded, matmul="xla")
            outside = ours(sharded, matmul="xla")
            what = f"{name}, {kind.name} mesh of {axes}"
            assert [tokens for tokens, _ in inside] == expected == [tokens for tokens, _ in outside], what
            results.add(what, compare(model, outside), f", {parts} arrays in parts")


def from_checkpoint(name: str, model, adopted) -> str:
    """Save a trainer's state as Levanter does, read it, and compare every parameter with that of the live model."""
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint({"model": model, "opt_state": {"mu": jnp.ones(3)}, "step": jnp.int32(5)}, 5, folder)
        config = dict(FAMILIES[adopted.config.model_type].config_to_hf(adopted.config))
        stored, _ = load_model(folder, config=config)
    assert stored.config == adopted.config, name
    same = [np.array_equal(*pair) for pair in zip(*map(jax.tree.leaves, (stored, adopted)), strict=True)]
    assert all(same), f"{name}: {same.count(False)} of {len(same)} parameters differ"
    return f", {len(same)} from its checkpoint"


SNOWBALL = SnowballConfig(
    vocab_size=VOCAB.size, hidden_dim=64, intermediate_dim=48, shared_expert_intermediate_dim=56, num_experts=8,
    num_experts_per_token=3, num_layers=6, num_heads=8, num_kv_heads=2, head_dim=16, max_seq_len=128, sliding_window=24,
    initializer_std=0.1, attention_implementation="reference",
)  # fmt: skip


@eqx.filter_jit
def _snowball_hidden(model, tokens):
    return model.transformer(tokens)


def _snowball_forward(model, tokens: np.ndarray) -> np.ndarray:
    """Logits of one sequence; each device of the mesh computes a copy of it."""
    hidden = _snowball_hidden(model, jnp.asarray(np.stack([tokens] * jax.device_count())))
    return np.asarray(hidden)[0].astype(np.float32) @ np.asarray(model.transformer.output_proj)


def snowball(results: Results) -> None:
    """Levanter's Snowball on a mesh with explicit axes, with gates and router biases as training leaves them."""
    with jax.set_mesh(compact_grug_mesh()):
        model = SNOWBALL.model_type.init(VOCAB, SNOWBALL, key=jax.random.key(7))
        rng = np.random.default_rng(7)

        def trained(path, leaf):
            name = jax.tree_util.keystr(path)
            scale = 0.3 if "attn_gate" in name or "router_bias" in name else 0.1 if "weight" in name else 0.0
            return leaf + scale * rng.standard_normal(leaf.shape, np.float32) if scale else leaf

        model = jax.tree_util.tree_map_with_path(trained, model)
    sampled = ours(model, matmul="xla")
    count, wrong, worst = 0, 0, 0.0
    for prompt, (tokens, logprobs) in zip(prompts(), sampled, strict=True):
        padded = np.zeros(max(LENGTHS) + MAX_TOKENS, np.int32)
        padded[: len(prompt) + len(tokens)] = prompt + tokens
        with jax.set_mesh(compact_grug_mesh()):
            logits = _snowball_forward(model, padded)
        logits = logits[len(prompt) - 1 : len(prompt) - 1 + len(tokens)]
        wrong += int((logits.argmax(-1) != tokens).sum())
        theirs = np.asarray(jax.nn.log_softmax(logits))[np.arange(len(tokens)), tokens]
        worst, count = max(worst, float(np.abs(theirs - logprobs).max())), count + len(tokens)
    results.add("Snowball", (count, wrong, worst), f", on {jax.device_count()} devices")


def check_refused() -> None:
    """Experts that all tokens share are refused by name."""
    config = MixtralConfig(**{**SIZES, "num_layers": 1}, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1)
    model = eqx.filter_eval_shape(config.model_type.init, VOCAB, config, key=jax.random.key(0))
    try:
        from_levanter(model)
    except ValueError as error:
        assert "shared_mlp" in str(error), error
        print(f"{type(config).__name__:58s} refused: {error}")
    else:
        raise AssertionError(f"{config} was taken")


def main() -> int:
    import levanter.main.train_lm  # noqa: F401 that it still can

    names = ("levanter", "marin-levanter", "haliax", "marin-haliax", "jax", "transformers", "levanter-infer")
    found = {distribution.metadata["Name"]: distribution.version for distribution in importlib.metadata.distributions()}
    print(", ".join(f"{name} {found[name]}" for name in names if name in found))
    results = Results()
    for name, model in models():
        if not any(wanted in name for wanted in sys.argv[1:] or [""]):
            continue
        adopted = from_levanter(model)
        kind = adopted.config.ropes[0].kind
        note = f", {shared(model, adopted)} arrays shared, {adopted.config.model_type}, rope {kind}"
        note += from_checkpoint(name, model, adopted)
        results.add(name, compare(model, ours(model, matmul="xla")), note)
        if cpu.available() and name in WITH_CPU_KERNELS:
            results.add(f"{name}, C++ kernels", compare(model, ours(model)))
        if jax.device_count() == 2 and name in ON_MESHES:
            on_meshes(name, model, results)
    if any(wanted in "Snowball" for wanted in sys.argv[1:] or [""]):
        snowball(results)
    check_refused()
    print(f"in all: {results.tokens - results.wrong}/{results.tokens} tokens, {results.worst:.1e}")
    return int(results.wrong > 0 or results.worst > MAX_LOGPROB_DIFFERENCE or not results.tokens)


if __name__ == "__main__":
    sys.exit(main())
