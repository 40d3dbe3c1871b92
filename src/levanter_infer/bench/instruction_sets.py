"""Compares the instruction sets of the CPU kernels, in turn: the one that an engine chooses against the others."""

import argparse
import dataclasses
import statistics
from collections.abc import Mapping, Sequence

import jax

from levanter_infer.bench.report import summarize
from levanter_infer.engine.backend_choice import BackendChoice
from levanter_infer.engine.config import EngineConfig
from levanter_infer.engine.instructions import usable_isas
from levanter_infer.kernels.cpu import bindings as cpu
from levanter_infer.layers.linear import Linear
from levanter_infer.models.decoder import DecoderModel

EACH = "each"


def add_isa_argument(parser: argparse.ArgumentParser) -> None:
    """`--cpu-isa`."""
    parser.add_argument(
        "--cpu-isa",
        default="auto",
        help="engine.cpu_isa; default auto. Several with commas, or each (all that the processor has, but generic): "
        "measured in turn, and compared with the one that auto chooses",
    )


def isas_in_turn(text: str, dtype) -> list[str] | None:
    """The instruction sets of `--cpu-isa` that are to be measured in turn; None if it names one, or auto."""
    if text == EACH:
        usable = usable_isas(dtype)
        return list(usable[:-1] or usable)
    return text.split(",") if "," in text else None


def chosen_isa(model: DecoderModel, isas: Sequence[str]) -> str:
    """The instruction set that `auto` chooses for the model. Raises: ValueError if it is not measured."""
    chosen = BackendChoice.choose(EngineConfig(), model, has_mods=False).isa
    if chosen is None or chosen not in isas:
        raise ValueError(f"--cpu-isa {','.join(isas)}: auto chooses {chosen}; name it too")
    return chosen


def multiplying_isa(isa: str, dtype) -> str:
    """The instruction set whose multiplications the matmuls of `isa` use for weights of `dtype`."""
    usable = usable_isas(dtype)
    return isa if isa in usable else usable[0]


def with_isa(model: DecoderModel, isa: str) -> DecoderModel:
    """A prepared model for another instruction set with panels of the same width."""

    def configured(part):
        if not isinstance(part, Linear):
            return part
        return dataclasses.replace(part, backend=part.backend.configured(cpu_isa=isa))

    return jax.tree.map(configured, model, is_leaf=lambda part: isinstance(part, Linear))


def prepared_for(isas: Sequence[str], model: DecoderModel, weight_dtype: str | None) -> dict[str, DecoderModel]:
    """The model prepared for each instruction set; those with panels of one width share them."""
    prepared: dict[str, DecoderModel] = {}
    for isa in isas:
        alike = next((name for name in prepared if cpu.panel_width(name) == cpu.panel_width(isa)), None)
        config = EngineConfig(cpu_isa=isa, matmul="cpu", weight_dtype=weight_dtype)
        prepared[isa] = (
            with_isa(prepared[alike], isa)
            if alike is not None
            else BackendChoice.choose(config, model, has_mods=False).prepare(model)
        )
    return prepared


def compared(values: Mapping[str, Sequence[float]], chosen: str, *, digits: int = 4) -> dict[str, object]:
    """Times of each instruction set, and the chosen one against the best.

    Args:
        values: measured in turn, in the same order for all; less is better.
    Returns: their statistics, the best by its median, and the quotient of the chosen one's and the best one's times:
        the median over the turns, which compares neighbouring measurements.
    """
    medians = {isa: statistics.median(each) for isa, each in values.items()}
    best = min(medians, key=medians.__getitem__)
    quotients = [a / b for a, b in zip(values[chosen], values[best], strict=True)]
    return {
        "by_isa": {isa: summarize(each, digits) for isa, each in values.items()},
        "chosen": chosen,
        "best": best,
        "chosen_over_best": round(statistics.median(quotients), 3),
    }
