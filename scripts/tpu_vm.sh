#!/usr/bin/env bash
# Sets specjax up on every worker of a TPU VM, or runs a command there. Needs gcloud with a login on your machine.
#
#   bash scripts/tpu_vm.sh setup NAME ZONE             copies this repository, installs it with jax[tpu]
#   bash scripts/tpu_vm.sh run NAME ZONE COMMAND...    runs a command in it, on all workers at once
#
# For example, T5 v1.1 XXL divided over the 16 chips of a v4-32 (four workers, four chips each):
#
#   bash scripts/tpu_vm.sh run my-v4-32 us-central2-b python -m experiments.generate --coordinator=auto \
#     --mesh=2x8 --batch_size=2 --target=DIR --draft=DIR2 --input=configs/demo.txt
#
# Every worker runs the same command and reads the same files (a mounted bucket, or hub ids); only the first prints.
set -euo pipefail

usage() {
  sed -n '2,6s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
  exit 2
}
[ "$#" -ge 3 ] || usage
what="$1" name="$2" zone="$3"
shift 3
root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"

on_all_workers() {
  gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker=all --command="$1"
}

case "$what" in
  setup)
    archive="$(mktemp -d)/specjax.tar.gz"
    tar -C "$root" --exclude=.git --exclude=.venv --exclude=runs --exclude=.jax_cache -czf "$archive" .
    gcloud compute tpus tpu-vm scp "$archive" "$name": --zone="$zone" --worker=all
    on_all_workers 'mkdir -p specjax && tar -xzf specjax.tar.gz -C specjax && cd specjax &&
      python3 -m venv .venv && .venv/bin/pip install --quiet --editable ".[tpu]" &&
      .venv/bin/python -c "import jax; print(jax.local_device_count(), jax.local_devices()[0].device_kind)"'
    ;;
  run)
    [ "$#" -ge 1 ] || usage
    on_all_workers "cd specjax && PATH=\"\$PWD/.venv/bin:\$PATH\" $(printf '%q ' "$@")"
    ;;
  *) usage ;;
esac
