"""`levanter-infer serve --model NAME`: an HTTP server with OpenAI's completion endpoints.

Messages go to standard error. SIGTERM and SIGINT end it: it takes no further connections, requests in progress have
`serve.grace_s` to end, and the exit status is 0.
"""

import asyncio
import dataclasses
import gc
import logging
import resource
import sys
from collections.abc import Callable, Sequence

from levanter_infer.cli import run_command

if __name__ == "__main__":  # here, so that an interrupt during the imports below leaves no traceback
    run_command("serve")

from levanter_infer.cli.common import run_config
from levanter_infer.cli.session import make_engine
from levanter_infer.io.prompts import RowParser, chat_settings
from levanter_infer.io.terminal import say
from levanter_infer.serve.config import ServeRunConfig

logger = logging.getLogger(__name__)
_OTHER_FILES = 256
"""Open files besides connections, at most."""
_SWITCH_S = 0.0005
"""Seconds that the engine's thread waits for the interpreter at most while the event loop has it."""
USAGE = """\
usage: levanter-infer serve --model NAME [--config FILE] [--KEY VALUE ...]

An HTTP server with OpenAI's completion endpoints: /v1/completions, /v1/chat/completions, /v1/models, and /health,
/metrics, /version, /openapi.json. It listens on 127.0.0.1:8000; docs/serving.md says more.

  --config FILE       the configuration; its `sampling` has the defaults of requests
  --model NAME        a directory in Hugging Face's layout, or a hub id
  --host, --port      the address; any but a loopback address needs an API key
  --tool_call_parser NAME
                      how the model writes tool calls: hermes, llama3_json or mistral
  --help              this text
"""
"""Read from the source by `cli.command_help`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    options = {name: f"serve.{name}" for name in ("host", "port", "tool_call_parser")}
    return run_config("serve", argv, run, ServeRunConfig, options)


def run(config: ServeRunConfig) -> int:
    """Serve until a signal; returns the exit status. Raises: ValueError for what stops the start."""
    try:
        import uvicorn

        from levanter_infer.serve.connections import http_config, listener
    except ModuleNotFoundError as e:
        raise ValueError(
            f"serve needs {e.name}: install this package with its extra, in a checkout pip install '.[serve]'"
        ) from e
    key = config.serve.api_key()
    try:
        # Before the model is loaded, so that an address in use is answered at once.
        bound = listener(config.serve.host, config.serve.port)
    except OSError as e:
        where = f"serve.host={config.serve.host} serve.port={config.serve.port}"
        raise ValueError(f"cannot listen on {where}: {e.strerror or e}") from e
    ahead = dict.fromkeys(config.serve.compile_ahead, True)
    engine = make_engine(config, 0, ahead=ahead | {"num_beams": config.serve.compile_num_beams})
    engine.warmup()

    from levanter_infer.engine.async_engine import AsyncEngine
    from levanter_infer.io.openai import Answers
    from levanter_infer.serve.app import Service
    from levanter_infer.serve.calls import CallReader
    from levanter_infer.serve.tokenization import Tokenization
    from levanter_infer.serve.tools import ToolReader

    tools = ToolReader(config.serve.tool_call_parser, engine.tokenizer)

    async def serve() -> None:
        names = config.model_names
        parser = RowParser(dataclasses.replace(config.sampling, seed=None), chat_settings(config))
        reader = CallReader(parser, tools, names, config.serve.max_prompts)
        answers = Answers(names[0], engine.tokenizer)
        waiting, seconds = config.serve.max_waiting, config.serve.max_round_seconds
        async with AsyncEngine(engine, max_waiting=waiting, max_round_seconds=seconds) as running:
            facts = {"engine": engine.describe()}
            tokenization = Tokenization(engine.tokenizer, engine.shapes.max_seq_len, names)
            service = Service(running, answers, reader, config.serve, tokenization, api_key=key, facts=facts)
            host, port = bound.getsockname()[:2]
            say(f"serving   http://{f'[{host}]' if ':' in host else host}:{port} as {', '.join(names)}")
            await uvicorn.Server(http_config(service.app(), config.serve)).serve(sockets=[bound])

    _quicken()
    allow_files(config.serve.max_connections)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(serve())
    except KeyboardInterrupt:  # uvicorn raises the signal again once all is over
        pass
    say(f"served    {engine.stats()['generated_tokens']} tokens")
    return 0


def _quicken() -> None:
    """Settings of the interpreter for two busy threads, that of the engine and that of the event loop."""
    gc.collect()
    gc.freeze()  # a full collection would look at all that JAX has made, for half a second
    sys.setswitchinterval(_SWITCH_S)


def allow_files(connections: int) -> None:
    """Raise the process' limit on open files so that so many connections fit. A system that does not let it gets a
    warning: further connections would wait unanswered there."""
    wanted = connections + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))
    if allowed < wanted:
        logger.warning(
            "the system allows %d open files, and serve.max_connections=%d needs %d; lower it or raise ulimit -n",
            allowed,
            connections,
            wanted,
        )


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, if it is installed."""
    try:
        import uvloop
    except ModuleNotFoundError:
        return None
    return uvloop.new_event_loop
