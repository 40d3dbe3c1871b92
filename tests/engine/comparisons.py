"""Requests of all kinds, alone and in a batch, compared to the bit."""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any
from unittest import mock

import numpy as np

from levanter_infer.engine.backend_choice import BackendChoice
from levanter_infer.engine.config import EngineConfig
from levanter_infer.engine.engine import InferenceEngine
from levanter_infer.engine.params import SamplingParams
from levanter_infer.engine.request import Request
from levanter_infer.kernels.tpu.tiling import Tiles
from levanter_infer.layers.layout import Layout
from tests.tiny_models import tiny_model

_MOST_BEAMS = 3
NONE: Mapping[str, Any] = MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The backend of an engine on a TPU or a GPU, on a CPU: the forward in blocks, matmuls and attention by XLA, or
    by kernels in Pallas' interpreter."""

    platform: str = "tpu"
    matmul: str = "xla"
    attention: str = "xla"
    tokens: int = 16
    """Tokens of a block: fewer than in an engine, so that steps of a tiny model have several."""
    is_apart: bool = True
    """False: the default mode, for tests of the tests."""
    tiles: Tiles | None = None
    """Tiles of the kernel for TPUs; None: those of a TPU."""

    def chosen(self, model) -> contextlib.AbstractContextManager:
        """Engines that are made in this context compute like this."""

        def choose(config, types, *, mesh=None, **_) -> BackendChoice:
            layout = dataclasses.replace(Layout.of(mesh, model.config), sums_in_order=self.is_apart)
            choice = BackendChoice.of(self.platform, layout, matmul=self.matmul, attention=self.attention)
            parts = {name: getattr(choice, name) for name in ("matmul_backend", "attention_backend")}
            own = dict(is_apart=self.is_apart, block_size=self.tokens)
            parts = {name: dataclasses.replace(part, **own) for name, part in parts.items()}
            choice = dataclasses.replace(choice, **parts)
            return choice if self.tiles is None else choice._with_options(tiles=self.tiles)

        return mock.patch.object(BackendChoice, "choose", choose)


def make_engine(
    dtype: str = "float32", *, model=None, with_beams: bool = False, family: Mapping[str, Any] = NONE,
    blocks: Blocks | None = None, mesh=None, **config,
) -> InferenceEngine:  # fmt: skip
    """
    Args:
        model: None for the tiny one of `dtype`.
        blocks: compute as on a TPU; None: by the kernels for CPUs.
        mesh: as of an engine.
        with_beams: compile for searches at once, and not again with the first one.
        family: changes to the tiny Llama.
    """
    sizes = dict(max_seq_len=96, numerics="batch_invariant", prefix_cache=True)
    model = model or tiny_model(dtype=dtype, **family)
    with contextlib.nullcontext() if blocks is None else blocks.chosen(model):
        engine = InferenceEngine(model, config=EngineConfig(**{**sizes, **config}), mesh=mesh)
    if with_beams:
        sampling = SamplingParams(num_beams=_MOST_BEAMS, max_tokens=1)
        assert engine.generate([Request(prompt_token_ids=[1], sampling=sampling)])[0].error is None
    return engine


def random_requests(count: int, seed: int) -> list[Request]:
    rng = np.random.default_rng(seed)
    common = rng.integers(0, 61, 40).tolist()
    requests = []
    for i in range(count):
        begin = common[: int(rng.integers(0, 40))] if rng.random() < 0.6 else []
        sampling = SamplingParams(
            max_tokens=int(rng.integers(1, 24)),
            temperature=float(rng.choice([0, 0.7, 1.0])),
            top_p=float(rng.choice([1, 0.9])),
            top_k=int(rng.choice([0, 5])),
            frequency_penalty=float(rng.choice([0, 0, 0.5])),
            n=int(rng.choice([1, 1, 3])),
            seed=int(rng.integers(2**30)),
        )
        ids = begin + rng.integers(0, 61, int(rng.integers(1, 20))).tolist()
        requests.append(Request(prompt_token_ids=ids, sampling=sampling, id=str(i)))
    return requests


def random_searches(count: int, seed: int) -> list[Request]:
    """Beam searches that fit into the smallest of the pools."""
    rng = np.random.default_rng([seed, 1])
    common = rng.integers(0, 61, 12).tolist()
    requests = []
    for i in range(count):
        beams = int(rng.integers(2, _MOST_BEAMS + 1))
        sampling = SamplingParams(
            num_beams=beams, n=int(rng.integers(1, beams + 1)), max_tokens=int(rng.integers(1, 9)),
            length_penalty=float(rng.choice([0, 1, 2])), early_stopping=bool(rng.random() < 0.5),
            stop_token_ids=rng.integers(0, 61, 3).tolist(),
        )  # fmt: skip
        ids = common[: int(rng.integers(13))] + rng.integers(0, 61, int(rng.integers(1, 9))).tolist()
        requests.append(Request(prompt_token_ids=ids, sampling=sampling, id=f"search {i}"))
    return requests


@dataclasses.dataclass(frozen=True)
class Resampling:
    """A request whose samples go on from one another, once, when all have so many tokens or have ended."""

    request: Request
    after: int
    ancestors: list[int]


def random_resamplings(count: int, seed: int) -> list[Resampling]:
    rng = np.random.default_rng([seed, 2])
    made = []
    for i in range(count):
        n = int(rng.integers(2, 4))
        sampling = SamplingParams(max_tokens=int(rng.integers(8, 24)), n=n, seed=int(rng.integers(2**30)))
        ids = rng.integers(0, 61, int(rng.integers(1, 30))).tolist()
        request = Request(prompt_token_ids=ids, sampling=sampling, id=f"resampling {i}")
        made.append(Resampling(request, int(rng.integers(1, 6)), rng.integers(0, n, n).tolist()))
    return made


def bits(outputs) -> list:
    """Tokens of every completion, and the bits of both logprobs and of the score."""
    return [[_bits(c) for c in output.completions] for output in outputs]


def _bits(completion) -> tuple:
    logprobs = (completion.logprobs, completion.processed_logprobs)
    return completion.token_ids, *(np.asarray(values, np.float32).tobytes() for values in logprobs), completion.score


Served = tuple[list[tuple], list | None]
"""The bits of each completion, and of what each sample went on from with whether that had ended."""


def serve(engine: InferenceEngine, cases: Sequence[Request | Resampling]) -> list[Served]:
    """Serve all together."""
    groups = [engine.submit(case.request if isinstance(case, Resampling) else case) for case in cases]
    begun: dict[int, list | None] = {i: None for i, case in enumerate(cases) if isinstance(case, Resampling)}
    waiting = set(begun)
    while not all(group.is_done for group in groups):
        engine.step_round(max_steps=3 if waiting else None)
        for i in [i for i in waiting if _is_due(groups[i], cases[i].after)]:
            engine.flush()
            waiting.remove(i)
            ancestors = cases[i].ancestors
            before = [groups[i].sequences[a].snapshot() for a in ancestors]
            try:
                engine.resample(groups[i], ancestors)
            except ValueError as error:
                assert "need a slot to go on" in str(error)  # and nothing has changed
                continue
            begun[i] = [(_bits(ancestor), ancestor.finish_reason is not None) for ancestor in before]
    engine.drain()
    found = [[_bits(completion) for completion in group.output().completions] for group in groups]
    return [(of_group, begun.get(i)) for i, of_group in enumerate(found)]


def _is_due(group, after: int) -> bool:
    ended = [s.finish_reason is not None for s in group.sequences]
    return not all(ended) and all(
        end or len(s.token_ids) >= after for end, s in zip(ended, group.sequences, strict=True)
    )


def expected(alone: InferenceEngine, case: Request | Resampling, prefixes: list | None) -> list[tuple]:
    """The result of a case by itself, in an engine that serves nothing else."""
    request = case.request if isinstance(case, Resampling) else case
    (whole,) = bits(alone.generate([request]))
    if prefixes is None:
        return whole
    assert isinstance(case, Resampling)
    made = []
    for index, (((tokens, *logprobs, score), has_ended), ancestor) in enumerate(
        zip(prefixes, case.ancestors, strict=True)
    ):
        # A prefix is that of its sample alone
        own_tokens, *own_logprobs, _ = whole[ancestor]
        is_own = own_tokens[: len(tokens)] == tokens
        is_own &= all(own.startswith(part) for own, part in zip(own_logprobs, logprobs, strict=True))
        rest = request.sampling.max_tokens - len(tokens)
        if not is_own or has_ended:
            made.append((tokens if is_own else None, *logprobs, score))
            continue
        # What follows depends on the text so far, the seed and the sample's own index: on a prompt that ends there
        longer = dataclasses.replace(
            request,
            prompt_token_ids=[*request.prompt_token_ids, *tokens],  # type: ignore[misc]
            sampling=dataclasses.replace(request.sampling, max_tokens=rest, n=index + 1),
        )
        more, *after, _ = bits(alone.generate([longer]))[0][index]
        made.append((tokens + more, *(b + a for b, a in zip(logprobs, after, strict=True)), score))
    return made


def all_kinds(count: int, seed: int) -> list[Request | Resampling]:
    """Nine in ten are samples, of the others every second one a search."""
    some = count // 20
    return [
        *random_requests(count - 2 * some, seed),
        *random_searches(some, seed),
        *random_resamplings(some, seed),
    ]
