"""GrugMoE: each part that its config.json does not name acts, keys that are not implemented are refused, and both
layouts of its experts are read. tests/models/test_hf_parity.py compares it with Levanter's own module."""

import dataclasses
import json

import equinox as eqx
import haliax as hax
import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from levanter_infer import from_levanter
from levanter_infer.axes import POSITION
from levanter_infer.checkpoints.load import load_model
from levanter_infer.checkpoints.save import save_model
from levanter_infer.layers.layout import Layout
from levanter_infer.layers.norm import NormConfig, RMSNorm
from levanter_infer.layers.rotary import RopeConfig
from levanter_infer.layers.router import Score, SelectionBias
from levanter_infer.models.grug_moe import ROUTER, config_from_hf, config_to_hf
from tests.golden_cases import load_case, make_weights, write_checkpoint

CASE = load_case("grug_moe")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(write_checkpoint(tmp_path_factory.mktemp("grug"), CASE), dtype="float32")[0]


def with_blocks(model, change):
    config = dataclasses.replace(model.config, blocks=tuple(map(change, model.config.blocks)))
    return dataclasses.replace(model, config=config)


def with_mixer(**fields):
    return lambda model: with_blocks(
        model, lambda block: dataclasses.replace(block, mixer=dataclasses.replace(block.mixer, **fields))
    )


def with_feed_forward(**fields):
    return lambda model: with_blocks(
        model, lambda block: dataclasses.replace(block, feed_forward=dataclasses.replace(block.feed_forward, **fields))
    )


def with_rope(rope: RopeConfig | None, is_long: bool):
    def change(block):
        ours = (block.mixer.window is None) is is_long
        return dataclasses.replace(block, mixer=dataclasses.replace(block.mixer, rope=rope)) if ours else block

    return lambda model: with_blocks(model, change)


def without(where):
    """The model without a module."""
    return lambda model: eqx.tree_at(where, model, None, is_leaf=lambda leaf: leaf is None)


def ungated(where):
    """The model with a norm that has lost its gate."""

    def change(model):
        gated = where(model)
        return eqx.tree_at(where, model, RMSNorm(gated.weight, dataclasses.replace(gated.config, gate_rank=None)))

    return change


OPTIONS = {
    "exclusive self-attention": with_mixer(exclusive=False),
    "gate of each head": without(lambda m: m.stacks[0].attention.gate_proj),
    "norms of queries and keys": with_mixer(qk_norm=None),
    "epsilon of these norms": with_mixer(qk_norm=NormConfig(1.0, weight=False)),
    "half a head rotated": with_rope(RopeConfig(theta=100.0), is_long=False),
    "no rope in long layers": with_rope(RopeConfig(theta=100.0, partial=0.5), is_long=True),
    "gate of the embedding norm": ungated(lambda m: m.embedding_norm),
    "embedding norm": without(lambda m: m.embedding_norm),
    "gate of the norm before attention": ungated(lambda m: m.stacks[0].input_norm),
    "gate of the norm before the experts": ungated(lambda m: m.stacks[0].mlp_norm),
    "gate of the last norm": ungated(lambda m: m.norm),
    "sigmoid": with_feed_forward(router=dataclasses.replace(ROUTER, score=Score.SOFTMAX)),
    "sum of 2.5": with_feed_forward(router=dataclasses.replace(ROUTER, scale=1.0)),
    "normalization": with_feed_forward(router=dataclasses.replace(ROUTER, normalize=False)),
    "bias of the choice": without(lambda m: m.stacks[0].mlp.selection_bias),
    "bias on logits": with_feed_forward(
        router=dataclasses.replace(ROUTER, selection_bias=SelectionBias.ON_SCORES),
    ),
    "shared expert": without(lambda m: m.stacks[0].mlp.shared),
}


@eqx.filter_jit
def forward(model, tokens):
    return model(hax.named(tokens, POSITION)).array


@pytest.mark.slow
@pytest.mark.parametrize("option", OPTIONS)
def test_every_part_moves_the_logits(option, model):
    prompt = CASE.prompts[-1]
    logits = np.asarray(forward(OPTIONS[option](model), prompt.tokens))[prompt.positions]
    assert np.abs(logits - prompt.logits).max() > 1e-2 * prompt.scale


def test_long_layers_are_every_fourth_and_the_last():
    mixers = [block.mixer for block in config_from_hf(CASE.config).blocks]
    assert [mixer.rope is None for mixer in mixers] == [False, False, False, True, False, True]
    assert [mixer.window for mixer in mixers] == [6, 6, 6, None, 6, None]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("grugmoe_artifact_schema_version", 3, "grugmoe_artifact_schema_version=3, expected 1 .Snowball. or 2 .Hero."),
        ("grugmoe_artifact_schema_version", 2, "num_shared_experts, latent_dim, .* missing, expected in"),
        ("grugmoe_attention_mode", "other", "grugmoe_attention_mode='other', expected 'production'"),
        ("disable_pko", False, "disable_pko=False, expected True"),
        ("disable_long_rope", False, "disable_long_rope=False, expected True"),
        ("tie_word_embeddings", True, "tie_word_embeddings=True, expected False"),
        ("rope_scaling", {"type": "linear", "factor": 2.0}, "rope_scaling=.*expected none"),
        ("latent_dim", 64, "'latent_dim' .* is not known here"),
        ("hidden_dim", 57, "hidden_dim=57 but hidden_size is also 56"),
        ("num_experts_per_tok", 8, "num_experts_per_tok=8, expected at most num_experts=7"),
    ],
)
def test_keys_that_are_not_implemented_are_refused_by_name(key, value, message):
    with pytest.raises(ValueError, match=message):
        config_from_hf({**CASE.config, key: value})


def test_names_of_older_exports_are_read():
    older = {"hidden_size": "hidden_dim", "num_experts": "num_local_experts", "rms_norm_eps": "layer_norm_eps"}
    older |= {"moe_intermediate_size": "intermediate_dim", "num_attention_heads": "num_heads"}
    renamed = {older.get(key, key): value for key, value in CASE.config.items()}
    assert config_from_hf(renamed) == config_from_hf(CASE.config)


@pytest.mark.parametrize("qk_mult", [1.5703274004183786, 1.7, 0.1, 3.3333333])
@pytest.mark.parametrize("head_dim", [24, 40, 128])
def test_the_query_multiplier_is_written_as_it_was_read(qk_mult, head_dim):
    config = config_from_hf({**CASE.config, "qk_mult": qk_mult, "head_dim": head_dim})
    assert config_from_hf(config_to_hf(config)) == config
    assert config_to_hf(config)["qk_mult"] == pytest.approx(qk_mult, rel=1e-15)


def test_experts_apart_are_the_stacked_ones(model, tmp_path):
    weights = make_weights(CASE.name, CASE.config)
    apart = {}
    for name, value in weights.items():
        if ".experts." in name:
            start, end = name.split(".experts.")
            apart |= {f"{start}.experts.{i}.{end}": np.ascontiguousarray(each) for i, each in enumerate(value)}
        else:
            apart[name] = value
    (tmp_path / "config.json").write_text(json.dumps(CASE.config))
    save_file(apart, tmp_path / "model.safetensors")
    found, _ = load_model(tmp_path)
    assert all(np.array_equal(*pair) for pair in zip(*map(jax.tree.leaves, (found, model)), strict=True))


def test_the_bias_of_the_choice_stays_float32(tmp_path, model):
    """As Levanter exports it beside bfloat16 weights; and it is saved so."""
    weights = make_weights(CASE.name, CASE.config)
    stored = {
        name: value if name.endswith("router.bias") else value.astype(ml_dtypes.bfloat16)
        for name, value in weights.items()
    }
    (tmp_path / "config.json").write_text(json.dumps(CASE.config))
    save_file(stored, tmp_path / "model.safetensors")
    half, _ = load_model(tmp_path)
    bias = half.stacks[0].mlp.selection_bias.array
    assert half.dtype == ml_dtypes.bfloat16 and bias.dtype == np.float32
    np.testing.assert_array_equal(bias, model.stacks[0].mlp.selection_bias.array)
    save_model(half, tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert all(again[name].tobytes() == value.tobytes() for name, value in stored.items())


def live(weights: dict[str, np.ndarray]) -> dict:
    """Parameters with the names of Levanter's `SnowballLMHeadModel`, which tests/compat/levanter_models.py takes."""

    def own(*names: str) -> np.ndarray:
        value = weights[".".join(names)]
        return np.ascontiguousarray(np.swapaxes(value, -1, -2)) if value.ndim > 1 else value

    def gate(name: str) -> dict:
        return {"w_down": own(name, "down_proj.weight"), "w_up": own(name, "up_proj.weight")}

    def swiglu(name: str) -> dict:
        return {f"w_{kind}": own(name, f"{kind}_proj.weight") for kind in ("gate", "up", "down")}

    def layer(name: str) -> dict:
        return {
            "rms_attn": {"weight": own(name, "input_layernorm.weight")},
            "attn_gated_norm": gate(f"{name}.attn_gated_norm"),
            "attn": {f"w_{each}": own(name, f"self_attn.{each}_proj.weight") for each in "qkvo"}
            | {"attn_gate": own(name, "self_attn.attn_gate.weight")},
            "rms_mlp": {"weight": own(name, "post_attention_layernorm.weight")},
            "mlp_gated_norm": gate(f"{name}.mlp_gated_norm"),
            "mlp": {
                "router": own(name, "mlp.router.weight"),
                "router_bias": own(name, "mlp.router.bias"),
                "expert_mlp": swiglu(f"{name}.mlp.experts"),
            },
            "shared": swiglu(f"{name}.shared_expert"),
        }

    transformer = {
        "token_embed": weights["model.embed_tokens.weight"],
        "embed_norm": {"weight": own("model.embed_norm.weight")},
        "embed_gated_norm": gate("model.embed_gated_norm"),
        "output_proj": own("lm_head.weight"),
        "blocks": tuple(layer(f"model.layers.{i}") for i in range(CASE.config["num_hidden_layers"])),
        "final_norm": {"weight": own("model.norm.weight")},
        "final_gated_norm": gate("model.final_gated_norm"),
    }
    return {"transformer": transformer}


def test_a_live_snowball_is_the_model_of_its_checkpoint(model):
    own = jax.tree.map(jax.numpy.asarray, live(make_weights(CASE.name, CASE.config)))
    for found in (from_levanter(own, CASE.config), jax.jit(lambda own: from_levanter(own, CASE.config))(own)):
        assert found.config == model.config
        assert all(np.array_equal(*pair) for pair in zip(*map(jax.tree.leaves, (found, model)), strict=True))
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), own)
    assert jax.tree.map(lambda leaf: leaf.shape, from_levanter(shapes, CASE.config)) == jax.tree.map(
        lambda leaf: leaf.shape, model
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 7}, "has no transformer.blocks.6.attn.w_q"),
        ({"num_hidden_layers": 5}, "no place for: transformer.blocks.5.attn.attn_gate, .* and 13 more"),
        ({"num_attention_heads": 4}, r"transformer.blocks.0.attn.w_q has shape \[56, 144\], expected \[56, 96\]"),
        ({"num_experts": 8}, "expected"),
        ({"model_type": "llama"}, "expected 'grug_moe' for a model with transformer.blocks"),
    ],
)
def test_a_live_snowball_of_other_sizes_is_refused(change, message):
    config = {**CASE.config, **change}
    if "model_type" in change:
        config = load_case("llama1").config
    own = jax.tree.map(jax.numpy.asarray, live(make_weights(CASE.name, CASE.config)))
    with pytest.raises(ValueError, match=message):
        from_levanter(own, config)


HERO = load_case("grug_moe_hero")


@pytest.fixture(scope="module")
def hero(tmp_path_factory):
    return load_model(write_checkpoint(tmp_path_factory.mktemp("hero"), HERO), dtype="float32")[0]


def test_hero_stores_all_layers_alike_and_uses_fewer_heads_in_global_ones(hero):
    mixers = [block.mixer for block in hero.config.blocks]
    is_global = [False, False, True, False, False, True, True]
    assert [mixer.rope is None for mixer in mixers] == is_global
    assert [(mixer.num_kv_heads, mixer.unused_kv_heads) for mixer in mixers] == [
        (2, 2) if g else (4, 0) for g in is_global
    ]
    assert len(hero.stacks) == 1 and [len(pool.layers) for pool in hero.config.pools] == [4, 7, 3]


@pytest.mark.parametrize("name", ["k_proj", "v_proj"])
def test_heads_that_a_layer_leaves_out_change_nothing(name, hero):
    """A global layer ignores the heads behind its first two; in a local one all four count."""
    prompt = HERO.prompts[-1]

    def moved(layer: int, head: int) -> float:
        where = lambda model: getattr(model.stacks[0].attention, name).weight.array  # noqa: E731
        changed = eqx.tree_at(where, hero, where(hero).at[layer, head].multiply(-1))
        logits = np.asarray(forward(changed, prompt.tokens))[prompt.positions]
        return np.abs(logits - prompt.logits).max() / prompt.scale

    assert moved(2, 3) < 2e-4 and moved(2, 1) > 1e-3 and moved(1, 3) > 1e-3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"latent_dim": ...}, "config.json: latent_dim missing, expected in grugmoe_artifact_schema_version=2"),
        ({"local_kv_heads": None}, "local_kv_heads=None, expected with global_kv_heads=2 the larger of both, 4"),
        ({"global_kv_heads": 5}, "expected with global_kv_heads=5 the larger of both, 4"),
        ({"global_kv_heads": 3, "num_attention_heads": 8}, "num_attention_heads=8 is no multiple of"),
        ({"sconv_sites": ["k", "v"]}, "sconv_sites=.*expected a list of k and attn and mlp"),
        ({"sconv_kernel": 1}, "sconv_kernel=1, expected at least 2"),
        ({"num_shared_experts": 17}, "num_shared_experts=17, expected a whole number from 1 to 16"),
        ({"qk_mult_long_scale": 2.0}, "'qk_mult_long_scale' .* is not known here"),
    ],
)
def test_keys_of_hero_that_are_not_implemented_are_refused_by_name(changes, message):
    config = {key: value for key, value in {**HERO.config, **changes}.items() if value is not ...}
    with pytest.raises(ValueError, match=message):
        config_from_hf(config)


@pytest.mark.parametrize(
    "changes",
    [
        {"sconv": False},
        {"sconv_sites": ["mlp", "k"], "sconv_kernel": 2},
        {"global_every": 100, "latent_dim": None},
        {"global_every": 1},
        {"num_shared_experts": 5, "local_kv_heads": 2, "global_kv_heads": 4},
        {"shared_expert_intermediate_size": 0},
    ],
)
def test_the_options_of_hero_are_written_as_they_were_read(changes):
    config = config_from_hf({**HERO.config, **changes})
    assert config_from_hf(config_to_hf(config)) == config


def test_a_mesh_that_shards_heads_is_refused():
    """Where keys pass a convolution, or layers leave out heads; other convolutions are of replicated numbers."""
    mesh, others = jax.sharding.AbstractMesh((2,), ("model",)), {"sconv_sites": ["mlp", "attn"]}
    with pytest.raises(ValueError, match="mesh.model=2: keys pass a short convolution"):
        Layout.of(mesh, config_from_hf({**HERO.config, "global_kv_heads": 4}))
    with pytest.raises(ValueError, match="mesh.model=2: layers leave out some heads of keys"):
        Layout.of(mesh, config_from_hf({**HERO.config, **others}))
    Layout.of(mesh, config_from_hf({**HERO.config, **others, "global_kv_heads": 4}))
