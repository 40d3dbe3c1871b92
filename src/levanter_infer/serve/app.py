"""The ASGI application: endpoints, and what a client that goes away leaves behind."""

import asyncio
import contextlib
import hmac
import math
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from levanter_infer.engine.async_engine import AsyncEngine, QueueFull, Update
from levanter_infer.engine.request import RequestOutput
from levanter_infer.fingerprint import package_version
from levanter_infer.io.openai import PROMPTS, Answers, error_body, failure
from levanter_infer.io.prompts import parse_json
from levanter_infer.serve.answers import Events, answer, event
from levanter_infer.serve.calls import Call, CallReader
from levanter_infer.serve.config import ServeConfig
from levanter_infer.serve.openapi import description

T = TypeVar("T")
_OPEN_PATHS = ("/health",)
"""Paths that need no API key: a load balancer has none."""


class Service:
    """The endpoints over one engine.

    Args:
        engine: serves the requests.
        answers: renders results.
        reader: reads requests. It has the model's names, of which the first is that of answers.
        config: limits.
        api_key: that requests must bring; None: no key.
        facts: for the status page.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        answers: Answers,
        reader: CallReader,
        config: ServeConfig,
        *,
        api_key: str | None = None,
        facts: dict[str, Any] | None = None,
    ):
        self.engine, self._answers, self._reader, self._names = engine, answers, reader, reader.model_names
        self._config, self._key, self._facts = config, api_key, facts or {}
        self._created = int(time.time())

    def app(self) -> Starlette:
        """The application."""
        get, post = ["GET"], ["POST"]
        routes = [
            Route("/", self._status, methods=get),
            Route("/health", self._health, methods=get),
            Route("/metrics", self._metrics, methods=get),
            Route("/version", self._version, methods=get),
            Route("/openapi.json", self._openapi, methods=get),
            Route("/v1/models", self._models, methods=get),
            *(Route(path, self._complete, methods=post) for path in PROMPTS),
        ]
        app = Starlette(routes=routes, exception_handlers={HTTPException: _http_error, Exception: _failure})
        app.add_middleware(_Keyed, key=self._key)
        return app

    async def _status(self, request: Request) -> Response:
        stats = self.engine.stats()
        shown = {
            "model": self._names[0],
            "version": package_version(),
            **self._facts,
            **{key: stats[key] for key in ("running", "waiting", "pages_total", "generated_tokens") if key in stats},
        }
        rows = "".join(f"<tr><th align=left>{key}</th><td>{_escaped(value)}</td></tr>" for key, value in shown.items())
        page = f"<!doctype html><meta charset=utf-8><title>levanter-infer</title><h1>levanter-infer</h1><table>{rows}"
        return HTMLResponse(f"{page}</table>", headers={"Content-Security-Policy": "default-src 'none'"})

    async def _health(self, request: Request) -> Response:
        if not self.engine.is_ready:
            return JSONResponse({"status": "not ready", "error": str(self.engine.error or "closing")}, 503)
        return JSONResponse({"status": "ok"})

    async def _metrics(self, request: Request) -> Response:
        return PlainTextResponse(self.engine.metrics().prometheus())

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"version": package_version()})

    async def _openapi(self, request: Request) -> Response:
        return JSONResponse(description(self._key is not None))

    async def _models(self, request: Request) -> Response:
        same = {"object": "model", "created": self._created, "owned_by": "levanter-infer"}
        return JSONResponse({"object": "list", "data": [{"id": name, **same} for name in self._names]})

    async def _complete(self, request: Request) -> Response:
        kind, name, created = PROMPTS[request.url.path], uuid.uuid4().hex, int(time.time())
        try:
            data = await _body(request, self._config.max_body_bytes)
            body = parse_json(_text(data), "the body")
            call = self._reader.read(body, kind, name)
        except ClientDisconnect:
            return Response(status_code=499)
        except ValueError as error:
            return JSONResponse(error_body(str(error), "invalid_request_error"), 400)
        if len(call.requests) > self._config.max_waiting:
            said = f"{len(call.requests)} prompts in one request; expected at most {self._config.max_waiting}"
            return JSONResponse(error_body(said, "invalid_request_error"), 400)
        try:
            if call.stream:
                return await self._streamed(call, name, created)
            outputs = await _unless_left(request, _all(self.engine.generate(each) for each in call.requests))
        except QueueFull as full:
            return _too_many(full)
        except ClientDisconnect:
            return Response(status_code=499)
        except RuntimeError as error:
            return JSONResponse(error_body(str(error), "server_error"), 503)
        status, content = answer(self._answers, call, outputs, name, created)
        return JSONResponse(content, status)

    async def _streamed(self, call: Call, name: str, created: int) -> Response:
        """The stream of a call, once its first update is there: what refuses it comes as a status."""
        updates = _merged(self.engine, call)
        try:
            first = await anext(updates)
        except BaseException:
            await updates.aclose()
            raise
        output = first[1].output
        if output is not None and output.error is not None:
            await updates.aclose()
            return JSONResponse(error_body(output.error, "invalid_request_error"), 400)
        return _EventStream(updates, self._events(call, name, created, first, updates))

    async def _events(self, call: Call, name: str, created: int, first, updates) -> AsyncGenerator[str]:
        events = Events(self._answers, call, name, created, self._names[0])
        outputs: dict[int, RequestOutput] = {}
        yield events.first()
        try:
            async for prompt, update in _after(first, updates):
                if update.output is not None:
                    outputs[prompt] = update.output
                    failed = failure(update.output)
                    if failed is not None:
                        yield event(failed[1])
                        continue
                yield events.update(prompt, update)
        except (QueueFull, RuntimeError) as error:
            yield event(error_body(str(error), "server_error"))
            return
        yield events.last([outputs[prompt] for prompt in sorted(outputs)])


async def _merged(engine: AsyncEngine, call: Call) -> AsyncGenerator[tuple[int, Update]]:
    """(number of the request, update) of all requests of a call, as they come."""
    arrived: asyncio.Queue[tuple[int, Update | Exception | None]] = asyncio.Queue(len(call.requests))

    async def pump(number: int) -> None:
        try:
            async with contextlib.aclosing(engine.stream(call.requests[number])) as updates:
                async for update in updates:
                    await arrived.put((number, update))
            await arrived.put((number, None))
        except Exception as error:
            await arrived.put((number, error))

    tasks = [asyncio.ensure_future(pump(number)) for number in range(len(call.requests))]
    try:
        left = len(tasks)
        while left:
            number, update = await arrived.get()
            if isinstance(update, Exception):
                raise update
            if update is None:
                left -= 1
            else:
                yield number, update
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _after(first: T, rest: AsyncIterator[T]) -> AsyncIterator[T]:
    yield first
    async for each in rest:
        yield each


async def _all(calls) -> list[RequestOutput]:
    """The results of all calls; if one fails, the others are cancelled."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def _left(receive: Callable[[], Awaitable[Any]]) -> None:
    """Returns when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _unless_left(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled if the client goes away. Raises: ClientDisconnect then."""
    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(_left(request.receive))]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ClientDisconnect
        return tasks[0].result()  # type: ignore[return-value]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _EventStream(Response):
    """Server-sent events until they end or the client goes away; either way `updates` is closed."""

    def __init__(self, updates, events: AsyncGenerator[str]):
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        self._updates, self._events = updates, events

    async def __call__(self, scope, receive, send) -> None:
        headers = [(key, value) for key, value in self.raw_headers if key != b"content-length"]

        async def write() -> None:
            await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
            async for text in self._events:
                await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        tasks = [asyncio.ensure_future(write()), asyncio.ensure_future(_left(receive))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._events.aclose()
            await self._updates.aclose()


class _Keyed:
    """Refuses requests without the API key."""

    def __init__(self, app, key: str | None):
        self._app, self._key = app, None if key is None else key.encode()

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] == "http" and self._key is not None and scope["path"] not in _OPEN_PATHS:
            scheme, _, given = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(given.strip(), self._key):
                said = error_body("the API key is missing or wrong; send it as a bearer token", "authentication_error")
                await JSONResponse(said, 401, headers={"WWW-Authenticate": "Bearer"})(scope, receive, send)
                return
        await self._app(scope, receive, send)


async def _body(request: Request, most: int) -> bytes:
    """Raises: HTTPException for one that is too large, without reading the rest."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise HTTPException(413, f"the body has more than {most} bytes (serve.max_body_bytes)")
        parts.append(part)
    return b"".join(parts)


def _text(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"the body is not UTF-8: {error}") from None


def _too_many(full: QueueFull) -> Response:
    headers = {"Retry-After": str(max(1, math.ceil(full.retry_after)))}
    return JSONResponse(error_body(str(full), "rate_limit_error"), 429, headers=headers)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    return JSONResponse(error_body(error.detail, kind), error.status_code, headers=error.headers)


async def _failure(request: Request, error: Exception) -> Response:
    return JSONResponse(error_body("the server failed; its log has the cause", "server_error"), 500)


def _escaped(value: object) -> str:
    return str(value).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
