"""`generate` inside other people's programs: what it compiles, what it refuses, and whose parameters it uses."""

import os
import subprocess
import sys
from pathlib import Path

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from levanter_infer import EngineConfig, SamplingParams, generate
from levanter_infer.layers.layout import Layout
from tests.golden_cases import load_case, make_weights
from tests.live_models import live_model
from tests.tiny_models import tiny_model

ROOT = Path(__file__).resolve().parents[2]
CONFIG = EngineConfig(max_seqs=2, page_size=4, max_step_tokens=8)
SAMPLING = SamplingParams(max_tokens=6, temperature=0.0)


def params_and_case():
    """Live parameters, as a training step has them, and what HF gives with them."""
    case = load_case("llama3")
    return live_model(case.config, make_weights("llama3", case.config)), case


def test_one_program_samples_from_any_prompts_and_parameters_and_nothing_leaves_the_device():
    model, case = params_and_case()
    leaves, structure = jax.tree.flatten(model)

    @jax.jit
    def sample(leaves, prompts, lens, seeds):
        live = jax.tree.unflatten(structure, leaves)
        return generate(live, prompts, lens, SAMPLING, config=CONFIG, seeds=seeds)

    prompt = case.prompts[0]
    padded = np.zeros((2, 12), np.int32)
    padded[0, : len(prompt.tokens)] = prompt.tokens
    padded[1] = np.arange(12)
    seeds = jnp.zeros((2, 2), jnp.uint32)
    text = sample.lower(leaves, jnp.asarray(padded), jnp.asarray([8, 3], jnp.int32), seeds).as_text()
    assert "callback" not in text and "infeed" not in text and "outfeed" not in text
    changed = [leaf * 0.5 for leaf in leaves]
    calls = [
        (leaves, jnp.asarray(padded), jnp.asarray([len(prompt.tokens), 12], jnp.int32)),
        (leaves, jnp.asarray(padded[::-1]), jnp.asarray([1, len(prompt.tokens)], jnp.int32)),
        (changed, jnp.asarray(padded), jnp.asarray([5, 7], jnp.int32)),
    ]
    with jax.transfer_guard("disallow"):
        outputs = [sample(*call, seeds) for call in calls]
    assert sample._cache_size() == 1
    assert outputs[0].token_ids[0, 0].tolist() == prompt.greedy[:6].tolist() == outputs[1].token_ids[1, 0].tolist()
    assert outputs[2].token_ids.tolist() != outputs[0].token_ids.tolist()


def test_what_is_looked_for_in_a_program_is_there_where_a_host_is_called():
    text = jax.jit(lambda x: jax.debug.print("{}", x)).lower(1).as_text()
    assert "callback" in text


@pytest.mark.parametrize("wrap", [lambda function: function, jax.jit], ids=["plain", "jit inside"])
def test_vmap_is_refused(wrap):
    prompts, lens = np.zeros((3, 1, 4), np.int32), np.full((3, 1), 4, np.int32)
    model = tiny_model()
    sample = wrap(lambda prompts, lens: generate(model, prompts, lens, SAMPLING, config=CONFIG).token_ids)
    with pytest.raises(ValueError, match="generate under vmap .*give all prompts to one call"):
        jax.vmap(sample)(prompts, lens)


def test_an_ensemble_of_parameters_is_refused_too():
    models = jax.tree.map(lambda *leaves: jnp.stack(leaves), tiny_model(), tiny_model(1))
    with pytest.raises(ValueError, match="generate under vmap"):
        jax.vmap(lambda model: generate(model, np.zeros((1, 4), np.int32), np.full(1, 4), SAMPLING))(models)


def test_a_shard_map_that_checks_what_varies_is_told_not_to():
    mesh, data = Mesh(np.array(jax.devices()[:1]), ("data",)), PartitionSpec("data")

    def sample(prompts, lens):
        return generate(tiny_model(), prompts, lens, SAMPLING, config=CONFIG).token_ids

    with pytest.raises(ValueError, match="shard_map over data .*check_vma=False"):
        jax.shard_map(sample, mesh=mesh, in_specs=data, out_specs=data)(
            np.zeros((2, 4), np.int32), np.full(2, 4, np.int32)
        )


SHARDED = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from levanter_infer import EngineConfig, SamplingParams, generate
from tests.golden_cases import load_case, make_weights
from tests.live_models import live_model

case, rng = load_case("llama3"), np.random.default_rng(0)
leaves, structure = jax.tree.flatten(live_model(case.config, make_weights("llama3", case.config)))
vocab = case.config["vocab_size"]
sampling, config = SamplingParams(max_tokens=9, temperature=1.0), EngineConfig(max_seqs=2, page_size=4)
prompts, lens = rng.integers(0, vocab, (16, 12)).astype(np.int32), rng.integers(1, 13, 16).astype(np.int32)
seeds = rng.integers(0, 2**32, (16, 2), np.uint32)

def sample(leaves, prompts, lens, seeds):
    return generate(jax.tree.unflatten(structure, leaves), prompts, lens, sampling, config=config, seeds=seeds)

alone = jax.jit(sample)(leaves, prompts, lens, seeds)
for data, other in ((4, 1), (2, 2)):
    mesh = Mesh(np.array(jax.devices()).reshape(data, other), ("data", "other"))
    rows = P("data")
    sharded = jax.shard_map(
        sample, mesh=mesh, in_specs=(P(), rows, rows, rows), out_specs=rows, check_vma=False
    )
    # As a trainer has them: sharded over the mesh, and replicated inside of the call
    places = [P(*[None] * (leaf.ndim - 1), "data" if leaf.shape[-1] % 4 == 0 else None) for leaf in leaves]
    parts = [jax.device_put(leaf, NamedSharding(mesh, place)) for leaf, place in zip(leaves, places, strict=True)]
    apart = jax.jit(sharded)(parts, prompts, lens, seeds)
    assert (apart.token_ids == alone.token_ids).all() and (apart.num_tokens == 9).all()
    np.testing.assert_allclose(apart.logprobs, alone.logprobs, atol=1e-4)
print("equal")
"""


def test_parts_of_a_model_are_refused():
    model = tiny_model()
    part = eqx.tree_at(
        lambda m: m.layers.mlp.up_proj.weight.array, model, model.layers.mlp.up_proj.weight.array[:, :16]
    )
    prompts, lens = np.zeros((2, 4), np.int32), np.full(2, 4, np.int32)
    with pytest.raises(ValueError, match=r"up_proj.weight is \[2, 16, 32\] here .*in_specs of"):
        generate(part, prompts, lens, SAMPLING, config=CONFIG)
    parts = model.shard_as(Layout.of(jax.sharding.AbstractMesh((2,), ("model",)), model.config))
    with pytest.raises(ValueError, match="the model of an engine on a mesh"):
        jax.eval_shape(lambda: generate(parts, prompts, lens, SAMPLING, config=CONFIG))


@pytest.mark.parametrize("axis", ["embed", "mlp", "layer", "vocab"])
def test_parts_of_a_live_model_are_refused(axis):
    """As they are inside of a `shard_map` whose in_specs shard every parameter along this axis."""
    model, _ = params_and_case()

    def half(named):
        index = tuple(slice(a.size // 2) if a.name == axis else slice(None) for a in named.axes)
        return eqx.tree_at(lambda n: n.array, named, named.array[index])

    part = jax.tree.map(half, model, is_leaf=lambda leaf: isinstance(leaf, hax.NamedArray))
    prompts, lens = np.zeros((2, 4), np.int32), np.full(2, 4, np.int32)
    with pytest.raises(ValueError, match=r"a part of the model: .* here and .* as a whole; in a shard_map"):
        jax.eval_shape(lambda: generate(part, prompts, lens, SAMPLING, config=CONFIG))


@pytest.mark.slow
def test_under_shard_map_each_shard_of_the_callers_mesh_samples_its_own_prompts():
    flags = "--xla_force_host_platform_device_count=4"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SHARDED],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.split() == ["equal"], done.stderr[-2000:]
