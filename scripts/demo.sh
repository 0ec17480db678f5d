#!/usr/bin/env bash
# Shows the main job on the small trained pair in experiments/checkpoints: text in, the target's
# text out, with and without speculation side by side. Run it from any directory; relative paths
# among the flags start at the repository.
#
#   bash scripts/demo.sh                      what configs/demo.flags says
#   bash scripts/demo.sh --num_draft=3        flags go to experiments.generate
#   VENV=~/envs/specjax bash scripts/demo.sh  another virtual environment than .venv
#   PYTHON=python3.12 bash scripts/demo.sh    the Python that makes a new environment
set -euo pipefail

root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${VENV:-$root/.venv}"
case "$venv" in /*) ;; *) venv="$PWD/$venv" ;; esac
cd -- "$root"

if [ ! -x "$venv/bin/python" ]; then
  echo "demo.sh: making a virtual environment in $venv"
  "${PYTHON:-python3}" -m venv "$venv"
fi
# The stamp makes a second run start at once, and without a network.
stamp="$venv/.specjax-dev"
if [ ! -e "$stamp" ] || [ setup.cfg -nt "$stamp" ] || [ "$(cat -- "$stamp")" != "$root" ]; then
  echo "demo.sh: installing specjax and its development tools; the first time takes a few minutes"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
  printf '%s\n' "$root" >"$stamp"
fi

echo "demo.sh: python -m experiments.generate --flagfile=configs/demo.flags $*"
exec "$venv/bin/python" -m experiments.generate --flagfile=configs/demo.flags "$@"
