"""Programs compiled for other devices, and what is parsed from them."""

import importlib.util
import json
import subprocess
import sys
from unittest import mock

import jax
import pytest

from experiments.lib import hlo
from specjax import api, decode, drafters, sharding
from tests import meshes
from tests.experiments import program

TEXT = """HloModule jit_generate

%fused (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %add = f32[4]{0} add(%p, %p)
}

%step (t: s32[]) -> s32[] {
  %t = (s32[], f32[4]{0}) parameter(0)
  %x = f32[4]{0} get-tuple-element(%t), index=1
  %f = f32[4]{0} fusion(%x), calls=%fused, metadata={op_name="f/sampled/while/body/draft/while/body/add"}
  %r = f32[4]{0} all-reduce(%f), metadata={op_name="f/sampled/while/body/draft/while/body/dot"}
  ROOT %o = (s32[], f32[4]{0}) tuple(%t, %r)
}

%stop (t: (s32[], f32[4])) -> pred[] {
  %t = (s32[], f32[4]{0}) parameter(0)
  ROOT %c = pred[] fusion(%t), kind=kLoop, calls=%fused
}

%body (t: s32[]) -> s32[] {
  %t = (s32[], f32[4]{0}) parameter(0)
  %w = s32[] while(%t), condition=%stop, body=%step, metadata={op_name="f/sampled/while/body/draft/while"}
  %s = (f32[4]{0:T(128)S(1)}, f32[4]{0}, u32[]) copy-start(%w)
  %d = f32[4]{0} copy-done(%s)
  %k = f32[2,3]{1,0} custom-call(%d), custom_call_target="Special", metadata={op_name="f/verify/dot"}
  ROOT %o = (s32[], f32[4]{0}) tuple(%w, %k)
}

%cond (t: (s32[], f32[4])) -> pred[] {
  %t = (s32[], f32[4]{0}) parameter(0)
  ROOT %c = pred[] fusion(%t), kind=kLoop, calls=%fused
}

ENTRY %main (a: f32[4]) -> f32[4] {
  %a = (s32[], f32[4]{0}) parameter(0)
  ROOT %w = (s32[], f32[4]{0}) while(%a), condition=%cond, body=%body, metadata={op_name="f/sampled/while"}
}
"""


def test_hlo_finds_loops_kernels_and_collectives():
    rounds = hlo.Module.parse(TEXT).rounds("sampled")
    assert hlo.per_round(rounds, 4) == (3, 3 + 4 * 3)  # each loop has a kernel for its condition
    draft, rest = hlo.draft_and_rest(rounds)
    assert hlo.names([one for one in draft if one.is_collective]) == "1 all-reduce"
    assert sorted(one.opcode for one in rest if one.is_kernel) == ["copy", "custom-call", "fusion"]
    (copy,) = [one for one in rounds.everything() if one.opcode == "copy"]
    assert copy.num_bytes == 16  # the result only
    assert [one.target for one in rounds.everything() if one.is_in("verify")] == ["Special"]
    with pytest.raises(ValueError, match="must have a loop of the greedy program"):
        hlo.Module.parse(TEXT).rounds("greedy")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    meshes.write(folder)
    return folder


def collectives(directory, name, which):
    """Returns the collectives of the draft stage on two devices that share the target."""
    target = meshes.load(directory / "target", sharding.make_mesh(1, 2))
    drafter = {
        "chain": lambda draft: drafters.from_model(draft(), 2),
        "tree": lambda draft: drafters.tree_from_model(draft(), (2, 1)),
        "staged": lambda draft: drafters.staged(draft(), drafters.prompt_lookup(1), 2),
        "eagle": lambda _: meshes.load_drafter(directory, target, "eagle"),
    }[name](lambda: meshes.load(directory / "draft", target.mesh, sharding.REPLICATED))
    ids, mask = api.encode_sources(target, meshes.PROMPTS)
    options = dict(max_new_tokens=8, temperature=float(which == "sampled"))
    request = decode.prepare(target.network, ids, mask, drafter=drafter, **options)
    compiled = decode.jitted_generate.trace(*request).lower().compile()
    rounds = hlo.Module.parse(compiled.as_text()).rounds(which)
    draft, rest = hlo.draft_and_rest(rounds)
    assert [one for one in rest if one.is_collective]  # the target's
    return [one.op_name for one in draft if one.is_collective]


@pytest.mark.parametrize(
    ("name", "which"), [("chain", "sampled"), ("tree", "greedy"), ("staged", "greedy"), ("eagle", "sampled")]
)
def test_drafting_needs_no_collective(directory, name, which):
    assert collectives(directory, name, which) == []


def test_drafting_needs_collectives_without_keep_whole(directory):
    with mock.patch.object(sharding, "keep_whole", lambda tree, place: tree):
        jax.clear_caches()
        assert collectives(directory, "chain", "sampled")
    jax.clear_caches()


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the extra compile-tpu")
def test_compile_runs_for_tpus(tmp_path):
    command = [
        sys.executable,
        "-m",
        "experiments.compile",
        "--topology=v5e-8",
        "--target=1x512",
        "--draft=1x64",
    ]
    command += ["--num_draft=3", "--source_length=16", "--max_new_tokens=16", f"--output={tmp_path}"]
    done = subprocess.run(command, cwd=program.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (row,) = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert row["fits"] == "yes" and 0 < row["arguments_gib"] <= row["peak_gib"] < 1
    assert row["collectives_in_draft"] == "none" and "all-reduce" in row["collectives_in_verify"]


@pytest.mark.skipif(importlib.util.find_spec("jax_cuda13_plugin") is not None, reason="it is installed")
def test_compile_reports_a_missing_compiler():
    done = program.run("compile", "--topology=h200", "--target=1x64", "--draft=1x64")
    assert done.returncode == 2 and 'pip install -e ".[compile-cuda]"' in done.stderr
