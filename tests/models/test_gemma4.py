"""Gemma 4: layers that share keys and values, inputs of each layer, and the keys of its config.json."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from levanter_infer.cache.memory import FullKv, WindowKv
from levanter_infer.checkpoints.load import load_model
from levanter_infer.engine.sizes import page_bytes
from levanter_infer.layers.rotary import RopeConfig, frequencies
from levanter_infer.models.periods import MAX_BODIES
from levanter_infer.models.registry import family_for
from tests.family_cases import golden_prompts, golden_requests, make_engine, samples
from tests.golden_cases import checkpoint_weights, load_case, write_checkpoint

SHAPES = Path(__file__).parents[2] / "configs/shapes"
SHARED = load_case("gemma4_shared").config


def config_of(raw: dict):
    return family_for(raw).config_from_hf(raw)


def test_layers_that_share_have_no_pages_and_read_those_of_the_last_layer_of_their_kind():
    config = config_of(SHARED)
    windows, full = config.pools
    assert windows.memory == WindowKv(1, 16, 6) and windows.layers == (0, 1, 2, 3, 5, 6, 7, 8)
    assert full.memory == FullKv(1, 24) and full.layers == (4, 9)
    assert sum(len(group.bodies) for group in config.groups) <= MAX_BODIES
    pages = [config.remembered_at(layer, is_paged=True) for layer in range(20)]
    assert pages[4] == (1, 0) and pages[9] == (1, 1) and pages[5] == (0, 4)
    assert pages[10:] == [*[(0, 7)] * 4, (1, 1)] * 2
    alone = config_of({**SHARED, "num_kv_shared_layers": 0})
    assert page_bytes(config, 16, jnp.dtype("float32"))[None] * 2 == page_bytes(alone, 16, jnp.dtype("float32"))[None]


@pytest.mark.parametrize("shared", [20, 16])
def test_a_layer_without_an_earlier_one_of_its_kind_is_refused(shared):
    with pytest.raises(ValueError, match="num_kv_shared_layers"):
        config_of({**SHARED, "num_kv_shared_layers": shared})


@pytest.mark.parametrize(
    "key, value",
    [
        ("use_bidirectional_attention", "all"),
        ("vocab_size_per_layer_input", 255),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 1e4}),
        ("num_attention_heads", 3),
        ("hidden_activation", "silu"),
    ],
)
def test_a_value_that_is_not_implemented_is_refused_by_its_key(key, value):
    heads = {"num_key_value_heads": 2, "num_attention_heads": 4}
    with pytest.raises(ValueError, match=key):
        config_of({**SHARED, **heads, key: value})


def test_both_forms_of_the_sizes_of_full_layers_are_read():
    raw = load_case("gemma4").config
    own = {"head_dim": raw["global_head_dim"], "num_key_value_heads": raw["num_global_key_value_heads"]}
    new = {key: value for key, value in raw.items() if not key.startswith(("global_", "num_global_"))}
    new["layer_types"] = ["sliding_attention"] * 5 + ["full_attention"] * 2
    new["per_layer_config"] = {"5": own, "6": own}
    assert config_of(new) == config_of(raw)
    for other in ({"5": own}, {"5": own, "6": {**own, "head_dim": 16}}, {"5": {"x": 1}, "6": {"x": 1}}):
        with pytest.raises(ValueError, match="per_layer_config"):
            config_of({**new, "per_layer_config": other})


def test_a_parent_is_read_as_its_text_model_and_unused_keys_of_shared_layers_are_left_out(tmp_path):
    case = load_case("gemma4_shared")
    weights = {name.replace("model.", "model.language_model.", 1): w for name, w in checkpoint_weights(case).items()}
    prefix = "model.language_model.layers.12.self_attn"
    extra = {f"{prefix}.{name}.weight": np.zeros((16, 40), np.float32) for name in ("k_proj", "v_proj")}
    extra |= {f"{prefix}.k_norm.weight": np.zeros(16, np.float32)}
    extra |= {"model.vision_tower.x": np.zeros(3, np.float32), "model.embed_audio.x": np.zeros(3, np.float32)}
    save_file({**weights, **extra}, tmp_path / "model.safetensors")
    parent = {"model_type": "gemma4", "text_config": case.config, "vision_config": {}, "image_token_id": 7}
    (tmp_path / "config.json").write_text(json.dumps(parent))
    model, _ = load_model(tmp_path, dtype="float32")
    own, _ = load_model(write_checkpoint(tmp_path / "own", case), dtype="float32")
    assert model.config == own.config
    # Of a layer that has keys of its own they are not left out
    bad = {**weights, f"{prefix.replace('12', '2')}.k_norm.weight": np.zeros(5, np.float32)}
    save_file(bad, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="k_norm"):
        load_model(tmp_path, dtype="float32")


def test_a_proportional_rope_has_the_frequencies_of_the_whole_head():
    rope = RopeConfig("proportional", theta=1e6, partial=0.25)
    found, scale = frequencies(rope, 512, 100)
    assert scale == 1 and found.shape == (256,) and not found[64:].any()
    np.testing.assert_array_equal(found[:64], frequencies(RopeConfig(theta=1e6), 512, 100)[0][:64])
    stretched, _ = frequencies(dataclasses.replace(rope, factor=8.0), 512, 100)
    np.testing.assert_allclose(stretched, found / 8, rtol=1e-6)


@pytest.mark.parametrize("name", ["gemma4_shared", "gemma4_moe_untied"])
@pytest.mark.slow
def test_paged_is_hf(name, tmp_path):
    """In chunks, on pages that others have left, with windows that are passed."""
    case = load_case(name)
    model, _ = load_model(write_checkpoint(tmp_path, case), dtype="float32")
    engine = make_engine(model)
    outputs = engine.generate(golden_requests(case))
    for prompt, output in zip(golden_prompts(case), outputs, strict=True):
        (sample,) = samples(output)
        assert sample.tokens == prompt.greedy.tolist()
        np.testing.assert_allclose(sample.logprobs, prompt.greedy_logprobs, rtol=0, atol=2 * prompt.bound)


@pytest.mark.slow
def test_tensor_parallelism_with_heads_by_kind_is_hf():
    """Two heads of keys and values in windows, one in full layers; experts with norms of their own."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.family_runs", "gemma4_moe", "model2"],
        cwd=Path(__file__).resolve().parents[2],
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    outputs = json.loads(done.stdout.splitlines()[-1])["model2"]
    for prompt, ((tokens, logprobs),) in zip(golden_prompts(load_case("gemma4_moe")), outputs, strict=False):
        assert tokens == prompt.greedy.tolist()
        np.testing.assert_allclose(logprobs, prompt.greedy_logprobs, rtol=0, atol=2 * prompt.bound)


def test_the_31b_shape_splits_bytes_by_kind():
    config = config_of(json.loads((SHAPES / "gemma-4-31b.json").read_text()))
    each = page_bytes(config, 16, jnp.dtype("bfloat16"))
    assert each == {1024: 16 * 50 * 2 * 16 * 256 * 2, None: 16 * 10 * 2 * 4 * 512 * 2}
    assert 30e9 < config.num_parameters < 32e9
    assert sum(len(group.bodies) for group in config.groups) == 6
