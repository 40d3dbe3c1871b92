"""`ServeRunConfig`: the configuration of a server."""

import dataclasses
import ipaddress
import os
from pathlib import Path

from levanter_infer.config import RunConfig
from levanter_infer.engine.params import brief
from levanter_infer.policies import ToolCallParser

API_KEY = "LEVANTER_INFER_API_KEY"
"""Environment variable with the API key."""
COMPILED_AHEAD = ("constraints", "scoring", "routing")
"""Arguments of `InferenceEngine` that say what it is compiled for at once."""


@dataclasses.dataclass(frozen=True)
class ServeConfig:
    """Address and limits of the server."""

    host: str = "127.0.0.1"
    """Address to listen on. Any other than a loopback address needs an API key."""
    port: int = 8000
    """Port to listen on; 0: a free one, which is printed."""
    api_key_file: str | None = None
    """A file with the API key, which clients send as a bearer token. Default: the environment variable
    LEVANTER_INFER_API_KEY; without either no key is asked for."""
    model_names: list[str] = dataclasses.field(default_factory=list)
    """Names of the model in requests; answers have the first. Default: the last part of the model's path."""
    max_waiting: int = 1024
    """Requests that wait for their first token, at most; a further one is answered with 429."""
    max_round_seconds: float = 0.05
    """Seconds that a round should take, at most, if engine.max_round_seconds is longer. A stream has one event for the
    tokens of a round, and a request starts with the next round."""
    max_connections: int = 4096
    """Open connections, at most; a further one is answered with 503."""
    max_body_bytes: int = 8388608
    """Bytes of a request's body, at most; a larger one is answered with 413."""
    max_prompts: int = 1024
    """Prompts of one request to /v1/completions, at most."""
    idle_timeout_s: float = 60.0
    """Seconds that a client may take to send the head of a request, to send its body, or to read what was sent; then
    its connection is closed."""
    tool_call_parser: str = "none"
    """How the model writes tool calls: hermes, llama3_json, mistral, or none, where calls stay text."""
    compile_ahead: list[str] = dataclasses.field(default_factory=list)
    """Features whose programs are compiled before the first request: constraints (structured output), scoring
    (`prompt_logprobs`, or `echo` with `logprobs`) and routing (`return_routed_experts`). Otherwise the first request
    that asks for one has the programs compiled again, and all others wait meanwhile."""
    compile_num_beams: int = 1
    """Beams of the widest searches (`num_beams`) whose programs are compiled before the first request, likewise."""
    grace_s: float = 30.0
    """Seconds that requests in progress have to end after SIGTERM; then they are aborted."""

    def __post_init__(self):
        if self.tool_call_parser not in list(ToolCallParser):
            raise ValueError(
                f"serve.tool_call_parser={brief(self.tool_call_parser)}: expected {ToolCallParser.listed()}"
            )
        for part in self.compile_ahead:
            if part not in COMPILED_AHEAD:
                raise ValueError(f"serve.compile_ahead has {brief(part)}; expected {', '.join(COMPILED_AHEAD)}")
        for name, low, high in (
            ("port", 0, 65535),
            ("max_waiting", 1, 2**31 - 1),
            ("max_connections", 1, 2**31 - 1),
            ("max_body_bytes", 1, 2**31 - 1),
            ("max_prompts", 1, 2**31 - 1),
            ("compile_num_beams", 1, 2**31 - 1),
        ):
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"serve.{name}={getattr(self, name)}: expected {low} to {high}")
        for name in ("idle_timeout_s", "max_round_seconds"):
            if not 0 < getattr(self, name) <= 1e6:
                raise ValueError(f"serve.{name}={getattr(self, name)}: expected seconds above 0, and up to 1e6")
        if not 0 <= self.grace_s <= 1e6:
            raise ValueError(f"serve.grace_s={self.grace_s}: expected seconds from 0 to 1e6")
        if not all(self.model_names):
            raise ValueError(f"serve.model_names={brief(self.model_names)}: expected names that are not empty")

    def api_key(self) -> str | None:
        """The key that clients must send; None: no key.

        Raises: ValueError if the file cannot be read, the key is empty, or the address needs a key and has none.
        """
        key = os.environ.get(API_KEY)
        if self.api_key_file is not None:
            try:
                key = Path(self.api_key_file).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as e:
                raise ValueError(f"serve.api_key_file={brief(self.api_key_file)}: cannot be read: {e}") from e
        key = key if key is None else key.strip()  # as what clients send; secrets often end with a line break
        if key == "":
            raise ValueError("the API key is empty; give one in serve.api_key_file, or in none at all")
        if key is None and not _is_loopback(self.host):
            raise ValueError(
                f"serve.host={brief(self.host)} is reached from other machines and no API key is set; give "
                f"serve.api_key_file or {API_KEY}, or listen on 127.0.0.1"
            )
        return key


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclasses.dataclass(frozen=True)
class ServeRunConfig(RunConfig):
    """Configuration of a server."""

    serve: ServeConfig = dataclasses.field(default_factory=ServeConfig)

    def __post_init__(self):
        for name, given in (("prompts", self.prompts), ("prompts_file", self.prompts_file), ("chat", self.chat)):
            if given:
                raise ValueError(f"{name} with a server, which gets its prompts from requests; leave it out")
        if self.output is not None:
            raise ValueError("output with a server, which answers its clients; leave it out")
        if self.multihost.is_on:
            raise ValueError("multihost with a server, which runs in one process; leave it out")
        self.check_files()

    @property
    def model_names(self) -> list[str]:
        """Names of the model, the one of answers first."""
        return self.serve.model_names or [self.model.path.rstrip("/").rsplit("/", 1)[-1]]
