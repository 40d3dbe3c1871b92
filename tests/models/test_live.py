"""Models under training are used as they are: no copy where none is needed, and the tokens of their checkpoints."""

import dataclasses
import functools
import os
import subprocess
import sys
from pathlib import Path

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from levanter_infer import EngineConfig, InferenceEngine, Request, SamplingParams, from_levanter
from levanter_infer.kernels.cpu import bindings as cpu
from levanter_infer.layers.rotary import frequencies
from levanter_infer.models.registry import FAMILIES
from tests.golden_cases import NUM_GREEDY, GoldenCase, load_case, make_weights
from tests.live_models import LiveModel, Rope, Rotary, levanter_yarn, live_model

ROOT = Path(__file__).resolve().parents[2]
SIZES = dict(page_size=4, max_pages=64, max_seqs=2, max_seq_len=80, max_step_tokens=24)


@functools.lru_cache
def case_and_model(name: str, **changes) -> tuple[GoldenCase, LiveModel]:
    case = load_case(name)
    return case, live_model(case.config, make_weights(name, case.config), **changes)


def greedy(model, case: GoldenCase, **config) -> tuple[list[list[int]], InferenceEngine]:
    engine = InferenceEngine(model, config=EngineConfig(**SIZES, **config))
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_GREEDY, ignore_eos=True)
    prompts = [p for p in case.prompts if len(p.tokens) + NUM_GREEDY <= SIZES["max_seq_len"]]
    outputs = engine.generate([Request(prompt_token_ids=p.tokens.tolist(), sampling=sampling) for p in prompts])
    return [output.completions[0].token_ids for output in outputs], engine


def expected(case: GoldenCase) -> list[list[int]]:
    return [p.greedy.tolist() for p in case.prompts if len(p.tokens) + NUM_GREEDY <= SIZES["max_seq_len"]]


def pointers(tree) -> list[int]:
    return sorted(leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array))


def test_the_engine_samples_from_the_arrays_of_the_model_and_gives_the_tokens_of_its_checkpoint():
    case, model = case_and_model("llama3")
    tokens, engine = greedy(model, case, matmul="xla")
    assert tokens == expected(case)
    assert pointers(engine.model) == pointers(model)


def test_with_sixteen_bits_the_bits_are_shared_too():
    case, _ = case_and_model("llama3")
    model = live_model(case.config, make_weights("llama3", case.config), dtype=jnp.bfloat16)
    engine = InferenceEngine(model, config=EngineConfig(**SIZES, matmul="xla"))
    shared = set(pointers(engine.model)) & set(pointers(model))
    assert len(shared) == len(pointers(model))


@pytest.mark.parametrize(
    "name", ["llama2_bias", "qwen2", "qwen3", "llama_tied", "llama_longrope", "qwen3_moe", "mixtral"]
)
def test_the_forward_of_every_kind_is_that_of_its_checkpoint(name):
    changes = {"qwen2": dict(kv_name="kv_heads", layer_name="layers"), "mixtral": dict(window=6)}
    case, model = case_and_model(name, **changes.get(name, {}))
    if case.config.get("original_max_position_embeddings"):
        adopted = from_levanter(model, case.config)  # longrope: what Levanter does not have
    else:
        adopted = from_levanter(model)
    assert adopted.config.model_type == case.config["model_type"]
    prompt = case.prompts[0]
    logits = jax.jit(lambda model, tokens: model(tokens).array)(adopted, hax.named(prompt.tokens, "position"))
    assert abs(logits[prompt.positions] - prompt.logits).max() <= prompt.bound


@pytest.mark.slow
@pytest.mark.skipif(not cpu.available(), reason="the kernels for CPUs were not built")
def test_where_weights_are_laid_out_anew_the_model_stays_its_owners():
    case, model = case_and_model("llama3")
    tokens, engine = greedy(model, case, matmul="cpu")
    assert tokens == expected(case)
    assert not set(pointers(engine.model.layers.mlp)) & set(pointers(model))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(model) if isinstance(leaf, jax.Array))


def test_its_parameters_alone_and_traced_ones_will_do():
    case, model = case_and_model("llama3")
    params, prompt = eqx.filter(model, eqx.is_array), case.prompts[0]
    adopted = from_levanter(_dicts(params), case.config)
    assert pointers(adopted) == pointers(model) and adopted.config == from_levanter(model).config
    tokens = hax.named(prompt.tokens, "position")
    logits = jax.jit(lambda params: from_levanter(params)(tokens).array)(params)
    assert abs(logits[prompt.positions] - prompt.logits).max() <= prompt.bound


def _dicts(tree):
    """Modules as mappings of their fields."""
    if not isinstance(tree, eqx.Module) or isinstance(tree, hax.NamedArray):
        return tree
    return {f.name: _dicts(getattr(tree, f.name)) for f in dataclasses.fields(tree) if not f.metadata.get("static")}


def test_weights_with_inputs_first_are_turned_round():
    case, model = case_and_model("llama3")
    turned = eqx.tree_at(
        lambda m: m.transformer.layers.stacked.mlp.up_proj.weight,
        model,
        replace_fn=lambda weight: weight.rearrange(("layer", "embed", "mlp")),
    )
    assert (
        from_levanter(turned).layers.mlp.up_proj.weight.array == from_levanter(model).layers.mlp.up_proj.weight.array
    ).all()


def changed(where, value):
    def change(model):
        return eqx.tree_at(where, model, value, is_leaf=lambda leaf: leaf is None)

    return change


def with_config(**values):
    def change(model):
        config = dataclasses.replace(model.config, **values)
        return dataclasses.replace(model, transformer=dataclasses.replace(model.transformer, config=config))

    return change


def with_rotary(rotary):
    def change(model):
        where = ("transformer", "layers", "stacked", "self_attn", "rot_embs")
        return _replaced(model, where, rotary)

    return change


def with_experts(name):
    """As Mixtral's layers, which have no `mlp`."""

    def change(model):
        layer = model.transformer.layers.stacked
        fields = {f.name: getattr(layer, f.name) for f in dataclasses.fields(layer) if f.name != "mlp"}
        return _replaced(model, ("transformer", "layers", "stacked"), {**fields, name: layer.mlp})

    return change


def _replaced(tree, where: tuple[str, ...], value):
    inner = value if len(where) == 1 else _replaced(getattr(tree, where[0]), where[1:], value)
    return dataclasses.replace(tree, **{where[0]: inner})


def with_norm(**values):
    def change(model):
        norm = dataclasses.replace(model.transformer.norm, **values)
        return dataclasses.replace(model, transformer=dataclasses.replace(model.transformer, norm=norm))

    return change


SHORT = hax.ones({"embed": 64}, dtype=jnp.bfloat16)
STACKED = "transformer.layers.stacked"
NORM = hnn.RmsNorm(hax.Axis("embed", 64), hax.ones((hax.Axis("layer", 2), hax.Axis("embed", 64))), None, 1e-5, None)  # type: ignore


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: {"weights": 1}, "dict has no embeddings.token_embeddings.weight, expected the fields"),
        (lambda model: model.transformer, "Transformer has no embeddings"),
        (lambda model: [model], "list has no embeddings"),
        (changed(lambda m: m.transformer.layers.stacked.post_attn_layernorm, NORM), f"{STACKED}.post_attn_layernorm"),
        (changed(lambda m: m.transformer.layers.stacked.mlp.up_proj.bias, hax.zeros({"mlp": 96})), "mlp.up_proj.bias"),
        (changed(lambda m: m.embeddings.token_embeddings.weight, jnp.zeros((256, 64))), "expected a haliax NamedArray"),
        (changed(lambda m: m.lm_head.weight, hax.zeros({"vocab": 250, "embed": 64})), "vocab=250.*expected vocab=256"),
        (changed(lambda m: m.transformer.norm.weight, SHORT), "bfloat16 .* float32"),
        (with_config(activation_function="gelu_new"), "activation_function='gelu_new', expected silu"),
        (with_config(rope=None), "config.rope is NoneType"),
        (with_rotary(Rotary((1.0,) * 8, pairs_of_neighbours=True)), "is Rotary, which does not turn pairs"),
        (with_rotary(lambda q, position_ids: hax.sin(q)), "is function, which does not turn pairs"),
        (with_rotary(lambda q: q), "is function, which cannot be called with queries and positions"),
        (with_experts("block_sparse_moe"), "has no .*stacked.mlp.gate_proj.weight, expected the fields"),
        (with_config(max_seq_len=None), "no max_seq_len or seq_len"),
        (with_norm(eps=1e-3), r"input_layernorm.eps=1e-05, expected 0.001"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        from_levanter(change(case_and_model("llama3")[1]))


YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "mscale": 1.0}


@pytest.mark.parametrize(("release", "kind"), [("today", "yarn"), ("1.2", "longrope")])
def test_yarn_is_the_models_own_formula_and_not_only_its_name(release, kind):
    """Releases of Levanter differ in it; the exported checkpoint must rotate as the model that was trained."""
    case = load_case("llama3")
    rope = Rope(1e4, YARN, yarn=release)
    model = live_model(case.config, make_weights("llama3", case.config), rope=rope)
    adopted = from_levanter(model)
    assert adopted.config.ropes[0].kind == kind
    inv_freq, scale = frequencies(adopted.config.ropes[0], adopted.config.head_dim, 64)
    expected, expected_scale = levanter_yarn(1e4, YARN, adopted.config.head_dim, release)
    np.testing.assert_allclose(inv_freq, expected, rtol=3e-7)
    assert scale == pytest.approx(expected_scale, rel=1e-6)
    again = FAMILIES[adopted.config.model_type].config_from_hf(FAMILIES["llama"].config_to_hf(adopted.config))
    assert again.ropes == adopted.config.ropes


def test_a_config_whose_rope_is_not_the_models_own_is_refused():
    case, model = case_and_model("llama3")
    wrong = {**case.config, "rope_scaling": None}
    assert case.config["rope_scaling"] is not None
    with pytest.raises(ValueError, match="config= says rope 'default' with theta=.*the model's own Rotary rotates"):
        from_levanter(model, wrong)
    assert from_levanter(model, case.config).config.ropes[0].kind == "llama3"


def test_a_family_that_live_models_do_not_have_is_refused():
    case, model = case_and_model("llama3")
    with pytest.raises(ValueError, match="config= says model_type='granite', expected one of llama, .*, mixtral, q"):
        from_levanter(model, {**case.config, "model_type": "granite", "pretraining_tp": 1})


def test_a_window_is_that_of_the_attention_layers():
    """Levanter's MistralConfig says sliding_window=4096, and its layers see everything."""
    case, model = case_and_model("llama3")
    assert from_levanter(model).config.model_type == "llama"
    declared = from_levanter(with_config(sliding_window=8)(model))
    assert (declared.config.model_type, set(declared.config.windows)) == ("mistral", {None})
    applied = from_levanter(live_model(case.config, make_weights("llama3", case.config), window=8))
    assert (applied.config.model_type, applied.config.windows) == ("mistral", (8,) * applied.config.num_layers)
    given = from_levanter(model, {**case.config, "model_type": "mistral", "sliding_window": 8})
    assert given.config == applied.config
    qwen3 = load_case("qwen3")
    applied = from_levanter(live_model(qwen3.config, make_weights("qwen3", qwen3.config), window=8)).config
    assert (applied.model_type, applied.windows) == ("qwen3", (8,) * applied.num_layers)


ON_A_MESH = """
import haliax as hax, jax, numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from levanter_infer import from_levanter
from tests.models.test_live import case_and_model

case, model = case_and_model("llama3")
prompt = case.prompts[0]

def sharded(leaf):  # its largest axis over both devices, as a trainer's FSDP has them
    axis = max(range(leaf.ndim), key=lambda i: leaf.shape[i])
    return jax.device_put(leaf, NamedSharding(mesh, P(*(None,) * axis, "data")))

def check():
    adopted, tokens = from_levanter(parts), hax.named(prompt.tokens, "position")
    logits = jax.jit(lambda model, tokens: model(tokens).array)(adopted, tokens)
    assert abs(np.asarray(logits)[prompt.positions] - prompt.logits).max() <= prompt.bound

for kind in AxisType.Explicit, AxisType.Auto:
    mesh = Mesh(np.array(jax.devices()), "data", axis_types=(kind,))
    parts = jax.tree.map(sharded, model)
    check()
    with jax.set_mesh(mesh):
        try:
            check()
        except ValueError as error:
            assert kind == AxisType.Explicit and "under a mesh with explicit axes, expected none" in str(error), error
        else:
            assert kind == AxisType.Auto
print("equal")
"""


@pytest.mark.slow
def test_parameters_in_parts_on_a_trainers_mesh_give_the_same_logits():
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    environment = {**os.environ, **flags, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    process = subprocess.run(
        [sys.executable, "-c", ON_A_MESH], capture_output=True, text=True, env=environment, cwd=ROOT, timeout=280
    )
    assert process.stdout.strip() == "equal", process.stderr[-3000:]
