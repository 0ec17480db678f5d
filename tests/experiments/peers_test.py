"""Peers: ours and torch on tiny random T5s, forced drafts, and what a missing library is called."""

import json
import sys
import types

import jax
import numpy as np
import pytest
from absl import flags

from experiments import forced, memory_floor, peer_arms, shapes
from specjax import decode, drafters
from specjax.models import convert, t5
from specjax.request import prepare
from tests.experiments.program import run

CONFIG = t5.T5Config(24, 16, 4, 16, 2, 1, 2)  # more decoder layers than encoder layers
IDS = np.array([5, 9, 3, 1])


@pytest.fixture(autouse=True)
def parsed():
    flags.FLAGS.mark_as_parsed()


@pytest.fixture(scope="module")
def params():
    return jax.tree.map(lambda x: 2 * x, shapes.random_params(CONFIG, 0))


def greedy(params, **options):
    request = prepare(
        t5.T5Network(CONFIG), params, IDS[None], np.ones((1, 4), bool), seed=0, max_new_tokens=12, **options
    )
    done = jax.device_get(decode.jitted_generate(*request))
    return done.tokens[0, : done.length[0]].tolist(), done


def test_transformers_plain_assisted_and_with_lookup_say_what_we_say(params, tmp_path):
    pytest.importorskip("torch")
    convert.save(tmp_path, CONFIG, params)
    case = types.SimpleNamespace(
        directory=str(tmp_path), draft_directory=str(tmp_path), sources=[IDS], max_new_tokens=12, lengths=[2]
    )
    expected, _ = greedy(params)
    made = peer_arms.transformers_arms(case, tmp_path)
    assert len(made) == 4
    for name, arm in made.items():
        assert arm(0) == expected, name


def test_missing_libraries_are_named(monkeypatch, tmp_path):
    for package in peer_arms.PACKAGES:
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "experiments.onnx_peer", raising=False)
    for library in peer_arms.BUILDERS:
        assert peer_arms.build(library, None, tmp_path) == {library: peer_arms.NOT_INSTALLED}


@pytest.mark.parametrize(("alpha", "num_rounds"), [(0.0, 12), (1.0, 4)])
def test_forced_drafts_are_accepted_as_told_and_change_no_token(params, alpha, num_rounds):
    expected, _ = greedy(params, eos_ids=())
    drafter = forced.ForcedDrafter(drafters.ModelDrafter(t5.T5Network(CONFIG), 2))
    told = forced.forced_tokens([expected], alpha, CONFIG.vocab_size, 0)
    found, done = greedy(
        params, eos_ids=(), drafter=drafter, drafter_params=forced.ForcedParams(params, told)
    )
    assert found == expected and int(done.stats.num_rounds[0]) == num_rounds


def test_memory_is_read_at_some_speed():
    assert memory_floor.read_bandwidth(1 << 16) > 0


@pytest.mark.slow
def test_peers_of_a_shape(tmp_path):
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
    plain, forced_row, *others = rows
    assert plain["same_rows"] == forced_row["same_rows"] == "1 of 1"
    assert forced_row["tokens_per_target_call"] == 3 and "forced" in forced_row["arm"]
    said = {row["ms_per_token"] for row in others if "same_rows" not in row}
    assert said <= {peer_arms.NO_DRAFT, peer_arms.NOT_INSTALLED} and said
    assert floor["floor_ms"] > 0 and (tmp_path / "peers.png").exists()
