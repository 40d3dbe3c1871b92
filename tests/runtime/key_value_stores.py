"""A store of texts in this process, and processes that are threads."""

import threading
import time
from collections.abc import Callable

from levanter_infer.runtime.hosts import Hosts, KeyValueStore


class LocalKeyValueStore(KeyValueStore):
    """A store that keeps the promises of `JaxKeyValueStore` among threads."""

    def __init__(self):
        self._texts: dict[str, str] = {}
        self._changed = threading.Condition()
        self.is_reachable = True
        self.answers = threading.Event()
        """Cleared: calls block, as those of JAX's client do while process 0 hangs."""
        self.answers.set()

    def set(self, key: str, text: str) -> None:
        self._check()
        with self._changed:
            self._texts[key] = text
            self._changed.notify_all()

    def wait(self, key: str, seconds: float) -> str | None:
        self._check()
        until = time.monotonic() + seconds
        with self._changed:
            while key not in self._texts and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)
            return self._texts.get(key)

    def all(self, folder: str) -> dict[str, str]:
        self._check()
        with self._changed:
            return {k.removeprefix(f"{folder}/"): v for k, v in self._texts.items() if k.startswith(f"{folder}/")}

    def remove(self, key: str) -> None:
        with self._changed:
            self._texts.pop(key, None)

    def _check(self) -> None:
        self.answers.wait()
        if not self.is_reachable:
            raise ConnectionError("no answer")


def several(count: int, **settings) -> list[Hosts]:
    board = LocalKeyValueStore()
    made = [Hosts(board, i, count, **settings) for i in range(count)]
    for hosts in made:
        hosts.names = [f"host {i} (m{i})" for i in range(count)]
    return made


def at_once(*calls: Callable) -> list:
    """The result of each call, or the exception that it raises; each runs in a thread."""
    results: list = [None] * len(calls)

    def run(i: int) -> None:
        try:
            results[i] = calls[i]()
        except Exception as e:
            results[i] = e

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "hangs"
    return results
