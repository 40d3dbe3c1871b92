"""One vocabulary: retired words do not come back, and lines of documents fit into 120 columns.

docs/glossary.md says what the words mean. `python tests/test_vocabulary.py` prints every use of a retired word.
"""

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEXT = {".py", ".md", ".yaml", ".yml", ".sh", ".toml", ".cc", ".h", ".inc"}
PROSE = ("docs/", "README.md", "CONTRIBUTING.md")
ENGINE = ("src/levanter_infer/engine/",)
MAX_COLUMNS = 120


class Retired(NamedTuple):
    """A word that is not used any more."""

    pattern: str
    say: str
    """The word to use in its place."""
    only: tuple[str, ...] = ("",)
    """Prefixes of the paths in which it is retired."""


RETIRED = {
    "product": Retired(r"(?<!dot )(?<!inner )(?<!\.)\bproducts?\b(?!\()", "matmul; a dot product stays one"),
    "beginning": Retired(r"\bbeginnings?\b", "prefix (common prefix, shared prefix) or start"),
    "sharing": Retired(
        r"\bdecode[./]sharing|\b(reuse|register)_pages\b", "decode/prefix.py: match_prefix, insert_prefix"
    ),
    "lie": Retired(r"\b(lies?|lain|lying)\b", "is stored, resides; layout, sharding, placement"),
    "spread": Retired(r"\bspreads?\b(?!\()(?! =)|\b(spread_as|is_spread|Spread)\b", "sharded, ShardAxis"),
    "place": Retired(
        r"(?<!\bin )(?<!\bin its )(?<!\bin their )(?<!\btakes )(?<!\btake )(?<!decimal )\bplaces?\b",
        "position, offset, slot, index; device_put or shard for arrays",
        only=PROSE,
    ),
    "nobody": Retired(
        r"(?i)\b(nobody|somebody|who(m|ever))\b", "the subject by its name: the request, the sequence, the caller"
    ),
    "who": Retired(
        r"(?<!people )(?<!users )\b[Ww]ho\b", "the subject by its name: the request, the sequence, the caller"
    ),
    "give-way": Retired(r"\bg(ave|iven?|ives|iving) way\b", "is preempted; preemption victim"),
    "told": Retired(r"\b(_is_)?told\b", "broadcast, admitted, notified"),
    "company": Retired(r"\bcompany\b", "batch composition (batch-invariant)"),
    "council": Retired(r"(?i)\bcouncil\b", "round coordinator"),
    "pace": Retired(r"\bpaces?\b|\bPace\b", "round length (RoundLengthController)"),
    "seat": Retired(r"\b(seat|seats|seated|occupants)\b", "assign_slot, active"),
    "settle": Retired(r"\bsettle[sd]?\b|\bengine\.sync\b", "flush"),
    "linger": Retired(r"\blinger(s|ed|ing)?\b", "wait_for_launch_window"),
    "room": Retired(r"\brooms?\b", "free slots, free pages, capacity"),
    "wishes": Retired(r"\bwishes\b|\btake_wishes\b|\bfarewell\b", "requests (pop_requests); exit_message"),
    "hear": Retired(r"\bhear\b|\bannounc(e|es|ed)\b", "publish, wait_for"),
    "promise": Retired(r"\b(read|make|write)_promise\b|\bPromise\b", "job spec (read_job_spec)"),
    "followed": Retired(r"\b(followed|told)\(", "broadcast_claims, receive_claims"),
    "last-words": Retired(r"\b(no|last)_words\b", "clear_abort_message, abort_message"),
    "shrink": Retired(r"\bshrink\b|\bhigh, total\b", "m, l, alpha (running max, denominator, rescale factor)"),
    "send-for": Retired(r"\bsen(d|ds|t|ding) for\b", "start an async copy, prefetch"),
    "host-tier": Retired(r"\bhosts?'s? memory\b|\bhost[ _]tier\b", "host memory; KV offload"),
    "spill": Retired(r"\bspill(ed|ing)?\b", "offload, swap out; spills of registers stay"),
    "data-shard": Retired(r"\bdata shards?\b", "data-parallel rank"),
    "chunk": Retired(r"\bchunks? of (a |the |each |their )?prompts?('s)?\b", "prompt chunk (chunked prefill)"),
    "engine-classes": Retired(r"\bclass (Group|Sequence)\b", "RequestState, SampleState", only=ENGINE),
    "offload-names": Retired(r"\b(readmit|park|parks|parked)\b", "swap_in, mark_swapped"),
    "old-names": Retired(
        r"\b(adopt_model|enter_version|unbatched|hungry|wanted_slots|collector_paused|skips_rows|hand_over)\b",
        "from_levanter, on_weight_update, no_vmap, starved, min_free_slots, gc_disabled, logits_skip_padding, migrate",
    ),
    "none-pages": Retired(r"\b(rows_with_none|without_none)\b|\bpage of none\b", "has_unmapped_page, mask_unmapped"),
}

ALLOWED = {
    ("old-names", "tests/kernels/test_backends.py"): "the flags that this test refuses",
    ("place", "docs/tiny-model.md"): "the place of a story",
    ("product", "src/levanter_infer/keys.py"): "a former key, which is answered with the new one",
    ("spill", "docs/kernels.md"): "spills of registers",
    ("spill", "scripts/tpu"): "spills of registers",
    ("spill", "src/levanter_infer/engine/tile_search.py"): "spills of registers",
    ("spill", "tests/test_tpu_schedule.py"): "spills of registers",
    ("spill", "tests/tpu_kernels.py"): "spills of registers",
    ("spread", "src/levanter_infer/bench/"): "the spread of measurements",
    ("spread", "scripts/peers/"): "the spread of measurements",
    ("spread", "tests/bench/"): "the spread of measurements",
    ("spread", "tests/golden_cases.py"): "the spread of random numbers",
}
"""(word, path prefix): the other meaning that the word has there, which stays."""

EXEMPT = {
    "docs/decisions/": "records name what there was before",
    "docs/glossary.md": "its last column names the words that are not used",
    "docs/contract.md": "its items quote designs of other authors",
}
"""Prefixes of the paths of documents in which no word is looked for, and why."""

LONG_ROWS = {
    "README.md": "a row has one name of vLLM and ours; tests/test_readme.py reads them",
    "docs/contract.md": "a row is one item; tests/test_contract.py reads them",
    "docs/kernels.md": "scripts/kernel_tables.py writes the rows",
    "docs/metrics.md": "a row is one metric; tests/engine/test_metrics.py reads them",
}
"""Documents with rows of tables longer than 120 columns, and why the rows cannot be broken."""


def is_checked(path: str) -> bool:
    """Whether a file is text that is still written: decisions up to 0030, and figures, are records of the past."""
    old = re.match(r"docs/decisions/00([0-2]\d|30)-|docs/benchmarks/", path)
    return Path(path).suffix in TEXT and not old and path != "tests/test_vocabulary.py"


@functools.cache
def files() -> list[str]:
    folders = ("src", "tests", "scripts", "configs", "docs")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    names = [str(path.relative_to(ROOT)) for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(found))]
    return [name for name in names if is_checked(name)]


def without_links(line: str) -> str:
    """A line without the targets of its links and without names of decision records, which keep their names."""
    return re.sub(r"\]\([^)]*\)|\b00\d\d-[\w-]+", "]", line)


def uses(path: str, text: str) -> Iterator[tuple[int, str]]:
    """(line, word) of every retired word in a text."""
    patterns = {name: re.compile(word.pattern) for name, word in RETIRED.items() if path.startswith(word.only)}
    patterns = {name: pattern for name, pattern in patterns.items() if pattern.search(text)}  # most are nowhere
    for number, line in enumerate(text.splitlines(), 1):
        line = without_links(line)
        yield from ((number, name) for name, pattern in patterns.items() if pattern.search(line))


@functools.cache
def all_uses() -> list[tuple[str, int, str]]:
    """(path, line, word), without those that are allowed."""
    paths = [path for path in files() if not path.startswith(tuple(EXEMPT))]
    found = ((path, number, word) for path in paths for number, word in uses(path, (ROOT / path).read_text()))
    return [
        (path, number, word)
        for path, number, word in found
        if not any(word == name and path.startswith(prefix) for name, prefix in ALLOWED)
    ]


def test_retired_words_are_not_used():
    wrong = [f"{path}:{number}: {word!r}: say {RETIRED[word].say}" for path, number, word in all_uses()]
    assert not wrong, "\n".join(wrong)


def test_exceptions_say_why():
    for why in (*ALLOWED.values(), *EXEMPT.values(), *LONG_ROWS.values()):
        assert len(why.split()) > 2
    assert {word for word, _ in ALLOWED} <= set(RETIRED)


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("equal beginnings of prompts", "beginning"),
        ("where a page lies", "lie"),
        ("weights spread over a mesh", "spread"),
        ("nobody holds it", "nobody"),
        ("whoever gives way first", "give-way"),
        ("in the host's memory", "host-tier"),
        ("rows of a product", "product"),
        ("a data shard that waits", "data-shard"),
    ],
)
def test_a_retired_word_is_seen(line, word):
    assert (1, word) in set(uses("src/levanter_infer/engine/x.py", line))


@pytest.mark.parametrize(
    "line",
    ["a dot product of two vectors", "itertools.product(a, b)", "[why](decisions/0009-max-tokens-beyond-the-room.md)"],
)
def test_other_meanings_are_not_refused(line):
    assert not set(uses("src/levanter_infer/engine/x.py", line))


@pytest.mark.parametrize("path", [path for path in files() if path.startswith(PROSE)])
def test_lines_of_documents_fit(path):
    wrong, fenced = [], False
    for number, line in enumerate((ROOT / path).read_text().splitlines(), 1):
        fenced ^= line.startswith("```")
        is_link = "](" in line and " " not in line.strip().removeprefix("- ")
        is_row = line.startswith("|") and path in LONG_ROWS
        if len(line) > MAX_COLUMNS and not (fenced or is_link or is_row):
            wrong.append(f"{path}:{number}: {len(line)} columns")
    assert not wrong, "\n".join(wrong)


def print_uses() -> None:
    for path, number, word in all_uses():
        print(f"{path}:{number}: {word!r}: say {RETIRED[word].say}")
    print(f"{len(all_uses())} uses of retired words")


if __name__ == "__main__":
    print_uses()
