"""Names and keys of GPT-NeoX, GPT-2, Apertus and others as files in the wild have them, and learnt positions."""

import json

import haliax as hax
import jax
import numpy as np
import pytest
from haliax import Axis
from safetensors.numpy import load_file, save_file

from levanter_infer.axes import POSITION
from levanter_infer.checkpoints.load import load_model
from levanter_infer.engine.config import EngineConfig
from levanter_infer.engine.sizes import resolve_shapes
from levanter_infer.layers.activation import Activation
from levanter_infer.models.decoder import DecoderModel
from levanter_infer.models.registry import family_for
from tests.golden_cases import load_case, write_checkpoint


def parse(case: str, drop: tuple[str, ...] = (), **changes):
    config = {key: value for key, value in load_case(case).config.items() if key not in drop} | changes
    return family_for(config).config_from_hf(config)


def renamed(directory, case: str, rename, **further):
    """The case's checkpoint with other names, and further tensors."""
    write_checkpoint(directory, load_case(case))
    path = directory / "model.safetensors"
    save_file({rename(name): value for name, value in load_file(path).items()} | further, path)
    return directory


def assert_equal(model, other) -> None:
    pairs = zip(jax.tree.leaves(model), jax.tree.leaves(other), strict=True)
    assert all(np.array_equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    "case, rename, mask",
    [
        ("gpt2", lambda name: name.removeprefix("transformer."), "h.0.attn.bias"),
        ("gpt2", lambda name: name, "transformer.h.0.attn.masked_bias"),
        ("gpt_neox", lambda name: name.replace("embed_out.", "lm_head."), "gpt_neox.layers.0.attention.bias"),
        ("gpt_neox", lambda name: name, "gpt_neox.layers.0.attention.rotary_emb.inv_freq"),
    ],
)
def test_files_with_older_names_and_masks_are_read(case, rename, mask, tmp_path):
    model, _ = load_model(renamed(tmp_path / "old", case, rename, **{mask: np.ones((1, 1, 4, 4), np.bool_)}))
    expected, _ = load_model(write_checkpoint(tmp_path / "new", load_case(case)))
    assert_equal(model, expected)


@pytest.mark.parametrize(
    "case, embeddings", [("gpt2", "transformer.wte.weight"), ("phi_tied", "model.embed_tokens.weight")]
)
def test_a_head_beside_tied_embeddings_has_to_be_them(case, embeddings, tmp_path):
    path = write_checkpoint(tmp_path, load_case(case)) / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"lm_head.weight": tensors[embeddings]}, path)
    load_model(tmp_path)
    save_file(tensors | {"lm_head.weight": tensors[embeddings] + 1}, path)
    with pytest.raises(ValueError, match=f"'lm_head.weight' differs from '{embeddings}' although"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    "case, changes, message",
    [
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True, expected False"),
        ("gpt2", {"n_embd": "60"}, "n_embd='60', expected a whole number"),
        ("gpt2", {"hidden_size": 64}, "n_embd=60 but hidden_size=64; leave one out"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention=True"),
        ("gpt2", {"rope_theta": 1e4}, "'rope_theta'"),
        ("gpt2", {"activation_function": "quick_gelu"}, "activation_function='quick_gelu', expected one of silu"),
        ("gpt_neox", {"rope_theta": 5e4}, "rotary_emb_base=10000 but rope_theta=50000.0; leave one out"),
        ("gpt_neox", {"layer_norm_eps": 0}, "layer_norm_eps=0, expected a finite number above 0"),
        ("phi", {"auto_map": {"AutoModel": "evil.Model"}}, "auto_map"),
        ("starcoder2", {"norm_type": "rms_norm"}, "norm_type='rms_norm', expected 'layer_norm'"),
        ("starcoder2", {"mlp_type": "gated"}, "mlp_type='gated', expected 'default'"),
        ("olmo", {"rms_norm_eps": 1e-6}, "'rms_norm_eps'"),
        ("apertus", {"hidden_act": "silu"}, "hidden_act='silu', expected one of xielu"),
        ("apertus", {"post_norm": True}, "post_norm=True, expected False"),
        ("apertus_tied", {"rope_theta": 5e5}, "rope_theta=500000.0 but rope_parameters.rope_theta=12000000.0"),
    ],
)
def test_keys_are_refused_by_the_names_of_the_file(case, changes, message):
    with pytest.raises(ValueError, match=message):
        parse(case, **changes)


def test_gpt_neox_reads_its_rope_in_all_spellings():
    """transformers 4 wrote the two keys under both names; transformers 5 writes one object."""
    config = parse("gpt_neox", rope_scaling=None)
    assert (config.ropes[0].partial, config.ropes[0].theta) == (0.25, 1e4)
    assert parse("gpt_neox", rope_scaling=None, rope_theta=1e4, partial_rotary_factor=0.25) == config
    keys = ("rotary_pct", "rotary_emb_base", "rope_scaling")
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    assert parse("gpt_neox", keys, rope_parameters=rope) == config
    with pytest.raises(ValueError, match="rope_theta=300.0, expected rotary_emb_base: HF ignores rope_theta"):
        parse("gpt_neox", keys, rope_theta=300.0)


def test_absent_keys_take_the_defaults_of_hf():
    gpt2 = parse("gpt2", ("n_inner", "activation_function", "layer_norm_epsilon", "tie_word_embeddings", "n_positions"))
    assert gpt2.blocks[0].feed_forward.width == 240 and gpt2.tie_word_embeddings and gpt2.norm.eps == 1e-5
    assert gpt2.blocks[0].feed_forward.activation is Activation.GELU_TANH and gpt2.max_position_embeddings == 1024
    neox = parse("gpt_neox", ("rotary_pct", "rotary_emb_base", "use_parallel_residual", "hidden_act", "rope_scaling"))
    assert neox.blocks[0].placement.is_parallel and neox.blocks[0].feed_forward.activation is Activation.GELU
    assert parse("phi", ("partial_rotary_factor",)).ropes[0].partial == 0.5
    apertus = parse("apertus_tied").ropes[0]
    assert (apertus.kind, apertus.theta, apertus.factor, apertus.original_len) == ("llama3", 12e6, 8.0, 8192)


def test_sequences_beyond_learnt_positions_are_refused():
    config = parse("gpt2")
    types = DecoderModel.types(config)
    sizes = {"max_seqs": 2, "max_pages": 32}
    assert resolve_shapes(EngineConfig(**sizes), types, 1).max_seq_len == 192
    with pytest.raises(ValueError, match="engine.max_seq_len=193: the model has learnt 192 positions"):
        resolve_shapes(EngineConfig(max_seq_len=193, **sizes), types, 1)
    with pytest.raises(ValueError, match="a sequence of 193 tokens: the model has learnt 192 positions only"):
        types(hax.zeros(hax.Axis(POSITION, 193), dtype=np.int32))


def test_the_tensors_of_the_activation_are_numbers_and_vectors(tmp_path):
    """As published: alphas of shape [1], beta and eps without axes."""
    case = load_case("apertus")
    tensors = load_file(write_checkpoint(tmp_path, case) / "model.safetensors")
    shapes = {name.split(".")[-1]: value.shape for name, value in tensors.items() if ".act_fn." in name}
    assert shapes == {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}
    model, _ = load_model(tmp_path)
    for name in shapes:
        found = np.asarray(getattr(model.layers.mlp.xielu, name).array)
        assert found.shape == (case.config["num_hidden_layers"], 1)
        assert found[1, 0] == tensors[f"model.layers.1.mlp.act_fn.{name}"].reshape(-1)[0]
    assert json.loads((tmp_path / "config.json").read_text())["hidden_act"] == "xielu"


def test_scalars_with_one_axis_are_read_as_levanter_exports_them(tmp_path):
    expected, _ = load_model(write_checkpoint(tmp_path / "plain", load_case("apertus")))
    path = write_checkpoint(tmp_path / "exported", load_case("apertus")) / "model.safetensors"
    tensors = load_file(path)
    scalars = {name: value.reshape(1) for name, value in tensors.items() if value.ndim == 0}
    assert any(name.endswith("act_fn.beta") for name in scalars)
    save_file(tensors | scalars, path)
    assert_equal(load_model(path.parent)[0], expected)
    save_file(tensors | {name: value.reshape(1, 1) for name, value in scalars.items()}, path)
    with pytest.raises(ValueError, match=r"has shape \[1, 1\], config.json expects \[\]"):
        load_model(path.parent)


def test_learnt_positions_are_those_of_every_sequence_of_a_batch():
    model = DecoderModel.init(parse("gpt2"), key=jax.random.key(0))
    tokens = hax.random.randint(jax.random.key(1), (Axis("batch", 2), Axis(POSITION, 4)), 0, 60)
    together = model(tokens).array
    for number in range(2):
        np.testing.assert_allclose(together[number], model(tokens["batch", number]).array, rtol=1e-4, atol=1e-5)
