"""Page and offset of a token's position in its sequence. For whole numbers and arrays; imports no JAX.

Page sizes are powers of two, so divisions are shifts.
"""

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from jax import Array

Tokens = TypeVar("Tokens", int, "Array")


def page_of(position: Tokens, page_size: int) -> Tokens:
    """Index of the page, within its sequence, that holds a position: `position // page_size`."""
    return position >> (page_size.bit_length() - 1)


def offset_of(position: Tokens, page_size: int) -> Tokens:
    """Offset of a position within its page: `position % page_size`."""
    return position & (page_size - 1)


def pages_for(num_tokens: Tokens, page_size: int) -> Tokens:
    """Pages that hold `num_tokens` tokens of one sequence: `ceil(num_tokens / page_size)`."""
    return page_of(num_tokens + (page_size - 1), page_size)
