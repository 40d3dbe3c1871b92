"""`levanter-infer batch --config FILE`: sample the rows of files, resumably.

Messages go to standard error. Exit status as in `cli/common.py`; 0 also for a job that SIGTERM stopped.
"""

from collections.abc import Sequence

from levanter_infer.cli import run_command

if __name__ == "__main__":  # here, so that an interrupt during the imports below leaves no traceback
    run_command("batch")

from levanter_infer.batch.config import BatchRunConfig
from levanter_infer.batch.run import run
from levanter_infer.cli.common import run_config

USAGE = """\
usage: levanter-infer batch --config FILE [--worker I/N] [--KEY VALUE ...]

Sample the rows of files, in shards, and go on where an interrupted run has stopped. FILE is YAML:

  model: models/tiny                 # a directory in Hugging Face's layout, or a hub id
  prompts_file: in/*.jsonl           # JSONL, Parquet, text or OpenAI batch lines; a path or URL for fsspec
  output: out                        # a directory, or a URL

The same command resumes the job. A job that was killed has, in the end, the same bytes as one that was not
(engine.numerics is batch_invariant unless it is given). docs/batch.md says more.

  --config FILE       the configuration
  --output DIR        the directory of the job
  --worker I/N        be worker I of N, from 0; all work on one job, in one directory
  --output.metrics FILE.json   write what the engine counted; FILE.prom for Prometheus; --overwrite lets it replace one
  --help              this text
"""
"""Read from the source by `cli.command_help`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    return run_config("batch", argv, run, BatchRunConfig, {"worker": "batch.worker"})
