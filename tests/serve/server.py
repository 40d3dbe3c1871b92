"""A server on loopback in a thread of this process, over the model in models/tiny."""

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import Iterator

import uvicorn

from levanter_infer import AsyncEngine, EngineConfig, InferenceEngine, SamplingParams, load_model
from levanter_infer.io.openai import Answers
from levanter_infer.io.prompts import RowParser
from levanter_infer.serve.app import Service
from levanter_infer.serve.calls import CallReader
from levanter_infer.serve.config import ServeConfig
from levanter_infer.serve.connections import http_config, listener
from levanter_infer.serve.tokenization import Tokenization
from levanter_infer.serve.tools import ToolReader

MODEL = "models/tiny"


def tiny_engine() -> InferenceEngine:
    model, tokenizer = load_model(MODEL)
    config = EngineConfig(max_seqs=16, max_seq_len=256, page_size=4, max_step_tokens=64, max_logprobs=4)
    return InferenceEngine(model, tokenizer, config, scoring=True, constraints=True)


@dataclasses.dataclass
class Running:
    """A server that runs."""

    url: str
    engine: InferenceEngine
    asynchronous: AsyncEngine
    loop: asyncio.AbstractEventLoop
    server: uvicorn.Server

    def end(self) -> None:
        """As SIGTERM does."""
        self.server.should_exit = True


@contextlib.contextmanager
def running(engine: InferenceEngine, *, api_key: str | None = None, **limits) -> Iterator[Running]:
    """Serve until the block ends.

    Args:
        limits: of `ServeConfig`.
    """
    config = ServeConfig(model_names=["tiny", "other"], **limits)
    started: threading.Event = threading.Event()
    found: dict[str, Running] = {}
    bound = listener("127.0.0.1", 0)

    async def serve() -> None:
        async with AsyncEngine(engine, max_waiting=config.max_waiting) as asynchronous:
            parser = RowParser(SamplingParams(max_tokens=8))
            tools = ToolReader(config.tool_call_parser, engine.tokenizer)
            reader = CallReader(parser, tools, config.model_names, config.max_prompts)
            tokenization = Tokenization(engine.tokenizer, engine.shapes.max_seq_len, config.model_names)
            answers = Answers("tiny", engine.tokenizer)
            service = Service(asynchronous, answers, reader, config, tokenization, api_key=api_key)
            server = uvicorn.Server(http_config(service.app(), config))
            server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
            url = f"http://127.0.0.1:{bound.getsockname()[1]}"
            found["it"] = Running(url, engine, asynchronous, asyncio.get_running_loop(), server)
            started.set()
            await server.serve(sockets=[bound])

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert started.wait(120)
    try:
        yield found["it"]
    finally:
        found["it"].end()
        thread.join(60)
        assert not thread.is_alive()
