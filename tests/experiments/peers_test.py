"""Peers on tiny random T5s, forced drafts, and missing libraries."""

import json
import sys
import types

import jax
import numpy as np
import pytest
from absl import flags

from experiments.lib import memory_floor, peer_arms, synthetic
from specjax import decode, drafters
from specjax.models import convert, t5
from tests.experiments.program import run
from tests.tiny_t5 import random_params

CONFIG = t5.T5Config(24, 16, 4, 16, 2, 1, 2)  # more decoder layers than encoder layers
IDS = np.array([5, 9, 3, 1])


@pytest.fixture(autouse=True)
def parsed():
    flags.FLAGS.mark_as_parsed()


@pytest.fixture(scope="module")
def network():
    return t5.T5Network(jax.tree.map(lambda x: 2 * x, random_params(CONFIG)), CONFIG)


def greedy(network, **options):
    mask = np.ones((1, 4), bool)
    done = jax.device_get(decode.generate(network, IDS[None], mask, max_new_tokens=12, **options))
    return done.tokens[0, : done.length[0]].tolist(), done


def test_transformers_arms_emit_our_tokens(network, tmp_path):
    pytest.importorskip("torch")
    convert.save(tmp_path, CONFIG, network.params)
    case = types.SimpleNamespace(
        directory=str(tmp_path), draft_directory=str(tmp_path), sources=[IDS], max_new_tokens=12, lengths=[2]
    )
    expected, _ = greedy(network)
    made = peer_arms.transformers_arms(case, tmp_path)
    assert len(made) == 4
    for name, arm in made.items():
        assert arm(0) == expected, name


def test_peer_arms_report_missing_libraries(monkeypatch, tmp_path):
    for package in peer_arms.PACKAGES:
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "experiments.lib.onnx_peer", raising=False)
    for library in peer_arms.BUILDERS:
        assert peer_arms.build(library, None, tmp_path) == {library: peer_arms.NOT_INSTALLED}


@pytest.mark.parametrize(("alpha", "num_rounds"), [(0.0, 12), (1.0, 4)])
def test_forced_drafter_is_accepted_as_drawn_and_changes_no_token(network, alpha, num_rounds):
    expected, _ = greedy(network, eos_ids=())
    tokens = synthetic.forced_tokens([expected], alpha, CONFIG.vocab_size, 0)
    drafter = synthetic.ForcedDrafter(drafters.ModelDrafter(network, 2), tokens)
    found, done = greedy(network, eos_ids=(), drafter=drafter)
    assert found == expected and int(done.stats.num_rounds[0]) == num_rounds


def test_read_bandwidth_is_positive():
    assert memory_floor.read_bandwidth(1 << 16) > 0


@pytest.mark.slow
def test_peers_compares_a_shape(tmp_path):
    done = run(
        "peers",
        "--shape=1x64",
        "--draft_shape=1x32",
        "--num_draft=2",
        "--num_examples=1",
        "--alpha=1",
        "--max_new_tokens=6",
        "--source_length=8",
        "--repeats=2",
        "--peers=transformers",
        f"--output={tmp_path}",
    )
    assert done.returncode == 0, done.stderr
    *rows, floor = json.loads((tmp_path / "results.json").read_text())["rows"]
    autoregressive, forced_row, *others = rows
    assert autoregressive["same_rows"] == forced_row["same_rows"] == "1 of 1"
    assert forced_row["tokens_per_target_call"] == 3 and "forced" in forced_row["arm"]
    reasons = {row["ms_per_token"] for row in others if "same_rows" not in row}
    assert reasons <= {peer_arms.NO_DRAFT, peer_arms.NOT_INSTALLED} and reasons
    assert floor["floor_ms"] > 0 and (tmp_path / "peers.png").exists()
