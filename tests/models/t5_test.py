"""The T5 modules against torch (golden activations), and what the cache must and must not do."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import cache as cache_lib
from specjax.models import convert, layers, t5
from tests.models.golden_model import TOLERANCE, Golden

NUM_SLOTS = 32


@pytest.fixture(scope="module", params=["v1_0", "v1_1"])
def golden(request) -> Golden:
    return Golden(request.param)


@pytest.fixture(scope="module")
def shallow() -> Golden:
    """One layer each: enough for masks and dtypes, and half the compilation."""
    golden = Golden("v1_1")
    golden.config = dataclasses.replace(golden.config, num_layers=1, num_decoder_layers=1)
    golden.model = t5.T5(golden.config)
    return golden


@pytest.fixture(scope="module")
def decoder() -> "Decoder":
    return Decoder(Golden("v1_1"))


class Decoder:
    """One compiled function per call width; the reference is a full teacher-forced pass.

    Row b of the tokens is its own random text, row b of the sources has its own length.
    """

    def __init__(self, golden: Golden, num_rows: int = 21):
        self.golden = golden
        rng = np.random.default_rng(0)
        vocab = golden.config.vocab_size
        self.tokens = jnp.asarray(rng.integers(0, vocab, (num_rows, NUM_SLOTS)))
        source = jnp.asarray(rng.integers(0, vocab, (num_rows, 9)))
        mask = jnp.arange(9)[None] < jnp.asarray(1 + np.arange(num_rows) % 9)[:, None]
        self.full = golden.apply(source, mask, self.tokens)
        encoded = golden.apply(source, mask, method="encode")
        self.empty = jax.jit(
            lambda params: golden.model.apply(
                {"params": params}, encoded, mask, NUM_SLOTS, method="init_cache"
            )
        )(golden.params)
        self._decode = jax.jit(
            lambda params, tokens, cache: golden.model.apply(
                {"params": params}, cache, tokens, method="decode"
            )
        )

    def extend(self, cache: cache_lib.Cache, num_new: int):
        """Feeds each row its own next tokens; returns logits, the reference there, and the cache."""
        rows = jnp.arange(len(self.tokens))[:, None]
        positions = cache.length[:, None] + jnp.arange(num_new)[None]
        logits, _, new = self._decode(self.golden.params, self.tokens[rows, positions], cache)
        return logits, self.full[rows, positions], new


# ---- parity with torch, module by module


def test_embedding_equals_torch(golden):
    np.testing.assert_array_equal(golden.params["embedding"][golden["source_ids"]], golden["embedding_out"])


def test_encoder_equals_torch(golden):
    real = golden.arrays["source_mask"]
    np.testing.assert_allclose(golden.encode()[real], golden["encoded"][real], **TOLERANCE)


@pytest.mark.parametrize("golden", ["v1_0", "v1_1", "byt5", "umt5"], indirect=True)
def test_logits_equal_torch(golden):
    logits = golden.apply(golden["source_ids"], golden["source_mask"], golden["decoder_input"])
    np.testing.assert_allclose(logits, golden["logits"], **TOLERANCE)


# ---- relative positions, head


@pytest.mark.parametrize(("tied", "expected"), [(True, 0.125), (False, 1.0)])
def test_tied_head_is_scaled_and_untied_head_is_not_scaled(tied, expected):
    config = t5.T5Config(64, 64, 4, 8, 2, 1, 1, gated=not tied, tied_head=tied, scale_logits=tied)
    params = {"embedding": jnp.eye(64)} | ({} if tied else {"head": jnp.eye(64)})
    features = jnp.zeros((1, 1, 64)).at[0, 0, 0].set(1.0)
    logits = t5.T5(config).apply({"params": params}, features, method="logits")
    np.testing.assert_array_equal(logits[0, 0], np.eye(64)[0] * expected)


# ---- masks and precision


def test_source_padding_is_invisible(shallow):
    rng = np.random.default_rng(1)
    tokens = jnp.asarray(rng.integers(0, 48, (2, 6)))
    sources = [rng.integers(2, 48, length) for length in (3, 11)]
    alone = [
        shallow.apply(jnp.asarray(ids)[None], jnp.ones((1, len(ids)), bool), tokens[row : row + 1])[0]
        for row, ids in enumerate(sources)
    ]
    for width in (16, 64):
        ids = np.full((2, width), 7)  # what the padding holds must not matter
        mask = np.zeros((2, width), bool)
        for row, source in enumerate(sources):
            ids[row, : len(source)], mask[row, : len(source)] = source, True
        together = shallow.apply(jnp.asarray(ids), jnp.asarray(mask), tokens)
        np.testing.assert_allclose(together, jnp.stack(alone), **TOLERANCE)


@pytest.mark.parametrize("dtype", convert.DTYPES)
def test_row_of_padding_gives_no_nan_and_leaves_its_neighbour_alone(shallow, dtype):
    config = dataclasses.replace(shallow.config, dtype=dtype)
    params = jax.tree.map(lambda x: x.astype(dtype), shallow.params)
    run = jax.jit(lambda mask, ids: t5.T5(config).apply({"params": params}, ids, mask, ids))
    ids = jnp.arange(20, 30).reshape(2, 5)
    mask = jnp.array([[True] * 5, [False] * 5])
    logits, normal = run(mask, ids), run(jnp.ones((2, 5), bool), ids)
    assert jnp.isfinite(logits).all()
    np.testing.assert_array_equal(logits[0], normal[0])


def test_activations_beyond_float16_stay_finite_in_float16(shallow):
    golden = shallow
    params = jax.tree.map(lambda x: x, golden.params)
    for layer in ("encoder_layers_0", "decoder_layers_0"):
        wo = params[layer]["feed_forward"]["wo"]
        params[layer] = params[layer] | {"feed_forward": params[layer]["feed_forward"] | {"wo": wo * 5e4}}
    feed_forward = layers.FeedForward(golden.config).apply(
        {"params": params["encoder_layers_0"]["feed_forward"]}, golden["feed_forward_in"], True
    )
    assert jnp.abs(feed_forward).max() > 1.2e5

    def logits(dtype):
        config = dataclasses.replace(golden.config, dtype=dtype)
        cast = jax.tree.map(lambda x: x.astype(dtype), params)
        args = (golden["source_ids"], golden["source_mask"], golden["decoder_input"])
        return jax.jit(lambda p: t5.T5(config).apply({"params": p}, *args))(cast)

    half, exact = logits("float16"), logits("float32")
    assert jnp.isfinite(half).all()
    top2 = jax.lax.top_k(exact, 2)[0]
    clear = top2[..., 0] - top2[..., 1] > 0.05
    assert clear.mean() > 0.5
    assert jnp.where(clear, half.argmax(-1) == exact.argmax(-1), True).all()


@pytest.mark.parametrize("dtype", convert.DTYPES)
def test_logits_are_float32_and_the_cache_has_the_compute_dtype(dtype):
    config = t5.T5Config(16, 8, 4, 8, 2, 1, 1, dtype=dtype)
    ids, mask = jnp.zeros((1, 2), int), jnp.ones((1, 2), bool)

    def run(key):
        params = t5.T5(config).init(key, ids, mask, ids)
        encoded = t5.T5(config).apply(params, ids, mask, method="encode")
        cache = t5.T5(config).apply(params, encoded, mask, 4, method="init_cache")
        return t5.T5(config).apply(params, cache, ids, method="decode")

    logits, features, cache = jax.eval_shape(run, jax.random.key(0))
    assert logits.dtype == jnp.float32
    assert {x.dtype for x in (features, *cache.keys, *cache.values, *cache.cross_keys)} == {jnp.dtype(dtype)}


# ---- causality and the cache


def test_gradient_reaches_no_later_position(decoder):
    """Every token is used once and the head is untied, so a table row's gradient is a position's."""
    golden = decoder.golden
    ids = jnp.arange(12).reshape(2, 6)
    cache = jax.tree.map(lambda x: x[:2, :, :0] if x.shape[2:3] == (NUM_SLOTS,) else x[:2], decoder.empty)
    assert cache.num_slots == 0

    def loss(table, position):
        params = golden.params | {"embedding": table}
        return golden.model.apply({"params": params}, cache, ids, method="decode")[0][0, position].max()

    gradient = jax.jit(jax.grad(loss))
    for position in (0, 3, 5):
        size = jnp.abs(gradient(golden.params["embedding"], position)[:12]).max(-1).reshape(ids.shape)
        assert (size[0, : position + 1] > 0).all()
        assert (size[0, position + 1 :] == 0).all()
        assert (size[1] == 0).all(), "a row reads its batch mate"


@pytest.mark.parametrize("num_new", [1, 2, 3, 5, 8])
def test_chunk_at_each_rows_own_offset_equals_the_full_pass(decoder, num_new):
    """Offsets 0..20, one per row: prefill of all, rollback to the offset, extend."""
    _, _, cache = decoder.extend(decoder.empty, 28)
    cache = cache_lib.rollback(cache, jnp.arange(21))
    logits, expected, new = decoder.extend(cache, num_new)
    np.testing.assert_allclose(logits, expected, **TOLERANCE)
    np.testing.assert_array_equal(new.length, np.arange(21) + num_new)


def test_prefill_and_single_steps_equal_the_full_pass(decoder):
    logits, expected, cache = decoder.extend(decoder.empty, 5)
    np.testing.assert_allclose(logits, expected, **TOLERANCE)
    for _ in range(NUM_SLOTS - 5):
        logits, expected, cache = decoder.extend(cache, 1)
        np.testing.assert_allclose(logits, expected, **TOLERANCE)


def test_rollback_and_other_tokens_leave_no_trace(decoder):
    """Rejected drafts are written, rolled back and written over."""
    _, _, cache = decoder.extend(decoder.empty, 5)
    wrong = (decoder.tokens[:, 5:8] + 1) % decoder.golden.config.vocab_size
    logits, _, drafted = decoder._decode(decoder.golden.params, wrong, cache)
    assert jnp.abs(logits - decoder.full[:, 5:8]).max() > 0.1
    back = cache_lib.rollback(drafted, cache.length)
    for old, new in zip(cache.keys, back.keys, strict=True):
        np.testing.assert_array_equal(old[..., :5], new[..., :5])
    for old, new in zip(cache.values, back.values, strict=True):
        np.testing.assert_array_equal(old[:, :, :5], new[:, :, :5])
    logits, expected, _ = decoder.extend(back, 3)
    np.testing.assert_allclose(logits, expected, **TOLERANCE)


@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf, 1e30])
def test_slots_at_or_beyond_the_length_influence_nothing(decoder, garbage):
    _, _, cache = decoder.extend(decoder.empty, 28)
    cache = cache_lib.rollback(cache, jnp.arange(21) % 20)
    free = (jnp.arange(NUM_SLOTS)[None] >= cache.length[:, None])[:, None, :, None]
    dirty = cache.replace(
        keys=tuple(jnp.where(free.swapaxes(2, 3), garbage, x) for x in cache.keys),
        values=tuple(jnp.where(free, -garbage, x) for x in cache.values),
    )
    for num_new in (1, 3):
        clean_logits, _, _ = decoder.extend(cache, num_new)
        dirty_logits, _, after = decoder.extend(dirty, num_new)
        np.testing.assert_array_equal(clean_logits, dirty_logits)
        assert jnp.isfinite(jnp.where(free, 0, after.values[0])).all()


def test_source_slots_of_padding_may_hold_nan(decoder):
    cache = decoder.empty
    hidden = ~cache.source_mask[:, None, :, None]
    dirty = cache.replace(
        cross_keys=tuple(jnp.where(hidden.swapaxes(2, 3), jnp.nan, x) for x in cache.cross_keys),
        cross_values=tuple(jnp.where(hidden, jnp.nan, x) for x in cache.cross_values),
    )
    np.testing.assert_array_equal(decoder.extend(dirty, 3)[0], decoder.extend(cache, 3)[0])


def test_keys_and_values_are_written_to_the_same_slots():
    random = np.random.default_rng(0)
    buffer, new = random.normal(size=(2, 3, 6, 4)), random.normal(size=(2, 2, 3, 4))
    start = jnp.array([1, 4])
    values = cache_lib.write(jnp.asarray(buffer), jnp.asarray(new), start)
    keys = cache_lib.write(jnp.asarray(buffer).swapaxes(2, 3), jnp.asarray(new), start, slots_last=True)
    np.testing.assert_array_equal(keys.swapaxes(2, 3), values)


def test_write_near_the_end_touches_no_earlier_slot():
    buffer = jnp.arange(3 * 6, dtype=jnp.float32).reshape(3, 1, 6, 1)
    new = -jnp.ones((3, 3, 1, 1))
    written = cache_lib.write(buffer, new, jnp.array([1, 5, 6]))[:, 0, :, 0]
    expected = [
        [0, -1, -1, -1, 4, 5],  # fits
        [6, 7, 8, 9, 10, -1],  # two of three fall off the end
        [12, 13, 14, 15, 16, 17],  # all fall off
    ]
    np.testing.assert_array_equal(written, expected)


@pytest.mark.parametrize("num_source", [1, 7, 300])
def test_cross_keys_and_values_depend_on_the_encoder_only(shallow, num_source):
    rng = np.random.default_rng(num_source)
    tokens = jnp.asarray(rng.integers(2, 48, (2, 4)))
    source, mask = jnp.asarray(rng.integers(2, 48, (2, num_source))), jnp.ones((2, num_source), bool)

    def run(model):
        encoded = model.encode(source, mask)
        cache = start = model.init_cache(encoded, mask, 8)
        for step in range(2):
            _, _, cache = model.decode(cache, tokens[:, 2 * step : 2 * step + 2])
        return encoded, start, cache

    encoded, start, end = shallow.apply(method=run)
    kernel = shallow.params["decoder_layers_0"]["cross"]["k"]
    expected = jnp.einsum("bsm,mhd->bhds", encoded, kernel, precision="highest")
    np.testing.assert_allclose(start.cross_keys[0], expected, **TOLERANCE)
    np.testing.assert_array_equal(start.cross_keys[0], end.cross_keys[0])
    np.testing.assert_array_equal(start.cross_values[0], end.cross_values[0])


def test_row_equals_its_solo_run(decoder):
    """Rows that differ in source length and in cache length do not see each other."""
    _, _, cache = decoder.extend(decoder.empty, 28)
    cache = cache_lib.rollback(cache, 3 + jnp.arange(21) % 7)
    together, _, _ = decoder.extend(cache, 3)
    for row in (0, 4, 13):
        solo = jax.tree.map(lambda x: x[row : row + 1], cache)  # noqa: B023
        tokens = jax.lax.dynamic_slice_in_dim(decoder.tokens[row : row + 1], int(solo.length[0]), 3, 1)
        logits, _, _ = decoder._decode(decoder.golden.params, tokens, solo)
        np.testing.assert_allclose(logits[0], together[row], **TOLERANCE)


def test_presets_have_the_published_sizes():
    def num_params(config):
        return sum(int(np.prod(tensor.shape)) for tensor in convert.tensor_names(config))

    sizes = {name: round(num_params(config) / 1e6, 1) for name, config in t5.PRESETS.items()}
    published = {
        "t5-small": 60.5,
        "t5-base": 222.9,
        "t5-large": 737.7,
        "t5-v1_1-small": 77.0,
        "t5-v1_1-base": 247.6,
        "t5-v1_1-large": 783.2,
        "byt5-small": 299.6,
    }
    assert {name: sizes[name] for name in published} == published
