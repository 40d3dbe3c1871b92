"""Connections of the server: what one may hold up, and for how long. uvicorn bounds none of it."""

import asyncio
import logging
import socket
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from levanter_infer.serve.config import ServeConfig

_MAX_HEAD_BYTES = 65536
"""Bytes of a request's line and headers, at most: h11's bound, and httptools has none."""


def listener(host: str, port: int) -> socket.socket:
    """A socket that listens, for `uvicorn.Server.serve`. Raises: OSError."""
    (family, *_, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    made = socket.create_server(address[:2], family=family, backlog=2048)
    # uvloop sets it; asyncio does for sockets that name their protocol only, unlike this one. Without it the body of an
    # answer on a connection that is kept alive waits 40 ms for the client to acknowledge the head.
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def http_config(app: Any, config: ServeConfig) -> uvicorn.Config:
    """uvicorn's configuration for an ASGI application within the limits of `config`."""
    return uvicorn.Config(
        app,
        http=_protocol(config.idle_timeout_s),
        ws="none",
        lifespan="off",
        log_level=logging.WARNING,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=config.max_connections,
        timeout_graceful_shutdown=config.grace_s,  # type: ignore[arg-type]  # it passes them on to asyncio
    )


def _protocol(seconds: float) -> type[asyncio.Protocol]:
    """uvicorn's HTTP protocol, which closes a connection whose client takes longer than `seconds` to send the head of a
    request or to read, or that sends more than `_MAX_HEAD_BYTES` of a head."""

    class Bounded(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        _timer: asyncio.TimerHandle | None = None
        _unread: asyncio.TimerHandle | None = None
        _seen: Any = None
        """The request that came before the head that `_size` counts."""
        _size = 0

        def connection_made(self, transport) -> None:
            super().connection_made(transport)
            self._timer = self._later(transport)

        def data_received(self, data: bytes) -> None:
            before: Any = self.cycle  # type: ignore[attr-defined]
            if before is not self._seen:
                self._seen, self._size = before, 0
            if before is None or not before.more_body:  # then this is of a head
                self._size += len(data)
            if self._timer is None and (before is None or before.response_complete):
                self._timer = self._later(self.transport)  # type: ignore[attr-defined]
            super().data_received(data)
            if self.cycle is not before:  # type: ignore[attr-defined]
                self._timer = _cancelled(self._timer)
            elif self._size > _MAX_HEAD_BYTES:
                self.transport.abort()  # type: ignore[attr-defined]

        def connection_lost(self, exc: Exception | None) -> None:
            self._timer, self._unread = _cancelled(self._timer), _cancelled(self._unread)
            super().connection_lost(exc)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._unread = self._later(self.transport)  # type: ignore[attr-defined]

        def resume_writing(self) -> None:
            super().resume_writing()
            self._unread = _cancelled(self._unread)

        def _later(self, transport) -> asyncio.TimerHandle:
            return self.loop.call_later(seconds, transport.abort)  # type: ignore[attr-defined]

    return Bounded


def _cancelled(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
