# Sourced by the other scripts: `use_venv EXTRAS` finds or makes a virtual environment with this package in it.
#
# The environment is $LEVANTER_INFER_VENV, by default .venv in the repository. It is made once; later calls find it
# complete and install nothing. $PYTHON chooses the interpreter it is made with. Sets `venv_python`.

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${LEVANTER_INFER_VENV:-$repository/.venv}
venv_python=$venv/bin/python
oldest_python=3.11

fail() {
  echo "error: $*" >&2
  exit 1
}

is_new_enough() {
  "$1" -c "import sys; sys.exit(sys.version_info < (${oldest_python/./, }))" >/dev/null 2>&1
}

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python}; do
    if is_new_enough "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  fail "no Python $oldest_python or newer among: ${PYTHON:-python3 python3.13 python3.12 python3.11 python}" \
    "(python3 is $(python3 --version 2>&1 | head -n 1)). Install one, or name it: PYTHON=/path/to/python $0"
}

make_venv() {
  local python
  python=$(find_python) || exit 1
  if [ -e "$venv" ] && [ ! -e "$venv/pyvenv.cfg" ] && [ -n "$(ls -A "$venv")" ]; then
    fail "$venv exists and is not a virtual environment; move it away or set LEVANTER_INFER_VENV"
  fi
  echo "Making a virtual environment in $venv ($("$python" --version))" >&2
  "$python" -m venv --clear "$venv" ||
    fail "$python cannot make virtual environments; on Debian and Ubuntu install the package python3-venv"
}

# What an environment must have been installed from to be used as it is.
installed_from() {
  echo "$repository $(cksum <"$repository/pyproject.toml")"
}

# Whether the environment has this package with the extras $1, or with all of them.
is_ready() {
  local mark
  is_new_enough "$venv_python" || return 1
  for mark in "$venv/.installed-$1" "$venv/.installed-test,train"; do
    if [ -e "$mark" ] && [ "$(cat "$mark")" = "$(installed_from)" ]; then
      return
    fi
  done
  return 1
}

# Installs $1 in editable form. uv takes less than half of pip's time, but reads no configuration of pip: where packages
# come through a mirror that only pip knows of, pip installs them.
install() {
  local pip=("$venv_python" -m pip install --quiet --disable-pip-version-check --no-compile)
  if "${pip[@]}" uv && "$venv_python" -m uv pip install --quiet --python "$venv_python" --editable "$1"; then
    return
  fi
  echo "uv could not install it; trying pip" >&2
  "${pip[@]}" --editable "$1"
}

use_venv() {
  local extras=$1 package=$repository${1:+"[$1]"}
  if is_ready "$extras"; then
    return
  fi
  if ! is_new_enough "$venv_python" || ! "$venv_python" -m pip --version >/dev/null 2>&1; then
    make_venv
  fi
  echo "Installing levanter_infer and what it needs into $venv (once; a few minutes)" >&2
  install "$package" || fail "the installation failed; the message above says why. Nothing outside $venv was changed"
  installed_from >"$venv/.installed-$extras"
}
