"""`PrefixTable` against a dictionary of whole texts, with and without hashes that collide."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from levanter_infer.cache import prefix_table
from levanter_infer.cache.prefix_table import PrefixTable
from tests.tiers import nightly_but

NUM_PAGES, SIZE, ROWS, WIDTH, ITEMS = 24, 2, 3, 4, 8


@functools.lru_cache
def operations():
    return {
        "find": jax.jit(lambda table, before, roots, *rest: table.find(*table.ends(before, roots), *rest)),
        "register": jax.jit(lambda table, *arguments: table.register(*arguments)),
        "forget": jax.jit(lambda table, pages: table.forget(pages)),
    }


class Texts:
    """A pool of pages, and which text each of them ends."""

    def __init__(self):
        self.table = PrefixTable.init(NUM_PAGES, SIZE)
        self.contents: dict[int, tuple] = {}  # page -> (root, tokens up to its end)
        self.text: dict[int, tuple] = {}  # the same of pages that have to be found

    def pages_of(self, text: tuple) -> set[int]:
        return {page for page, other in self.text.items() if other == text}

    def find(self, root: int, tokens: list[int], computed: int = 0, page_before: int = NUM_PAGES) -> list[int]:
        rest = tokens[computed * SIZE : (computed + WIDTH) * SIZE]
        padded = np.zeros((ROWS, WIDTH, SIZE), np.int32)
        padded[1].reshape(-1)[: len(rest)] = rest
        counts = np.zeros(ROWS, np.int32)
        counts[1] = len(rest) // SIZE
        before, roots = np.full(ROWS, NUM_PAGES, np.int32), np.full(ROWS, root, np.int32)
        before[1] = page_before
        pages, found = operations()["find"](self.table, before, roots, padded, counts)
        assert found[0] == found[2] == 0
        return pages[1, : int(found[1])].tolist()

    def register(self, rows: list[tuple[int, list[int], list[int]]]) -> None:
        """Rows of (root, tokens, pages): the pages hold the last of these tokens."""
        columns = {
            "pages": np.full(ITEMS, NUM_PAGES, np.int32),
            "before": np.full(ITEMS, NUM_PAGES, np.int32),
            "roots": np.full(ITEMS, -1, np.int32),
            "place": np.zeros(ITEMS, np.int32),
            "tokens": np.zeros((ITEMS, SIZE), np.int32),
        }
        item = 0
        for root, tokens, pages, *before in rows:
            start = len(tokens) // SIZE - len(pages)
            for place, page in enumerate(pages):
                end = (start + place + 1) * SIZE
                values = {
                    "pages": page,
                    "before": before[0] if before else NUM_PAGES,
                    "roots": root,
                    "place": place,
                    "tokens": tokens[end - SIZE : end],
                }
                for name, value in values.items():
                    columns[name][item] = value
                self.contents[page] = (root, tuple(tokens[:end]))
                if not self.pages_of((root, tuple(tokens[:end]))):
                    self.text[page] = (root, tuple(tokens[:end]))
                item += 1
        self.table = operations()["register"](self.table, *columns.values())

    def forget(self, pages: list[int]) -> None:
        for page in pages:
            self.text.pop(page, None)
            self.contents.pop(page, None)
        padded = np.full(NUM_PAGES, NUM_PAGES, np.int32)
        padded[: len(pages)] = pages
        self.table = operations()["forget"](self.table, padded)


def test_the_longest_known_beginning_is_found():
    texts = Texts()
    texts.register([(-1, [1, 2, 3, 4, 5, 6], [7, 3, 9])])
    assert texts.find(-1, [1, 2, 3, 4, 5, 6, 7, 8]) == [7, 3, 9]
    assert texts.find(-1, [1, 2, 3, 4, 6, 5]) == [7, 3]
    assert texts.find(-1, [1, 2, 3, 4, 5]) == [7, 3]
    assert texts.find(-1, [3, 4]) == [] and texts.find(-2, [1, 2]) == []
    assert texts.find(-1, [1, 2, 3, 4, 5, 6], computed=1, page_before=7) == [3, 9]


def test_pages_are_added_to_what_is_known_and_equal_ones_are_found_once():
    texts = Texts()
    texts.register([(-1, [1, 2], [0])])
    texts.register([(-1, [1, 2, 3, 4], [1], 0), (-1, [1, 2, 3, 4, 5, 6], [4, 5], 0)])
    found = texts.find(-1, [1, 2, 3, 4, 5, 6])
    assert found == [0, 1, 5]
    texts.register([(-1, [1, 2, 3, 4, 7, 8], [6, 8, 9])])  # computed again from the start
    assert texts.find(-1, [1, 2, 3, 4, 7, 8]) == [6, 8, 9]
    assert texts.find(-1, [1, 2, 3, 4, 5, 6]) == [6, 8, 5]


def test_a_text_whose_beginning_was_forgotten_is_known_again_when_it_is_computed_again():
    texts = Texts()
    text = [1, 2, 3, 4, 5, 6]
    texts.register([(-1, text, [0, 1, 2])])
    texts.forget([0])
    assert texts.find(-1, text) == []
    texts.register([(-1, text, [3, 4, 5])])
    assert texts.find(-1, text) == [3, 4, 5]


def test_what_follows_a_forgotten_page_is_not_registered():
    texts = Texts()
    texts.register([(-1, [1, 2], [0])])
    texts.forget([0])
    texts.register([(-1, [1, 2, 3, 4], [1], 0)])
    assert texts.find(-1, [1, 2, 3, 4]) == [] and texts.table.serials[1] == prefix_table.UNKNOWN


@pytest.mark.parametrize("collisions", nightly_but(["prefixes"], ["none", "contents", "prefixes", "buckets"]))
def test_random_texts_are_found_as_in_a_dictionary(collisions, monkeypatch):
    """Where hashes collide a page may be missed; a page of another text is never found."""
    if collisions == "contents":
        monkeypatch.setattr(prefix_table, "content_hashes", lambda tokens: tokens[:, 0].astype(jnp.uint32) % 2)
    if collisions == "prefixes":
        monkeypatch.setattr(prefix_table, "chained", lambda contents, place, starts: contents)
    if collisions == "buckets":
        monkeypatch.setattr(PrefixTable, "_bucket", lambda self, hashes: jnp.zeros(hashes.shape, jnp.int32))
    operations.cache_clear()
    rng = np.random.default_rng(0)
    texts, missed, hits = Texts(), 0, 0
    for _ in range(150):
        rows, fresh = [], [int(page) for page in rng.permutation(NUM_PAGES)]
        for _ in range(rng.integers(1, 4)):
            root, tokens = -1 - int(rng.integers(2)), rng.integers(0, 2, 2 * rng.integers(1, 5)).tolist()
            found = texts.find(root, tokens)
            hits += len(found)
            for place, page in enumerate(found):
                assert texts.contents[page] == (root, tuple(tokens[: 2 * place + 2]))
            rest = len(tokens) // SIZE - len(found)
            longer = (root, tuple(tokens[: 2 * len(found) + 2]))
            missed += rest > 0 and bool(texts.pages_of(longer))
            in_use = {page for row in rows for page in row[2]} | set(found)
            pages = [page for page in fresh if page not in in_use][:rest]
            if rest and sum(len(row[2]) for row in rows) + rest <= ITEMS:
                fresh = [page for page in fresh if page not in pages]
                rows.append((root, tokens, pages, *found[-1:]))
        kept = {row[3] for row in rows if len(row) > 3}
        rows = [row for row in rows if not set(row[2]) & kept]
        taken = [page for row in rows for page in row[2]]
        ends = [texts.contents[page] for page in taken if page in texts.contents]
        after = [
            page
            for page, (root, tokens) in texts.contents.items()
            for end in ends
            if (root, tokens[: len(end[1])]) == end
        ]
        if not kept & set(after):
            texts.forget(sorted({*taken, *after}))
            texts.register(rows)
    operations.cache_clear()
    assert hits > 20 and (missed == 0 or collisions != "none"), (hits, missed)
