"""Loss of precision and range by matmuls in float16 with float16 sums, as AVX512-FP16 has them.

    python scripts/half_precision.py            # random matmuls, and the tiny model of this repository

A fused multiplication and addition rounds once: it is computed here in float64 and then rounded to float16. `every`:
after so many inputs the float16 sum is added to a float32 one and begins anew; each time costs about four instructions
beside the multiplications (two conversions and two additions).
"""

import argparse

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np

from levanter_infer.axes import POSITION
from levanter_infer.checkpoints.load import load_model
from levanter_infer.kernels.xla import backend

EVERY = (16, 32, 64, 128, None)
"""Inputs in one float16 sum; None: all."""


def rounded(x: np.ndarray, dtype) -> np.ndarray:
    """`x` rounded to `dtype`, as float64."""
    with np.errstate(over="ignore"):
        return np.asarray(jnp.asarray(np.float32(x)).astype(dtype).astype(jnp.float32), np.float64)


def half_sums(x: np.ndarray, weight: np.ndarray, every: int | None) -> np.ndarray:
    """[rows, inputs] · [outputs, inputs]ᵀ of float16 numbers, with float16 sums."""
    x, weight = rounded(x, jnp.float16), rounded(weight, jnp.float16)
    total = np.zeros((len(x), len(weight)), np.float32)
    inputs = x.shape[1]
    for begin in range(0, inputs, every or inputs):
        half = np.zeros(total.shape, np.float16)
        for k in range(begin, min(begin + (every or inputs), inputs)):
            with np.errstate(over="ignore", invalid="ignore"):
                half = (half.astype(np.float64) + x[:, k, None] * weight[None, :, k]).astype(np.float16)
        total += half.astype(np.float32)
    return total


def scaled_half_sums(x: np.ndarray, weight: np.ndarray, every: int) -> np.ndarray:
    """The same of rows that are divided by the power of two next to their largest input, which rounds nothing."""
    largest = np.maximum(np.abs(x).max(axis=1, keepdims=True), np.finfo(np.float32).tiny)
    scale = 2.0 ** np.ceil(np.log2(np.float64(largest)))
    return (half_sums(x / scale, weight, every) * scale).astype(np.float32)


def pair_sums(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """The same of bfloat16 numbers, with float32 sums: `avx512_bf16`."""
    return wide_sums(rounded(x, jnp.bfloat16), rounded(weight, jnp.bfloat16))


def wide_sums(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """The same of float32 inputs and bfloat16 weights, with float32 sums: `avx512`."""
    return np.asarray(x, np.float32) @ np.asarray(weight, np.float32).T


WAYS = {
    "float32 inputs, float32 sums (avx512)": wide_sums,
    "bfloat16 inputs, float32 sums (avx512_bf16)": pair_sums,
    **{
        f"float16 inputs, float16 sums {'of all' if every is None else f'of {every}'}": (
            lambda x, weight, every=every: half_sums(x, weight, every)
        )
        for every in EVERY
    },
    "float16 inputs scaled row by row, float16 sums of 32": lambda x, weight: scaled_half_sums(x, weight, 32),
}


def of_random_matmuls(outlier: float) -> None:
    """Relative errors, root mean square, of matmuls of 4 normal rows with 64 rows of normal bfloat16 weights."""
    sizes = (576, 2048, 8192)
    print(f"| one input of {outlier:g} in each row |" + "".join(f" {size} inputs |" for size in sizes))
    for name, way in WAYS.items():
        cells = []
        for size in sizes:
            rng = np.random.default_rng(size)
            x, weight = (
                rng.standard_normal((4, size)),
                rounded(rng.standard_normal((64, size)) * size**-0.5, jnp.bfloat16),
            )
            x[:, 5] = outlier
            exact = np.float32(x).astype(np.float64) @ weight.T
            with np.errstate(invalid="ignore"):
                error = way(np.float32(x), weight).astype(np.float64) - exact
            cells.append(float(np.sqrt(np.mean(error**2) / np.mean(exact**2))))
        print(f"| {name} |" + "".join(f" {cell:.1e} |" for cell in cells))


def of_the_model(path: str) -> None:
    """Logits of the plain forward with every matmul computed in each way, against float32."""
    model, _ = load_model(path, dtype="float32")
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, 48).astype(np.int32)

    def logits(way) -> np.ndarray:
        def rounded_matmul(flat, matrix):
            shape = jax.ShapeDtypeStruct((flat.shape[0], matrix.shape[0]), jnp.float32)
            return jax.pure_callback(lambda x, w: way(np.asarray(x), np.asarray(w)), shape, flat, matrix)

        kept, backend.matmul = backend.matmul, rounded_matmul
        try:
            return np.asarray(model(hax.named(jnp.asarray(tokens), POSITION)).array, np.float64)
        finally:
            backend.matmul = kept

    exact = logits(lambda x, w: (x.astype(np.float64) @ w.astype(np.float64).T).astype(np.float32))
    print(f"\n| {path} | largest error of a logit, of their standard deviation | greedy tokens that differ, of 48 |")
    for name, way in WAYS.items():
        found = logits(way)
        error = np.abs(found - exact).max() / exact.std()
        print(f"| {name} | {error:.1e} | {int((found.argmax(-1) != exact.argmax(-1)).sum())} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/tiny")
    model = parser.parse_args().model
    for outlier in (1.0, 3000.0, 70000.0):
        of_random_matmuls(outlier)
    of_the_model(model)


if __name__ == "__main__":
    main()
