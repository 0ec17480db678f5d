#!/usr/bin/env bash
# Runs all checks: ruff (lint and format), mypy, pytest. Run it from any directory:
#
#   bash scripts/test.sh                      all checks
#   bash scripts/test.sh -k cache -n 0        with arguments for pytest
#   PARITY=1 bash scripts/test.sh             with comparisons to the PyTorch T5, if torch can be installed
#   VENV=~/envs/specjax bash scripts/test.sh  with another virtual environment than .venv
#   PYTHON=python3.12 bash scripts/test.sh    with the Python that makes a new environment
set -euo pipefail

source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"
if [ "${PARITY:-0}" = 1 ] && ! "$venv/bin/python" -c "import torch" 2>/dev/null; then
  echo "test.sh: installing torch for the parity tests"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "torch==2.13.0" ||
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check ".[parity]" ||
    echo "test.sh: torch cannot be installed, so the parity tests are skipped"
fi

echo "test.sh: ruff"
"$venv/bin/python" -m ruff check .
"$venv/bin/python" -m ruff format --check .
echo "test.sh: mypy"
"$venv/bin/python" -m mypy specjax
echo "test.sh: pytest"
"$venv/bin/python" -m pytest -n 2 --dist loadfile --durations=15 "$@"
