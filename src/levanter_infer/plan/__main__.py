"""`levanter-infer plan --config FILE --target v5e-16`: does a job fit, and how fast can it be?

Exit status: `cli.EXIT_STATUS`.
"""

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from levanter_infer.cli import run_command

if __name__ == "__main__":  # here, so that an interrupt during the imports below leaves no traceback
    run_command("plan")

from levanter_infer.cli.common import run_config
from levanter_infer.config import RunConfig
from levanter_infer.io.terminal import say
from levanter_infer.runtime.progress import stage

USAGE = """\
usage: levanter-infer plan --config FILE --target NAME [--KEY VALUE ...]

What a job will need on another machine, from the configuration of `levanter-infer sample` or `levanter-infer batch`:
memory of each device, pages, tiles, programs and their collectives, and modelled speed.
The programs of the job are compiled for the target; weights are not read, and nothing is downloaded.

  --target NAME       v5e-16, v5p-16, v6e-4, v4-8, h100, h100x8, a100, cpu, cpux4, ...
  --shape FILE        the model's config.json, where the model itself is not here
  --no-compile        figures from shapes alone: no compiler needed, a second instead of minutes
  --prompt-tokens N   mean prompt tokens of a request, for the speed model; default 512
  --output-tokens N   mean generated tokens of a request; default sampling.max_tokens
  --json FILE         write all of it as JSON too; - for standard output, in place of the tables
  --help              this text

The plan of a job that does not fit names the smallest change with which it would fit.
"""
"""Read from the source by `cli.command_help`."""
_OPTIONS = {
    "target": "plan.target",
    "shape": "plan.shape",
    "prompt-tokens": "plan.prompt_tokens",
    "output-tokens": "plan.output_tokens",
    "json": "plan.json",
}


@dataclasses.dataclass(frozen=True)
class PlanConfig:
    """Target and workload of a plan."""

    target: str
    """Name of a machine, such as v5e-16."""
    shape: str | None = None
    """Path of the model's config.json, if the model itself is not on this machine."""
    compile: bool = True
    """Compile the job's programs for the target."""
    prompt_tokens: int = 512
    """Mean number of prompt tokens of a request."""
    output_tokens: int | None = None
    """Mean number of generated tokens of a request. Default: sampling.max_tokens."""
    json: str | None = None
    """Path of a file for all figures as JSON; - writes to standard output, in place of the tables."""
    timeout_s: float = 3600
    """Time limit of compiling, in seconds."""

    def __post_init__(self):
        for name in ("prompt_tokens", "output_tokens", "timeout_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"plan.{name}={value}: expected more than 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanRunConfig(RunConfig):
    """Configuration of a run or a batch job, and its plan."""

    plan: PlanConfig
    batch: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Keys of a batch job; the plan of an engine does not depend on them."""

    def __post_init__(self):
        if self.prompts or self.prompts_file or self.chat:
            super().__post_init__()  # a plan needs no prompts


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    given = ["--plan.compile=false" if a == "--no-compile" else a for a in (sys.argv[1:] if argv is None else argv)]
    return run_config("plan", given, run, PlanRunConfig, _OPTIONS)


def run(config: PlanRunConfig) -> int:
    """Make a plan; returns the exit status. Raises: ValueError for an invalid configuration."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # shapes only: no device is needed

    from rich.console import Console

    from levanter_infer.plan.plan import make_plan
    from levanter_infer.plan.report import show
    from levanter_infer.plan.roofline import Workload
    from levanter_infer.plan.spec import spec_of

    wanted = config.plan
    if wanted.json not in (None, "-") and not Path(wanted.json).absolute().parent.is_dir():
        raise ValueError(f"--json {wanted.json}: its directory does not exist; make it, or give another file")
    spec = spec_of(config, wanted.target, wanted.shape)
    workload = Workload(wanted.prompt_tokens, wanted.output_tokens or max(1, config.sampling.max_tokens))
    if wanted.compile:
        say(f"compiling for {spec.target}; --no-compile gives what needs no compiler")

    def on_program(program) -> None:
        say(f"program   {program.name}: {'refused' if program.error else f'{program.compile_s:.1f} s'}")

    with stage(f"compiling for {spec.target}" if wanted.compile else "computing sizes"):
        plan = make_plan(spec, workload, compiles=wanted.compile, timeout_s=wanted.timeout_s, on_program=on_program)
    if wanted.json is not None:
        text = json.dumps(plan.as_dict(), indent=1) + "\n"
        if wanted.json == "-":
            print(text, end="")
        else:
            with open(wanted.json, "w", encoding="utf-8") as file:
                file.write(text)
    if wanted.json != "-":
        show(plan, Console(highlight=False, soft_wrap=True))
    return 0 if plan.why_not is None else 1
