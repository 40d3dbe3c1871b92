"""`levanter-infer doctor`: `levanter-infer check --level diagnosis` by its former name; alone, `--level machine`."""

import functools

from levanter_infer.cli import run_command

if __name__ == "__main__":  # here, so that an interrupt during the import below leaves no traceback
    run_command("doctor")

from levanter_infer import check

main = functools.partial(check.main, command="doctor")
