"""`gc_disabled`: Python's cyclic garbage collection is off while an engine starts."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def gc_disabled() -> Iterator[None]:
    """Disable garbage collection: imports and traces create hundreds of thousands of objects, which nearly all stay."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
