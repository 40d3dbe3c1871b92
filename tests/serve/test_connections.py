"""Connections that are slow or large on purpose, by raw sockets: they are closed, and no other request notices."""

import asyncio
import contextlib
import fcntl
import socket
import struct
import termios
import threading
import time

import httpx
import pytest

from tests.serve.server import running, tiny_engine

SECONDS = 0.5
"""`idle_timeout_s` of the server."""
BODY = b'{"prompt": "17+25=", "temperature": 0}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n" % len(BODY)


@pytest.fixture(scope="module")
def served():
    with running(tiny_engine(), idle_timeout_s=SECONDS) as server:
        assert answers(server)  # compiles, which is in no time that a test measures
        yield server


@contextlib.contextmanager
def connected(served):
    with socket.create_connection(("127.0.0.1", int(served.url.rsplit(":", 1)[1])), timeout=20) as connection:
        yield connection


def until_closed(connection: socket.socket) -> bytes:
    """What the server sends until it closes. Raises: TimeoutError if it does not."""
    parts = []
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)


def trickle(connection: socket.socket, data: bytes) -> threading.Thread:
    """Send a byte every 20 ms, until all are sent or the server closes."""

    def send() -> None:
        with contextlib.suppress(OSError):
            for i in range(len(data)):
                connection.sendall(data[i : i + 1])
                time.sleep(0.02)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    return thread


def answers(served) -> bool:
    done = httpx.post(f"{served.url}/v1/completions", content=BODY, timeout=60)
    return done.status_code == 200 and done.json()["choices"][0]["text"] == "42\n"


@pytest.mark.parametrize("data", [b"", HEAD + b"X-Slow: " + b"a" * 1000], ids=["nothing", "slowly"])
def test_head_that_does_not_arrive_closes_the_connection(served, data):
    with connected(served) as connection:
        began = time.monotonic()
        sender = trickle(connection, data)
        assert answers(served)
        assert until_closed(connection) == b""
        assert SECONDS * 0.9 < time.monotonic() - began < SECONDS + 10
        sender.join(20)


def test_body_that_does_not_arrive_is_answered_with_408(served):
    with connected(served) as connection:
        connection.sendall(HEAD + b"\r\n")
        sender = trickle(connection, b" " * (len(BODY) - 1))
        assert answers(served)
        answer = until_closed(connection)
        assert answer.startswith(b"HTTP/1.1 408") and b"serve.idle_timeout_s" in answer
        sender.join(20)


def test_head_that_does_not_end_is_cut(served):
    with connected(served) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(HEAD)
            for _ in range(200):
                connection.sendall(b"X-More: " + b"a" * 1000 + b"\r\n")
        assert b" 200 " not in until_closed(connection).split(b"\r\n")[0]
    assert answers(served)


def test_answers_that_are_not_read_close_the_connection(served):
    with connected(served) as connection:
        get = b"GET /openapi.json HTTP/1.1\r\nHost: a\r\n\r\n"
        wanted = 800  # of 20 KB each: more than the kernel takes for a reader that does not read
        sender = threading.Thread(target=lambda: _send(connection, get * wanted), daemon=True)
        sender.start()
        seen, queued = -1, 0
        while queued == 0 or queued > seen:  # until the server has no more space for its answers
            time.sleep(SECONDS * 4)
            seen, queued = queued, unread(connection)
        assert answers(served)
        sender.join(20)
        assert until_closed(connection).count(b"HTTP/1.1 200") < wanted


def unread(connection: socket.socket) -> int:
    """Bytes that the system has received and nothing has read."""
    return struct.unpack("i", fcntl.ioctl(connection, termios.FIONREAD, b"\0" * 4))[0]


def _send(connection: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(data)


def test_connection_that_waits_for_its_answer_stays(served):
    """Also one that is kept, whose second request comes in parts."""
    with connected(served) as connection:
        for _ in range(2):
            asyncio.run_coroutine_threadsafe(served.asynchronous.pause("admit"), served.loop).result(60)
            connection.sendall(HEAD[:20])
            time.sleep(SECONDS / 2)
            connection.sendall(HEAD[20:] + b"\r\n" + BODY)
            time.sleep(SECONDS * 2)
            asyncio.run_coroutine_threadsafe(served.asynchronous.resume(), served.loop).result(60)
            answer = connection.recv(65536)
            while b"usage" not in answer:
                part = connection.recv(65536)
                assert part, answer
                answer += part
            assert answer.startswith(b"HTTP/1.1 200")
