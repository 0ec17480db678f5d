"""A tiny copying task and network, for the tests of training and the programs that they start."""

import functools
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np

from specjax import data
from specjax.models import t5
from specjax.training import loop, state

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = t5.T5Config(24, 8, 4, 16, 2, 1, 1, dropout_rate=0.2)
OPTIMIZATION = state.Optimization(learning_rate=0.05, warmup_steps=2, num_steps=40)


def pairs():
    random = np.random.default_rng(0)
    sources = [[*random.integers(2, 24, size=3 + i % 4).tolist(), 1] for i in range(16)]
    return [data.Pair(s, s) for s in sources]


@functools.cache
def params(config=CONFIG):
    ids = np.zeros((1, 4), np.int32)
    return jax.jit(t5.T5(config).init)(jax.random.key(0), ids, ids == 0, ids)["params"]


def fresh_state(optimization=OPTIMIZATION, config=CONFIG, mesh=None):
    return state.init_state(params(config), optimization, seed=0, mesh=mesh)


def batches(start_step=0):
    """Yields batches without end; those of step n are the same wherever the iteration starts."""
    for rows in data.training_rows(pairs(), 8, [(8, 8)], seed=0, start_step=start_step):
        yield data.make_batch([pairs()[i] for i in rows], (8, 8))


def train(step, state, num_steps, on_report=lambda state, progress: True, report_every=10):
    return loop.run(state, step, batches(int(state.step)), num_steps, report_every, on_report)


def run_program(source, *args, num_devices=1):
    """Runs Python source in a process of its own, on that many simulated devices."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "error",
        "JAX_NUM_CPU_DEVICES": str(num_devices),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # halves the compile time
    }
    command = [sys.executable, "-c", source, *map(str, args)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
