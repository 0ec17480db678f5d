"""Training on several devices equals training on one; checkpoints move between device counts."""

import contextlib
import dataclasses
import functools

import jax
import numpy as np
import pytest

from specjax import data, sharding
from specjax.models import t5
from specjax.training import checkpoints, loop, state
from tests.training import tiny

# The compiler may order sums differently; without parameter scaling no difference is amplified.
EXACT = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-6)


def steps(mesh, num_steps=3, config=tiny.CONFIG, optimization=tiny.OPTIMIZATION):
    like = tiny.fresh_state(optimization, config, mesh)
    step = loop.make_step(loop.likelihood(t5.T5(config), 0.1), optimization, like)
    return tiny.train(step, like, num_steps)


@pytest.mark.parametrize(("optimizer", "shape"), [("adamw", (2, 1)), ("adafactor", (1, 2))])
def test_two_devices_train_as_one_does(optimizer, shape):
    """Dropout included: the noise does not depend on the placement."""
    optimization = dataclasses.replace(tiny.OPTIMIZATION, optimizer=optimizer, learning_rate=1e-3)
    one = steps(None, optimization=optimization)
    two = steps(sharding.make_mesh(*shape), optimization=optimization)
    assert len(two.params["embedding"].sharding.device_set) == 2
    jax.tree.map(EXACT, two.params, one.params)
    placed = two.params["encoder_layers_0"]["attention"]["q"].sharding.spec
    assert tuple(placed)[1] == "model"


def test_evaluate_on_two_devices_ignores_padding_rows():
    pairs = tiny.pairs()
    batches = [data.make_batch(pairs[:5], (8, 8)), data.make_batch(pairs[5:16], (8, 8))]
    one = loop.make_evaluate(t5.T5(tiny.CONFIG))(tiny.params(), batches)
    mesh = sharding.make_mesh(2, 1)
    two = loop.make_evaluate(t5.T5(tiny.CONFIG), mesh)(tiny.fresh_state(mesh=mesh).params, batches)
    assert two == pytest.approx(one, rel=1e-6)


def test_batch_that_the_devices_do_not_divide_raises():
    optimization = dataclasses.replace(tiny.OPTIMIZATION, num_accumulated=8)
    like = tiny.fresh_state(optimization, mesh=sharding.make_mesh(2, 1))
    step = loop.make_step(loop.likelihood(t5.T5(tiny.CONFIG), 0.1), optimization, like)
    with pytest.raises(ValueError, match="a multiple of 16 rows .num_accumulated=8 parts on 2 .*got 8"):
        step(like, dataclasses.asdict(next(tiny.batches())))


def test_optimizer_state_is_sharded_like_the_params():
    mesh = sharding.make_mesh(1, 2)
    optimization = dataclasses.replace(tiny.OPTIMIZATION, optimizer="adamw")
    like = state.abstract_state(tiny.params(), optimization, mesh)
    adam = like.opt_state[1][0]
    assert (
        adam.mu["embedding"].sharding
        == like.params["embedding"].sharding
        == sharding.NamedSharding(mesh, sharding.P("model", None))
    )
    assert adam.count.sharding.is_fully_replicated and like.step.sharding.is_fully_replicated


MOVE = """
import sys
import jax
import numpy as np
from specjax import data, sharding
from specjax.models import t5
from specjax.training import checkpoints, loop, state
from tests.training import tiny

task, directory, data_size, model_size = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
mesh = sharding.make_mesh(data_size, model_size)
assert len(jax.devices()) == data_size * model_size
like = state.abstract_state(tiny.params(), tiny.OPTIMIZATION, mesh)
step = loop.make_step(loop.likelihood(t5.T5(tiny.CONFIG), 0.1), tiny.OPTIMIZATION, like)
saved = checkpoints.Checkpoints(directory)

def dump(name, train_state):
    np.savez(f"{directory}/{name}.npz", *[np.asarray(x) for x in jax.tree.leaves(train_state)])

if task == "write":
    three = tiny.train(step, tiny.fresh_state(mesh=mesh), 3)
    saved.save(3, three)
    dump("three", three)
    dump("four", tiny.train(step, three, 4))
else:
    three, _ = saved.restore(like)
    assert jax.tree.structure(three) == jax.tree.structure(tiny.fresh_state())
    jax.tree.map(lambda x, y: (x.sharding == y.sharding) or 1 / 0, three, like)
    dump(f"three on {len(jax.devices())}", three)
    dump(f"four on {len(jax.devices())}", tiny.train(step, three, 4))
saved.close()
"""


@pytest.mark.slow
def test_a_checkpoint_of_eight_devices_restores_on_one_and_on_four(tmp_path):
    """Params and optimizer state bit-equal, types included; the next step continues the run."""
    for task, rows, model in [("write", 4, 2), ("read", 2, 2)]:
        done = tiny.run_program(MOVE, task, tmp_path, rows, model, num_devices=rows * model)
        assert done.returncode == 0, done.stderr
    load = lambda name: list(np.load(tmp_path / f"{name}.npz").values())  # noqa: E731
    jax.tree.map(np.testing.assert_array_equal, load("three"), load("three on 4"))
    jax.tree.map(EXACT, load("four"), load("four on 4"))
    like = state.abstract_state(tiny.params(), tiny.OPTIMIZATION)
    with contextlib.closing(checkpoints.Checkpoints(tmp_path)) as saved:
        three, _ = saved.restore(like)
    assert jax.tree.structure(three) == jax.tree.structure(tiny.fresh_state())
    jax.tree.map(np.testing.assert_array_equal, load("three"), jax.tree.leaves(three))
    step = loop.make_step(loop.likelihood(t5.T5(tiny.CONFIG), 0.1), tiny.OPTIMIZATION, like)
    jax.tree.map(EXACT, load("four"), jax.tree.leaves(tiny.train(step, three, 4)))
    assert any((a != b).any() for a, b in zip(load("three"), load("four"), strict=True))
    # And against training on one device from the start.
    jax.tree.map(EXACT, load("four"), jax.tree.leaves(steps(None, 4)))


def test_a_checkpoint_moves_between_one_and_two_devices(tmp_path):
    one = steps(None)
    with contextlib.closing(checkpoints.Checkpoints(tmp_path)) as saved:
        saved.save(3, one)
        like = state.abstract_state(one.params, tiny.OPTIMIZATION, sharding.make_mesh(1, 2))
        two, _ = saved.restore(like)
    assert jax.tree.structure(two) == jax.tree.structure(one)
    jax.tree.map(np.testing.assert_array_equal, two, one)
    assert len(two.params["embedding"].sharding.device_set) == 2
