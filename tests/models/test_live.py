"""Models under training are used as they are: no copy where none is needed, and the tokens of their checkpoints."""

import dataclasses
import functools

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import pytest

from levanter_infer import EngineConfig, InferenceEngine, Request, SamplingParams, adopt_model
from levanter_infer.kernels import cpu
from tests.golden_cases import NUM_GREEDY, GoldenCase, load_case, make_weights
from tests.live_models import LiveModel, Rope, live_model

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
    tokens, engine = greedy(model, case, products="xla")
    assert tokens == expected(case)
    assert pointers(engine.model) == pointers(model)


def test_with_sixteen_bits_the_bits_are_shared_too():
    case, _ = case_and_model("llama3")
    model = live_model(case.config, make_weights("llama3", case.config), dtype=jnp.bfloat16)
    engine = InferenceEngine(model, config=EngineConfig(**SIZES, products="xla"))
    shared = set(pointers(engine.model)) & set(pointers(model))
    assert len(shared) == len(pointers(model))


@pytest.mark.parametrize("name", ["llama2_bias", "qwen2", "qwen3", "llama_tied", "llama_longrope"])
def test_the_forward_of_every_kind_is_that_of_its_checkpoint(name):
    case, model = case_and_model(name, kv_name="kv_heads" if name == "qwen2" else "kv_head")
    if case.config.get("original_max_position_embeddings"):
        adopted = adopt_model(model, case.config)  # longrope: what Levanter does not have
    else:
        adopted = adopt_model(model)
    assert adopted.config.model_type == case.config["model_type"]
    prompt = case.prompts[0]
    logits = jax.jit(lambda model, tokens: model(tokens).array)(adopted, hax.named(prompt.tokens, "position"))
    assert abs(logits[prompt.positions] - prompt.logits).max() <= prompt.bound


@pytest.mark.slow
@pytest.mark.skipif(not cpu.available(), reason="the kernels for CPUs were not built")
def test_where_weights_are_laid_out_anew_the_model_stays_its_owners():
    case, model = case_and_model("llama3")
    tokens, engine = greedy(model, case, products="cpu")
    assert tokens == expected(case)
    assert not set(pointers(engine.model.layers.mlp)) & set(pointers(model))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(model) if isinstance(leaf, jax.Array))


def test_its_parameters_alone_and_traced_ones_will_do():
    case, model = case_and_model("llama3")
    params, prompt = eqx.filter(model, eqx.is_array), case.prompts[0]
    adopted = adopt_model(_dicts(params), case.config)
    assert pointers(adopted) == pointers(model) and adopted.config == adopt_model(model).config
    tokens = hax.named(prompt.tokens, "position")
    logits = jax.jit(lambda params: adopt_model(params)(tokens).array)(params)
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
        replace_fn=lambda weight: weight.rearrange(("layers", "embed", "mlp")),
    )
    assert (
        adopt_model(turned).layers.mlp.up_proj.weight.array == adopt_model(model).layers.mlp.up_proj.weight.array
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


def with_norm(**values):
    def change(model):
        norm = dataclasses.replace(model.transformer.norm, **values)
        return dataclasses.replace(model, transformer=dataclasses.replace(model.transformer, norm=norm))

    return change


SHORT = hax.ones({"embed": 64}, dtype=jnp.bfloat16)
STACKED = "transformer.layers.stacked"
NORM = hnn.RmsNorm(hax.Axis("embed", 64), hax.ones((hax.Axis("layers", 2), hax.Axis("embed", 64))), None, 1e-5, None)  # type: ignore


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: {"weights": 1}, "dict has no embeddings.token_embeddings.weight, expected the fields"),
        (lambda model: model.transformer, "Transformer has no embeddings"),
        (changed(lambda m: m.transformer.layers.stacked.post_attn_layernorm, NORM), f"{STACKED}.post_attn_layernorm"),
        (changed(lambda m: m.transformer.layers.stacked.mlp.up_proj.bias, hax.zeros({"mlp": 96})), "mlp.up_proj.bias"),
        (changed(lambda m: m.embeddings.token_embeddings.weight, jnp.zeros((256, 64))), "expected a haliax NamedArray"),
        (changed(lambda m: m.lm_head.weight, hax.zeros({"vocab": 250, "embed": 64})), "vocab=250.*expected vocab=256"),
        (changed(lambda m: m.transformer.norm.weight, SHORT), "bfloat16 .* float32"),
        (with_config(activation_function="gelu_new"), "activation_function='gelu_new', expected silu"),
        (with_config(sliding_window=8), "sliding_window=8, expected None; give the model's config.json"),
        (with_config(rope=None), "config.rope is NoneType"),
        (with_config(rope=Rope(1e4, {"rope_type": "unheard of"})), "rope_type='unheard of'"),
        (with_config(max_seq_len=None), "no max_seq_len or seq_len"),
        (with_norm(eps=1e-3), r"input_layernorm.eps=1e-05, expected 0.001"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        adopt_model(change(case_and_model("llama3")[1]))
