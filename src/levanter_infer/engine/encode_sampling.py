"""`SamplingParams` as rows of a `SamplingTable`, in numpy: what the host uploads."""

from collections.abc import Sequence

import numpy as np

from levanter_infer.decode.sampling_table import SamplingTable
from levanter_infer.decode.shapes import SamplingLimits
from levanter_infer.engine.params import SamplingParams, stop_sequences


class SamplingColumns:
    """Numpy columns of `num_rows` admitted sequences; rows that are never set hold no sequence.

    Args:
        num_rows: entries of the `admitted` axis.
        limits: sizes of the engine's tables; `max_stop_sequences` includes the end-of-sequence ids.
    """

    def __init__(self, num_rows: int, limits: SamplingLimits):
        self._limits = limits
        none, stops = limits.vocab_size, (num_rows, limits.max_stop_sequences)
        self._columns = {
            "temperature": np.zeros(num_rows, np.float32),
            "top_k": np.zeros(num_rows, np.int32),
            "top_p": np.ones(num_rows, np.float32),
            "min_p": np.zeros(num_rows, np.float32),
            "frequency_penalty": np.zeros(num_rows, np.float32),
            "presence_penalty": np.zeros(num_rows, np.float32),
            "repetition_penalty": np.ones(num_rows, np.float32),
            "sample_index": np.zeros(num_rows, np.int32),
            "min_tokens": np.zeros(num_rows, np.int32),
            "num_logprobs": np.zeros(num_rows, np.int32),
            "seed": np.zeros((num_rows, 2), np.uint32),
            "bias_ids": np.full((num_rows, limits.max_logit_bias), none, np.int32),
            "bias_values": np.zeros((num_rows, limits.max_logit_bias), np.float32),
            "stop_ids": np.full((*stops, limits.max_stop_tokens), none, np.int32),
            "stop_lens": np.zeros(stops, np.int32),
        }

    def set(
        self, row: int, params: SamplingParams, *, seed: int, sample_index: int, eos_token_ids: Sequence[int]
    ) -> None:
        """Write one sequence. Each end-of-sequence id is a stop sequence of one token unless `ignore_eos`.

        Args:
            seed: 0 to 2^64 - 1.
            sample_index: which of the request's samples.
        Requires: `check_limits(params)` passed with the sizes of this object's limits.
        """
        columns, vocab = self._columns, self._limits.vocab_size
        columns["temperature"][row] = params.temperature if params.num_beams == 1 else 0
        for name in ("min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"):
            columns[name][row] = getattr(params, name)
        # A value just below 1 may round to 1, which is off; one that rounds to 0 would keep nothing
        columns["top_p"][row] = max(np.float32(params.top_p), np.finfo(np.float32).tiny)
        columns["top_k"][row] = min(params.top_k or 0, vocab)
        columns["sample_index"][row] = sample_index
        columns["min_tokens"][row] = params.min_tokens
        columns["num_logprobs"][row] = params.logprobs or 0
        columns["seed"][row] = (seed >> 32, seed & 0xFFFFFFFF)
        bias = params.logit_bias or {}
        columns["bias_ids"][row, : len(bias)] = list(bias.keys())
        columns["bias_values"][row, : len(bias)] = list(bias.values())
        stops = list(dict.fromkeys(stop_sequences(params)))
        if not params.ignore_eos:
            stops += [(token,) for token in eos_token_ids if token < vocab and (token,) not in stops]
        for i, sequence in enumerate(stops):
            columns["stop_ids"][row, i, self._limits.max_stop_tokens - len(sequence) :] = sequence
            columns["stop_lens"][row, i] = len(sequence)

    def table(self) -> SamplingTable:
        """The columns as a table of numpy arrays over `admitted`, ready to be uploaded."""
        return SamplingTable(**self._columns, limits=self._limits)  # type: ignore[arg-type]
