#!/usr/bin/env bash
# Translates captions with the small trained pair in experiments/checkpoints, and compares speculative
# with autoregressive decoding. Run it from any directory; relative paths in flags start at the
# repository.
#
#   bash scripts/demo.sh                      with the flags of configs/demo.flags
#   bash scripts/demo.sh --num_draft=3        with more flags for experiments.generate
#   VENV=~/envs/specjax bash scripts/demo.sh  with another virtual environment than .venv
#   PYTHON=python3.12 bash scripts/demo.sh    with the Python that makes a new environment
set -euo pipefail

source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

echo "demo.sh: python -m experiments.generate --flagfile=configs/demo.flags $*"
exec "$venv/bin/python" -m experiments.generate --flagfile=configs/demo.flags "$@"
