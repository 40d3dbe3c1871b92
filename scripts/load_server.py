"""Load on `levanter-infer serve`: throughput, latency, and whether the server's memory and open files stay constant.

python scripts/load_server.py --requests 20000 --streams 64
python scripts/load_server.py --requests 320 --streams 64 --rounds 5 --tokens 64    # beside engine.generate, in turns
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import time
import urllib.parse
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.fuzz_server import server  # noqa: E402


class Client:
    """One connection that is kept; lean, because it shares the processor with the server."""

    def __init__(self, host: str, port: int):
        self._address = (host, port)

    async def __aenter__(self) -> "Client":
        self._reader, self._writer = await asyncio.open_connection(*self._address)
        return self

    async def __aexit__(self, *exc) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def stream(self, body: dict) -> list[float]:
        """Send a request; returns when it was sent and when each event came. Raises: RuntimeError for no stream."""
        data = json.dumps(body).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
        )
        times = [time.perf_counter()]
        self._writer.write(head.encode() + b"\r\n\r\n" + data)
        status = (await self._reader.readuntil(b"\r\n\r\n")).split(b"\r\n")[0]
        if b" 200 " not in status:
            raise RuntimeError(status.decode())
        done = False
        while size := int(await self._reader.readline(), 16):
            chunk = (await self._reader.readexactly(size + 2))[:-2]
            done = done or chunk.endswith(b"data: [DONE]\n\n")
            times.append(time.perf_counter())
        await self._reader.readline()
        if not done:
            raise RuntimeError("the stream ended early")
        return times


async def load(url: str, bodies: list[dict], streams: int) -> list[list[float]]:
    """The times of all requests, in the order of their ends."""
    parts = urllib.parse.urlsplit(url)
    left, found = iter(bodies), []

    async def work() -> None:
        async with Client(parts.hostname or "", parts.port or 80) as client:
            for body in left:
                found.append(await client.stream(body))

    await asyncio.gather(*(work() for _ in range(streams)))
    return found


def held(pid: int) -> tuple[float, int]:
    """(resident memory in MiB, open file descriptors) of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    rss = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
    return int(rss.split()[1]) / 1024, len(list(Path(f"/proc/{pid}/fd").iterdir()))


def share(values: list[float], part: float) -> float:
    """The value that `part` of all values do not exceed."""
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def request_bodies(count: int, tokens: int) -> list[dict]:
    same = {"max_tokens": tokens, "ignore_eos": True, "stream": True}
    return [{"prompt": f"{i % 90 + 5}+{i % 7}=", "seed": i, **same} for i in range(count)]


def quarters(url: str, pid: int, bodies: list[dict], streams: int) -> list[tuple[float, int]]:
    """Run all requests, print what was measured, and return `held` at the start and after each quarter."""
    found, seconds, states = [], 0.0, [held(pid)]
    print(f"start      {states[0][0]:8.1f} MiB {states[0][1]:5d} files")
    size = -(-len(bodies) // 4)
    for begin in range(0, len(bodies), size):
        started = time.perf_counter()
        found += asyncio.run(load(url, bodies[begin : begin + size], streams))
        seconds += time.perf_counter() - started
        time.sleep(0.5)  # connections that the client has closed
        states.append(held(pid))
        print(f"{begin + size:7d}    {states[-1][0]:8.1f} MiB {states[-1][1]:5d} files", flush=True)
    first = [times[1] - times[0] for times in found]
    between = [b - a for times in found for a, b in zip(times[1:], times[2:], strict=False)]
    tokens = sum(body["max_tokens"] for body in bodies)
    rates = f"{len(found) / seconds:.1f} requests/s, {tokens / seconds:.0f} tokens/s"
    print(f"{len(found)} requests in {seconds:.1f} s: {rates}")
    for name, values in (("time to first token", first), ("between events", between)):
        print(f"{name}: p50 {share(values, 0.5) * 1e3:.1f} ms, p99 {share(values, 0.99) * 1e3:.1f} ms")
    return states


async def closed_loop(engine, requests: list, streams: int) -> None:
    """The same requests from as many coroutines, without HTTP and without a second process."""
    from levanter_infer import AsyncEngine

    left = iter(requests)
    async with AsyncEngine(engine) as asynchronous:

        async def work() -> None:
            for request in left:
                async for _ in asynchronous.stream(request):
                    pass

        await asyncio.gather(*(work() for _ in range(streams)))


def beside_generate(url: str, model: str, bodies: list[dict], args: argparse.Namespace, length: int) -> None:
    """Throughput of the server, of coroutines that call `AsyncEngine`, and of `engine.generate` on the same requests,
    by turns; and the share of a core that this client takes while it loads the server."""
    from levanter_infer import EngineConfig, InferenceEngine, Request, SamplingParams, load_model

    weights, tokenizer = load_model(model)
    engine = InferenceEngine(weights, tokenizer, EngineConfig(max_seqs=args.max_seqs, max_seq_len=length))
    engine.warmup()
    keys = ("max_tokens", "ignore_eos", "seed")
    requests = [Request(prompt=b["prompt"], sampling=SamplingParams(**{k: b[k] for k in keys})) for b in bodies]
    tokens, rates = sum(body["max_tokens"] for body in bodies), []
    for number in range(args.rounds + 1):
        times, used = [time.perf_counter()], time.process_time()
        asyncio.run(load(url, bodies, args.streams))
        times.append(time.perf_counter())
        client = (time.process_time() - used) / (times[1] - times[0])
        asyncio.run(closed_loop(engine, requests, args.streams))
        times.append(time.perf_counter())
        engine.generate(requests)
        times.append(time.perf_counter())
        if number:  # the first warms all
            rates.append([tokens / (end - begin) for begin, end in zip(times, times[1:], strict=False)] + [client])
            server, loop, generate, _ = rates[-1]
            said = f"server {server:.0f}, AsyncEngine {loop:.0f}, generate {generate:.0f} tokens/s"
            print(f"{said}; client {client:.3f} of a core", flush=True)
    print(
        f"median of {args.rounds}: server / generate {statistics.median(s / g for s, _, g, _ in rates):.3f}", end=", "
    )
    print(f"AsyncEngine / generate {statistics.median(a / g for _, a, g, _ in rates):.3f}", end=", ")
    print(f"client {statistics.median(c for *_, c in rates):.3f} of a core")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--max_seqs", type=int, default=64, help="sequences that the engine computes at once")
    parser.add_argument("--tokens", type=int, default=8, help="of each answer")
    parser.add_argument("--rounds", type=int, default=0, help="compare with engine.generate this often")
    parser.add_argument("--model", default="models/tiny")
    args = parser.parse_args()
    max_seq_len = 64 + args.tokens
    bodies = request_bodies(args.requests, args.tokens)
    options = ("--engine.max_seqs", str(args.max_seqs), "--engine.max_seq_len", str(max_seq_len))
    with server(*options, model=args.model) as (url, pid):
        if args.rounds:
            beside_generate(url, args.model, bodies, args, max_seq_len)
            return 0
        asyncio.run(load(url, bodies[: 4 * args.streams], args.streams))
        quarters(url, pid, bodies, args.streams)
    return 0


if __name__ == "__main__":
    sys.exit(main())
