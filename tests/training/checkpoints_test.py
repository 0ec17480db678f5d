"""Checkpoints are restored exactly, or raise."""

import contextlib
import json
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from orbax.checkpoint import v1 as ocp

from specjax.training import checkpoints
from tests.training import tiny

STATE = {"x": jnp.arange(3.0), "opt": optax.TraceState({"y": jnp.ones((2, 2), jnp.bfloat16)})}


def save(directory, *steps, state=None, **kwargs):
    with contextlib.closing(checkpoints.Checkpoints(directory)) as saved:
        for step in steps:
            saved.save(step, state or STATE, **kwargs)


def restore(directory, step=None, like=None):
    with contextlib.closing(checkpoints.Checkpoints(directory)) as saved:
        return saved.restore(like or STATE, step)


def data_file(folder):
    """The file that holds most of the arrays."""
    return max((p for p in (folder / "state").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def test_state_and_note_come_back_types_included(tmp_path):
    note = {"position": b"\x00\xff", "more": [1, 2.5, None, {"text": "é"}]}
    save(tmp_path, 7, note=note)
    state, again = restore(tmp_path)
    assert jax.tree.structure(state) == jax.tree.structure(STATE) and again == note
    assert isinstance(state["opt"], optax.TraceState) and state["opt"].trace["y"].dtype == jnp.bfloat16
    jax.tree.map(np.testing.assert_array_equal, state, STATE)


def test_a_relative_path_is_made_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save("here", 1)
    os.chdir("/")
    np.testing.assert_array_equal(restore(tmp_path / "here").state["x"], STATE["x"])


def test_an_unwritable_path_raises_in_the_caller(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="cannot write checkpoints to .*file/run .*choose a directory"):
        checkpoints.Checkpoints(tmp_path / "file" / "run")


def test_a_directory_that_vanishes_raises_in_the_caller(tmp_path):
    saved = checkpoints.Checkpoints(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(FileNotFoundError, match="run"):
        saved.save(1, STATE)
    saved.close()


def test_a_write_that_fails_in_the_background_raises_at_the_next_call(tmp_path, monkeypatch):
    def full(*args):
        raise OSError("no space left")

    monkeypatch.setattr(checkpoints, "write_manifest", full)
    saved = checkpoints.Checkpoints(tmp_path)
    saved.save(1, STATE)
    with pytest.raises(OSError, match="no space left"):
        saved.save(2, STATE)
    saved.close()
    assert saved.steps == []


def test_save_copies_arrays_that_are_donated_next(tmp_path):
    bump = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = bump(jnp.zeros((500, 1000)))
    with contextlib.closing(checkpoints.Checkpoints(tmp_path)) as saved:
        for step in range(1, 4):
            saved.save(step, {"x": x})
            x = bump(bump(bump(x)))
            like = {"x": x}
            assert (saved.restore(like, step).state["x"] == 3 * step - 2).all()


def test_the_newest_two_are_kept_and_those_asked_for(tmp_path):
    with contextlib.closing(checkpoints.Checkpoints(tmp_path)) as saved:
        for step in (8, 9, 10, 11, 100):
            saved.save(step, STATE, keep=(9,))
        saved.wait()
        assert saved.steps == [9, 11, 100] and saved.latest_step == 100
    assert sorted(os.listdir(tmp_path)) == ["100", "11", "9"]


def test_save_leaves_an_existing_checkpoint_unchanged(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 1, state=jax.tree.map(lambda x: x + 1, STATE))
    np.testing.assert_array_equal(restore(tmp_path).state["x"], STATE["x"])


def test_a_half_written_checkpoint_is_ignored_and_later_removed(tmp_path):
    save(tmp_path, 1)
    shutil.copytree(tmp_path / "1" / "state", tmp_path / ".partial-2" / "state")
    with contextlib.closing(checkpoints.Checkpoints(tmp_path)) as saved:
        assert saved.latest_step == 1 and (tmp_path / ".partial-2").exists()  # it may be being written
        saved.save(3, STATE)
        assert not (tmp_path / ".partial-2").exists()


def test_missing_step_is_named(tmp_path):
    save(tmp_path, 4)
    with pytest.raises(ValueError, match="has no checkpoint of step 5; it has \\[4\\]"):
        restore(tmp_path, 5)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    """Checkpoints of steps 1 and 2."""
    directory = tmp_path_factory.mktemp("run")
    save(directory, 1, 2)
    return directory


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: flip(data_file(folder)), "{data} was changed after it was written"),
        (lambda folder: os.truncate(data_file(folder), 5), "{data} has 5 bytes, .* were written"),
        (lambda folder: data_file(folder).unlink(), "{data} is missing"),
        (lambda folder: flip(folder / "note.json"), "{folder}/note.json was changed"),
        (lambda folder: os.truncate(folder / "manifest.json", 30), "{folder}/manifest.json is damaged"),
        (lambda folder: (folder / "manifest.json").unlink(), "{folder} was not written by this program"),
        (lambda folder: (folder / "manifest.json").write_text("{}"), "{folder}/manifest.json is not of the"),
        (lambda folder: (shutil.rmtree(folder), folder.mkdir()), "{folder} was not written by this program"),
    ],
    ids=["flip", "truncate", "delete", "flip note", "cut manifest", "no manifest", "other manifest", "empty"],
)
def test_damaged_checkpoint_raises_with_file_and_remedy(intact, tmp_path, damage, message):
    directory = shutil.copytree(intact, tmp_path / "run")
    folder = directory / "2"
    expected = message.format(folder=folder, data=data_file(folder))
    damage(folder)
    with pytest.raises(ValueError, match=f"{expected}.*: remove {folder} to resume from step 1") as caught:
        restore(directory)
    assert "\n" not in str(caught.value)
    shutil.rmtree(folder)  # the remedy
    np.testing.assert_array_equal(restore(directory).state["x"], STATE["x"])


def test_the_checksum_is_needed_orbax_loads_a_flipped_byte(intact, tmp_path):
    """If this fails, the checksums are no longer needed."""
    state = {"x": jnp.asarray(np.random.default_rng(0).normal(size=(64, 64)), jnp.float32)}
    save(tmp_path, 1, state=state)
    path = data_file(tmp_path / "1")
    silent = 0
    for offset in range(0, path.stat().st_size, path.stat().st_size // 16):
        content = bytearray(path.read_bytes())
        content[offset] ^= 1
        (folder := tmp_path / f"flip{offset}").mkdir()
        copy = shutil.copytree(tmp_path / "1" / "state", folder / "state")
        (copy / path.relative_to(tmp_path / "1" / "state")).write_bytes(content)
        with contextlib.suppress(Exception):  # of no narrower class
            silent += not bool((ocp.load(copy, state)["x"] == state["x"]).all())
    assert silent > 0


def test_checkpoint_without_a_manifest_raises(tmp_path):
    (tmp_path / "3").mkdir()
    ocp.save(tmp_path / "3" / "state", STATE)
    with pytest.raises(ValueError, match=f"{tmp_path}/3 was not written by this program.*start anew"):
        restore(tmp_path)


@pytest.mark.parametrize(
    ("like", "message"),
    [
        ({**STATE, "x": jnp.zeros(4)}, "holds float32\\[3\\] as \\['x'\\], not float32\\[4\\]:"),
        ({**STATE, "x": jnp.zeros(3, jnp.int32)}, "holds float32\\[3\\] as \\['x'\\], not int32\\[3\\]"),
        ({**STATE, "z": jnp.zeros(3)}, "holds nothing as \\['z'\\]"),
        ({"x": STATE["x"]}, "holds bfloat16.* as .*'opt'.*, not nothing"),
    ],
    ids=["shape", "dtype", "more", "less"],
)
def test_checkpoint_of_another_model_raises(intact, like, message):
    with pytest.raises(ValueError, match=f"{intact}/2 {message}.*choose another directory"):
        restore(intact, like=like)


def test_every_file_is_in_the_manifest(intact):
    folder = intact / "2"
    files = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    assert json.loads((folder / "manifest.json").read_text())["files"].keys() == files - {"manifest.json"}


KILLED = """
import os, signal, sys, time
from specjax.models import t5
from specjax.training import checkpoints, loop
from specjax.training.state import abstract_state
from tests.training import tiny

point, kill_at, *directories = sys.argv[1:]

def killing(name, now):
    real = getattr(checkpoints, name)
    def wrapped(path, *args):
        if kill_at in path.name:
            now(path, *args)
            os.kill(os.getpid(), signal.SIGKILL)
        real(path, *args)
    setattr(checkpoints, name, wrapped)

if point == "while orbax writes":  # the rest of the save never runs
    killing("write_manifest", lambda *args: time.sleep(100))
elif point == "within the manifest":
    killing("write_manifest", lambda path, *args: (path / "manifest.json").write_text('{"format": "sp'))
elif point == "before the rename":
    killing("commit", lambda *args: None)

like = abstract_state(tiny.params(), tiny.OPTIMIZATION)
step = loop.make_step(loop.likelihood(t5.T5(tiny.CONFIG), 0.1), tiny.OPTIMIZATION, like)
for directory in directories:
    saved = checkpoints.Checkpoints(directory)

    def report(state, progress):
        saved.save(progress.step, state, {"position": progress.step})
        if point == "while orbax writes" and str(progress.step) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return True

    if saved.latest_step is None:
        state = tiny.fresh_state()
    else:
        state, note = saved.restore(like)
        assert note == {"position": int(state.step)}
    print("from", int(state.step), flush=True)
    tiny.train(step, state, 8, report, report_every=2)
    saved.close()
"""


@pytest.mark.slow
def test_run_killed_while_saving_equals_an_uninterrupted_one(tmp_path):
    """SIGKILL at three moments of a save; each time the newest complete checkpoint is resumed."""
    kills = [("while orbax writes", 4, 0), ("within the manifest", 6, 2), ("before the rename", 8, 4)]
    for point, kill_at, resumed_from in kills:
        done = tiny.run_program(KILLED, point, kill_at, tmp_path / "killed")
        assert (done.returncode, done.stdout) == (-9, f"from {resumed_from}\n"), done.stderr
        assert (tmp_path / "killed" / f".partial-{kill_at}").exists()
        assert not (tmp_path / "killed" / str(kill_at)).exists()
    done = tiny.run_program(KILLED, "never", 0, tmp_path / "killed", tmp_path / "whole")
    assert (done.returncode, done.stdout) == (0, "from 6\nfrom 0\n"), done.stderr
    whole, killed = (restore(tmp_path / name, 8, tiny.fresh_state()).state for name in ("whole", "killed"))
    assert jax.tree.structure(whole) == jax.tree.structure(killed)
    jax.tree.map(np.testing.assert_array_equal, whole, killed)
