#!/usr/bin/env bash
# Measures specjax on the accelerator of this machine, in at most eight minutes.
#
#   bash scripts/gpu_check.sh DIR
#   PYTHON=python3.12 bash scripts/gpu_check.sh DIR    the Python to use; it must have jax and flax
#   SMALL=1 bash scripts/gpu_check.sh DIR              the same steps on small shapes, to try the script
#
# The steps are, in this order: greedy tokens of the shipped pair compared with the CPU; T5 v1.1 XXL with T5-small at
# batch 1 (ms per token, share of bandwidth, v, c, speed-up at forced acceptance); a profile of its rounds; the same
# with loops in command buffers; a draft of one layer; batch 8 and 32; XL; large. Each writes DIR/STEP/results.json
# after every row. DIR/steps.md lists which steps ended, ran out of time or were not reached.
#
# It uses no network and installs nothing: specjax is read from the repository. It also runs on newer releases than
# the tests (jax 0.11 on Python 3.12), and without tensorflow-datasets and grain.
set -euo pipefail

if [ "$#" -ne 1 ] || [ -z "$1" ]; then
  echo "gpu_check.sh: name the directory for the results, as in: bash scripts/gpu_check.sh /tmp/check" >&2
  exit 2
fi
mkdir -p -- "$1"
output="$(cd -- "$1" && pwd)"
root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
cd -- "$root"

export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$(mktemp -d)}"
deadline=$((SECONDS + ${SECONDS_IN_ALL:-460}))
report="$output/steps.md"
printf '| step | state | seconds |\n| --- | --- | --- |\n' > "$report"

if [ "${SMALL:-0}" = 1 ]; then
  xxl=(--target=2x128 --draft=1x64) xl=(--target=2x96 --draft=1x64) large=(--target=1x96 --draft=1x64)
  shallow=(--target=2x128 --draft=1x32) quick=(--num_runs=1 --repeats=2 --max_new_tokens=16)
else
  xxl=(--target=t5-v1_1-xxl --draft=t5-small) xl=(--target=t5-v1_1-xl --draft=t5-small)
  large=(--target=t5-v1_1-large --draft=t5-small) shallow=(--target=t5-v1_1-xxl --draft=1x512) quick=()
fi

# XLA records kernels as CUDA graphs, each of which is one launch. Without WHILE and CONDITIONAL the host launches
# every kernel of the loop over drafted tokens.
buffers="--xla_gpu_enable_command_buffer=+WHILE,+CONDITIONAL --xla_gpu_graph_min_graph_size=1"

backend="$("${PYTHON:-python}" -c 'import jax; print(jax.default_backend())')"
if [ "$backend" != gpu ] && [ "${SMALL:-0}" != 1 ]; then
  echo "gpu_check.sh: JAX must find a GPU, got $backend; run pip install -e '.[cuda]', or set SMALL=1" >&2
  exit 2
fi

failed=0
step() { # NAME EXPERIMENT FLAGS...: runs a step if there is time left
  local name="$1" experiment="$2" started="$SECONDS" left=$((deadline - SECONDS)) state=ended status=0
  shift 2
  if [ "$left" -lt 10 ]; then
    printf '| %s | not reached | |\n' "$name" >> "$report"
    return
  fi
  echo "gpu_check.sh: $name ($left s left)"
  timeout "$left" "${PYTHON:-python}" -m "experiments.$experiment" "$@" --output="$output/$name" || status=$?
  if [ "$status" -eq 124 ]; then
    state="ran out of time; earlier rows are kept"
  elif [ "$status" -ne 0 ]; then
    state="failed with exit status $status" failed=1
  fi
  printf '| %s | %s | %d |\n' "$name" "$state" "$((SECONDS - started))" >> "$report"
}

measured() { # NAME FLAGS...: runs a step of experiments.walltime
  local name="$1"
  shift
  step "$name" walltime --flagfile=configs/gpu_check.flags "$@" "${quick[@]}"
}

step tokens device_check --part=tokens
measured xxl "${xxl[@]}"
step profile device_check --part=profile "${xxl[@]}"
if [ "$backend" = gpu ]; then
  XLA_FLAGS="${XLA_FLAGS:-} $buffers" measured command_buffers "${xxl[@]}"
else
  printf '| command_buffers | not applicable: %s has none | |\n' "$backend" >> "$report"
fi
measured shallow_draft "${shallow[@]}"
measured batch_8 "${xxl[@]}" --batch_size=8
measured batch_32 "${xxl[@]}" --batch_size=32
measured xl "${xl[@]}"
measured large "${large[@]}"

cat -- "$report"
exit "$failed"
