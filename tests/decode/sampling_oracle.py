"""The sampled distribution, written plainly in float64, and tables to sample with."""

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats

from levanter_infer.decode.sampling import SamplingTable
from levanter_infer.decode.shapes import SamplingLimits
from levanter_infer.engine.admission import SamplingColumns
from levanter_infer.engine.params import SamplingParams

EOS = 3


def limits_for(vocab_size: int, max_logit_bias: int = 4) -> SamplingLimits:
    return SamplingLimits(
        vocab_size=vocab_size,
        max_logprobs=6,
        max_logit_bias=max_logit_bias,
        max_stop_sequences=5,
        max_stop_tokens=16,
    )


def sampling_table(columns: SamplingColumns) -> SamplingTable:
    """Sampling parameters as a table of NumPy arrays."""
    return SamplingTable(**columns.columns, limits=columns.limits)  # type: ignore[arg-type]


def table_of(
    params: list[SamplingParams], vocab_size: int, seeds=None, sample_indices=None, limits=None
) -> SamplingTable:
    """A table over `seq` with one slot for each of `params`."""
    limits = limits or limits_for(vocab_size)
    columns = SamplingColumns(len(params), limits)
    for row, entry in enumerate(params):
        seed = 2**40 + row if seeds is None else seeds[row]
        index = 0 if sample_indices is None else sample_indices[row]
        columns.set(row, entry, seed=seed, sample_index=index, eos_token_ids=(EOS,))
    return jax.tree.map(jnp.asarray, sampling_table(columns))


def processed_logits(logits, params: SamplingParams, prompt: list[int], output: list[int]) -> np.ndarray:
    """Logits after bias, penalties and bans."""
    z = np.asarray(logits, np.float64).copy()
    for token, bias in params.logit_bias.items():
        z[token] += bias
    for token in set(prompt) | set(output):
        z[token] = z[token] / params.repetition_penalty if z[token] > 0 else z[token] * params.repetition_penalty
    for token in set(output):
        z[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    if len(output) < params.min_tokens:
        stops = [ids[0] for ids in params.stop_token_ids if len(ids) == 1] + ([] if params.ignore_eos else [EOS])
        z[stops] = -np.inf
    return z


def distribution(logits, params: SamplingParams, prompt: list[int], output: list[int]) -> np.ndarray:
    """Probability of each token."""
    z = processed_logits(logits, params, prompt, output)
    if params.temperature == 0:
        return np.eye(len(z))[np.argmax(z)]
    p = np.exp((z - z.max()) / params.temperature)
    p /= p.sum()
    if params.top_k:
        kth = np.sort(z)[::-1][min(params.top_k, len(z)) - 1]
        p = np.where(z >= kth, p, 0) / p[z >= kth].sum()
    if params.top_p < 1:
        likelier = np.array([p[z > value].sum() for value in z])
        p = np.where(likelier < params.top_p, p, 0)
        p /= p.sum()
    p = np.where(p >= params.min_p * p.max(), p, 0)
    return p / p.sum()


def chi_square_p(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Probability of a deviation at least as large; cells of few expected draws are put together."""
    expected = probabilities * counts.sum()
    order = np.argsort(expected)
    counts, expected = counts[order], expected[order]
    small = np.cumsum(expected) < 10
    first = int(small.sum())
    observed = np.append(counts[:first].sum(), counts[first:])
    expected = np.append(expected[:first].sum(), expected[first:])
    observed, expected = observed[expected > 0], expected[expected > 0]
    if len(expected) == 1:
        return 1.0
    statistic = float(((observed - expected) ** 2 / expected).sum())
    return float(scipy.stats.chi2.sf(statistic, len(expected) - 1))
