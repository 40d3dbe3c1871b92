"""Names of the parts of a step (`jax.named_scope`), by which profiles and compiled programs show where time goes."""

SCHEDULE = "schedule"
"""Choice of the sequences and tokens of a step, and allocation of their pages."""
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
PROCESSED = "processed"
"""Rows that want more than the likeliest token."""
DRAWN = "drawn"
"""Rows that are sampled with a temperature."""
FILTERED = "filtered"
"""Thresholds of top_k and top_p."""
_FORWARD = "forward_"


def forward(bucket: int) -> str:
    """The model, in a bucket of so many tokens."""
    return f"{_FORWARD}{bucket}"


def bucket_of(scope: str) -> int | None:
    """The bucket of a scope that `forward` names; None for others."""
    size = scope.removeprefix(_FORWARD)
    return int(size) if size != scope and size.isdigit() else None
