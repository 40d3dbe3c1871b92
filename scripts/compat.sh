#!/usr/bin/env bash
# Makes the environments of our neighbours from nothing, installs us beside them, and tries both sides. Needs the network.
#
#   ./scripts/compat.sh [levanter] [transformers] [tunix] [clients]  by default all, one after the other: 30 minutes on
#                                                                    two cores
#
# levanter:      Python 3.12 or newer with marin-levanter. Its trainer still imports, `pip check` says what it said before
#                us, and its models are sampled with the tokens and log probabilities of its own forward.
# transformers:  Python 3.11 with transformers 5, datasets and lm-eval. `pip check` is clean, and the README's command runs.
# tunix:         Python 3.11 with google-tunix. `pip check` is clean, and tests/test_tunix.py passes: the rollout worker with
#                Tunix' own base class, configuration and tokenizer adapter.
# clients:       Python 3.11 with guidellm and schemathesis. The command of docs/serving.md loads a server, and 10,000 requests
#                from its own description find no fault in it.
#
# $COMPAT_DIR: where the environments are made, by default a temporary folder that is removed. $PYTHON312 and $PYTHON311
# name the interpreters. $COMPAT_RUN is put before the commands that compute, such as nice.
set -euo pipefail
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$repository"
if [ -n "${COMPAT_DIR:-}" ]; then
  mkdir -p "$COMPAT_DIR"
  folder=$(cd "$COMPAT_DIR" && pwd)
else
  folder=$(mktemp -d)
  trap 'rm -rf "$folder"' EXIT
fi
export JAX_PLATFORMS=cpu HF_HUB_OFFLINE=1 WANDB_MODE=disabled
unset PYTHONPATH

fail() {
  echo "error: $*" >&2
  exit 1
}

find_python() {
  local version=$1 given=$2 candidate
  for candidate in "$given" "python$version" "$HOME"/.pyenv/versions/"$version".*/bin/python; do
    if [ -n "$candidate" ] && "$candidate" --version >/dev/null 2>&1; then
      echo "$candidate"
      return
    fi
  done
  fail "no Python $version; install it, or name it with PYTHON${version/./}=/path/to/python"
}

new_environment() {
  echo "== $1: $("$2" --version)"
  "$2" -m venv --clear "$folder/$1"
  python=$folder/$1/bin/python
}

install() {
  "$python" -m pip install --quiet --disable-pip-version-check "$@"
}

# What was checked before us must not have become worse.
check_dependencies() {
  "$python" -m pip check >"$folder/after" || true
  if [ -n "$(comm -13 <(sort "$1") <(sort "$folder/after"))" ]; then
    cat "$folder/after"
    fail "pip check says more than it did before us"
  fi
  echo "pip check: $(tail -n 1 "$folder/after")"
}

levanter() {
  new_environment levanter "$(find_python 3.12 "${PYTHON312:-}")"
  install marin-levanter
  "$python" -m pip check >"$folder/before" || true
  "$python" -m pip freeze >"$folder/levanter.txt"
  install "$repository"
  check_dependencies "$folder/before"
  # Whatever we bring in is new: nothing of Levanter's environment was exchanged for another version.
  "$python" -m pip freeze >"$folder/levanter-after.txt"
  [ -z "$(comm -23 <(sort "$folder/levanter.txt") <(sort "$folder/levanter-after.txt"))" ] ||
    fail "installing us changed $(comm -23 <(sort "$folder/levanter.txt") <(sort "$folder/levanter-after.txt"))"
  export XLA_FLAGS=--xla_force_host_platform_device_count=2
  ${COMPAT_RUN:-} "$python" -W ignore tests/compat/levanter_models.py
  ${COMPAT_RUN:-} "$python" -W ignore tests/compat/levanter_families.py
}

transformers() {
  new_environment transformers "$(find_python 3.11 "${PYTHON311:-}")"
  install torch==2.13.0 # lm-eval wants one, and pip would choose the one with CUDA
  install "transformers>=5" datasets lm-eval
  "$python" -m pip check >"$folder/before" || true
  install "$repository"
  check_dependencies "$folder/before"
  "$python" -m pip list --format=freeze 2>/dev/null | grep -E '^(transformers|datasets|lm.eval|safetensors|fsspec|jax|haliax)==' | xargs
  unset XLA_FLAGS
  ${COMPAT_RUN:-} "$python" scripts/peers/beside.py
  ${COMPAT_RUN:-} "$python" -m levanter_infer.sample --config configs/tiny.yaml
}

tunix() {
  new_environment tunix "$(find_python 3.11 "${PYTHON311:-}")"
  install google-tunix==0.1.7
  "$python" -m pip check >"$folder/before" || true
  install "$repository"
  check_dependencies "$folder/before"
  install "pytest>=8,<10" "pytest-timeout>=2.3,<3" "hypothesis>=6.100,<7"
  "$python" -m pip list --format=freeze 2>/dev/null | grep -E '^(google-tunix|flax|jax|haliax)==' | xargs
  # The installed package, not that of the checkout; pytest fails if the file is skipped.
  ${COMPAT_RUN:-} "$python" -m pytest -o pythonpath=. -p no:cacheprovider tests/test_tunix.py
}

clients() {
  new_environment clients "$(find_python 3.11 "${PYTHON311:-}")"
  install torch==2.13.0 # guidellm wants one, and pip would choose the one with CUDA
  install guidellm==0.8.1 schemathesis==4.32.5
  "$python" -m pip check >"$folder/before" || true
  install "$repository[serve,structured]"
  check_dependencies "$folder/before"
  install "pytest>=8,<10" "pytest-timeout>=2.3,<3" "hypothesis>=6.100,<7"
  "$python" -m pip list --format=freeze 2>/dev/null | grep -E '^(guidellm|schemathesis|starlette|uvicorn|jax)==' | xargs
  ${COMPAT_RUN:-} "$python" -m pytest -s -o pythonpath=. -p no:cacheprovider tests/serve/test_guidellm.py
  ${COMPAT_RUN:-} "$python" scripts/fuzz_server.py --requests 5200 --schemathesis "$python"
}

for part in "${@:-levanter transformers tunix clients}"; do
  for name in $part; do
    case $name in
      levanter | transformers | tunix | clients) "$name" ;;
      *) fail "$name: expected levanter, transformers, tunix or clients" ;;
    esac
  done
done
echo "== all passed"
