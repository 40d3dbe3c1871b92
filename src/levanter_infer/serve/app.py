"""The ASGI application: endpoints, and what a client that goes away leaves behind."""

import asyncio
import concurrent.futures
import contextlib
import hmac
import json
import math
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from levanter_infer.engine.async_engine import AsyncEngine, QueueFull
from levanter_infer.engine.params import brief
from levanter_infer.engine.reader import Update
from levanter_infer.engine.request import RequestOutput
from levanter_infer.fingerprint import package_version
from levanter_infer.io.openai import PROMPTS, Answers, error_body, failure
from levanter_infer.io.prompts import parse_json
from levanter_infer.serve.answers import Events, answer, event
from levanter_infer.serve.calls import Call, CallReader
from levanter_infer.serve.config import ServeConfig
from levanter_infer.serve.openapi import description
from levanter_infer.serve.tokenization import PATHS, Tokenization

Result = TypeVar("Result")
_OPEN_PATHS = ("/health",)
"""Paths that need no API key: a load balancer has none."""
_STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
_LARGE_BODY = 65536
"""Bytes of a body that is no longer read on the event loop."""
_CLOSE = {"Connection": "close"}
"""Header of an answer to a request whose rest is not read."""


class _Json(Response):
    """A JSON answer, in ASCII: messages repeat what a client sent, which may hold half a surrogate pair, and UTF-8 has
    no form of that."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


class Service:
    """The endpoints over one engine.

    Args:
        engine: serves the requests.
        answers: renders results.
        reader: reads requests. It has the model's names, of which the first is that of answers.
        config: limits.
        tokenization: for the endpoints of the tokenizer.
        api_key: that requests must bring; None: no key.
        facts: for the status page.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        answers: Answers,
        reader: CallReader,
        config: ServeConfig,
        tokenization: Tokenization,
        *,
        api_key: str | None = None,
        facts: dict[str, Any] | None = None,
    ):
        self.engine, self._answers, self._reader, self._names = engine, answers, reader, reader.model_names
        self._config, self._key, self._facts = config, api_key, facts or {}
        self._tokenization = tokenization
        self._created = int(time.time())
        # One thread, so that no more than one large body competes with the event loop for the interpreter
        self._large = concurrent.futures.ThreadPoolExecutor(1, "levanter-infer-bodies")

    def app(self) -> Starlette:
        """The application."""
        get, post = ["GET"], ["POST"]
        routes = [
            # Routes are tried in order: the busiest come first.
            *(Route(path, self._complete, methods=post) for path in PROMPTS),
            Route("/", self._status, methods=get),
            Route("/health", self._health, methods=get),
            Route("/metrics", self._metrics, methods=get),
            Route("/version", self._version, methods=get),
            Route("/tokenizer_info", self._tokenizer_info, methods=get),
            *(Route(path, self._tokenize, methods=post) for path in PATHS),
            Route("/openapi.json", self._openapi, methods=get),
            Route("/v1/models", self._models, methods=get),
            Route("/v1/models/{name:path}", self._model, methods=get),
        ]
        app = Starlette(routes=routes, exception_handlers={HTTPException: _http_error, Exception: _failure})
        app.add_middleware(_Keyed, key=self._key)
        app.add_middleware(_Ending)
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
            return _Json({"status": "not ready", "error": str(self.engine.error or "closing")}, 503)
        return _Json({"status": "ok"})

    async def _metrics(self, request: Request) -> Response:
        return PlainTextResponse(self.engine.metrics().prometheus())

    async def _version(self, request: Request) -> Response:
        return _Json({"version": package_version()})

    async def _openapi(self, request: Request) -> Response:
        return _Json(description(self._key is not None))

    async def _models(self, request: Request) -> Response:
        return _Json({"object": "list", "data": [self._named(name) for name in self._names]})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._names:
            raise HTTPException(404, f"there is no model {brief(name)}; there are: {', '.join(self._names)}")
        return _Json(self._named(name))

    def _named(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._created, "owned_by": "levanter-infer"}

    async def _tokenizer_info(self, request: Request) -> Response:
        try:
            return _Json(self._tokenization.info())
        except ValueError as error:
            return _refused(error)

    async def _tokenize(self, request: Request) -> Response:
        """In a thread of its own: a long text takes long, and so does its JSON."""
        try:
            body = await self._read(request, lambda body: body)
            return await asyncio.to_thread(lambda: _Json(self._tokenization.answer(request.url.path, body)))
        except ClientDisconnect:
            return Response(status_code=499)
        except ValueError as error:
            return _refused(error)

    async def _read(self, request: Request, made: Callable[[Any], Result]) -> Result:
        """`made` of the JSON of a body; of a large one in a thread.

        Raises: ClientDisconnect, HTTPException, ValueError, and what `made` does.
        """
        data = await _body(request, self._config.max_body_bytes, self._config.idle_timeout_s)

        def read() -> Result:
            return made(parse_json(_text(data), "the body"))

        if len(data) < _LARGE_BODY:
            return read()
        return await asyncio.get_running_loop().run_in_executor(self._large, read)

    async def _complete(self, request: Request) -> Response:
        kind, name, created = PROMPTS[request.url.path], uuid.uuid4().hex, int(time.time())
        try:
            call = await self._read(request, lambda body: self._reader.read(body, kind, name))
            if len(call.requests) > self._config.max_waiting:
                said = f"{len(call.requests)} prompts in one request; expected at most {self._config.max_waiting}"
                raise ValueError(said)
        except ClientDisconnect:
            return Response(status_code=499)
        except ValueError as error:
            return _refused(error)
        return _Attended(self._stream(call, name, created) if call.stream else self._answer(call, name, created))

    async def _answer(self, call: Call, name: str, created: int) -> AsyncGenerator[Response]:
        """The answer of a call that is no stream."""
        try:
            self.engine.check_capacity(len(call.requests))
            outputs = await _all([self.engine.generate(each) for each in call.requests])
        except RuntimeError as error:
            yield _unavailable(error)
            return
        status, content = answer(self._answers, call, outputs, name, created)
        yield _Json(content, status)

    async def _stream(self, call: Call, name: str, created: int) -> AsyncGenerator[Response | str]:
        """The events of a call; what fails before its first event comes as a status."""
        events = Events(self._answers, call, name, created, self._names[0])
        outputs: dict[int, RequestOutput] = {}
        has_begun = False
        try:
            self.engine.check_capacity(len(call.requests))
            async with contextlib.aclosing(_merged(self.engine, call)) as updates:
                async for prompt, update in updates:
                    failed = None
                    if update.output is not None:
                        outputs[prompt] = update.output
                        failed = failure(update.output)
                        if failed is not None and not has_begun:
                            status, content = failed
                            yield _Json(content, status)
                            return
                    before = "" if has_begun else events.first(update.num_prompt_tokens)
                    has_begun = True
                    yield before + (event(failed[1]) if failed is not None else events.update(prompt, update))
        except RuntimeError as error:
            yield event(error_body(str(error), "server_error")) if has_begun else _unavailable(error)
            return
        yield events.last([outputs[prompt] for prompt in sorted(outputs)])


async def _merged(engine: AsyncEngine, call: Call) -> AsyncGenerator[tuple[int, Update]]:
    """(number of the request, update) of all requests of a call, as they come."""
    if len(call.requests) == 1:
        async with contextlib.aclosing(engine.stream(call.requests[0])) as own:
            async for update in own:
                yield 0, update
        return
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


async def _all(calls: Sequence[Coroutine[Any, Any, RequestOutput]]) -> list[RequestOutput]:
    """The results of all calls; if one fails, the others are cancelled."""
    if len(calls) == 1:
        return [await calls[0]]
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


class _Attended(Response):
    """One answer, or server-sent events; cancelled if the client goes away, and closed either way."""

    def __init__(self, parts: AsyncGenerator[Response | str] | AsyncGenerator[Response]):
        super().__init__()
        self._parts = parts

    async def __call__(self, scope, receive, send) -> None:
        with contextlib.suppress(ClientDisconnect):
            async with _unless_left(receive), contextlib.aclosing(self._parts):
                has_begun = False
                async for part in self._parts:
                    if isinstance(part, Response):
                        await part(scope, receive, send)
                        return
                    if not has_begun:
                        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
                        has_begun = True
                    await send({"type": "http.response.body", "body": part.encode(), "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})


@contextlib.asynccontextmanager
async def _unless_left(receive: Callable[[], Awaitable[Any]]) -> AsyncIterator[None]:
    """Cancels its block if the client goes away. Raises: ClientDisconnect then."""
    task = asyncio.current_task()
    assert task is not None
    has_left = False

    async def watch() -> None:
        nonlocal has_left
        while (await receive())["type"] != "http.disconnect":
            pass
        has_left = True
        task.cancel()

    watcher = asyncio.ensure_future(watch())
    try:
        yield
    except asyncio.CancelledError:
        if has_left and task.uncancel() == 0:
            raise ClientDisconnect from None
        raise
    finally:
        watcher.cancel()


class _Ending:
    """Answers requests that are cancelled because the server ends (`ServeConfig.grace_s`)."""

    def __init__(self, app):
        self._app = app

    async def __call__(self, scope, receive, send) -> None:
        started: dict[str, Any] | None = None

        async def noting_start(message) -> None:
            nonlocal started
            started = message if message["type"] == "http.response.start" else started
            await send(message)

        try:
            await self._app(scope, receive, noting_start)
        except asyncio.CancelledError:
            said = error_body("the server ends, and its requests with it", "server_error")
            if started is None:
                await _Json(said, 503, headers=_CLOSE)(scope, receive, send)
            elif started.get("headers") == _STREAM_HEADERS:
                await send({"type": "http.response.body", "body": event(said).encode(), "more_body": False})


class _Keyed:
    """Refuses requests without the API key."""

    def __init__(self, app, key: str | None):
        self._app, self._key = app, None if key is None else key.encode()

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] == "http" and self._key is not None and scope["path"] not in _OPEN_PATHS:
            scheme, _, given = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(given.strip(), self._key):
                said = error_body("the API key is missing or wrong; send it as a bearer token", "authentication_error")
                await _Json(said, 401, headers={"WWW-Authenticate": "Bearer"})(scope, receive, send)
                return
        await self._app(scope, receive, send)


async def _body(request: Request, most: int, seconds: float) -> bytes:
    """Raises: HTTPException for one that is too large or comes too slowly, without reading the rest."""
    parts, size = [], 0
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                size += len(part)
                if size > most:
                    said = f"the body has more than {most} bytes (serve.max_body_bytes)"
                    raise HTTPException(413, said, headers=_CLOSE)
                parts.append(part)
    except TimeoutError:
        said = f"the body did not arrive within {seconds:g} s (serve.idle_timeout_s)"
        raise HTTPException(408, said, headers=_CLOSE) from None
    return b"".join(parts)


def _text(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"the body is not UTF-8: {error}") from None


def _refused(error: ValueError) -> Response:
    return _Json(error_body(str(error), "invalid_request_error"), 400)


def _unavailable(error: RuntimeError) -> Response:
    """The answer where the engine takes no request: its queue is full, or it has stopped."""
    if not isinstance(error, QueueFull):
        return _Json(error_body(str(error), "server_error"), 503)
    headers = {"Retry-After": str(max(1, math.ceil(error.retry_after)))}
    return _Json(error_body(str(error), "rate_limit_error"), 429, headers=headers)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    return _Json(error_body(error.detail, kind), error.status_code, headers=error.headers)


async def _failure(request: Request, error: Exception) -> Response:
    return _Json(error_body("the server failed; its log has the cause", "server_error"), 500)


def _escaped(value: object) -> str:
    return str(value).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
