"""Random ragged batches over a shuffled, poisoned pool, and their attention computed from contiguous K/V in numpy."""

import contextlib
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from levanter_infer.kernels import int8
from levanter_infer.kernels.backend import Backend
from levanter_infer.kernels.call import AttentionCall
from levanter_infer.kernels.registry import make_backend
from levanter_infer.kernels.rules import ScoreRules
from levanter_infer.kernels.tpu.pool import TpuPool

LAYERS, LAYER = 3, 1

RUNS_HERE = (
    ("reference", "xla", "gpu") if jax.default_backend() == "gpu" else ("reference", "xla", "cpu", "gpu_interpret")
)
"""Implementations of attention that run on this machine."""
CALLS_MODS = tuple(impl for impl in RUNS_HERE if impl != "cpu")
"""Implementations of them that support `score_mod` and `mask_mod`."""


def attention_call(
    q, kv_pages, *, layer, page_indices, seq_lens, cu_q_lens, num_seqs, backend: Backend, kv_dtype=None, kv_heads=None,
    sinks=None, value_dim=None, index_dim=0, chosen=None, **rules,
) -> AttentionCall:  # fmt: skip
    """The call for arrays by name; rules: the fields of `ScoreRules`."""
    return AttentionCall(
        q=q,
        kv_pages=kv_pages,
        layer=layer,
        page_indices=page_indices,
        seq_lens=seq_lens,
        cu_q_lens=cu_q_lens,
        num_seqs=num_seqs,
        rules=ScoreRules(**rules),
        kv_dtype=jnp.dtype(kv_pages.dtype if kv_dtype is None else kv_dtype),
        kv_heads=kv_pages.shape[-2] // (2 if value_dim is None else 1) if kv_heads is None else kv_heads,
        page_size=kv_pages.shape[backend.pool_order.index(2)],
        sinks=sinks,
        value_dim=value_dim,
        index_dim=index_dim,
        chosen=chosen,
    )


def attend(*, impl: str, isa=None, tiles=None, rows_apart=None, **arguments):
    """Attention by the backend named `impl`; arguments: as in `attention_call`."""
    options = dict(cpu_isa=isa, tiles=tiles, rows_apart=rows_apart)
    options = {name: value for name, value in options.items() if value is not None}
    backend = make_backend(impl).configured(**options)
    return backend.attend(attention_call(**arguments, backend=backend))


def lowering_for_gpu(kind: str = "NVIDIA H200"):
    """A context in which programs are lowered for a GPU that is not there: jax 0.11 asks which one it is."""
    if jax.default_backend() == "gpu" or jax.__version_info__ < (0, 11):
        return contextlib.nullcontext()
    device = jax.sharding.AbstractDevice(kind, None, "cuda")
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))


@dataclass(frozen=True)
class Sizes:
    """Static sizes of a batch."""

    q_heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    tokens: int = 48
    rows: int = 5
    max_pages: int = 12
    dtype: str = "float32"
    stored: str | None = None
    """Unsigned integer that holds the bits of `dtype`."""
    sinks: bool = False
    """Whether each query head has a random attention sink, near the scores: any test runs with them by this."""
    value_dim: int | None = None
    """Values are the first `value_dim` numbers of keys: a pool of latents. None: it stores keys and values."""


@dataclass(frozen=True)
class Ragged:
    """A batch: the arguments of the entry (`arrays`), and the same as one contiguous sequence per row."""

    sizes: Sizes
    arrays: dict
    q_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    queries: list[np.ndarray]
    """[q_len, q_heads, head_dim] per row."""
    keys: list[np.ndarray]
    """[seq_len, kv_heads, head_dim] per row."""
    values: list[np.ndarray]


def make_ragged(sizes: Sizes, rows: list[tuple[int, int]], seed: int = 0) -> Ragged:
    """A batch with (q_len, seq_len) per row.

    Everything that no row may read is NaN: other layers, free pages, offsets beyond a sequence's end, padding queries.
    """
    rng = np.random.default_rng(seed)
    q_lens, seq_lens = tuple(q for q, _ in rows), tuple(n for _, n in rows)
    assert sum(q_lens) <= sizes.tokens and len(rows) <= sizes.rows
    num_pages = sizes.rows * sizes.max_pages + 3
    is_int8, encode, decode = sizes.dtype == "int8", jax.jit(int8.encode), jax.jit(int8.decode)
    sides = 2 if sizes.value_dim is None else 1
    shape = LAYERS, num_pages, sizes.page_size, sides * sizes.kv_heads, sizes.head_dim + is_int8
    # int8 has no NaN: the largest integers and scales.
    pool = np.full(shape, 127 if is_int8 else np.nan, np.float32)
    page_indices = np.full((sizes.rows, sizes.max_pages), num_pages, np.int32)
    free = iter(rng.permutation(num_pages))

    def rounded(*shape, dtype=sizes.dtype):
        return rng.standard_normal(shape).astype(np.float32).astype(jnp.dtype(dtype)).astype(np.float32)

    def stored_and_read(*shape):
        """Random numbers as stored, in f32, and as read back."""
        if sizes.dtype != "int8":
            return 2 * (rounded(*shape),)
        integers, codes = encode(jnp.asarray(rng.standard_normal(shape), jnp.float32))
        return np.concatenate([integers, codes], axis=-1).astype(np.float32), np.asarray(decode(integers, codes))

    queries, keys, values = [], [], []
    for row, (q_len, seq_len) in enumerate(rows):
        queries.append(rounded(q_len, sizes.q_heads, sizes.head_dim, dtype="float32"))
        drawn = [stored_and_read(seq_len, sizes.kv_heads, sizes.head_dim) for _ in range(sides)]
        keys.append(drawn[0][1])
        values.append(drawn[-1][1][..., : sizes.value_dim])
        for page in range(-(-seq_len // sizes.page_size)):
            page_indices[row, page] = next(free)
        for position in range(seq_len):
            index = LAYER, page_indices[row, position // sizes.page_size], position % sizes.page_size
            for side in range(sides):
                pool[(*index, slice(side, None, sides))] = drawn[side][0][position]
    q = np.full((sizes.tokens, sizes.q_heads, sizes.head_dim), np.nan, np.float32)
    if rows:
        q[: sum(q_lens)] = np.concatenate(queries)
    padding = [0] * (sizes.rows - len(rows))
    stored = jnp.asarray(pool.astype(jnp.dtype(sizes.dtype)))
    arrays = dict(
        q=jnp.asarray(q),
        kv_pages=stored if sizes.stored is None else stored.view(sizes.stored),
        layer=jnp.int32(LAYER),
        page_indices=jnp.asarray(page_indices),
        seq_lens=jnp.asarray([*seq_lens, *padding], jnp.int32),
        cu_q_lens=jnp.asarray(np.cumsum([0, *q_lens, *padding]), jnp.int32),
        num_seqs=jnp.int32(len(rows)),
    )
    if sizes.sinks:
        arrays["sinks"] = jnp.asarray(3 * rng.standard_normal(sizes.q_heads), jnp.float32)
    return Ragged(sizes, arrays, q_lens, seq_lens, queries, keys, values)


def for_tpu(batch: Ragged, index_dim: int = 0) -> dict:
    """The batch's arrays with the pool in a TPU's layout. Args: index_dim: the last of `head_dim`, of an index key."""
    sizes, pool = batch.sizes, batch.arrays["kv_pages"]
    head_dim = sizes.head_dim - index_dim
    layout = TpuPool(sizes.kv_heads, head_dim, sizes.dtype == "int8", sizes.value_dim, index_dim)

    @jax.jit
    def packed(pool):
        tokens = pool.reshape(-1, sizes.kv_heads, layout.sides, pool.shape[-1])
        packed = layout.pack_stored(*(tokens[:, :, side] for side in range(layout.sides)))
        return packed.reshape(*pool.shape[:3], layout.slabs, 128).swapaxes(2, 3)

    return {**batch.arrays, "kv_pages": packed(pool), "kv_heads": sizes.kv_heads}


def random_rows(sizes: Sizes, kind: str, seed: int) -> list[tuple[int, int]]:
    """(q_len, seq_len) per row: `decode`, `prompts`, `chunks` (prompts with history) or `mixed`."""
    rng = np.random.default_rng(seed)
    longest, budget, rows = sizes.max_pages * sizes.page_size, sizes.tokens, []
    for row in range(int(rng.integers(1, sizes.rows + 1))):
        wide = kind != "decode" and (kind != "mixed" or row % 2 == 1)
        left = budget - (sizes.rows - row - 1)
        q_len = int(rng.integers(1, max(1, min(left, longest)) + 1)) if wide else 1
        history = 0 if kind == "prompts" else int(rng.integers(0, longest - q_len + 1))
        budget -= q_len
        rows.append((q_len, q_len + history))
    return rows


def dense_attention(
    batch: Ragged,
    *,
    scale: float,
    sliding_window: int | None = None,
    attention_chunk: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
    score_mod=None,
    mask_mod=None,
    chosen: np.ndarray | None = None,
) -> np.ndarray:
    """The oracle: attention in f64, one row, query and head at a time.

    Args:
        sinks: None for the batch's own, if it has some.
        chosen: positions [token, n] that each token sees, and others that no sequence has; None: all.
    """
    sizes = batch.sizes
    if sizes.sinks and sinks is None:
        sinks = np.asarray(batch.arrays["sinks"], np.float64)
    out = np.zeros((sizes.tokens, sizes.q_heads, sizes.value_dim or sizes.head_dim))
    token = 0
    for q, k, v, q_len, seq_len in zip(
        batch.queries, batch.keys, batch.values, batch.q_lens, batch.seq_lens, strict=True
    ):
        for i in range(q_len):
            for head in range(sizes.q_heads):
                kv_head = head // (sizes.q_heads // sizes.kv_heads)
                q_pos = seq_len - q_len + i
                first = 0 if sliding_window is None else max(0, q_pos - sliding_window + 1)
                if attention_chunk is not None:
                    first = max(first, q_pos // attention_chunk * attention_chunk)
                kv_pos = np.arange(first, q_pos + 1)
                if mask_mod is not None:
                    kv_pos = kv_pos[np.asarray(mask_mod(q_pos, kv_pos, head), bool)]
                if chosen is not None:
                    kv_pos = np.intersect1d(kv_pos, chosen[token + i])
                if kv_pos.size == 0:
                    continue
                scores = k[kv_pos, kv_head].astype(np.float64) @ q[i, head] * scale
                if soft_cap is not None:
                    scores = soft_cap * np.tanh(scores / soft_cap)
                if alibi_slopes is not None:
                    scores = scores + alibi_slopes[head] * (kv_pos - q_pos)
                if score_mod is not None:
                    scores = np.asarray(score_mod(scores, q_pos, kv_pos, head))
                logits = scores if sinks is None else np.append(scores, sinks[head])
                weights = np.exp(scores - logits.max()) / np.exp(logits - logits.max()).sum()
                out[token + i, head] = weights @ v[kv_pos, kv_head]
        token += q_len
    return out


def bits(array) -> np.ndarray:
    """For comparisons that tell 0.0 from -0.0 and hold NaN equal to itself."""
    return np.asarray(jax.lax.bitcast_convert_type(array, jnp.uint32))
