"""Weights of int8: what the floats give that they mean, however they come into an engine and whatever computes them."""

import dataclasses
import functools
import subprocess
import sys

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import NamedArray

from levanter_infer import EngineConfig, InferenceEngine, SamplingParams, generate
from levanter_infer.axes import EXPERT, POSITION
from levanter_infer.checkpoints.load import open_model
from levanter_infer.checkpoints.save import save_model
from levanter_infer.checkpoints.source import resolve_source
from levanter_infer.engine.backend_choice import BackendChoice
from levanter_infer.engine.request import Request
from levanter_infer.kernels.cpu import bindings as cpu
from levanter_infer.kernels.cpu.backend import CPU
from levanter_infer.kernels.xla.backend import XLA, XlaBackend
from levanter_infer.layers.linear import Linear
from levanter_infer.layers.quantize import MOST, quantized
from levanter_infer.models.decoder import DecoderModel
from tests.decode.test_counting_model import CountingModel
from tests.engine.test_mesh import EXPERTS, runs
from tests.family_cases import (
    case_of,
    load,
    make_engine,
    requests_for,
    samples,
    served_names,
    sizes_for,
)
from tests.golden_cases import load_case
from tests.tiers import nightly_but
from tests.tiny_models import SIZES, tiny_model, uncached_logprobs

MOST_LOGPROB_DIFFERENCE = 2e-4
"""Floats that codes mean are rounded once more, and sums of float32 in another order."""
TIED = {"tie_word_embeddings": True}
DENSE_NIGHTLY = pytest.param({}, marks=pytest.mark.slow, id="dense")
TIED_NIGHTLY = pytest.param(TIED, marks=pytest.mark.slow, id="tied")
needs_cpu = pytest.mark.skipif(not cpu.available(), reason="the C++ kernels were not built")


def meant(model: DecoderModel) -> DecoderModel:
    """The model with the floats that its weights mean once they are quantized."""

    def one(part):
        if not isinstance(part, Linear) or (narrow := part.quantized()) is part:
            return part
        assert narrow.scale is not None
        shape = [axis.size for axis in part.weight.axes[: -part.num_in]] + [1] * part.num_in
        floats = narrow.weight.array.astype(jnp.float32) * narrow.scale.array.reshape(shape)
        return dataclasses.replace(part, weight=NamedArray(floats.astype(part.weight.dtype), part.weight.axes))

    maps = jax.tree.map(one, (model.stacks, model.head), is_leaf=lambda part: isinstance(part, Linear))
    name = "embeddings" if model.lm_head is None else "lm_head"
    return dataclasses.replace(model, stacks=maps[0], **{name: maps[1]})


def requests() -> list[Request]:
    rng = np.random.default_rng(3)
    sampling = SamplingParams(max_tokens=12, temperature=0.0, logprobs=0)
    return [
        Request(prompt_token_ids=rng.integers(0, 61, length).tolist(), sampling=sampling, id=str(length))
        for length in (1, 9, 20, 4, 14)
    ]


def engine_for(model, **config) -> InferenceEngine:
    return InferenceEngine(model, config=EngineConfig(**{**SIZES, "weight_dtype": "int8", **config}))


def assert_equal(found, expected) -> None:
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    assert all(np.array_equal(one, other) for one, other in pairs)


def answers(engine: InferenceEngine) -> list[tuple[list[int], bytes]]:
    """Tokens, and the bits of their log probabilities."""
    outputs = engine.generate(requests())
    return [(c.token_ids, np.asarray(c.logprobs).tobytes()) for output in outputs for c in output.completions]


def test_a_weight_is_off_by_half_a_scale_at_most_and_outputs_stand_alone():
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((2, 5, 3, 7)).astype(np.float32) * 10.0 ** rng.integers(-30, 30, (2, 5, 1, 1))
    weight[1, 2], weight[0, 3, 1, 2] = 0, np.nan
    codes, scales = (np.asarray(each) for each in quantized(jnp.asarray(weight, jnp.float32), 2))
    assert codes.dtype == np.int8 and scales.shape == (2, 5)
    assert np.isnan(scales[0, 3]) and np.isfinite(np.delete(scales.reshape(-1), 3)).all()
    assert not codes[1, 2].any() and scales[1, 2] == 1
    sound = np.delete(np.arange(10), 3)
    error = np.abs(codes * scales[:, :, None, None].astype(np.float64) - weight).reshape(10, -1)[sound]
    assert (error <= 0.5001 * scales.reshape(10, 1)[sound]).all()
    largest = np.abs(codes.astype(int)).reshape(10, -1)[[i for i in sound if i != 7]].max(axis=1)
    assert (largest == MOST).all()


@pytest.mark.parametrize("shape, options", [((256, 512, 512), ""), ((2**17, 512), ", is_stack=False")])
def test_on_a_cpu_the_floats_of_one_layer_at_a_time_are_converted(shape, options):
    program = f"""
import jax, jax.numpy as jnp, numpy as np, pathlib, re
from levanter_infer.layers.quantize import quantized
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+) kB", pathlib.Path("/proc/self/status").read_text())[1]) / 1024
jax.block_until_ready(quantized(jnp.ones((2, 8, 8), jnp.bfloat16), 1))
weight = jax.device_put(np.ones({shape}, jnp.bfloat16))
before = peak()
jax.block_until_ready(quantized(weight, 1{options}))
print(peak() - before)
"""
    grown = float(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout)
    assert 60 < grown < 128 + 64, "MiB, of weights of 128 and codes of 64"


@pytest.mark.parametrize("model_type", nightly_but(["qwen3_moe"], served_names()))
def test_an_engine_gives_what_the_floats_give_that_its_weights_mean(model_type, tmp_path):
    case = load_case(case_of(model_type))
    model = load(case, tmp_path)
    floats = meant(model)
    given = requests_for(case, model.config.vocab_size)
    outputs = make_engine(model, weight_dtype="int8", matmul="xla", attention="xla").generate(given)
    differs = 0.0
    for request, output in zip(given, outputs, strict=True):
        prompt = list(request.prompt_token_ids)
        for sample in samples(output):
            tokens = prompt + sample.tokens
            length = len(tokens) if case.depends_on_length else sizes_for(model.config)["max_seq_len"]
            own = np.arange(len(prompt) - 1, len(tokens) - 1), sample.tokens
            every, exact = (uncached_logprobs(each, tokens, length) for each in (floats, model))
            np.testing.assert_allclose(sample.logprobs, every[own], atol=MOST_LOGPROB_DIFFERENCE)
            if request.sampling.temperature == 0:
                assert (every[own] >= every[own[0]].max(axis=1) - MOST_LOGPROB_DIFFERENCE).all()
            differs = max(differs, np.abs(sample.logprobs - exact[own]).max(initial=0))
    assert differs > 1e-4  # they were quantized


@pytest.mark.parametrize("changes", [{}, TIED, {**TIED, "model_type": "gemma"}], ids=["untied", "tied", "gemma"])
def test_the_plain_forward_over_codes_gives_what_their_floats_give(changes):
    model = tiny_model(**changes)
    narrow = model.prepare(model.backend, quantizes=True)
    assert narrow.head.weight.dtype == jnp.int8 and (narrow.lm_head is None) == bool(changes)
    tokens = hax.named(np.arange(24, dtype=np.int32) * 7 % 61, POSITION)
    found, expected, exact = (np.asarray(each(tokens).array) for each in (narrow, meant(model), model))
    np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max())
    assert np.abs(found - exact).max() > 1e-3 * np.abs(expected).max()


@pytest.mark.parametrize("changes", [{}, TIED], ids=["untied", "tied"])
def test_a_model_that_was_stored_as_bits_is_quantized_as_its_floats(changes):
    backend = XlaBackend(CPU)
    model = tiny_model(dtype="bfloat16", **changes)
    directly = model.prepare(backend, quantizes=True)
    later = model.prepare(backend).prepare(backend, quantizes=True)
    assert later.head.dtype == jnp.bfloat16
    assert_equal(*((each.stacks, each.head) for each in (later, directly)))


def test_weights_may_be_arrays_of_numpy():
    model = tiny_model(dtype="bfloat16")
    assert_equal(*(each.prepare(XLA, quantizes=True) for each in (jax.tree.map(np.asarray, model), model)))


@pytest.mark.parametrize("platform", [CPU, XLA.platform], ids=["cpu", "other"])
def test_one_array_may_be_embeddings_and_head(platform):
    model = tiny_model(dtype="bfloat16")
    expected = model.prepare(XlaBackend(platform), quantizes=True)
    table = NamedArray(jnp.array(model.lm_head.weight.array), model.lm_head.weight.axes)
    head, lookup = (dataclasses.replace(part, weight=table) for part in (model.lm_head, model.embeddings))
    shared = dataclasses.replace(jax.tree.map(jnp.array, model), lm_head=head, embeddings=lookup)
    stored = shared.prepare(XlaBackend(platform), donate=True, quantizes=True)
    assert np.array_equal(stored.lm_head.weight.array, expected.lm_head.weight.array)
    assert np.isfinite(np.asarray(stored.embeddings.take_rows(jnp.arange(3), jnp.bfloat16)).astype(np.float32)).all()


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
def test_routers_embeddings_and_norms_keep_their_dtype(model_type):
    changes = EXPERTS if model_type == "qwen3_moe" else {}
    model = tiny_model(dtype="bfloat16", **changes)
    stored = model.prepare(model.backend, quantizes=True)
    maps = [
        part
        for part in jax.tree.leaves(stored, is_leaf=lambda part: isinstance(part, Linear))
        if isinstance(part, Linear)
    ]
    narrow = [part for part in maps if part.weight.dtype == jnp.int8]
    assert len(narrow) == 8 and all(part.scale is not None and part.dtype == jnp.bfloat16 for part in narrow)
    others = [part.outs[0].name for part in maps if part.weight.dtype != jnp.int8]
    assert sorted(others) == sorted(["vocab", *([EXPERT] if model_type == "qwen3_moe" else [])])
    assert stored.lm_head.weight.dtype == jnp.int8 and stored.embeddings.dtype == jnp.bfloat16


@needs_cpu
def test_rows_that_are_scaled_and_added_to_are_not_promised_bits(tmp_path):
    model = load(load_case(case_of("gpt2")), tmp_path)
    config = EngineConfig(numerics="batch_invariant", matmul="cpu")
    BackendChoice.choose(config, model, has_mods=False)
    with pytest.raises(ValueError, match="not possible for gpt2: XLA computes add of what was multiplied"):
        BackendChoice.choose(dataclasses.replace(config, weight_dtype="int8"), model, has_mods=False)


@needs_cpu
@pytest.mark.parametrize("dtype", nightly_but(["bfloat16"], ["float32", "bfloat16"]))
@pytest.mark.parametrize("changes", [DENSE_NIGHTLY, pytest.param(EXPERTS, id="experts"), TIED_NIGHTLY])
def test_on_a_cpu_bits_do_not_depend_on_what_else_is_in_the_batch(changes, dtype):
    engine = engine_for(tiny_model(dtype=dtype, **changes), matmul="cpu", numerics="batch_invariant")
    together = engine.generate(requests())
    for request, output in zip(requests(), together, strict=True):
        engine.reset()
        (alone,) = engine.generate([request])
        assert alone.completions[0].token_ids == output.completions[0].token_ids
        assert np.asarray(alone.completions[0].logprobs).tobytes() == output.completions[0].logprobs.tobytes()


@needs_cpu
@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, EXPERTS, TIED], ids=["dense", "experts", "tied"])
def test_the_kernels_for_cpus_are_near_xla(changes):
    by_xla, by_kernels = (
        engine_for(tiny_model(**changes), matmul=matmul, cpu_isa=isa).generate(requests())
        for matmul, isa in (("xla", "auto"), ("cpu", "avx2"))
    )
    for one, other in zip(by_xla, by_kernels, strict=True):
        assert one.completions[0].token_ids == other.completions[0].token_ids
        np.testing.assert_allclose(one.completions[0].logprobs, other.completions[0].logprobs, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, TIED], ids=["dense", "tied"])
def test_a_checkpoint_is_quantized_as_a_model_in_memory_and_takes_half_of_the_memory(changes, tmp_path):
    model = tiny_model(dtype="bfloat16", hidden_size=64, intermediate_size=192, vocab_size=128, **changes)
    save_model(model, tmp_path)
    engines = [engine_for(given) for given in (model, open_model(resolve_source(tmp_path)))]
    assert answers(engines[0]) == answers(engines[1])
    for engine in engines:
        stored = engine.runner.model.stacks, engine.runner.model.head
        wide = [leaf for leaf in jax.tree.leaves(stored) if leaf.size >= 64 * 64]
        assert wide and all(leaf.dtype == jnp.int8 for leaf in wide)
        codes = sum(leaf.size for leaf in wide)
        plain = engine_for(model, weight_dtype=None).stats()["weights_bytes"]
        saved = plain - engine.stats()["weights_bytes"]
        scales = sum(leaf.size for leaf in jax.tree.leaves(stored) if leaf.dtype == jnp.float32)
        assert saved == codes - 4 * scales > 0.9 * codes
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(model))  # the caller's


@pytest.mark.slow
def test_weights_that_are_swapped_in_are_quantized(tmp_path):
    first, second = tiny_model(), tiny_model(seed=1)
    engine = engine_for(first)
    before = answers(engine)
    for given in (second, str(tmp_path)):
        save_model(second, tmp_path)
        engine.swap_weights(given)
        assert answers(engine) == answers(engine_for(second))
        engine.swap_weights(first)
        assert answers(engine) == before
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(engine.runner.model.stacks)} == {"int8", "float32"}


def test_a_second_swap_compiles_nothing():
    models = [tiny_model(seed=seed) for seed in range(3)]
    engine = engine_for(models[0], matmul="xla")
    engine.swap_weights(models[1])
    compiled: list[str] = []

    def note(event: str, duration: float, **_) -> None:
        if "backend_compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    jax.jit(lambda x: x + 2)(jnp.ones(3, jnp.float32))
    assert compiled  # it is noted
    compiled.clear()
    engine.swap_weights(models[2])
    assert not compiled


def test_an_engine_of_a_quantized_model_says_so():
    first = engine_for(tiny_model(), matmul="xla")
    second = engine_for(first.model, matmul="xla", weight_dtype=None)
    assert first.describe()["weight_dtype"] == second.describe()["weight_dtype"] == "int8"
    assert answers(first) == answers(second)
    assert engine_for(tiny_model(), weight_dtype=None).describe()["weight_dtype"] == "float32"


@pytest.mark.parametrize("matmul", ["xla", "auto"])
def test_a_quantized_model_is_not_saved(matmul, tmp_path):
    engine = engine_for(tiny_model(), matmul=matmul)
    with pytest.raises(ValueError, match="save the model as it was loaded"):
        save_model(engine.model, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_inside_jit_generate_gives_the_tokens_of_an_engine():
    asked = requests()
    prompts = np.zeros((len(asked), 20), np.int32)
    lens = np.asarray([len(request.prompt_token_ids) for request in asked], np.int32)
    for row, request in zip(prompts, asked, strict=True):
        row[: len(request.prompt_token_ids)] = request.prompt_token_ids
    config = EngineConfig(max_seqs=4, page_size=4, max_step_tokens=16, weight_dtype="int8", matmul="xla")
    sampling = SamplingParams(max_tokens=12, temperature=0.0)
    found = jax.jit(functools.partial(generate, sampling=sampling, config=config))(tiny_model(), prompts, lens)
    expected = [tokens for tokens, _ in answers(engine_for(tiny_model(), matmul="xla"))]
    assert found.token_ids[:, 0].tolist() == expected


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["model2", "model4", "data2_model2", "model8"])
def test_on_a_mesh_they_give_the_tokens_of_one_device(mesh):
    cases = [f"{kind}_{mesh}" for kind in ("int8", "int8loaded", "ringint8")]
    one, *many = runs("int8_one", *cases).values()
    for found in many:
        assert found["tokens"] == one["tokens"]
        for ours, theirs in zip(found["logprobs"], one["logprobs"], strict=True):
            np.testing.assert_allclose(ours, theirs, atol=MOST_LOGPROB_DIFFERENCE)
        assert found["weight_dtypes"] == ["float32", "int8"]


@pytest.mark.slow
def test_a_tied_head_on_a_mesh_gives_the_tokens_of_one_device():
    one, *many = runs(*(f"int8tied_{mesh}" for mesh in ("one", "model2", "data2_model2", "model8"))).values()
    for found in many:
        assert found["tokens"] == one["tokens"]
        for ours, theirs in zip(found["logprobs"], one["logprobs"], strict=True):
            np.testing.assert_allclose(ours, theirs, atol=MOST_LOGPROB_DIFFERENCE)


@pytest.mark.slow
def test_experts_on_a_mesh_give_the_tokens_of_one_device():
    one, *many = runs(*(f"int8experts_{mesh}" for mesh in ("one", "expert4", "model2_expert2"))).values()
    for found in many:
        assert found["tokens"] == one["tokens"]


def test_a_model_that_cannot_quantize_is_refused_by_name():
    with pytest.raises(ValueError, match='weight_dtype="int8": CountingModel.prepare takes no'):
        BackendChoice.choose(EngineConfig(weight_dtype="int8"), CountingModel.init(), has_mods=False)


@pytest.mark.parametrize("value", ["int4", "bfloat16", 8, True])
def test_other_dtypes_are_refused(value):
    with pytest.raises(ValueError, match="engine.weight_dtype=.*: expected int8"):
        EngineConfig(weight_dtype=value)
