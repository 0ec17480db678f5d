#!/usr/bin/env bash
# Builds the wheel, installs it into a bare virtual environment (nothing of the clone, no extras), and runs the
# README's Python there. Prints what importing specjax adds to importing jax.
#
#   bash scripts/package.sh            the newest versions of what specjax needs
#   bash scripts/package.sh oldest     the lower bounds of setup.cfg
#   PYTHON=python3.12 bash scripts/package.sh
set -euo pipefail
root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
python="${PYTHON:-python3}"
work="$(mktemp -d)"
trap 'rm -rf -- "$work"' EXIT

echo "package.sh: building the wheel"
# From a copy: a build leaves folders beside the sources.
git -C "$root" ls-files -z -- specjax setup.cfg pyproject.toml README.md LICENSE |
  (cd -- "$root" && xargs -0 cp --parents -t "$work")
"$python" -m venv "$work/venv"
"$work/venv/bin/python" -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$work/dist" "$work"

bounds=()
if [ "${1:-newest}" = oldest ]; then
  "$python" - "$root/setup.cfg" >"$work/oldest.txt" <<'PYTHON'
import configparser
import sys

config = configparser.ConfigParser()
config.read(sys.argv[1])
print(config["options"]["install_requires"].strip().replace(">=", "=="))
PYTHON
  bounds=(--constraint "$work/oldest.txt")
fi
echo "package.sh: installing it into a bare environment, ${1:-newest} versions"
"$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "${bounds[@]}" "$work"/dist/*.whl

# Away from the clone, so that `import specjax` finds the wheel; the pair of checkpoints is looked up from here.
mkdir "$work/elsewhere"
ln -s -- "$root/experiments" "$work/elsewhere/experiments"
cd -- "$work/elsewhere"
sed -n '/^```python$/,/^```$/p' "$root/README.md" | sed '/^```/d' >readme.py
test -s readme.py
cat >start.py <<'PYTHON'
import importlib.metadata
import sys
import time

start = time.perf_counter()
import jax  # noqa: E402

with_jax = time.perf_counter()
import specjax  # noqa: E402

end = time.perf_counter()
assert specjax.__file__.startswith(sys.prefix), specjax.__file__
assert specjax.__version__ == importlib.metadata.version("specjax")
print(f"package.sh: import jax {jax.__version__} takes {with_jax - start:.1f} s, specjax {end - with_jax:.1f} s more")
PYTHON
"$work/venv/bin/python" start.py >/dev/null # writes the byte code
"$work/venv/bin/python" start.py
echo "package.sh: the README's Python"
"$work/venv/bin/python" readme.py
