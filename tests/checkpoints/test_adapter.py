"""LoRA adapters of PEFT are merged into the weights when these are read."""

import json
from pathlib import Path

import equinox as eqx
import haliax as hax
import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from levanter_infer import EngineConfig, InferenceEngine, SamplingParams
from levanter_infer.axes import POSITION
from levanter_infer.checkpoints import adapter as adapter_module
from levanter_infer.checkpoints import load as load_module
from levanter_infer.checkpoints.adapter import Place, adapted
from levanter_infer.checkpoints.load import load_model
from levanter_infer.checkpoints.source import resolve_source
from levanter_infer.checkpoints.weights import stored_tensors
from levanter_infer.config import ModelSource, load_config
from levanter_infer.fingerprint import model_fingerprint
from tests.checkpoints.test_quantized import FP8, fp8_checkpoint
from tests.golden_cases import RELATIVE_BOUND, load_case, write_checkpoint

GOLDEN = sorted((Path(__file__).parents[1] / "golden" / "adapters").glob("*.safetensors"))
"""Made by scripts/golden/make_adapters.py with PEFT."""


def golden(stem: str, tmp_path: Path, **changes) -> tuple[Path, Path, dict]:
    """A base and an adapter as directories, and the tensors of the golden file. Args: changes: keys of
    adapter_config.json."""
    path = next(path for path in GOLDEN if path.stem == stem)
    with safe_open(str(path), framework="numpy") as file:
        metadata = file.metadata()
    tensors, base, adapter = load_file(path), tmp_path / "base", tmp_path / "adapter"
    for directory in (base, adapter):
        directory.mkdir(exist_ok=True)
    write_checkpoint(base, load_case(metadata["case"]))
    (adapter / "adapter_config.json").write_text(json.dumps({**json.loads(metadata["config"]), **changes}))
    own = {name: tensor for name, tensor in tensors.items() if name not in ("tokens", "logits")}
    save_file(own, adapter / "adapter_model.safetensors")
    return base, adapter, tensors


def logits(model, tokens) -> np.ndarray:
    return np.asarray(eqx.filter_jit(lambda model, tokens: model(tokens).array)(model, hax.named(tokens, POSITION)))


@pytest.mark.parametrize("stem", [path.stem for path in GOLDEN])
def test_logits_are_those_of_peft(tmp_path, stem):
    base, adapter, tensors = golden(stem, tmp_path)
    expected, bound = tensors["logits"], RELATIVE_BOUND * np.abs(tensors["logits"]).max()
    found = logits(load_model(base, adapter=adapter)[0], tensors["tokens"])
    assert np.abs(found - expected).max() <= bound
    plain = logits(load_model(base)[0], tensors["tokens"])
    assert np.abs(plain - expected).max() > 50 * bound, "the adapter changes nothing"


def by_hand(base: Path, adapter: Path, name: str, scale: float) -> np.ndarray:
    module, change = name.removesuffix(".weight"), load_file(adapter / "adapter_model.safetensors")
    down, up = (change[f"base_model.model.{module}.lora_{part}.weight"] for part in "AB")
    return load_file(base / "model.safetensors")[name].astype(np.float32) + np.float32(scale) * (up @ down)


def test_rows_and_dtypes(tmp_path):
    base, adapter, _ = golden("plain", tmp_path)
    stored = stored_tensors(resolve_source(base))
    place = Place(lambda names: {name: name for name in names}, (), None)
    found = adapted(stored, resolve_source(base, adapter=adapter).adapter, place)
    name = "model.layers.1.mlp.down_proj.weight"
    expected = by_hand(base, adapter, name, 4)
    for dtype in (np.float32, ml_dtypes.bfloat16):
        for tensor, rows in ((found[name], slice(None)), (found[name].rows(3, 9), slice(3, 9))):
            out = np.empty(tensor.shape, dtype)
            tensor.read_into(out)
            rounded = expected[rows].astype(dtype).astype(np.float32)
            np.testing.assert_allclose(out.astype(np.float32), rounded, rtol=1e-6)
    assert found["model.norm.weight"] is stored["model.norm.weight"]


def test_a_quantized_base(tmp_path):
    """As after a training with QLoRA: the adapter is added to the floats that the codes stand for."""
    base, adapter, _ = golden("plain", tmp_path)
    _, floats = fp8_checkpoint(base, "llama3", {"quantization_config": FP8})
    found = load_model(base, adapter=adapter, dtype="float32")[0]
    save_file(floats, base / "model.safetensors")
    (base / "config.json").write_text(json.dumps(load_case("llama3").config))
    expected = load_model(base, adapter=adapter)[0]
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


REFUSED = {
    "peft_type='LOHA', expected LORA": {"peft_type": "LOHA"},
    "use_dora=True, expected nothing": {"use_dora": True},
    "lora_bias=True, expected nothing": {"lora_bias": True},
    "target_parameters=3, expected a list of names": {"target_parameters": 3},
    "init_lora_weights='pissa_niter_4', expected an initialisation": {"init_lora_weights": "pissa_niter_4"},
    "lora_alpha=None|lora_alpha='x', expected a number": {"lora_alpha": "x"},
    "lora_alpha=1000.*0, expected a number": {"lora_alpha": 10**400},
    "alpha_pattern=.*is a pattern": {"alpha_pattern": {"^model.*": 2}},
    "use_rslora='yes', expected true or false": {"use_rslora": "yes"},
    "r=0, expected a whole number": {"r": 0},
    "rank_pattern='x', expected an object": {"rank_pattern": "x"},
    "of rank [0-9]+, and adapter_config.json has ranks 99": {"r": 99, "rank_pattern": None},
    "use_later_lora=True, expected no such key": {"use_later_lora": True},
}


def test_keys_that_a_later_peft_adds_and_does_not_use_are_read(tmp_path):
    base, adapter, _ = golden("plain", tmp_path, use_later_lora=False, later_config=None, velora_config={"groups": 2})
    load_model(base, adapter=adapter)


@pytest.mark.parametrize("says", REFUSED)
def test_what_is_not_merged_is_refused_by_its_key(tmp_path, says):
    base, adapter, _ = golden("plain", tmp_path, **REFUSED[says])
    with pytest.raises(ValueError, match=says):
        load_model(base, adapter=adapter)


def test_an_adapter_of_another_model_is_refused(tmp_path):
    base, adapter, _ = golden("plain", tmp_path)
    path, prefix = adapter / "adapter_model.safetensors", "base_model.model.model.layers.0."
    tensors = load_file(path)

    def refused(says: str, changed: dict) -> None:
        save_file(changed, path)
        with pytest.raises(ValueError, match=says):
            load_model(base, adapter=adapter)

    other = {name.replace("layers.0", "layers.99"): tensor for name, tensor in tensors.items()}
    refused("changes tensors that the model does not have: 'model.layers.99", other)
    name = f"{prefix}mlp.down_proj.lora_A.weight"
    refused("lora_A.weight is missing", {key: tensor for key, tensor in tensors.items() if key != name})
    refused(r"expected \[r, in\] and \[out, r\]", {**tensors, name: tensors[name][:1].copy()})
    refused("change a matrix", {**tensors, name: tensors[name][:, :-1].copy()})
    refused("is I8 and .*, expected floats", {**tensors, name: tensors[name].astype(np.int8)})
    refused("names that begin with base_model.model.", {**tensors, "lora": tensors[name]})
    dora = {f"{prefix}mlp.down_proj.lora_magnitude_vector": np.ones(3, np.float32)}
    refused("lora_magnitude_vector", {**tensors, **dora})
    refused("holds no tensors; save the adapter again", {})
    path.unlink()
    with pytest.raises(ValueError, match="no adapter_model.safetensors"):
        load_model(base, adapter=adapter)
    with pytest.raises(ValueError, match="is an adapter and no model; give its base"):
        load_model(adapter)
    with pytest.raises(ValueError, match="adapter .* there is no directory"):
        load_model(base, adapter=tmp_path / "nowhere")


def test_a_base_may_store_its_tied_head_too(tmp_path):
    base, adapter, _ = golden("tied", tmp_path)
    expected = load_model(base, adapter=adapter)[0]
    path = base / "model.safetensors"
    stored = load_file(path)
    save_file({**stored, "lm_head.weight": stored["model.embed_tokens.weight"].copy()}, path)
    found = load_model(base, adapter=adapter)[0]
    assert np.array_equal(found.embeddings.weight.array, expected.embeddings.weight.array)
    assert not np.array_equal(found.embeddings.weight.array, load_model(base)[0].embeddings.weight.array)


def test_a_change_of_one_of_two_tied_tables_is_refused(tmp_path):
    """PEFT changes the embeddings alone then, or the head alone."""
    base, adapter, tensors = golden("tied", tmp_path)
    path, prefix = adapter / "adapter_model.safetensors", "base_model.model."
    stored = load_file(path)
    head, table = f"{prefix}lm_head.weight", f"{prefix}model.embed_tokens.weight"
    assert head in stored and table in stored
    vocab, embed = stored[table].shape
    lora = {
        f"{prefix}model.embed_tokens.lora_embedding_A": np.ones((2, vocab), np.float32),
        f"{prefix}model.embed_tokens.lora_embedding_B": np.ones((embed, 2), np.float32),
    }
    others = {name: tensor for name, tensor in stored.items() if name not in (head, table)}
    for changed in ({table: stored[table]}, {head: stored[head]}, lora, {head: stored[head] + 1, table: stored[table]}):
        save_file({**others, **changed}, path)
        with pytest.raises(ValueError, match="so that they differ, and in this model they are one"):
            load_model(base, adapter=adapter)
    save_file(others, path)
    expected = load_model(base, adapter=adapter)[0]
    copy = load_file(base / "model.safetensors")["model.embed_tokens.weight"]  # PEFT saves such with new tokens
    for copies in ({table: copy}, {head: copy}, {head: copy, table: copy}):
        save_file({**others, **copies}, path)
        found = load_model(base, adapter=adapter)[0]
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_an_engine_gets_and_swaps_adapters(tmp_path):
    base, adapter, _ = golden("plain", tmp_path)
    prompt, sampling = [[1, 5, 9, 2]], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)

    def tokens(engine) -> list[int]:
        return engine.generate(prompt, sampling)[0].completions[0].token_ids

    sizes = EngineConfig(max_seqs=2, max_seq_len=32)
    merged, plain = (
        tokens(InferenceEngine(load_model(base, adapter=each)[0], None, sizes)) for each in (adapter, None)
    )
    assert merged != plain
    engine = InferenceEngine(load_model(base)[0], None, sizes)
    engine.swap_weights(base, adapter=adapter)
    assert tokens(engine) == merged
    engine.swap_weights(str(base))
    assert tokens(engine) == plain
    with pytest.raises(ValueError, match="an adapter for weights in memory"):
        engine.swap_weights(load_model(base)[0], adapter=adapter)


def test_a_configuration_names_an_adapter(tmp_path):
    base, adapter, _ = golden("plain", tmp_path)
    (tmp_path / "c.yaml").write_text(f"model: {{path: {base}, adapter: {adapter}}}\nprompts: [a]\n")
    config = load_config(tmp_path / "c.yaml", [])
    assert config.model == ModelSource(str(base), adapter=str(adapter))
    found, without = model_fingerprint(config.model.resolve()), model_fingerprint(resolve_source(base))
    assert {name: found[name] for name in without} == without and "adapter_weights" in set(found) - set(without)
    (adapter / "adapter_config.json").write_text((adapter / "adapter_config.json").read_text() + " ")
    assert model_fingerprint(config.model.resolve()) != found


def test_what_an_adapter_changes_of_other_parts_of_a_multimodal_model_is_not_read(tmp_path):
    """As the base's own tensors of these parts. Its vision tower has a `q_proj` too."""
    base, adapter, _ = golden("plain", tmp_path)
    text = json.loads((base / "config.json").read_text())
    tensors = load_file(base / "model.safetensors")
    own = load_file(adapter / "adapter_model.safetensors")
    plain = load_model(base, adapter=adapter)[0]
    within = {"model_type": "mistral3", "text_config": {**text, "model_type": "mistral"}, "vision_config": {}}
    within["text_config"]["rope_scaling"] = None
    (base / "config.json").write_text(json.dumps(within["text_config"]))
    plain = load_model(base, adapter=adapter)[0]
    (base / "config.json").write_text(json.dumps(within))
    named = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    save_file(named | {"model.vision_tower.q_proj.weight": np.ones((4, 4), np.float32)}, base / "model.safetensors")
    start = "base_model.model.model."
    vision = {f"{start}vision_tower.q_proj.lora_{part}.weight": np.ones((2, 4), np.float32) for part in "AB"}
    language = {name.replace(start, f"{start}language_model.", 1): tensor for name, tensor in own.items()}
    save_file(language | vision, adapter / "adapter_model.safetensors")
    assert eqx.tree_equal(load_model(base, adapter=adapter)[0], plain)
    save_file(vision, adapter / "adapter_model.safetensors")
    with pytest.raises(ValueError, match="changes nothing that is read of the model: 'model.vision_tower.q_proj"):
        load_model(base, adapter=adapter)


def test_an_adapter_in_a_folder_is_pointed_out(tmp_path):
    base, adapter, _ = golden("plain", tmp_path)
    (tmp_path / "saved").mkdir()
    adapter.rename(tmp_path / "saved" / "style")
    with pytest.raises(ValueError, match="no adapter_config.json in .*saved; .*; there is one in style"):
        load_model(base, adapter=tmp_path / "saved")


@pytest.mark.parametrize("stem, name", [("experts", "gate_up_proj"), ("experts_stacked", "down_proj")])
def test_parts_of_experts_are_those_of_the_whole(tmp_path, stem, name):
    """As several hosts read them. B has a column of each expert in turn, and A rows of one after the other."""
    base, adapter, _ = golden(stem, tmp_path)
    change = load_file(adapter / "adapter_model.safetensors")
    start = "base_model.model.model.layers.1.mlp.experts." + ("base_layer." if name == "gate_up_proj" else "")
    down, up = (change[f"{start}lora_{part}.weight"] for part in "AB")
    config = json.loads((adapter / "adapter_config.json").read_text())
    stacked = stem == "experts_stacked"
    number = 2
    count = json.loads((base / "config.json").read_text())["num_local_experts" if stacked else "num_experts"]
    rank = len(down) // count
    scale = 6 / 2**0.5 if stacked else config["alpha_pattern"][".*\\.gate_up_proj"] / rank
    part = scale * (up[:, number::count] @ down[number * rank : (number + 1) * rank])
    tensors = load_file(base / "model.safetensors")
    own = f"model.layers.1.mlp.experts.{name}" if stacked else f"model.layers.1.mlp.experts.{number}.up_proj.weight"
    expected = tensors[own][number] + part.T if stacked else tensors[own] + part[len(part) // 2 :]
    seen = {}
    real = adapter_module.adapted
    place_of = lambda tensors, source, place: seen.update(real(tensors, source, place)) or seen  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load_module, "adapted", place_of)
        load_model(base, adapter=adapter)
    found = seen[own].entry(number) if stacked else seen[own]
    for tensor, rows in (
        (found, slice(None)),
        (found.rows(3, 9), slice(3, 9)),
        (found.rows(3, 9).rows(1, 2), slice(4, 5)),
    ):
        out = np.empty(tensor.shape, np.float32)
        tensor.read_into(out)
        np.testing.assert_allclose(out, expected[rows], rtol=1e-5, atol=1e-5)


def test_experts_that_do_not_fit_are_refused(tmp_path):
    base, adapter, _ = golden("experts", tmp_path)
    for parameters in (["down_proj"], ["gate_up_proj", "down_proj", "gate.weight"]):
        golden("experts", tmp_path, target_parameters=parameters)
        if len(parameters) == 1:
            with pytest.raises(
                ValueError, match="target_parameters=.'down_proj'. and the tensors .* do not fit together"
            ):
                load_model(base, adapter=adapter)
        else:
            load_model(base, adapter=adapter)
    own = load_file(adapter / "adapter_model.safetensors")
    name = next(name for name in own if name.endswith("experts.lora_A.weight"))
    save_file({**own, name: own[name][:-1]}, adapter / "adapter_model.safetensors")
    with pytest.raises(
        ValueError, match="of rank [0-9.]+ for 8 experts, and adapter_config.json has ranks|expected .r, in."
    ):
        load_model(base, adapter=adapter)
    write_checkpoint(base, load_case("qwen3"))
    golden_adapter = adapter / "adapter_model.safetensors"
    save_file(own, golden_adapter)
    with pytest.raises(ValueError, match="do not fit together, or not the experts of the model"):
        load_model(base, adapter=adapter)
