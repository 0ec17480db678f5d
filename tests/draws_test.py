"""Choices from weights, and the independence of draws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import draws
from specjax.draws import KeyDraws, Stream

ALMOST_ONE = np.float32(1 - 2.0**-23)  # the largest that `jax.random.uniform` gives
V_T5 = 32128


def zipf(num_entries: int) -> np.ndarray:
    weights = 1 / np.arange(1, num_entries + 1)
    return np.random.default_rng(0).permutation(weights / weights.sum())


# ---- choose


def implied_probs(weights: np.ndarray) -> np.ndarray:
    """The probability of every entry that float32 cumulative sums imply, for ideal uniforms."""

    def steps(weights):  # [R, E] float32 -> widths of the intervals, float64
        cumulative = np.asarray(jnp.cumsum(jnp.asarray(weights, jnp.float32), axis=-1), np.float64)
        return np.diff(cumulative, axis=1, prepend=0) / cumulative[:, -1:]

    group = draws.GROUP
    padded = np.pad(weights.astype(np.float32), (0, -len(weights) % group)).reshape(-1, group)
    sums = np.asarray(jnp.asarray(padded).sum(-1))
    return (steps(sums[None])[0][:, None] * steps(padded)).reshape(-1)[: len(weights)]


def test_choice_has_the_distribution_of_the_weights_at_32128_entries():
    """A bound, not a sample: the probabilities that the cumulative sums imply."""
    weights = zipf(V_T5)
    implied = implied_probs(weights)
    np.testing.assert_allclose(implied.sum(), 1, atol=1e-6)
    assert np.abs(implied - weights).max() < 1e-7
    assert np.abs(implied - weights).sum() / 2 < 2e-5  # total variation
    assert (implied > 0).all()  # no entry is lost
    assert np.median(np.abs(implied / weights - 1)) < 1e-4


@pytest.mark.parametrize("num_entries", [3, 129, 1000])
def test_choice_follows_the_cumulative_weights(num_entries):
    """Uniforms at the middle of every entry's interval choose that entry."""
    weights = np.random.default_rng(1).random(num_entries).astype(np.float32) + 0.01
    padded = np.pad(weights.astype(np.float64), (0, -num_entries % draws.GROUP))
    padded = padded.reshape(-1, draws.GROUP)
    sums = padded.sum(1)
    of_group = (np.cumsum(sums) - sums / 2) / sums.sum()
    of_entry = (np.cumsum(padded, 1) - padded / 2) / sums[:, None]
    entry = np.arange(num_entries)
    uniform = np.stack([of_group[entry // draws.GROUP], of_entry.reshape(-1)[:num_entries]], axis=1)
    rows = jnp.broadcast_to(weights[None], (num_entries, num_entries))
    chosen = draws.choose_by_inverse(rows, jnp.asarray(uniform, jnp.float32))
    np.testing.assert_array_equal(chosen, entry)


@pytest.mark.parametrize("cumsum", ["of jax", "of a parallel scan"])
def test_entry_of_zero_weight_is_never_chosen(cumsum, monkeypatch):
    """With uniforms at 0, just below 1, and at every step of the cumulative sum.

    Partial sums of a parallel scan, as accelerators use, differ across an entry of zero weight.
    """
    if cumsum == "of a parallel scan":
        scan = lambda x, axis: jax.lax.associative_scan(jnp.add, x, axis=axis)  # noqa: E731
        monkeypatch.setattr(jnp, "cumsum", scan)
    rng = np.random.default_rng(2)
    weights = (rng.random((64, 128)) * (rng.random((64, 128)) < 0.4)).astype(np.float32)
    weights[:, 64] = 1
    cumulative = np.asarray(jnp.cumsum(jnp.asarray(weights), axis=-1))
    at_steps = cumulative / cumulative[:, -1:]
    edges = [np.zeros(64), np.full(64, ALMOST_ONE), np.full(64, 2.0**-23)]
    uniforms = [*edges, *at_steps.T, *np.nextafter(at_steps, 0).T]
    uniforms = np.clip(np.stack(uniforms).astype(np.float32), 0, ALMOST_ONE)  # [U, B]
    choose = jax.jit(lambda uniform: draws._first_above(jnp.asarray(weights), uniform))
    for uniform in uniforms:
        assert (weights[np.arange(64), choose(jnp.asarray(uniform))] > 0).all()


@pytest.mark.parametrize("position", [0, 5, 127, 128, 250, 299])
@pytest.mark.parametrize("uniform", [0.0, 0.5, float(ALMOST_ONE)])
def test_only_positive_entry_is_chosen_whatever_the_uniform(position, uniform):
    weights = np.zeros((1, 300), np.float32)
    weights[0, position] = 1e-30
    assert draws.choose_by_inverse(jnp.asarray(weights), jnp.full((1, 2), uniform))[0] == position


def test_choice_from_nan_weights_is_an_entry():
    """NaN is reported elsewhere; the choice must be an id of the vocabulary."""
    weights = jnp.asarray([[jnp.nan] * 40, [0.5, jnp.nan] * 20])
    chosen = draws.choose_by_inverse(weights, jnp.full((2, 2), 0.7))
    assert ((chosen >= 0) & (chosen < 40)).all()


def test_choice_of_unnormalised_weights_equals_that_of_normalised_ones():
    weights = jnp.asarray(zipf(500)[None], jnp.float32)
    uniform = jax.random.uniform(jax.random.key(1), (64, 2))
    rows = jnp.broadcast_to(weights, (64, 500))
    chosen = [draws.choose_by_inverse(rows * scale, uniform) for scale in (1.0, 2.0**-20, 2.0**10)]
    np.testing.assert_array_equal(chosen[0], chosen[1])
    np.testing.assert_array_equal(chosen[0], chosen[2])


# ---- streams


def test_streams_of_a_round_are_distinct():
    ids = [int(stream.at(position)) for stream in Stream for position in range(64)]
    assert len(set(ids)) == len(ids)


@pytest.fixture(scope="module")
def uniforms() -> np.ndarray:
    """What 2^14 rows draw in each of two rounds, `[2 rounds * streams, rows]`."""
    num = 2**14
    streams = jnp.asarray([int(s.at(i)) for s in Stream for i in range(3)])

    @jax.jit
    def of_round(round_):
        keyed = KeyDraws.of_round(jnp.arange(num, dtype=jnp.uint32), jnp.full(num, round_))
        each = jax.vmap(lambda key: jax.vmap(lambda s: draws._uniform(key, s, ()))(streams))
        return each(keyed.keys).T

    return np.concatenate([np.asarray(of_round(jnp.int32(i))) for i in range(2)])


def test_draws_are_uncorrelated_across_streams_positions_and_rounds(uniforms):
    """Every pair of streams, 5 sigma."""
    correlation = np.corrcoef(uniforms) - np.eye(len(uniforms))
    assert np.abs(correlation).max() < 5 / np.sqrt(uniforms.shape[1])


def test_draws_are_uncorrelated_across_rows(uniforms):
    """Neighbouring seeds, 5 sigma."""
    for drawn in uniforms:
        assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 5 / np.sqrt(len(drawn))


def test_draws_are_uniform(uniforms):
    num = uniforms.shape[1]
    assert np.abs(uniforms.mean(1) - 0.5).max() < 5 * np.sqrt(1 / 12 / num)
    assert uniforms.min() >= 0 and uniforms.max() < 1


def test_draws_depend_on_seed_and_round_only():
    """The index of the row and the other rows do not matter."""
    weights = jnp.asarray(np.tile(zipf(50), (3, 1)), jnp.float32)

    def chosen(seeds, rounds):
        keyed = KeyDraws.of_round(jnp.asarray(seeds, jnp.uint32), jnp.asarray(rounds, jnp.int32))
        return np.asarray(keyed.choose(Stream.NEXT.at(0), weights[: len(seeds)]))

    batch = chosen([7, 8, 9], [0, 1, 2])
    np.testing.assert_array_equal(batch[1:2], chosen([8], [1]))
    np.testing.assert_array_equal(batch[::-1], chosen([9, 8, 7], [2, 1, 0]))


def test_certain_outcomes_are_certain():
    keyed = KeyDraws.of_round(jnp.arange(256, dtype=jnp.uint32), jnp.zeros(256, jnp.int32))
    probability = jnp.broadcast_to(jnp.asarray([[0.0, 1.0, 3.0]]), (256, 3))
    accepted = keyed.accept(Stream.ACCEPT.at(jnp.arange(3)), probability)
    np.testing.assert_array_equal(accepted, np.broadcast_to([[False, True, True]], (256, 3)))
