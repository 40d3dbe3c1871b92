"""Python's collector of cyclic garbage, out of the way while an engine starts."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def gc_disabled() -> Iterator[None]:
    """It does not run within: imports and traces make hundreds of thousands of objects, and nearly all of them stay."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
