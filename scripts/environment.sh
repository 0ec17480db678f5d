# Sourced by the other scripts: changes to the repository, and makes a virtual environment with specjax
# and its development tools if it is missing. Sets `root` and `venv` ($VENV, or .venv).
script="$(basename -- "$0")"
root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${VENV:-$root/.venv}"
case "$venv" in /*) ;; *) venv="$PWD/$venv" ;; esac
cd -- "$root"

if [ ! -x "$venv/bin/python" ]; then
  echo "$script: making a virtual environment in $venv"
  "${PYTHON:-python3}" -m venv "$venv"
fi
# With the stamp a second run starts at once and needs no network.
stamp="$venv/.specjax-dev"
if [ ! -e "$stamp" ] || [ setup.cfg -nt "$stamp" ] || [ "$(cat -- "$stamp")" != "$root" ]; then
  echo "$script: installing specjax and its development tools; the first time takes a few minutes"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
  printf '%s\n' "$root" >"$stamp"
fi
