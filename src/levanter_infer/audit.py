"""`levanter-infer audit`: `levanter-infer check --level numerics` by its former name."""

import functools

from levanter_infer.cli import run_command

if __name__ == "__main__":  # here, so that an interrupt during the import below leaves no traceback
    run_command("audit")

from levanter_infer import check

main = functools.partial(check.main, command="audit")
