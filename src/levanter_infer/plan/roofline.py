"""Upper bounds of speed, from the bytes and operations of each step. A model: nothing was measured on a target.

Source: the roofline model, Williams et al. 2009, doi:10.1145/1498765.1498785; collectives over rings, Patarasu and Yuan
2009, doi:10.1016/j.jpdc.2008.09.002.
"""

import dataclasses
import math
import re
from collections.abc import Mapping

from levanter_infer.plan.figures import Figures
from levanter_infer.plan.hlo import Collective
from levanter_infer.plan.targets import Chip

_DIMS = re.compile(r"\[([\d,]*)\]")
_LAYER_DEPTH = 3
"""Least loop depth of a layer's collectives: steps, buckets, layers, and perhaps equal layers that share a body."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """Mean tokens of a request."""

    prompt_tokens: int
    output_tokens: int


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Seconds of a step on each device."""

    weights_s: float
    """Time to read the weights."""
    kv_s: float
    """Time to read keys and values."""
    compute_s: float
    collectives_s: float

    @property
    def total_s(self) -> float:
        """Memory and arithmetic overlap; collectives follow."""
        return max(self.weights_s + self.kv_s, self.compute_s) + self.collectives_s


@dataclasses.dataclass(frozen=True)
class Speed:
    """Modelled speed of an engine."""

    sequences: int
    """Maximal concurrent sequences per data-parallel rank."""
    seqs_by_pages: int
    """Concurrent sequences that the pages of a data-parallel rank allow."""
    decode: StepTime
    """A step in which every sequence gets a token."""
    prompt_s: float
    """Time to compute a prompt, in steps full of prompt tokens."""
    decode_tokens_per_s: float
    """Generated tokens per second of all devices while all sequences decode."""
    tokens_per_s: float
    """Generated tokens per second of all devices in the steady state of the workload."""
    gains: dict[str, float]
    """Speed-up from twice as much of each resource, the largest first. Of gains that are equal to a tenth, those that a
    configuration can change come first."""
    assumptions: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class StepCollectives:
    """Collectives in a step of one bucket, by how often they run."""

    per_layer: tuple[Collective, ...]
    per_step: tuple[Collective, ...]
    per_block: tuple[Collective, ...]
    """Collectives of each block of rows that is sampled together; some run only for certain parameters."""


def step_collectives(found: tuple[Collective, ...], figures: Figures, bucket: int) -> StepCollectives:
    """The collectives of a round that a step of `bucket` tokens runs."""
    hidden = figures.model["hidden"]

    def dims(each: Collective) -> tuple[int, ...]:
        match = _DIMS.search(each.kind)
        return tuple(int(n) for n in match[1].split(",") if n) if match else ()

    def is_activations(each: Collective) -> bool:
        rows, columns = dims(each) if len(dims(each)) == 2 else (0, 0)
        in_parts = each.operation == "collective-permute" and columns > 0 and hidden % columns == 0  # around a ring
        return rows in figures.buckets and (columns == hidden or in_parts)

    own = [each for each in found if is_activations(each) and dims(each)[0] == bucket]
    rest = [each for each in found if each.depth > 0 and not is_activations(each)]
    return StepCollectives(
        per_layer=tuple(each for each in own if each.depth >= _LAYER_DEPTH),
        per_step=tuple(each for each in own if each.depth < _LAYER_DEPTH)
        + tuple(each for each in rest if each.depth == 1),
        per_block=tuple(each for each in rest if each.depth > 1),
    )


def assumed_collectives(figures: Figures, bucket: int) -> tuple[Collective, ...]:
    """Collectives that tensor parallelism needs at least: two all-reduces in each layer, and one of the embeddings."""
    parts, hidden, itemsize = (figures.model[name] for name in ("parts", "hidden", "itemsize"))
    if parts == 1:
        return ()
    each = Collective("all-reduce", f"[{bucket},{hidden}]", bucket * hidden * itemsize, parts, _LAYER_DEPTH, 2)
    return each, dataclasses.replace(each, depth=_LAYER_DEPTH - 1, count=1)


def send_s(each: Collective, chip: Chip, scale: float = 1.0) -> float:
    """Seconds of all instances of a collective with `scale` times as many bytes, over a ring in both directions."""
    share = (each.parts - 1) / each.parts
    passes = {"all-reduce": 2 * share, "collective-permute": 1.0}.get(each.operation, share)
    size = passes * scale * each.num_bytes
    bandwidth = size / (chip.link_gbps * 1e9) if chip.link_gbps else 0.0
    return each.count * (bandwidth + each.parts * chip.hop_us * 1e-6)


def model_speed(figures: Figures, chip: Chip, workload: Workload, collectives: tuple[Collective, ...] | None) -> Speed:
    """The modelled speed.

    Args:
        chip: with `memory_gbps` and `tflops`.
        collectives: collectives of the compiled round; None: it was not compiled.
    """
    if figures.block_tokens is not None:
        collectives = None  # sums in order are an all-to-all and an all-gather, with the bytes of an all-reduce
    model = _Model(figures, chip, workload, collectives, figures.forward_tokens)
    tokens_per_s = model.tokens_per_s
    gains = {name: more.tokens_per_s / tokens_per_s for name, more in model.with_more().items()}
    return Speed(
        sequences=model.sequences,
        seqs_by_pages=model.seqs_by_pages,
        decode=model.decode,
        prompt_s=model.prompt_s,
        decode_tokens_per_s=figures.num_ranks * model.sequences / model.decode.total_s,
        tokens_per_s=tokens_per_s,
        gains=dict(sorted(gains.items(), key=lambda item: -round(item[1], 1))),
        assumptions=_assumptions(figures, chip, workload, collectives is not None),
    )


@dataclasses.dataclass(frozen=True)
class _Model:
    figures: Figures
    chip: Chip
    workload: Workload
    collectives: tuple[Collective, ...] | None
    compiled_buckets: tuple[int, ...]
    """Buckets of the compiled collectives; the bytes of another step size are in proportion."""

    @property
    def _held(self) -> float:
        """Mean number of stored tokens of a sequence."""
        return self.workload.prompt_tokens + self.workload.output_tokens / 2

    @property
    def seqs_by_pages(self) -> int:
        return int(self.figures.num_pages / (self._held / self.figures.page_size + 0.5))

    @property
    def sequences(self) -> int:
        return max(1, min(self.figures.max_seqs, self.seqs_by_pages))

    @property
    def decode(self) -> StepTime:
        return self._step(self.sequences, self._held, self.sequences)

    @property
    def prompt_s(self) -> float:
        tokens, most = self.workload.prompt_tokens, self.figures.max_step_tokens
        attention_s = self._attention_flops * tokens**2 / 2 / self._flops_per_s
        return tokens / most * self._step(most, 0.0, 0).total_s + attention_s

    @property
    def tokens_per_s(self) -> float:
        prompts = self.sequences / self.workload.output_tokens
        return self.figures.num_ranks * self.sequences / (self.decode.total_s + prompts * self.prompt_s)

    def with_more(self) -> Mapping[str, "_Model"]:
        """Models with twice as much of one resource."""
        figures, chip = self.figures, self.chip
        buckets = tuple(2 * size if size >= figures.max_seqs else size for size in figures.buckets)
        slots = dataclasses.replace(
            figures, max_seqs=2 * figures.max_seqs, max_step_tokens=2 * figures.max_step_tokens, buckets=buckets
        )
        more = {
            "memory bandwidth": dataclasses.replace(chip, memory_gbps=2 * chip.memory_gbps),
            "arithmetic": dataclasses.replace(chip, tflops=2 * chip.tflops),
        }
        if figures.model["parts"] > 1:
            more["links"] = dataclasses.replace(chip, link_gbps=2 * chip.link_gbps, hop_us=chip.hop_us / 2)
        sizes = {
            "slots (engine.max_seqs)": slots,
            "pages (engine.max_pages)": dataclasses.replace(figures, num_pages=2 * figures.num_pages),
        }
        models = {name: dataclasses.replace(self, chip=each) for name, each in more.items()}
        return {name: dataclasses.replace(self, figures=each) for name, each in sizes.items()} | models

    @property
    def _flops_per_s(self) -> float:
        return self.chip.tflops * 1e12

    @property
    def _attention_flops(self) -> float:
        """Operations of one query and one key in all layers, on one device."""
        model = self.figures.model
        return 2.0 * model["q_heads"] * (model["head_dim"] + model["value_dim"]) * model["layers"]

    def _step(self, tokens: int, context: float, sampled: int) -> StepTime:
        """Time of a step of `tokens` that reads keys and values of `context` tokens for each running sequence."""
        figures, model = self.figures, self.figures.model
        sizes = figures.forward_tokens
        index = next((i for i, size in enumerate(sizes) if size >= tokens), len(sizes) - 1)
        blocks = math.ceil(tokens / sizes[index])  # one, unless `block_tokens` says how large they are
        head_blocks = max(1, math.ceil(sampled / (figures.block_tokens or figures.max_seqs)))
        head_rows = sampled if figures.block_tokens is None else head_blocks * figures.block_tokens
        share, touched = 1.0, 1.0
        if model["experts"]:
            share = model["experts_per_token"] / model["experts"]
            touched = 1 - (1 - share) ** (tokens / blocks)
        layers = figures.weights_bytes - model["embedding_bytes"] - model["head_bytes"]
        flops = 2.0 * blocks * sizes[index] * (layers - (1 - share) * model["expert_bytes"])
        flops = (flops + 2.0 * head_rows * model["head_bytes"]) / model["weight_itemsize"]
        flops += self.sequences * context * self._attention_flops
        bandwidth = self.chip.memory_gbps * 1e9
        kinds = [(context, figures.page_bytes)]
        kinds += [(min(context, each.window), each.page_bytes) for each in figures.windows]
        read_bytes = sum(tokens * each / figures.page_size for tokens, each in kinds)
        return StepTime(
            weights_s=(blocks * (layers - (1 - touched) * model["expert_bytes"]) + head_blocks * model["head_bytes"])
            / bandwidth,
            kv_s=self.sequences * read_bytes / bandwidth,
            compute_s=flops / self._flops_per_s,
            collectives_s=blocks * self._send_s(index, sampled),
        )

    def _send_s(self, index: int, sampled: int) -> float:
        """Seconds of the collectives in a step of a bucket with `sampled` sampled rows."""
        figures, compiled = self.figures, self.compiled_buckets[index]
        found = assumed_collectives(figures, compiled) if self.collectives is None else self.collectives
        sent = step_collectives(found, dataclasses.replace(figures, buckets=self.compiled_buckets), compiled)
        scale = figures.forward_tokens[index] / compiled
        blocks = math.ceil(sampled / figures.sampled_rows)
        layers = figures.model["layers"]
        if self.collectives is not None:  # those of all bodies, of which a loop over periods runs each for some layers
            layers = figures.model["looped_layers"] / max(1, figures.model["layer_bodies"])
        groups = ((sent.per_layer, layers, scale), (sent.per_step, 1, scale), (sent.per_block, blocks, 1.0))
        return sum(times * send_s(each, self.chip, size) for group, times, size in groups for each in group)


def _assumptions(figures: Figures, chip: Chip, workload: Workload, is_compiled: bool) -> tuple[str, ...]:
    blocks = "" if figures.block_tokens is None else f" for each block of {figures.block_tokens} tokens"
    by = "measured here" if chip.platform == "cpu" else "from the data sheet"
    lines = [
        f"requests of {workload.prompt_tokens} prompt and {workload.output_tokens} generated tokens, always enough of "
        "them, which share nothing",
        f"memory at {chip.memory_gbps:.0f} GB/s and matmuls at {chip.tflops:.3g} Tflop/s, {by}, all of "
        "it used: an upper bound",
        f"a step reads all weights but the embeddings once{blocks} and the keys and values of its sequences once, and "
        "computes meanwhile",
        "sequences are in the middle of their generation in the mean; prompts fill steps of their own",
        "the host's work is hidden behind the device's",
    ]
    if figures.block_tokens is not None:
        lines.append("attention takes as long as its reads; in blocks its kernels may take longer (docs/numerics.md)")
    if figures.model["experts"]:
        lines.append("experts are chosen evenly and independently")
    if figures.model["parts"] > 1:
        what = "as compiled, conditional ones included" if is_compiled else "2 sums a layer and 1 of the embeddings"
        lines.append(
            f"collectives, {what}, over a ring: {chip.link_gbps:.0f} GB/s, and {chip.hop_us:.0f} µs for each device in "
            "it; nothing is computed meanwhile"
        )
    return tuple(lines)
