"""Codes in the tables, for host and device: status of a slot, finish reason, end of a beam search, root of a sequence.

Imports no JAX.
"""

from enum import IntEnum
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from jax import Array

Codes = TypeVar("Codes", int, "Array")


class Status(IntEnum):
    """Status of a slot. The order matters: slots between FREE and FINISHED are live."""

    FREE = 0  # holds no pages; unused since the last reset
    LOADING = 1  # holds no pages; the host has more of its prompt, or of its pages, to upload
    SWAPPED = 2  # holds no pages; the host swaps them in before any younger sequence starts
    WAITING = 3  # ready; not among the running sequences
    RUNNING = 4  # takes part in every step while tokens are pending
    FINISHED = 5  # holds no pages; its results stay until the host uses the slot again


class FinishReason(IntEnum):
    """Why a sequence finished."""

    NOT_FINISHED = 0
    STOP = 1  # a stop token sequence was generated
    LENGTH = 2  # max_tokens or the engine's length limit was reached
    ERROR = 3  # its logits were not finite
    ABORT = 4  # the host cancelled it
    IMPOSSIBLE = 5  # its logits were finite, but what the request or a logits_mod excludes left no token


class EarlyStopping(IntEnum):
    """Conditions at which a beam search ends."""

    PATIENT = 0  # once no running beam can beat the worst hypothesis by its score at its present length
    EARLY = 1  # once it has as many hypotheses as beams
    NEVER = 2  # once no running beam can beat the worst hypothesis at any length


# Device code uses these plain numbers: JAX takes a member of an enum for an array, and compiles another program
FREE, LOADING, SWAPPED, WAITING, RUNNING, FINISHED = map(int, Status)
NOT_FINISHED, STOP, LENGTH, ERROR, ABORT, IMPOSSIBLE = map(int, FinishReason)
PATIENT, EARLY, NEVER = map(int, EarlyStopping)


def has_failed(reasons: Codes) -> Codes:
    """Whether a sequence of this finish reason ended because no token could be chosen."""
    return (reasons == ERROR) | (reasons == IMPOSSIBLE)  # type: ignore[return-value]


DEFAULT_ROOT = -1
"""Root of sequences without a salt whose prompts are not scored."""

_PRIVATE = -(2**31)
"""The two least roots, of sequences that share no pages: `_PRIVATE` with scored prompts, `_PRIVATE + 1` without."""


def is_scored_root(roots: Codes) -> Codes:
    """Whether prompts are scored: those roots are even. Their pages have scores, which pages of odd roots lack."""
    return roots % 2 == 0  # type: ignore[return-value]


def private_root(roots: Codes) -> Codes:
    """Replaces `roots` for sequences whose pages hold keys and values of several versions of the weights."""
    return _PRIVATE + roots % 2  # type: ignore[return-value]


def is_private_root(roots: Codes) -> Codes:
    return roots <= _PRIVATE + 1  # type: ignore[return-value]
