"""Names of the parts of a step (`jax.named_scope`), by which profiles and compiled programs show where time goes."""

SCHEDULE = "schedule"
"""Choice of the sequences and tokens of a step, and allocation of their pages."""
SPECULATION = "speculation"
"""The lookup of draft tokens."""
COPIES = "copies"
"""Copy on write, and copies of states of fixed size."""
SCORING = "scoring"
"""Log probabilities of prompt tokens."""
SAMPLING = "sampling"
"""The head, and a token of each row."""
APPEND = "append"
"""Tokens that are stored, sequences that end, pages that are freed."""
KV_WRITE = "kv_write"
ATTENTION = "attention"
CHUNKS = "chunks"
"""Attention of rows with several tokens."""
HEAD = "head"
"""Branches for the numbers of rows that the head computes, from no row on."""
PROCESSED = "processed"
"""Rows that want more than the likeliest token."""
CHANGED = "changed"
"""Rows whose logits a bias, a penalty or a ban changes."""
PENALISED = "penalised"
"""Penalties, of rows that have some."""
DRAWN = "drawn"
"""Rows that are sampled with a temperature."""
FILTERED = "filtered"
"""Thresholds of top_k and top_p."""
NUCLEUS = "nucleus"
"""The mass of all tokens, where top_p applies without top_k."""
FOUND = "found"
"""Thresholds that are among the likeliest tokens, as most are."""
BY_ROWS = "by_rows"
"""Numbers that are computed row by row (`loops.one_by_one`)."""
GROUPED_MATMUL = "grouped_matmul"
"""The kernel for matmuls of experts."""
_FORWARD, _HEAD = "forward_", "head_"


def forward(bucket: int) -> str:
    """The model, in a bucket of so many tokens."""
    return f"{_FORWARD}{bucket}"


def head(rows: int) -> str:
    """The head, for so many rows."""
    return f"{_HEAD}{rows}"


def bucket_of(scope: str) -> int | None:
    """The bucket of a scope that `forward` names; None for others."""
    return _size(scope, _FORWARD)


def rows_of(scope: str) -> int | None:
    """The rows of a scope that `head` names; None for others."""
    return _size(scope, _HEAD)


def _size(scope: str, prefix: str) -> int | None:
    size = scope.removeprefix(prefix)
    return int(size) if size != scope and size.isdigit() else None
