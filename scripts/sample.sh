#!/usr/bin/env bash
# Samples a model, after setting up whatever is missing. Without arguments: the tiny model of this repository.
#
#   ./scripts/sample.sh [--config FILE] [--dotted.key value ...] [--output FILE.jsonl]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
use_venv ""
case " $* " in
  *" --config "* | *" --config="* | *" --help "* | *" -h "*) ;;
  *)
    # The configuration names its model relative to the repository.
    if [ "$PWD" != "$repository" ]; then
      set -- --model "$repository/models/tiny" "$@"
    fi
    set -- --config "$repository/configs/tiny.yaml" "$@"
    ;;
esac
exec "$venv_python" -m levanter_infer.sample "$@"
