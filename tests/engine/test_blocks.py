"""`numerics: batch_invariant` as on a TPU, on a CPU: the forward in blocks of one size, attention by one path."""

import collections
from types import SimpleNamespace

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis, NamedArray
from scripts.tpu.float_code import float_code

from levanter_infer.axes import ROW, ROW_BOUND, SEQ_PAGE, TOKEN
from levanter_infer.cache.batch_info import PageBatchInfo
from levanter_infer.decode.blocks import forward_in_blocks
from levanter_infer.decode.invariants import check_invariants
from levanter_infer.decode.scoring import keep_hidden
from levanter_infer.engine.backend_choice import BackendChoice
from levanter_infer.engine.config import EngineConfig
from levanter_infer.engine.sizes import resolve_shapes
from levanter_infer.kernels import scopes
from levanter_infer.kernels.tpu.sizes import Tile
from levanter_infer.kernels.tpu.tiling import Tiles
from levanter_infer.layers.layout import one_device_mesh
from levanter_infer.models.decoder import DecoderModel
from levanter_infer.models.registry import FAMILIES
from tests.engine.comparisons import Blocks, expected, make_engine, random_requests, serve
from tests.engine.test_batch_invariant import MIXTURES
from tests.family_cases import case_of, load, load_config
from tests.golden_cases import load_case
from tests.tiny_models import tiny_model

CONFIGS = (
    dict(max_seqs=8, page_size=4, max_step_tokens=16, max_pages=24),
    dict(max_seqs=24, page_size=16, max_step_tokens=48, max_pages=9),
)
"""Steps of one block in a pool that is too small, and of several, in which rows begin and end anywhere."""


def differing(model, blocks: Blocks, count: int, configs=CONFIGS) -> tuple[int, collections.Counter]:
    """Requests whose bits are not those of the request alone, of `count` in two orders; and what has happened."""
    cases = random_requests(count, seed=5)
    alone = make_engine(model=model, blocks=blocks, max_seqs=4, page_size=8, max_step_tokens=128, prefix_cache=False)
    plain = [expected(alone, case, None) for case in cases]
    done: collections.Counter[str] = collections.Counter()
    wrong = 0
    for config in configs:
        engine = make_engine(model=model, blocks=blocks, **{"prefix_cache": None, **config})
        for order in (range(count), np.random.default_rng(0).permutation(count)):
            served = serve(engine, [cases[i] for i in order])
            wrong += sum(found != plain[i] for i, (found, _) in zip(order, served, strict=True))
        check_invariants(engine.state.decode)
        done.update({name: engine.stats()[name] for name in ("preemptions", "prefix_hits", "forks")})
    return wrong, done


@pytest.mark.slow
def test_bits_are_those_of_the_request_alone():
    """In a batch, in another order, in chunks of other sizes, preempted, cached and cold."""
    wrong, done = differing(tiny_model(dtype="bfloat16"), Blocks(), 16)
    assert wrong == 0
    assert all(done[name] > 0 for name in ("preemptions", "prefix_hits", "forks"))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(MIXTURES))
def test_bits_of_experts_are_those_of_the_request_alone(model_type):
    model = tiny_model(dtype="bfloat16", model_type=model_type, **MIXTURES[model_type])
    assert differing(model, Blocks(), 16)[0] == 0


@pytest.mark.slow
def test_bits_of_the_kernel_for_tpus_are_those_of_the_request_alone():
    """In Pallas' interpreter: decode tokens are chunks of one token."""
    tiles = Tiles(Tile(32, 2, 1), Tile(32, 2, 1, 8))
    blocks = Blocks(matmul="tpu_interpret", attention="tpu_interpret", tiles=tiles)
    config = dict(max_seqs=8, page_size=8, max_step_tokens=32, max_pages=14)
    assert differing(tiny_model(dtype="bfloat16", num_hidden_layers=1), blocks, 4, (config,))[0] == 0


@pytest.mark.slow
def test_bits_of_the_kernels_for_gpus_are_those_of_the_request_alone():
    blocks = Blocks("gpu", matmul="gpu_interpret", attention="gpu_interpret")
    config = dict(max_seqs=8, page_size=8, max_step_tokens=32, max_pages=14)
    assert differing(tiny_model(dtype="bfloat16", num_hidden_layers=1), blocks, 4, (config,))[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_bits_of_a_family_are_those_of_the_request_alone(model_type, tmp_path):
    model = load(load_case(case_of(model_type)), tmp_path)
    assert differing(model, Blocks(), 8, CONFIGS[:1])[0] == 0


def loop_of_blocks(max_step_tokens: int) -> collections.Counter[str]:
    """Float instructions in the loop over blocks of steps of so many tokens, where a layer without a state, as the
    first, is followed by one with a state."""
    shapes = chosen("tpu", max_step_tokens=max_step_tokens)[1]
    (tokens,), (block,), rows, width = shapes.buckets, shapes.forward_tokens, shapes.max_rows, 8

    def zeros(axis: str, size: int) -> NamedArray:
        return NamedArray(jnp.zeros(size, jnp.int32), (Axis(axis, size),))

    def forward(whole: PageBatchInfo, table, weights, memory):
        def compute(batch, memory, routes):
            states = jnp.tanh(table[batch.tokens.array] @ weights)
            memory = memory + jnp.sum(states @ memory, axis=0, keepdims=True)
            return memory, routes, keep_hidden(states @ memory, batch.cu_q_lens.array, shapes)

        return forward_in_blocks(compute, whole, (memory, None, jnp.zeros((rows, width))), shapes)

    whole = PageBatchInfo(
        tokens=zeros(TOKEN, tokens),
        positions=zeros(TOKEN, tokens),
        slot_ids=zeros(ROW, rows),
        cu_q_lens=zeros(ROW_BOUND, rows + 1),
        seq_lens=zeros(ROW, rows),
        page_indices=hax.named(jnp.zeros((rows, 1), jnp.int32), (ROW, SEQ_PAGE)),
        num_seqs=hax.named(jnp.int32(0), ()),
        new_token_dests=zeros(TOKEN, tokens),
        page_size=shapes.page_size,
    )
    square = jnp.ones((width, width))
    hlo = jax.jit(forward).lower(whole, square, square, square).compile().as_text()
    assert hlo is not None
    return float_code(hlo, scopes.forward(block))


def test_steps_of_one_block_and_of_several_have_the_same_code(optimized):
    """XLA moves out of a loop what does not change in it, and compiles it otherwise there."""
    code = loop_of_blocks(max_step_tokens=256)
    assert sum(each.startswith("dot") or "fusion" in each for each in code) > 2
    assert code == loop_of_blocks(max_step_tokens=512)


def chosen(platform: str, model=None, **config):
    device = SimpleNamespace(platform=platform, device_kind="TPU v5 lite", compute_capability="9.0")
    sizes = dict(max_seqs=4, max_seq_len=64, max_step_tokens=16)
    engine = EngineConfig(numerics="batch_invariant", **{**sizes, **config})
    model = model or tiny_model(dtype="bfloat16")
    backend = BackendChoice.choose(engine, model, has_mods=False, mesh=one_device_mesh(), device=device)
    return backend, backend.adapt(resolve_shapes(engine, model, 1))


def test_a_tpu_computes_every_step_in_blocks_of_one_size():
    backend, shapes = chosen("tpu")
    assert backend.matmul_backend.rows_apart and backend.attention_backend.rows_apart
    assert backend.layout.sums_in_order
    assert shapes.block_tokens == 256 and shapes.buckets == (256,) and shapes.forward_tokens == (256,)


@pytest.mark.parametrize("attention", ["xla", "reference"])
def test_a_tpu_refuses_attention_with_other_shapes_for_chunks(attention):
    with pytest.raises(
        ValueError, match=f"not possible with .*attention={attention} on tpu: it computes decode tokens"
    ):
        chosen("tpu", attention=attention)


def test_a_gpu_takes_the_kernels_for_all_matmuls():
    backend, shapes = chosen("gpu")
    assert (backend.matmul, backend.attention, shapes.block_tokens) == ("gpu", "gpu", 256)
    assert backend.compiler_options["xla_gpu_deterministic_ops"] is True
    for config in ({"matmul": "xla"}, {"attention": "xla"}):
        with pytest.raises(ValueError, match="batch_invariant.* not possible with .*=xla.* on gpu: its libraries"):
            chosen("gpu", **config)


def test_a_gpu_refuses_models_with_matmuls_of_its_libraries():
    with pytest.raises(ValueError, match="not possible for minicpm3 on a GPU: XLA computes dot_general .layers/latent"):
        chosen("gpu", model=DecoderModel.types(load_config(case_of("minicpm3")), jnp.dtype("bfloat16")))
