"""Sizes that follow from a configuration, and how much memory sequences take."""

import dataclasses

import jax
import pytest

from levanter_infer.checkpoints.load import open_model
from levanter_infer.checkpoints.save import save_model
from levanter_infer.checkpoints.source import resolve_source
from levanter_infer.decode.programs import Programs
from levanter_infer.engine import sizes as engine_sizes
from levanter_infer.engine.backend_choice import BackendChoice
from levanter_infer.engine.config import EngineConfig
from levanter_infer.engine.engine import InferenceEngine
from levanter_infer.engine.params import SamplingParams
from levanter_infer.engine.request import Request
from levanter_infer.engine.sizes import resolve_shapes
from levanter_infer.kernels.cpu import bindings as cpu
from levanter_infer.runtime import memory
from tests.tiny_models import tiny_model

built = pytest.mark.skipif(not cpu.available(), reason="the C++ kernels were not built")
TOKEN_BYTES = 2 * 2 * 2 * 8 * 4  # layers, K and V, kv heads, head size, f32


def test_the_pool_holds_everybody_if_memory_allows(monkeypatch):
    monkeypatch.setattr(engine_sizes, "default_pool_bytes", lambda *_: 1 << 40)
    shapes = resolve_shapes(EngineConfig(max_seqs=8, max_seq_len=100, page_size=16), tiny_model(), 1)
    assert shapes.num_pages == 8 * 7


def test_the_pool_is_bounded_by_free_memory(monkeypatch):
    monkeypatch.setattr(engine_sizes, "default_pool_bytes", lambda *_: 10 * 16 * TOKEN_BYTES + 1)
    shapes = resolve_shapes(EngineConfig(max_seqs=8, max_seq_len=100, page_size=16), tiny_model(), 1)
    assert shapes.num_pages == 10


def test_narrow_pages_cost_half(monkeypatch):
    monkeypatch.setattr(engine_sizes, "default_pool_bytes", lambda *_: 10 * 16 * TOKEN_BYTES)
    config = EngineConfig(max_seqs=8, max_seq_len=100, page_size=16, kv_dtype="bfloat16")
    assert resolve_shapes(config, tiny_model(), 1).num_pages == 20
    # A token of the tiny model has 64 numbers in 8 heads; integers of 8 bits come with the code of each head's scale.
    config = dataclasses.replace(config, kv_dtype="int8")
    assert resolve_shapes(config, tiny_model(), 1).num_pages == 10 * TOKEN_BYTES // (2 * 4 * (8 + 1))


def test_weights_that_are_not_loaded_yet_count_with_their_bytes():
    model = tiny_model()
    backend = BackendChoice.choose(EngineConfig(), model, has_mods=False)
    types = backend.prepared_types(jax.eval_shape(lambda: model))
    assert backend.device_bytes(types) == sum(leaf.nbytes for leaf in jax.tree.leaves(backend.prepare(model)))


def test_pages_decide_the_pool_and_sequence_length_only_the_tables():
    def bytes_of(**sizes):
        engine = InferenceEngine(tiny_model(), config=EngineConfig(max_seqs=2, page_size=4, **sizes))
        return engine.state.cache.pools[0].pages.array.nbytes, engine.state.decode.sequences.tokens.nbytes

    small, long, many = (
        bytes_of(max_pages=12, max_seq_len=32),
        bytes_of(max_pages=12, max_seq_len=512),
        bytes_of(max_pages=24, max_seq_len=32),
    )
    assert small[0] == long[0] == 12 * 4 * TOKEN_BYTES and many[0] == 2 * small[0]
    assert long[1] == 16 * small[1] and many[1] == small[1]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"max_seqs": 8, "max_step_tokens": 4}, "max_step_tokens=4"),
        ({"max_pages": 2**28, "page_size": 16}, "exceeds 2.31 tokens"),
        ({"page_size": 12}, "power of two"),
        ({"max_pages": 0}, "max_pages=0"),
        ({"kv_dtype": "int4"}, "kv_dtype='int4': expected one of float32, .*, int8, float8_e4m3fn"),
        ({"preempt": "swap"}, "expected recompute or offload"),
        ({"host_bytes": -1}, "host_bytes"),
        ({"attention": "flash"}, "attention"),
    ],
)
def test_sizes_that_make_no_sense_are_refused_by_name(sizes, message):
    with pytest.raises(ValueError, match=message):
        resolve_shapes(EngineConfig(**{"max_seq_len": 32, **sizes}), tiny_model(), 1)


def with_free_memory(monkeypatch, size: int) -> None:
    monkeypatch.setattr(memory, "_machine_bytes", lambda: size)
    monkeypatch.setattr(memory, "_bytes_by_name", lambda _: {})  # no swap space


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="an accelerator has memory of its own")
@pytest.mark.parametrize("matmul", ["xla", pytest.param("cpu", marks=built)])
def test_an_engine_for_which_there_is_no_memory_is_refused_before_anything_is_compiled(monkeypatch, matmul):
    """Tables and pages count, and weights that the C++ kernels copy."""
    config = EngineConfig(max_seqs=2, max_seq_len=32, page_size=4, max_pages=100, matmul=matmul, attention=matmul)
    engine = InferenceEngine(tiny_model(), config=config)
    copies = {id(leaf): leaf.nbytes for leaf in jax.tree.leaves(engine.model)}
    for leaf in jax.tree.leaves(tiny_model()):
        copies.pop(id(leaf), None)
    copied = sum(copies.values())
    needed = sum(leaf.nbytes for leaf in jax.tree.leaves(engine.state)) + copied
    assert needed > 100 * 4 * TOKEN_BYTES and (copied > 0) == (matmul == "cpu")
    with_free_memory(monkeypatch, needed)
    InferenceEngine(tiny_model(), config=config)
    with_free_memory(monkeypatch, needed - 1)
    monkeypatch.setattr(Programs, "compile_all", lambda *_: pytest.fail("compiled"))
    with pytest.raises(ValueError, match=r"the engine does not fit into memory: .* lower engine\.max_pages \(100\), "):
        InferenceEngine(tiny_model(), config=config)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="an accelerator has memory of its own")
def test_weights_for_which_there_is_no_memory_are_not_read(tmp_path, monkeypatch):
    save_model(tiny_model(), tmp_path)
    model = open_model(resolve_source(tmp_path))
    config = EngineConfig(max_seqs=2, max_seq_len=32, page_size=4, max_pages=100, matmul="xla", attention="xla")
    state = sum(leaf.nbytes for leaf in jax.tree.leaves(InferenceEngine(tiny_model(), config=config).state))
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(tiny_model()))
    with_free_memory(monkeypatch, state + weights - 1)
    with pytest.raises(ValueError, match=rf"weights {weights / 2**20:.1f} MiB"):
        InferenceEngine(model, config=config)


def test_a_round_ends_at_the_step_limit_and_the_next_goes_on():
    config = EngineConfig(max_seqs=2, max_seq_len=32, page_size=4, max_round_steps=3)
    engine = InferenceEngine(tiny_model(), config=config)
    group = engine.submit(Request(prompt_token_ids=[1, 2], sampling=SamplingParams(max_tokens=11, temperature=0.0)))
    known = []
    while not group.is_done:
        engine.step_round()
        known.append(engine.stats()["steps"])
    assert all(after - before <= 3 for before, after in zip([0, *known], known, strict=False))
    assert known[-1] == 11 and len(group.sequences[0].token_ids) == 11
    engine.drain()


@pytest.mark.slow
def test_mixed_lengths_waste_less_than_a_page_each():
    lengths, generated, size = (3, 50, 17, 30, 9), 6, 4
    config = EngineConfig(max_seqs=5, max_seq_len=64, page_size=size, max_step_tokens=128)
    engine = InferenceEngine(tiny_model(), config=config)
    sampling = SamplingParams(max_tokens=generated, temperature=0.0)
    prompts = [[i] * length for i, length in enumerate(lengths)]  # nothing to share
    engine.generate([Request(prompt_token_ids=prompt, sampling=sampling) for prompt in prompts])
    stored = [length + generated - 1 for length in lengths]  # the last token is never computed
    assert engine.stats()["pages_peak"] == sum(-(-count // size) for count in stored)
    assert engine.stats()["pages_peak"] * size - sum(stored) < len(lengths) * size


@pytest.mark.slow
def test_memory_of_samples_does_not_grow_with_samples_times_history():
    history, generated, n, size = 48, 5, 8, 4
    config = EngineConfig(max_seqs=n, max_seq_len=64, page_size=size, max_step_tokens=128)
    engine = InferenceEngine(tiny_model(), config=config)
    sampling = SamplingParams(max_tokens=generated, temperature=1.0, n=n, seed=3)
    engine.generate([Request(prompt_token_ids=[1] * history, sampling=sampling)])
    shared, own = history // size, 1 + -(-generated // size)
    assert engine.stats()["pages_peak"] <= shared + n * own
    assert engine.stats()["pages_peak"] < n * history // size // 2
