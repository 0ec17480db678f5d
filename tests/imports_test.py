"""The import rules of CONTRIBUTING.md, checked on every file of the library."""

import ast
import graphlib
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
FILES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "specjax").rglob("*.py"))

# A file imports only from lines above its own. Files of one folder may import each other, in one
# direction; two files that share a line may not.
ORDER = (
    ("types", "sharding", "writing", "hub"),
    ("sampling", "draws"),
    ("tree",),
    ("cache",),
    ("acceptance",),
    ("round",),
    ("drafters",),
    ("generation_config",),
    ("decode",),
    ("corpus",),
    ("models",),
    ("analysis",),
    ("data", "metrics"),
    ("training",),
    ("texts",),
    ("loading", "convert_checkpoint"),
    ("api",),
    ("__init__",),
)
LINE = {part: line for line, parts in enumerate(ORDER) for part in parts}

# Package -> where it may be imported; "(inside functions)": not when the file is loaded.
CONFINED = {
    "flax.linen": ("models/", "training/"),
    "flax.nnx": (),
    "transformers": ("hub.py (inside functions)", "loading.py", "data/ (inside functions)"),
    "tensorflow_datasets": ("data/ (inside functions)",),
    "grain": ("data/ (inside functions)",),
    "orbax": ("training/",),
    "absl.app": (),
    "absl.flags": (),
    "tensorflow": ("data/ (inside functions)",),  # to hide the GPUs from it, where it is present
    "torch": ("convert_checkpoint.py (inside functions)",),
    "experiments": (),
}

HEAVY = ("transformers", "tensorflow_datasets", "tensorflow", "grain", "torch", "orbax")


def imported_names(path: str, source: str) -> list[tuple[str, bool]]:
    """Every dotted name that a file imports, and whether that happens inside a function.

    `from a import b` gives `a.b`, whether b is a module or not; `flax.linen` written out after
    a bare `import flax` counts as well.
    """
    names: list[tuple[str, bool]] = []

    def visit(node: ast.AST, inside: bool) -> None:
        if isinstance(node, ast.Import):
            names.extend((alias.name, inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = pathlib.PurePath(path).parts[:-1]
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*above, *([node.module] if node.module else [])])
            names.extend((f"{module}.{alias.name}", inside) for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id in ("flax", "absl"):
                names.append((f"{node.value.id}.{node.attr}", inside))
        inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            visit(child, inside)

    visit(ast.parse(source, path), False)
    return names


def part_of(path: str) -> str:
    """`specjax/models/t5.py` -> "models", `specjax/cache.py` -> "cache"."""
    return pathlib.PurePath(path).with_suffix("").parts[1]


def is_allowed(path: str, places: tuple[str, ...], inside: bool) -> bool:
    """Whether `path` is one of the `places` that CONFINED names for a package."""
    file = path.removeprefix("specjax/")
    for place in places:
        where, _, only_inside = place.partition(" ")
        matches = file.startswith(where) if where.endswith("/") else file == where
        if matches and (inside or not only_inside):
            return True
    return False


def violations(path: str, source: str) -> list[str]:
    """Returns the imports of a file that break the rules, a sentence each."""
    part = part_of(path)
    if part not in LINE:
        return [f"{path}: not on the map; give {part!r} a line in ORDER and in CONTRIBUTING.md"]
    found = []
    for name, inside in imported_names(path, source):
        for package, places in CONFINED.items():
            if f"{name}.".startswith(f"{package}.") and not is_allowed(path, places, inside):
                found.append(f"{path}: imports {name}; allowed in: {', '.join(places) or 'no file'}")
        if name.split(".")[0] != "specjax":
            continue
        other = name.split(".")[1] if name.count(".") else "__init__"
        other = other if other in LINE else "__init__"  # `from specjax import generate`
        same_folder = other == part and path.count("/") > 1
        if not same_folder and LINE[other] >= LINE[part]:
            found.append(f"{path}: imports {name}, which is not above {part!r} in ORDER")
    return found


@pytest.mark.parametrize("path", FILES)
def test_file_imports_only_what_the_map_allows(path):
    assert not violations(path, (ROOT / path).read_text("utf-8"))


def test_no_folder_holds_an_import_cycle():
    modules = {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in FILES}
    graph = {}
    for module, path in modules.items():
        names = [name for name, _ in imported_names(path, (ROOT / path).read_text("utf-8"))]
        # `from specjax.models import t5` names the file; in `from specjax.models.t5 import T5` the
        # file stands before the last dot.
        named = {name if name in modules else name.rpartition(".")[0] for name in names}
        graph[module] = named & set(modules)
    tuple(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError, naming the cycle


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("specjax/types.py", "from specjax import sampling"),
        ("specjax/types.py", "def f():\n    from specjax.api import load"),
        ("specjax/cache.py", "import specjax"),
        ("specjax/cache.py", "from specjax import generate"),
        ("specjax/cache.py", "from . import decode"),
        ("specjax/drafters/eagle.py", "from ..decode import generate"),
        ("specjax/data/files.py", "from specjax import metrics"),
        ("specjax/decode.py", "import flax.linen as nn"),
        ("specjax/decode.py", "from flax import linen"),
        ("specjax/decode.py", "from flax.linen import Module"),
        ("specjax/decode.py", "import flax\nflax.linen.Dense"),
        ("specjax/models/t5.py", "import transformers"),
        ("specjax/data/batches.py", "import transformers"),
        ("specjax/data/stream.py", "import grain"),
        ("specjax/metrics.py", "def f():\n    import tensorflow_datasets as tfds"),
        ("specjax/corpus.py", "import grain.python"),
        ("specjax/models/convert.py", "from orbax.checkpoint import v1"),
        ("specjax/api.py", "from absl import flags"),
        ("specjax/api.py", "import torch"),
        ("specjax/new_part.py", ""),
    ],
)
def test_a_planted_import_is_found(path, source):
    assert violations(path, source)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("specjax/sampling.py", "from specjax import types\nfrom specjax.types import Draft"),
        ("specjax/cache.py", "from flax import struct\nfrom absl import logging"),
        ("specjax/models/heads.py", "from flax import linen\nfrom specjax.models import t5"),
        ("specjax/hub.py", "def f():\n    import transformers"),
        ("specjax/data/batches.py", "def f():\n    import grain\n    import transformers"),
        ("specjax/training/loop.py", "from specjax.training import losses\nimport flax.linen"),
        ("specjax/__init__.py", "from specjax.api import generate, load"),
    ],
)
def test_an_import_along_the_map_passes(path, source):
    assert not violations(path, source)


def loaded_heavy_packages(script: str) -> list[str]:
    """Runs a script in a new process; returns the HEAVY packages loaded at its end."""
    script += f"\nimport sys\nprint('heavy:', *[name for name in {HEAVY} if name in sys.modules])"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, env=environment
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()[-1].split()[1:]


def test_the_check_sees_a_heavy_package():
    assert loaded_heavy_packages("import transformers") == ["transformers"]


def test_importing_specjax_loads_no_heavy_package():
    assert loaded_heavy_packages("import specjax") == []


def test_importing_the_algorithms_and_the_network_loads_no_heavy_package():
    parts = ("models/t5", *(part for part, line in LINE.items() if line <= LINE["metrics"]))
    files = [path for path in FILES if path.removesuffix(".py").removeprefix("specjax/").startswith(parts)]
    modules = [path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in files]
    assert loaded_heavy_packages("\n".join(f"import {module}" for module in modules)) == []


TINY_GENERATION = """
import jax
import jax.numpy as jnp
import specjax
from specjax import decode
from specjax.drafters import ModelDrafter
from specjax.models import t5

config = t5.T5Config(40, 8, 4, 8, 2, 1, 1)
source = jnp.array([[5, 6, 1], [7, 1, 0]])
params = jax.jit(t5.T5(config).init)(jax.random.key(0), source, source != 0, source)["params"]
network = t5.T5Network(params, config)
output = decode.generate(
    network, source, source != 0, drafter=ModelDrafter(network, 2), temperature=1.0, max_new_tokens=3, seed=0
)
jax.block_until_ready(output)
"""


def test_token_level_generation_loads_no_heavy_package():
    assert loaded_heavy_packages(TINY_GENERATION) == []
