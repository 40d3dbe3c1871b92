"""The engine as it runs on a GPU: what it chooses, its round program lowered, and its tokens in Pallas' interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from levanter_infer import EngineConfig, InferenceEngine, Request, SamplingParams
from levanter_infer.axes import POSITION
from levanter_infer.decode.programs import ProgramOptions, Programs
from levanter_infer.engine.backend_choice import BackendChoice
from levanter_infer.engine.runner import empty_admission, shapes_for
from levanter_infer.engine.sizes import resolve_shapes
from levanter_infer.layers.attention import AttentionSpec
from levanter_infer.layers.layout import Layout, one_device_mesh
from tests.tiny_models import tiny_model

ROOT = Path(__file__).resolve().parents[2]
CONFIG = EngineConfig(max_seqs=4, max_seq_len=64, max_step_tokens=16)


def gpu(capability: str = "9.0"):
    """A GPU of the given compute capability, as far as `BackendChoice` looks at it."""
    return SimpleNamespace(platform="gpu", compute_capability=capability)


def chosen(device, dtype="bfloat16", **config):
    model, mesh = tiny_model(dtype=dtype), one_device_mesh()
    backend = BackendChoice.choose(EngineConfig(**config), model, has_mods=True, mesh=mesh, device=device)
    return backend.attention, backend.matmul


def test_auto_takes_the_kernels_for_gpus_where_they_can_do_the_work():
    assert chosen(gpu()) == ("gpu", "gpu")
    assert chosen(gpu(), "float32") == ("gpu", "xla")
    assert chosen(gpu(), attention="xla", matmul="xla") == ("xla", "xla")
    for old in ("7.5", "gfx942"):
        assert chosen(gpu(old)) == ("xla", "xla")
        with pytest.raises(ValueError, match=f'attention="gpu" is not possible: the device is {old}'):
            chosen(gpu(old), attention="gpu")


def test_the_kernels_suit_the_devices_of_the_mesh(monkeypatch):
    """And not the first device of the process, which may be a GPU beside a mesh of CPU devices."""
    monkeypatch.setattr(jax, "devices", lambda: [gpu()])
    backend = BackendChoice.choose(CONFIG, tiny_model(), has_mods=False, mesh=one_device_mesh(jax.local_devices()[0]))
    assert backend.platform.name == jax.default_backend()


def test_a_jax_without_triton_imports_and_a_gpu_gets_xla(monkeypatch):
    hidden = "import sys; sys.modules['jax.experimental.pallas.triton'] = None; "
    code = hidden + "from levanter_infer.kernels.gpu import backend; assert backend.plt is None"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    monkeypatch.setattr("levanter_infer.kernels.gpu.backend.plt", None)
    assert chosen(gpu()) == ("xla", "xla")
    with pytest.raises(ValueError, match='attention="gpu" is not possible: jax .* has no Triton backend'):
        chosen(gpu(), attention="gpu")


def test_a_gpu_stores_floats_and_samples_all_rows_at_once():
    backend = BackendChoice.choose(CONFIG, tiny_model(), has_mods=False, mesh=one_device_mesh(), device=gpu())
    assert not backend.platform.integers_for_floats
    assert backend.adapt(resolve_shapes(CONFIG, tiny_model(), 1)).sampled_rows is None


@pytest.mark.parametrize("capability, bytes_", [("9.0", 227 << 10), ("8.6", 99 << 10)])
def test_the_shared_memory_is_that_of_the_device(capability, bytes_):
    config = EngineConfig(numerics="batch_invariant")
    model, device = tiny_model(dtype="bfloat16"), gpu(capability)
    backend = BackendChoice.choose(config, model, has_mods=False, mesh=one_device_mesh(), device=device)
    assert (backend.matmul_backend.shared_memory, backend.matmul_backend.is_apart) == (bytes_, True)


def test_steps_of_a_gpu_are_large_and_have_a_bucket_for_short_prompts():
    def shapes(**config):
        config, model = EngineConfig(**config), tiny_model(dtype="bfloat16")
        backend = BackendChoice.choose(config, model, has_mods=False, mesh=one_device_mesh(), device=gpu())
        return shapes_for(config, model, backend, num_eos=1, is_loaded=True)

    assert shapes(max_seq_len=100).buckets == (8, 64, 256, 2048)
    assert shapes(max_seqs=2, max_seq_len=50).max_step_tokens == 256
    assert shapes(max_seq_len=100, max_step_tokens=100).buckets == (8, 64, 100)
    assert shapes(max_seqs=512, max_seq_len=100).buckets == (8, 512, 2048)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="of other platforms")
@pytest.mark.parametrize("key", ["attention", "matmul"])
def test_other_platforms_refuse_it(key):
    with pytest.raises(
        ValueError, match=f'engine.{key}="gpu" is not possible: this engine runs on {jax.default_backend()}'
    ):
        chosen(None, **{key: "gpu"})


@pytest.mark.skipif(
    jax.default_backend() != "gpu" and jax.__version_info__ >= (0, 11),
    reason="jax 0.11 lowers Triton for the device of a mesh, here a CPU",
)
def test_the_round_program_is_lowered_for_a_gpu():
    model = tiny_model(dtype="bfloat16")
    backend = BackendChoice.of("gpu", Layout.of(None, model.config), matmul="gpu", attention="gpu")
    model = backend.prepare(model)
    shapes = backend.adapt(resolve_shapes(CONFIG, model, 1))
    programs = Programs(model, shapes, ProgramOptions(AttentionSpec(), jnp.bfloat16, backend.attention_backend))
    traced = programs.trace_round(model, jax.eval_shape(programs.init), empty_admission(shapes))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    # In each bucket attention, in one lane, the rotation, two norms, and four matmuls: q, k, v; output; gate, up, which
    # compute the gate too; down. And once the statistics of the logits, and of changed ones, by two kernels each, and
    # the changes of logits by three, and copies of pages by one.
    assert text.count("__gpu$xla.gpu.triton") == len(shapes.buckets) * (1 + 1 + 2 + 4) + 2 * 2 + 3 + 1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_log_probabilities_are_those_of_the_plain_forward(monkeypatch, dtype):
    """In float32 to 1e-5, with XLA's matmuls; in bfloat16 about as near to them as the plain forward comes."""
    model = tiny_model(dtype=dtype, num_hidden_layers=1)
    exact_model = jax.tree.map(lambda a: a.astype(jnp.float32) if eqx.is_inexact_array(a) else a, model)
    kernels = "gpu" if jax.default_backend() == "gpu" else "gpu_interpret"
    matmul = "xla" if dtype == "float32" else kernels
    backend = BackendChoice.of("gpu", Layout.of(None, model.config), matmul=matmul, attention=kernels)
    monkeypatch.setattr(BackendChoice, "choose", lambda *_, **__: backend)
    sampling = SamplingParams(max_tokens=5, temperature=0, logprobs=0)
    prompts = [np.random.default_rng(length).integers(2, 60, length).tolist() for length in range(2, 14)]
    errors, of_plain = [], []
    with jax.default_matmul_precision("highest"):
        engine = InferenceEngine(model, config=EngineConfig(max_seqs=4, max_seq_len=32, max_step_tokens=4))
        outputs = engine.generate([Request(prompt_token_ids=ids, sampling=sampling) for ids in prompts])
        for prompt, output in zip(prompts, outputs, strict=True):
            chosen = output.completions[0]
            tokens = np.zeros(20, np.int32)
            tokens[: len(prompt) + 5] = prompt + chosen.token_ids
            place = np.arange(len(prompt) - 1, len(prompt) + 4), np.asarray(chosen.token_ids)
            plain, exact = (
                np.asarray(jax.nn.log_softmax(each(hax.named(jnp.asarray(tokens), (POSITION,))).array))[place]
                for each in (model, exact_model)
            )
            errors.extend(chosen.logprobs - exact)
            of_plain.extend(plain - exact)
    if dtype == "float32":
        np.testing.assert_allclose(errors, 0, atol=1e-5)
    else:
        for share in (0.5, 0.9):
            assert np.quantile(np.abs(errors), share) < 2 * np.quantile(np.abs(of_plain), share)


def test_the_round_program_compiles_for_an_h200_without_copies_of_the_pool():
    pytest.importorskip("jax_plugins.xla_cuda12", reason="needs jax-cuda12-plugin, see tests/gpu_compile.py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.gpu_compile"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["copies"] == []
    assert report["temp_bytes"] < report["pool_bytes"] / 100
