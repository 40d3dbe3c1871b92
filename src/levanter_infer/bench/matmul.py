"""The matmuls of a step alone: a lower bound of the step time.

Each matmul runs layer by layer over the whole stack, as in a step, fused with its norm and residual; `mlp` is the three
of a feed-forward block, which may be one call. `call_ms` is such a call for no rows at all.

`--limits` measures, in turn with each matmul, how fast memory is read and how fast the instruction set of the kernels
multiplies and adds, and prints each matmul's share of the bound that follows (`bench/limits.py`): 1 is as fast as this
processor can be. Memory's bandwidth is that of as many bytes as the matmul's weights in all layers have, because they
are read in turn and may stay in a cache; the last line has the bandwidth of memory itself, by the number of threads.
"""

import argparse
import functools
from collections.abc import Callable, Sequence

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from levanter_infer.axes import TOKEN
from levanter_infer.bench.attention import Clock
from levanter_infer.bench.instruction_sets import (
    add_isa_argument,
    chosen_isa,
    compared,
    isas_in_turn,
    multiplying_isa,
    prepared_for,
)
from levanter_infer.bench.limits import Probe, share_of_bound
from levanter_infer.bench.report import digest, emit, provenance, summarize
from levanter_infer.bench.workload import (
    add_model_arguments,
    add_weight_dtype,
    amount,
    count,
    model_sizes,
    numbers,
    random_model,
)
from levanter_infer.decode.programs import compile_program
from levanter_infer.engine.backend_choice import BackendChoice
from levanter_infer.engine.config import EngineConfig
from levanter_infer.engine.instructions import choose
from levanter_infer.layers.attention import Attention
from levanter_infer.layers.linear import Fusion, apply
from levanter_infer.layers.mlp import DenseBlock
from levanter_infer.models.decoder import DecoderModel


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=numbers, default=(1, 8, 32, 256), help="tokens of the step; default 1,8,32,256")
    parser.add_argument("--matmul", default="auto", help="engine.matmul; default auto")
    add_isa_argument(parser)
    parser.add_argument(
        "--limits",
        action="store_true",
        help="a line for each matmul: its share of the bound that the rates of memory and arithmetic give, which are "
        "measured in turn with it; of the C++ kernels",
    )
    parser.add_argument("--repeats", type=count, default=5)
    parser.add_argument("--milliseconds", type=amount, default=100, help="of one measurement, about; default 100")
    add_weight_dtype(parser)
    add_model_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Print one line per number of rows; with `--limits` one per instruction set, number of rows and matmul."""
    about = provenance()
    given = random_model(model_sizes(args), args.dtype)
    clock = Clock(args.repeats, args.milliseconds)
    isas = isas_in_turn(args.cpu_isa, args.dtype)
    about_model = {"model": model_sizes(args), "dtype": args.dtype, "weight_dtype": args.weight_dtype}
    if args.limits:
        named = isas or [choose(args.cpu_isa, args.dtype).isa]
        models, probe = prepared_for(named, given, args.weight_dtype), Probe()
        del given
        for isa, model in models.items():
            config = {**about_model, "matmul": "cpu", "cpu_isa": isa}
            for rows in args.rows:
                for line in beside_limits(model, rows, clock, probe, multiplying_isa(isa, args.dtype)):
                    emit({"bench": "matmul", **line, "config": config, **about})
        emit({"bench": "matmul", "limits": probe.measured(), **about})
        return
    if isas is not None:
        chosen, models = chosen_isa(given, isas), prepared_for(isas, given, args.weight_dtype)
        del given
        for rows in args.rows:
            config = {**about_model, "matmul": "cpu"}
            emit({"bench": "matmul", **compare(models, rows, clock, chosen), "config": config, **about})
        return
    options = EngineConfig(matmul=args.matmul, cpu_isa=args.cpu_isa, weight_dtype=args.weight_dtype)
    backend = BackendChoice.choose(options, given, has_mods=False)
    model = backend.prepare(given, donate=True)
    for rows in args.rows:
        config = {**about_model, "matmul": backend.matmul, "cpu_isa": backend.isa}
        emit({"bench": "matmul", **measure(model, rows, clock), "config": config, **about})


def measure(model: DecoderModel, rows: int, clock: Clock) -> dict[str, object]:
    config, itemsize = model.config, model.head.weight.dtype.itemsize
    parameters = parameters_of(model)
    lines: dict[str, dict] = {}
    outputs: list[float] = []
    inputs = inputs_of(model, rows)
    for name, matmul in MATMULS.items():
        start = (inputs[name], jnp.float32(0))
        times, result = clock.per_trip(_over_layers(matmul), start, model, jnp.int32(rows))
        outputs.append(float(result[1]))
        seconds = times["median"] / 1e3
        lines[name] = {
            "ms": times,
            "gb_per_s": round(parameters[name] * itemsize / seconds / 1e9, 2),
            "gflop_per_s": round(2 * rows * parameters[name] / seconds / 1e9, 1),
        }
    idle = (inputs["out"], jnp.float32(0))
    nothing, _ = clock.per_trip(_over_layers(MATMULS["out"]), idle, model, jnp.int32(0))
    per_step = {name: (1 if name == "head" else config.num_layers) for name in MATMULS}
    step = sum(lines[name]["ms"]["median"] * times for name, times in per_step.items())
    flops = 2 * rows * sum(parameters[name] * times for name, times in per_step.items())
    return {
        "rows": rows,
        "matmul": lines,
        "call_ms": nothing,
        "step_ms": round(step, 3),
        "step_gb_per_s": round(sum(parameters[n] * t for n, t in per_step.items()) * itemsize / step / 1e6, 2),
        "step_gflop_per_s": round(flops / step / 1e6, 1),
        "workload_hash": digest([rows, clock.milliseconds]),
        "output_hash": digest(outputs),
    }


def compare(models: dict[str, DecoderModel], rows: int, clock: Clock, chosen: str) -> dict[str, object]:
    """All matmuls of a step by each instruction set, in turn."""
    steps = {isa: [0.0] * clock.repeats for isa in models}
    config = next(iter(models.values())).config
    for name, matmul in MATMULS.items():
        turns = {isa: clock.turns(_runner(model, matmul, name, rows)) for isa, model in models.items()}
        for turn in range(clock.repeats):
            for isa, one_turn in turns.items():
                steps[isa][turn] += one_turn() * (1 if name == "head" else config.num_layers)
    return {"rows": rows, "step_ms": compared(steps, chosen), "workload_hash": digest([rows, clock.milliseconds])}


def beside_limits(model: DecoderModel, rows: int, clock: Clock, probe: Probe, isa: str) -> list[dict[str, object]]:
    """A line for each matmul: its times, and its share of the bound by memory and arithmetic.

    Args:
        isa: the instruction set that multiplies.
    """
    parameters, itemsize = parameters_of(model), model.head.weight.dtype.itemsize
    lines: list[dict[str, object]] = []
    for name, matmul in MATMULS.items():
        num_bytes, flops = parameters[name] * itemsize, 2 * rows * parameters[name]
        of_all_layers = num_bytes * (1 if name == "head" else model.config.num_layers)
        one_turn, times, bounds = clock.turns(_runner(model, matmul, name, rows)), [], []
        for _ in range(clock.repeats):
            ms, bound = probe.around(one_turn, num_bytes, flops, isa, cached=of_all_layers)
            times.append(ms)
            bounds.append(bound)
        probe.gbps(), probe.gbps(threads=1), probe.gflops(isa, threads=1)
        lines.append(
            {
                "rows": rows,
                "matmul": name,
                "weights_bytes": num_bytes,
                "flops": flops,
                "ms": summarize(times, 5),
                **share_of_bound(times, bounds),
                "workload_hash": digest([rows, name, clock.milliseconds]),
            }
        )
    return lines


def _runner(model: DecoderModel, matmul: Callable, name: str, rows: int) -> Callable[[int], None]:
    start, program = (inputs_of(model, rows)[name], jnp.float32(0)), compile_program(_over_layers(matmul))

    def run(trips: int) -> None:
        jax.block_until_ready(program(jnp.int32(trips), start, model, jnp.int32(rows)))

    run(1)  # compiles
    return run


def parameters_of(model: DecoderModel) -> dict[str, int]:
    """Number of weights of each matmul in one layer."""
    c = model.config
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    return {
        "qkv": c.hidden_size * (q + 2 * kv),
        "out": c.hidden_size * q,
        "mlp": 3 * c.hidden_size * c.feed_forward.width,
        "head": c.hidden_size * c.vocab_size,
    }


def inputs_of(model: DecoderModel, rows: int) -> dict[str, Sequence[NamedArray]]:
    """Random inputs of each matmul, with its residual."""
    token, heads = Axis(TOKEN, rows), _q_axes(model)

    def random(seed: int, *axes: Axis) -> NamedArray:
        return hax.random.normal(jax.random.key(seed), (token, *axes)).astype(model.activation_dtype)

    x = random(0, model.embed)
    return {
        "qkv": (x,),
        "out": (random(1, *heads), x),
        "mlp": (x,),
        "head": (x,),
    }


def _q_axes(model: DecoderModel) -> tuple[Axis, ...]:
    attention = model.layers.attention
    assert isinstance(attention, Attention)
    return attention.q_proj.outs


MATMULS: dict[str, Callable] = {
    "qkv": lambda layer, x: apply(
        x, layer.attention.q_proj, layer.attention.k_proj, layer.attention.v_proj, norm=layer.input_norm
    ),
    "out": lambda layer, attended, x: apply(attended, layer.attention.o_proj, residual=x),
    "mlp": lambda layer, x: [
        layer.mlp(x, Fusion(norm=layer.mlp_norm, residual=x), DenseBlock(layer.mlp.up_proj.outs[0].size))
    ],
    "head": lambda logits, x: [logits(x)],
}


def _over_layers(matmul: Callable) -> Callable:
    """A program that runs a matmul `trips` times, in one layer after another; each trip depends on the one before.

    Carries the inputs, and one number of the last result, on which the number of rows of the next trip depends.
    """

    def program(trips, start, model: DecoderModel, num_rows):
        def body(trip, carry):
            inputs, last = carry
            layer = trip % model.config.num_layers
            used = num_rows + (last * 0).astype(jnp.int32)
            is_head = matmul is MATMULS["head"]
            part = functools.partial(model.logits, num_rows=used) if is_head else model.layers.at(layer, used)
            results = jax.lax.optimization_barrier(matmul(part, *inputs))
            return inputs, jnp.sum(jnp.stack([result.array.reshape(-1)[0].astype(jnp.float32) for result in results]))

        return jax.lax.fori_loop(0, trips, body, start)

    return program
