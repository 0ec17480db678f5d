#!/usr/bin/env bash
# Shows the main job on the small trained pair in experiments/checkpoints: text in, the target's
# text out, with and without speculation side by side. Run it from any directory; relative paths
# among the flags start at the repository.
#
#   bash scripts/demo.sh                      what configs/demo.flags asks for
#   bash scripts/demo.sh --num_draft=3        flags go to experiments.generate
#   VENV=~/envs/specjax bash scripts/demo.sh  another virtual environment than .venv
#   PYTHON=python3.12 bash scripts/demo.sh    the Python that makes a new environment
set -euo pipefail

source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

echo "demo.sh: python -m experiments.generate --flagfile=configs/demo.flags $*"
exec "$venv/bin/python" -m experiments.generate --flagfile=configs/demo.flags "$@"
