"""Changes of logits, and what NumPy makes of them."""

import numpy as np

from levanter_infer.kernels.backend import LogitChanges
from levanter_infer.structured.automaton import packed


def changes_of(vocab: int) -> tuple[np.ndarray, LogitChanges, np.ndarray]:
    """Logits of ten rows, their changes, and the tokens that the masks allow. The slots of the fourth and the eighth
    row do not exist, the fifth and the ninth know no token, and the last has more tokens than the table holds. Some
    biased and banned ids are no tokens."""
    rng, rows = np.random.default_rng(vocab), 10
    allowed = rng.random((rows, vocab)) < 0.5
    allowed[1] = np.arange(vocab) == vocab - 1
    logits = rng.normal(size=(rows, vocab)).astype(np.float32)
    logits[2, 0], logits[3, -1], logits[5, 0] = np.nan, np.inf, -np.inf
    bias_ids = np.stack([rng.permutation(vocab + 4)[: min(4, vocab)] - 2 for _ in range(rows)])
    changes = LogitChanges(
        bias_ids=bias_ids.astype(np.int32),
        bias_values=rng.normal(size=bias_ids.shape).astype(np.float32),
        repetition=np.array([1.3, 1, 0.8, 1.1, 1.2, 2, 1, 1.5, 1.4, 1.3], np.float32),
        frequency=np.array([0.2, 0.5, 0, 0.1, 0.3, -0.4, 0, 0.1, 0.2, 0.3], np.float32),
        presence=np.array([0, 0.7, -0.3, 0.1, 0.3, 0, 0.6, 0.2, 0, 0.1], np.float32),
        tokens=rng.integers(-1, vocab + 2, size=(9, 50)).astype(np.int32),
        slot_ids=np.array([3, 8, 0, 9, 1, 2, 7, -1, 4, 5], np.int32),
        prompt_lens=np.array([20, 0, 50, 4, 9, 3, 12, 5, 6, 7], np.int32),
        seq_lens=np.array([50, 30, 50, 40, 0, 17, 13, 30, -3, 70], np.int32),
        banned_ids=rng.integers(-2, 2 * vocab, size=(rows, 3)).astype(np.int32),
        masks=packed(allowed),
        masked=np.array([1, 1, 1, 0, 1, 1, 0, 0, 1, 0], bool),
        changed=np.ones(rows, bool),
    )
    return logits, changes, allowed


def changed_by_numpy(logits: np.ndarray, changes: LogitChanges, allowed: np.ndarray) -> np.ndarray:
    z, vocab = logits.astype(np.float64), logits.shape[1]
    for row, own in enumerate(z):
        for token, value in zip(changes.bias_ids[row], changes.bias_values[row], strict=True):
            if 0 <= token < vocab:
                own[token] += value
        slot, known, prompt = changes.slot_ids[row], changes.seq_lens[row], changes.prompt_lens[row]
        history = list(changes.tokens[slot, : max(known, 0)]) if 0 <= slot < len(changes.tokens) else []
        for token in {token for token in history if 0 <= token < vocab}:
            factor = 1 / changes.repetition[row] if own[token] > 0 else changes.repetition[row]
            own[token] *= factor
            generated = history[prompt:].count(token)
            own[token] -= changes.frequency[row] * generated + changes.presence[row] * (generated > 0)
        own[[token for token in changes.banned_ids[row] if 0 <= token < vocab]] = -np.inf
        if changes.masked[row]:
            own[~allowed[row]] = -np.inf
    return z
