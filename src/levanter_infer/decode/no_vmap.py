"""`refuse_vmap`: an error where `vmap` batches a generation."""

from typing import Any

import jax
from jax.custom_batching import custom_vmap


@custom_vmap
def refuse_vmap(arrays: Any) -> Any:
    """`arrays`, a pytree, as they are.

    Raises: ValueError where `vmap` batches any of them, also from outside of a `jit` that this is traced in.
    """
    return arrays


@refuse_vmap.def_vmap
def _rule(axis_size: int, in_batched, arrays):
    raise ValueError(
        f"generate under vmap (axis of {axis_size}): the sequences of one call share a pool of pages and run in one "
        "loop, which vmap would run in lockstep with a pool for each; give all prompts to one call, as a batch of "
        "prompt_token_ids with seeds of their own, and reshape the result"
    )


def varying_axes(tree: Any) -> set[str]:
    """Names of the mesh axes along which arrays differ, where a `shard_map` checks that (`check_vma`); else none."""
    found: set[str] = set()
    for leaf in jax.tree.leaves(tree):
        kind = jax.typeof(leaf)
        found |= set(getattr(kind, "vma", ())) | set(getattr(getattr(kind, "mat", None), "varying", ()))
    return found
