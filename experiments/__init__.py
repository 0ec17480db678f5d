"""Scripts that are run from a clone, as `python -m experiments.NAME`."""

import importlib.util

if importlib.util.find_spec("rich") is None:
    raise SystemExit('the package rich is missing; run: pip install -e ".[experiments]"')
