#!/usr/bin/env bash
# Checks specjax on the accelerator of this machine in one run of at most eight minutes: prints
# one table and writes results.json into DIR.
#
#   bash scripts/gpu_check.sh DIR
#   PYTHON=python3.12 bash scripts/gpu_check.sh DIR   the Python to use; it must have jax and flax
#
# Uses no network and installs nothing: specjax is read from the repository. Meant to run on newer
# releases than the tests do (jax 0.11 on Python 3.12) and without tensorflow-datasets and grain.
set -euo pipefail

if [ "$#" -ne 1 ] || [ -z "$1" ]; then
  echo "gpu_check.sh: name the directory for results.json, as in: bash scripts/gpu_check.sh /tmp/check" >&2
  exit 2
fi
mkdir -p -- "$1"
output="$(cd -- "$1" && pwd)"
root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
cd -- "$root"

export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1
status=0
timeout 480 "${PYTHON:-python}" -m experiments.generate \
  --flagfile=configs/demo.flags --output="$output" || status=$?
if [ "$status" -eq 124 ]; then
  echo "gpu_check.sh: stopped after eight minutes, before the run had ended" >&2
elif [ "$status" -eq 0 ] && [ ! -s "$output/results.json" ]; then
  echo "gpu_check.sh: the run ended well but wrote no $output/results.json" >&2
  status=1
fi
exit "$status"
