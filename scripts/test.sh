#!/usr/bin/env bash
# Runs the tests, after setting up whatever is missing. Arguments go to pytest: ./scripts/test.sh tests/cache -x
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
use_venv "test,train"
cd "$repository"
export JAX_PLATFORMS=${JAX_PLATFORMS:-cpu}
# Many tests start processes, each of which would parse every module again that has no bytecode.
export PYTHONDONTWRITEBYTECODE="" PYTHONPYCACHEPREFIX=${PYTHONPYCACHEPREFIX:-$venv/pycache}
# Whole files go to one process: the tests of a file share compiled programs.
exec "$venv_python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
