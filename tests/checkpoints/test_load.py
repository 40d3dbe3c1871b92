"""Loading: every tensor once, everything checked before it is read, nothing from outside the directory."""

import dataclasses
import json
import os

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from safetensors.numpy import load_file, save_file

from levanter_infer.checkpoints import load as load_module
from levanter_infer.checkpoints import source as source_module
from levanter_infer.checkpoints.load import _own_rows, _read_entries, load_model, open_model
from levanter_infer.checkpoints.save import save_model
from levanter_infer.checkpoints.source import resolve_source
from levanter_infer.checkpoints.weights import StoredTensor, stored_tensors
from levanter_infer.layers.layout import Layout
from levanter_infer.models.registry import family_for
from levanter_infer.models.tensors import parameters
from levanter_infer.runtime import memory
from tests.golden_cases import load_case, make_weights, write_checkpoint

CONFIG = {
    "model_type": "llama",
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
K_PROJ = "model.layers.1.self_attn.k_proj.weight"


def weights(**changes):
    return make_weights("load", {**CONFIG, **changes})


@pytest.fixture
def write(tmp_path):
    """`write(tensors, **config changes)` -> directory; a second call writes over the first."""

    def write(tensors=None, name="model.safetensors", **changes):
        (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **changes}))
        save_file(weights(**changes) if tensors is None else tensors, tmp_path / name)
        return tmp_path

    return write


@pytest.fixture
def write_shards(tmp_path, write):
    """Two shards with an index; `weight_map` changes are applied to the index alone."""

    def write_shards(**weight_map):
        tensors = weights()
        names = sorted(tensors)  # K_PROJ is in the first shard
        parts = {"a-1.safetensors": names[::2], "a-2.safetensors": names[1::2]}
        for shard, held in parts.items():
            write({name: tensors[name] for name in held}, shard)
        index = {name: shard for shard, held in parts.items() for name in held}
        index = {name: shard for name, shard in {**index, **weight_map}.items() if shard is not None}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
        return tmp_path

    return write_shards


@pytest.fixture
def no_reading(monkeypatch):
    """Reading a tensor is an error: what a test refuses, it refuses by the headers."""

    def read(*_):
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(load_module, "_read", read)


def test_load_puts_every_tensor_in_its_place(write):
    model, tokenizer = load_model(write())
    tensors = weights()
    assert tokenizer is None and model.config.num_layers == 2
    k_proj = model.layers.attention.k_proj.weight
    assert [axis.name for axis in k_proj.axes] == ["layers", "kv_head", "head_size", "embed"]
    assert (np.asarray(k_proj.array[1]).reshape(4, 8) == tensors[K_PROJ]).all()
    o_proj = model.layers.attention.o_proj.weight.array[0]
    assert (np.asarray(o_proj).reshape(8, 8) == tensors["model.layers.0.self_attn.o_proj.weight"]).all()
    assert (np.asarray(model.lm_head.weight.array) == tensors["lm_head.weight"]).all()
    assert sum(leaf.size for leaf in jax.tree.leaves(model)) == sum(t.size for t in tensors.values())


def test_dtype_is_the_stored_one_unless_asked(write):
    stored = {name: tensor.astype(jnp.bfloat16) for name, tensor in weights().items()}
    directory = write(stored)
    for dtype, expected in (
        *((None, jnp.bfloat16), ("bfloat16", jnp.bfloat16), ("float32", jnp.float32)),
        *((jnp.bfloat16, jnp.bfloat16), (np.float32, jnp.float32)),
    ):
        model, _ = load_model(directory, dtype=dtype)
        assert {leaf.dtype for leaf in jax.tree.leaves(model)} == {jnp.dtype(expected)}
        assert (np.asarray(model.norm.weight.array) == stored["model.norm.weight"]).all()
    for wrong in ("int8", np.dtype("int8"), np.float16, float, np.ones(2)):
        with pytest.raises(ValueError, match="dtype=.*, expected bfloat16, float32, or none"):
            load_model(directory, dtype=wrong)
    stored["model.norm.weight"] = stored["model.norm.weight"].astype(np.float32)
    with pytest.raises(ValueError, match="stored as BF16 and F32; give dtype"):
        load_model(write(stored))


def test_shards_load_like_one_file(write_shards, write):
    sharded, _ = load_model(write_shards())
    single, _ = load_model(write())
    for a, b in zip(jax.tree.leaves(sharded), jax.tree.leaves(single), strict=True):
        assert (a == b).all()


@pytest.mark.parametrize(
    "shard",
    ["../a-1.safetensors", "/tmp/a-1.safetensors", "sub/a-1.safetensors", "..", "a-1.bin", 3, ".hidden.safetensors"],
)
def test_index_names_only_files_beside_it(write_shards, no_reading, shard):
    with pytest.raises(ValueError, match="expected the plain name of a .safetensors file beside the index"):
        load_model(write_shards(**{K_PROJ: shard}))


def test_index_and_shards_must_agree(write_shards, no_reading):
    with pytest.raises(ValueError, match="a-2.safetensors lacks tensors that the index places there.*k_proj"):
        load_model(write_shards(**{K_PROJ: "a-2.safetensors"}))
    with pytest.raises(ValueError, match="no file a-3.safetensors"):
        load_model(write_shards(**{K_PROJ: "a-3.safetensors"}))
    directory = write_shards()
    extra = load_file(directory / "a-2.safetensors") | {K_PROJ: weights()[K_PROJ]}
    save_file(extra, directory / "a-2.safetensors")
    with pytest.raises(ValueError, match=f"{K_PROJ!r} is in .*a-1.safetensors and in .*a-2.safetensors"):
        load_model(directory)


def test_links_out_of_the_directory_are_refused(write, tmp_path_factory):
    directory = write()
    outside = tmp_path_factory.mktemp("outside") / "secret.safetensors"
    (directory / "model.safetensors").rename(outside)
    (directory / "model.safetensors").symlink_to(outside)
    with pytest.raises(ValueError, match="outside the model directory"):
        load_model(directory)


def test_links_of_a_hub_cache_into_its_blobs_are_followed(write, tmp_path_factory):
    repo = tmp_path_factory.mktemp("models--org--name")
    snapshot, blobs = repo / "snapshots" / "0123abc", repo / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(write().iterdir())):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(os.path.relpath(blobs / str(number), snapshot))
    model, _ = load_model(snapshot)
    assert (np.asarray(model.embeddings.weight.array) == weights()["model.embed_tokens.weight"]).all()


def test_missing_and_unexpected_tensors_are_named_together(write, no_reading):
    tensors = weights()
    tensors["model.layers.1.self_attn.q_norm.weight"] = np.ones(2, np.float32)
    del tensors[K_PROJ]
    with pytest.raises(ValueError, match=f"missing tensors: {K_PROJ!r}; .* no use for: 'model.layers.1.*q_norm"):
        load_model(write(tensors))


def test_more_layers_in_the_files_than_in_the_config_are_refused(write, no_reading):
    with pytest.raises(ValueError, match="no use for: 'model.layers.1.*and 3 more"):
        load_model(write(weights(), num_hidden_layers=1))


def test_computed_rope_buffers_of_old_checkpoints_are_ignored(write):
    tensors = weights() | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(1, np.float32)}
    load_model(write(tensors))


def test_shapes_are_checked_before_anything_is_read(write, no_reading):
    tensors = weights()
    tensors[K_PROJ] = tensors[K_PROJ].T.copy()
    with pytest.raises(ValueError, match=r"k_proj.weight' has shape \[8, 4\], config.json expects \[4, 8\]"):
        load_model(write(tensors))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="an accelerator has memory of its own")
def test_weights_that_do_not_fit_into_memory_are_refused_before_anything_is_read(write, monkeypatch):
    directory = write()
    needed = sum(leaf.nbytes for leaf in jax.tree.leaves(load_model(directory)[0]))
    monkeypatch.setattr(memory, "_bytes_by_name", lambda _: {})  # no swap space
    monkeypatch.setattr(memory, "_machine_bytes", lambda: needed)
    load_model(directory)
    monkeypatch.setattr(memory, "_machine_bytes", lambda: needed - 1)
    monkeypatch.setattr(load_module, "read_tensors", lambda *_: pytest.fail("read"))
    with pytest.raises(ValueError, match='the model does not fit into memory: .* give dtype="bfloat16", or'):
        load_model(directory)
    with pytest.raises(pytest.fail.Exception):
        load_model(directory, dtype="bfloat16")


def test_quantized_tensors_are_refused(write, no_reading):
    tensors = weights()
    tensors[K_PROJ] = tensors[K_PROJ].astype(np.int8)
    with pytest.raises(ValueError, match="k_proj.weight' is stored as I8, expected one of F32, F16, BF16; quantized"):
        load_model(write(tensors))


def test_weights_that_are_all_quantized_are_named_as_such(write, no_reading):
    tensors = {name: tensor.astype(np.int8) for name, tensor in weights().items()}
    with pytest.raises(ValueError, match="is stored as I8, expected one of F32, F16, BF16; quantized"):
        load_model(write(tensors))


@pytest.mark.parametrize("changes", [{"vocab_size": 2**30}, {"num_hidden_layers": 9999}, {"hidden_size": 2**20}])
def test_config_larger_than_the_files_is_refused_before_anything_is_made(write, monkeypatch, changes):
    monkeypatch.setattr(load_module.DecoderModel, "types", lambda *_, **__: pytest.fail("made shapes"))
    with pytest.raises(ValueError, match="config.json describes .* parameters, but the files hold 21 tensors"):
        load_model(write(weights(), **changes))


def test_tied_checkpoint_has_no_head_of_its_own(write):
    tensors = weights(tie_word_embeddings=True)
    model, _ = load_model(write(tie_word_embeddings=True))
    assert model.lm_head is None
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model, _ = load_model(write(tensors, tie_word_embeddings=True))
    assert model.lm_head is None
    tensors["lm_head.weight"] = tensors["lm_head.weight"] + np.float32(1)
    with pytest.raises(ValueError, match="'lm_head.weight' differs from 'model.embed_tokens.weight' although"):
        open_model(resolve_source(write(tensors, tie_word_embeddings=True)))  # before `swap_weights` gives up others
    del tensors["lm_head.weight"]
    with pytest.raises(ValueError, match="missing tensors: 'lm_head.weight'.*tie_word_embeddings"):
        load_model(write(tensors, tie_word_embeddings=False))


def _truncated(data: bytes) -> bytes:
    return data[:-1]


def _longer(data: bytes) -> bytes:
    return data + b"\0"


def _header_too_long(data: bytes) -> bytes:
    return (2**40).to_bytes(8, "little") + data[8:]


def _overlapping(data: bytes) -> bytes:
    return _edited(data, lambda header: header[K_PROJ].update(data_offsets=header["model.norm.weight"]["data_offsets"]))


def _larger_than_its_bytes(data: bytes) -> bytes:
    return _edited(data, lambda header: header[K_PROJ].update(shape=[2**40, 8]))


def _repeated_name(data: bytes) -> bytes:
    size = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + size].rstrip()
    entry = json.dumps({K_PROJ: json.loads(header)[K_PROJ]}).encode()[1:]
    return _with_header(data, header[:-1] + b"," + entry)


def _edited(data: bytes, edit) -> bytes:
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    edit(header)
    return _with_header(data, json.dumps(header).encode())


def _with_header(data: bytes, header: bytes) -> bytes:
    body = data[8 + int.from_bytes(data[:8], "little") :]
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + body


@pytest.mark.parametrize(
    "damage",
    [_truncated, _longer, _header_too_long, _overlapping, _larger_than_its_bytes, _repeated_name, lambda _: b""],
)
def test_damaged_file_is_named_with_a_remedy(write, no_reading, damage):
    path = write() / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=r"model\.safetensors.*(again|mend)"):
        load_model(path.parent)


@pytest.mark.parametrize("text", ["{", "[]", '{"a": 1, "a": 2}', "[" * 100_000, "\xff"])
def test_broken_config_is_named(write, text):
    path = write() / "config.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match="config.json"):
        load_model(path.parent)


def test_huge_config_is_refused_unread(write):
    path = write() / "config.json"
    path.write_bytes(b" " * (2**20 + 1))
    with pytest.raises(ValueError, match="1048577 bytes, expected at most 1048576"):
        load_model(path.parent)


def test_pickled_weights_are_refused_with_the_way_out(write):
    directory = write()
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(ValueError, match="found pytorch_model.bin but no model.safetensors.*convert to safetensors"):
        load_model(directory)
    (directory / "pytorch_model.bin").unlink()
    with pytest.raises(ValueError, match="no model.safetensors and no model.safetensors.index.json"):
        load_model(directory)


def test_what_is_no_model_is_refused(write, tmp_path):
    with pytest.raises(ValueError, match="no such directory, and no hub id of the form org/name"):
        load_model(str(tmp_path / "absent"))
    with pytest.raises(ValueError, match="there is no directory .*absent; give hub ids as strings"):
        load_model(tmp_path / "absent")
    with pytest.raises(ValueError, match="is a file; give the directory"):
        load_model(write() / "config.json")
    with pytest.raises(ValueError, match="revision='main' with the directory"):
        load_model(tmp_path, revision="main")
    for wrong in (None, 5, b"x"):
        with pytest.raises(ValueError, match="expected a directory, a URL or a hub id"):
            load_model(wrong)
    for wrong in ([1], "x"):
        with pytest.raises(ValueError, match="expected a mapping of keys to values"):
            load_model(write(), config=wrong)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ValueError, match="no file config.json"):
        load_model(tmp_path)


@pytest.mark.parametrize("name, says", [("~no-such-user/m", "home directory"), ("x" * 300, "name too long")])
def test_name_that_no_directory_can_have_is_reported(name, says):
    with pytest.raises(ValueError, match=f"cannot look for model '.*{says}.*; give a directory or a hub id"):
        resolve_source(name)


def test_tokenizer_of_a_hub_id_is_fetched_without_weights(write, monkeypatch):
    directory, fetched = write(), []
    monkeypatch.setattr(source_module, "_download", lambda name, at, files: fetched.extend(files) or directory)
    source = resolve_source("org/name", weights=False)
    assert source.revision == directory.name and not any(
        ".safetensors" in file for file in fetched if "index" not in file
    )


def test_hub_id_fetches_text_then_the_shards_of_one_commit(write_shards, monkeypatch):
    directory = write_shards()
    calls = []

    def download(name, revision, files):
        calls.append((name, revision, files))
        return directory

    monkeypatch.setattr(source_module, "_download", download)
    source = resolve_source("org/name", revision="v1")
    assert source.revision == directory.name and source.directory == directory
    assert [call[:2] for call in calls] == [("org/name", "v1"), ("org/name", directory.name)]
    assert not any(name.endswith(".safetensors") for name in calls[0][2])
    assert {name for name in calls[1][2] if name.endswith(".safetensors")} == {"a-1.safetensors", "a-2.safetensors"}
    assert {name for call in calls for name in call[2] if "*" in name} == {"additional_chat_templates/*.jinja"}


def test_hub_that_does_not_answer_is_reported(monkeypatch):
    import huggingface_hub

    def fail(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ValueError, match="'org/name' at revision 'v1': .*OSError: no network; check the name"):
        load_model("org/name", revision="v1")


PARENTS = {
    "gemma3": {"architectures": ["Gemma3ForConditionalGeneration"], "mm_tokens_per_image": 256},
    "mistral3": {
        **{"architectures": ["Mistral3ForConditionalGeneration"], "projector_hidden_act": "gelu"},
        **{"multimodal_projector_bias": False, "spatial_merge_size": 2, "vision_feature_layer": -1},
    },
    "kimi_k25": {
        **{"architectures": ["KimiK25ForConditionalGeneration"], "media_placeholder_token_id": 9, "ignore_index": -100},
        **{"use_unified_vision_chunk": True, "auto_map": {"AutoConfig": "configuration_kimi_k25.KimiK25Config"}},
    },
}


@pytest.mark.parametrize(
    "prefixes", [("language_model.model.", "language_model.lm_head."), ("model.language_model.", "lm_head.")]
)
@pytest.mark.parametrize(
    "name, parent_type",
    [
        *[("gemma3_untied", "gemma3"), ("mistral", "mistral3"), ("ministral3", "mistral3"), ("mistral4", "mistral3")],
        *[("deepseek_v3", "kimi_k25"), ("kimi_k2", "kimi_k25")],
    ],
)
def test_the_text_model_of_a_multimodal_checkpoint_is_read_alone(tmp_path, prefixes, name, parent_type):
    case = load_case(name)
    directory = write_checkpoint(tmp_path / "text", case)
    model, _ = load_model(directory)
    tensors = load_file(directory / "model.safetensors")
    named = {
        name.replace("model.", prefixes[0], 1).replace("lm_head.", prefixes[1], 1): t for name, t in tensors.items()
    }
    projector = "mm_projector" if parent_type == "kimi_k25" else "multi_modal_projector"
    vision = {"vision_tower.embeddings.weight": np.ones((3, 4), np.float32), f"{projector}.norm": np.ones(3)}
    config = {
        "model_type": parent_type, "text_config": case.config, "vision_config": {"hidden_size": 4},
        "image_token_id" if parent_type == "kimi_k25" else "image_token_index": 9, "eos_token_id": [1, 2],
        **PARENTS[parent_type],
    }  # fmt: skip
    directory = tmp_path / "parent"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    save_file(named | vision, directory / "model.safetensors")
    parent, _ = load_model(directory)
    assert parent.config == model.config and eqx.tree_equal(parent, model)
    save_file(named | {"audio_tower.weight": np.ones(3, np.float32)}, directory / "model.safetensors")
    with pytest.raises(ValueError, match="no use for: 'audio_tower.weight'"):
        load_model(directory)
    save_file(named | {"model.norm.weight": np.ones(56, np.float32)}, directory / "model.safetensors")
    with pytest.raises(ValueError, match="are both 'model.norm.weight'; leave one out"):
        load_model(directory)
    (directory / "config.json").write_text(json.dumps({**config, "audio_config": {}}))
    with pytest.raises(ValueError, match="'audio_config'"):
        load_model(directory)
    # transformers 5 writes its default into parents without the key; a stored head is one all the same
    (directory / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    save_file(named, directory / "model.safetensors")
    assert eqx.tree_equal(load_model(directory)[0], model)
    without = {key: tensor for key, tensor in named.items() if not key.endswith("lm_head.weight")}
    save_file(without, directory / "model.safetensors")
    tied, _ = load_model(directory)
    assert tied.config == dataclasses.replace(model.config, tie_word_embeddings=True)
    other = {**config, "text_config": {**case.config, "model_type": "gpt2"}}
    with pytest.raises(ValueError, match="model_type='gpt2', expected "):
        family_for(other)


@pytest.mark.parametrize("name, parent_type", [("qwen3", "qwen3_vl"), ("qwen3_moe", "qwen3_vl_moe")])
def test_the_text_model_of_qwen3_vl_is_a_qwen3(tmp_path, name, parent_type):
    """As published: the rope has several axes, and the experts of a layer are one tensor, [expert, in, out]."""
    case = load_case(name)
    tensors = make_weights(case.name, case.config)
    model, _ = load_model(write_checkpoint(tmp_path / "text", case))
    stacked = {}
    for layer in range(case.config["num_hidden_layers"] if name == "qwen3_moe" else 0):
        path, experts = f"model.layers.{layer}.mlp.experts", range(case.config["num_experts"])
        gate, up, down = (
            np.stack([tensors.pop(f"{path}.{expert}.{part}_proj.weight").T for expert in experts])
            for part in ("gate", "up", "down")
        )
        gate_up, down = map(np.ascontiguousarray, (np.concatenate([gate, up], axis=2), down))
        stacked |= {f"{path}.gate_up_proj": gate_up, f"{path}.down_proj": down}
    named = {n.replace("model.", "model.language_model.", 1): t for n, t in (tensors | stacked).items()}
    rope = {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True}
    text = {**case.config, "model_type": f"{parent_type}_text", "rope_scaling": rope}
    tokens = {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8}
    config = {"model_type": parent_type, "text_config": text, "vision_config": {"depth": 2}, **tokens}
    directory = tmp_path / "parent"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    save_file(named | {"model.visual.pos_embed.weight": np.ones((3, 4), np.float32)}, directory / "model.safetensors")
    parent, _ = load_model(directory)
    assert parent.config == model.config and eqx.tree_equal(parent, model)
    turned = {  # as transformers 5 writes it: [expert, out, in]
        key: np.ascontiguousarray(tensor.swapaxes(1, 2)) if tensor.ndim == 3 else tensor
        for key, tensor in named.items()
    }
    save_file(turned, directory / "model.safetensors")
    assert eqx.tree_equal(load_model(directory)[0], model)
    del text["rope_theta"]  # HF's default is not that of Qwen3
    assert family_for(config).config_from_hf(config).ropes[0].theta == 5e5
    for refused in ({"rope_scaling": {**rope, "rope_type": "mrope"}}, {"mrope_section": [1]}):
        with pytest.raises(ValueError, match="rope_type='mrope', expected|key 'mrope_section'"):
            family_for(config).config_from_hf({**config, "text_config": {**text, **refused}})


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("name, parent_type", [("qwen2", "qwen2_vl"), ("qwen2", "qwen2_5_vl")])
def test_the_text_model_of_qwen2_vl_is_a_qwen2(tmp_path, name, parent_type, flat):
    """Older files have no text_config, and the names of a text model."""
    case = load_case(name)
    tensors = make_weights(case.name, case.config)
    model, _ = load_model(write_checkpoint(tmp_path / "text", case))
    rope = {"type": "mrope", "rope_type": "default", "mrope_section": [16, 24, 24]}
    text = {**case.config, "model_type": f"{parent_type}_text", "rope_scaling": rope}
    vision = {"vision_config": {"depth": 2}, "image_token_id": 5, "vision_token_id": 6}
    config = {**(text if flat else {"text_config": text}), **vision, "model_type": parent_type}
    prefix, visual = ("model.", "visual.") if flat else ("model.language_model.", "model.visual.")
    named = {name.replace("model.", prefix, 1): tensor for name, tensor in tensors.items()}
    directory = tmp_path / "parent"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    save_file(named | {f"{visual}patch_embed.weight": np.ones((3, 4), np.float32)}, directory / "model.safetensors")
    parent, _ = load_model(directory)
    assert parent.config == model.config and eqx.tree_equal(parent, model)
    for key in ("rope_theta", "rms_norm_eps"):
        text.pop(key), config.pop(key, None)
    read = family_for(config).config_from_hf(config)
    assert read.ropes[0].theta == 1e6 and read.norm.eps == 1e-5  # HF's defaults are not those of Qwen2
    with pytest.raises(ValueError, match="key 'audio_config'"):
        family_for({**config, "audio_config": {}}).config_from_hf({**config, "audio_config": {}})


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("name, parent_type", [("glm4", "glm4v"), ("glm4_moe", "glm4v_moe")])
def test_the_text_model_of_glm_with_vision_is_a_glm4(tmp_path, name, parent_type, flat):
    """GLM-4.1V was published without a text_config."""
    case = load_case(name)
    directory = write_checkpoint(tmp_path / "text", case)
    model, _ = load_model(directory)
    text = {**case.config, "model_type": f"{parent_type}_text"}
    rope = text.get("rope_scaling") or {"rope_type": "default"}
    text["rope_scaling"] = {**rope, "mrope_section": [8, 12, 12]}
    vision = {"model_type": parent_type, "vision_config": {}, "video_start_token_id": 5}
    config = {**(text if flat else {"text_config": text}), **vision}
    named = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(directory / "model.safetensors").items()
    }
    directory = tmp_path / "parent"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    save_file(named | {"model.visual.norm.weight": np.ones(3, np.float32)}, directory / "model.safetensors")
    parent, _ = load_model(directory)
    assert parent.config == model.config and eqx.tree_equal(parent, model)


def test_layers_for_multi_token_prediction_are_skipped_by_their_number(tmp_path):
    """GLM-4.5 has them behind the last layer, and `num_nextn_predict_layers` of them."""
    case = load_case("glm4_moe")
    directory = write_checkpoint(tmp_path, case)
    tensors = load_file(directory / "model.safetensors")
    last = case.config["num_hidden_layers"]
    extra = {f"model.layers.{last}.{name}": np.ones((2, 3), np.float32) for name in ("eh_proj.weight", "enorm.weight")}
    save_file({**tensors, **extra}, directory / "model.safetensors")
    with pytest.raises(ValueError, match=f"tensors that config.json has no use for: 'model.layers.{last}.eh_proj"):
        open_model(resolve_source(directory))
    (directory / "config.json").write_text(json.dumps({**case.config, "num_nextn_predict_layers": 1}))
    model, _ = load_model(directory)
    assert model.config.num_layers == last


@pytest.mark.parametrize("name", ["glm4_moe", "ernie4_5_moe"])
def test_parameters_of_the_choice_of_experts_stay_float32(name, tmp_path):
    """Beside weights of bfloat16, which is how such models are published; and they are saved as they were."""
    case = load_case(name)
    directory = write_checkpoint(tmp_path / "given", case)
    kept = ("e_score_correction_bias", *(["mlp.gate.weight"] if name == "ernie4_5_moe" else []))
    given = load_file(directory / "model.safetensors")
    given = {key: value if key.endswith(kept) else value.astype(ml_dtypes.bfloat16) for key, value in given.items()}
    save_file(given, directory / "model.safetensors")
    model, _ = load_model(directory)
    assert model.dtype == jnp.bfloat16
    save_model(model, tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert {key: value.dtype for key, value in saved.items()} == {key: value.dtype for key, value in given.items()}
    assert all(saved[key].tobytes() == given[key].tobytes() for key in given)


@pytest.mark.parametrize("heads, devices, expected", [(2, 2, (0, 4)), (1, 2, (0, 8)), (2, 4, (0, 4))])
def test_a_process_reads_the_rows_of_its_own_heads_only(write, monkeypatch, heads, devices, expected):
    """Rows that a process with the first device of a model axis reads: 4 query heads of 2 numbers, 8 rows in all."""
    stored = open_model(resolve_source(write(num_key_value_heads=heads)))
    layout = Layout.of(AbstractMesh((1, devices), ("data", "model")), stored.types.config)
    params = {param.line: param for param in parameters(stored.types, family_for(CONFIG).tensors)}
    q_proj = params["layers.attention.q_proj.weight"]
    fitted = heads * layout.kv_copies
    assert _own_rows(q_proj, layout, (0, fitted // devices)) == expected
    tensors = stored_tensors(resolve_source(write(num_key_value_heads=heads)))
    read: list[StoredTensor] = []
    monkeypatch.setattr(load_module, "read_tensors", lambda pieces: read.extend(tensor for tensor, _ in pieces))
    _read_entries(q_proj, tensors, [(q_proj.sources[0], np.zeros((8, 8), np.float32))], expected)
    whole = tensors["model.layers.0.self_attn.q_proj.weight"]
    assert [(each.offset, each.num_bytes) for each in read] == [(whole.offset, whole.num_bytes * expected[1] // 8)]
    # Padded axes end with the tensor, and an axis that is not sharded is needed whole.
    up_proj, o_proj = params["layers.mlp.up_proj.weight"], params["layers.attention.o_proj.weight"]
    assert _own_rows(up_proj, layout, (9, 16)) == (9, 12) and _own_rows(o_proj, layout, (0, 8)) == (0, 8)


@pytest.mark.parametrize("parent_type, within", [("mistral3", False), ("qwen2_5_vl", True), ("gemma3", False)])
def test_quantized_parents_say_so_beside_the_text_model(tmp_path, parent_type, within):
    """As Mistral and Qwen publish them; transformers 4.52 and 4.53 wrote keys of the text model in both places."""
    name = {"mistral3": "mistral", "qwen2_5_vl": "qwen2", "gemma3": "gemma3_untied"}[parent_type]
    case = load_case(name)
    tensors = load_file(write_checkpoint(tmp_path / "text", case) / "model.safetensors")
    codes, floats = {}, {}
    for key, tensor in tensors.items():
        named = key.replace("model.", "model.language_model.", 1)
        if key.endswith("_proj.weight"):
            scale = np.float32(np.abs(tensor).max() / 448)
            codes[named] = (tensor / scale).astype(ml_dtypes.float8_e4m3fn)
            codes[named.replace(".weight", ".weight_scale_inv")] = np.asarray(scale)
            floats[named] = codes[named].astype(np.float32) * scale
        else:
            codes[named] = floats[named] = tensor
    text = {**case.config, "model_type": {"qwen2": "qwen2_5_vl_text"}.get(name, case.config["model_type"])}
    config = {"model_type": parent_type, "text_config": text, "vision_config": {}}
    if within:
        text |= {"image_token_id": None, "vision_start_token_id": 7}
        config |= {"hidden_size": 5, "sliding_window": 32768, "hidden_act": "silu"}
    directory = tmp_path / "parent"
    directory.mkdir()
    fp8 = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    found = []
    for stored, quantized in ((codes, {"quantization_config": fp8}), (floats, {})):
        save_file(stored, directory / "model.safetensors")
        (directory / "config.json").write_text(json.dumps({**config, **quantized}))
        found.append(load_model(directory, dtype="float32")[0])
    assert eqx.tree_equal(*found)
