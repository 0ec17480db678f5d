"""The text level, on a tiny random T5 and a tokenizer of single letters."""

import concurrent.futures
import dataclasses
from unittest import mock

import jax
import numpy as np
import pytest

import specjax
from specjax import api, decode, drafters, texts
from specjax.drafters import ModelDrafter
from specjax.generation_config import row_seeds
from specjax.loading import Model
from tests.text_model import CONFIG, PIECES, PROMPTS, Letters, random_model


@pytest.fixture(scope="module")
def target() -> Model:
    return random_model(0)


@pytest.fixture(scope="module")
def drafter():
    return drafters.from_model(random_model(1), num_draft=2)


@pytest.fixture(scope="module")
def outputs(target, drafter) -> list[api.Output]:
    """Greedy, without and with a drafter."""
    return [
        specjax.generate(target, PROMPTS, drafter=d, max_new_tokens=[5, 12], seed=3) for d in (None, drafter)
    ]


def test_text_with_a_drafter_equals_text_without(outputs):
    plain, speculative = outputs
    assert speculative.texts == plain.texts
    assert speculative.token_ids == plain.token_ids
    assert speculative.finish_reasons == plain.finish_reasons


def test_output_lists_agree_with_one_another(outputs):
    for output in outputs:
        assert output.texts == Letters().batch_decode(output.token_ids, skip_special_tokens=True)
        for ids, log_probs, reason, limit in zip(
            output.token_ids, output.log_probs, output.finish_reasons, [5, 12], strict=True
        ):
            assert len(ids) == len(log_probs) <= limit
            assert reason == ("eos" if 1 in ids else "length")
            assert 1 not in ids[:-1]


def test_samples_of_all_prompts_use_different_seeds():
    """No two rows of a call share noise, whichever prompt they belong to."""
    seeds = np.asarray(api.sample_seeds(0, 5, 4)).tolist()
    assert len(set(seeds)) == len(seeds)


def test_seeds_of_a_prompt_do_not_depend_on_other_rows():
    batch = np.asarray(api.sample_seeds([7, 8, 9], 3, 2)).reshape(3, 2)
    np.testing.assert_array_equal(batch[1], api.sample_seeds([8], 1, 2))


def test_a_key_is_a_seed():
    """One key, from which each row's seed is made, or one per row."""
    one, other, again = (np.asarray(row_seeds(jax.random.key(i), 3)) for i in (0, 1, 0))
    assert len({*one.tolist(), *other.tolist()}) == 6
    np.testing.assert_array_equal(one, again)
    keys = lambda: jax.random.split(jax.random.key(5), 3)  # noqa: E731
    np.testing.assert_array_equal(np.asarray(row_seeds(keys(), 3))[1:2], row_seeds(keys()[1:2], 1))


def test_a_key_samples_as_a_seed_does(target, drafter):
    options = dict(drafter=drafter, temperature=1.0, max_new_tokens=6)
    one, again, other = (
        specjax.generate(target, PROMPTS, seed=jax.random.key(i), **options).token_ids for i in (3, 3, 4)
    )
    assert one == again != other


MANY = ["translate this.", "a b", "c", "hello there. how are you", "z z z z z z z z z", "", "a b"]


class Killed(Exception):
    pass


def test_generate_all_equals_separate_calls_also_after_a_kill(target, drafter, tmp_path):
    """Greedy and sampled prompts."""
    options = dict(drafter=drafter, max_new_tokens=9)
    seeds, temperatures = list(range(50, 50 + len(MANY))), [0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0]
    alone = [
        specjax.generate(target, [prompt], seed=[seed], temperature=temperature, **options)
        for prompt, seed, temperature in zip(MANY, seeds, temperatures, strict=True)
    ]
    options |= dict(seed=seeds, temperature=temperatures)
    run = lambda size, **more: specjax.generate_all(  # noqa: E731
        target, MANY, batch_size=size, num_refilled=1, **options, **more
    )
    killed = []

    def kill(done, num_tokens):
        killed.append((done, num_tokens))
        if 3 <= done:
            raise Killed

    with pytest.raises(Killed):
        run(2, journal=tmp_path / "journal", on_progress=kill)
    assert killed[0] == (0, 0)
    resumed = []
    after = run(3, journal=tmp_path / "journal", on_progress=lambda *now: resumed.append(now))
    assert resumed[0] == (killed[-1][0], 0) and resumed[-1][0] == len(MANY)
    total = sum(len(output.token_ids[0]) for output in alone)
    assert resumed[-1][1] + killed[-1][1] == total  # nothing was decoded twice
    for output in (after, run(2)):
        for name in ("texts", "token_ids", "log_probs", "processed_log_probs", "finish_reasons"):
            assert getattr(output, name) == [getattr(one, name)[0] for one in alone], name
        np.testing.assert_array_equal(output.stats.accepted, [one.stats.accepted[0] for one in alone])


@pytest.mark.parametrize(
    "options",
    [
        dict(
            num_samples=2,
            temperature=[1.0] * len(MANY),
            top_k=[3, 9, 2, 5, 4, 8, 7],
            decoder_prefix=["", "a", "bcd", "", "x", "yz", "q"],
            max_new_tokens=[3, 9, 2, 5, 4, 8, 7],
        ),
        dict(stop=["a", "ti"], eos_ids=[]),
    ],
    ids=["samples and prefixes", "stop strings"],
)
def test_many_prompts_take_the_options_that_one_call_takes(target, drafter, options):
    options = dict(drafter=drafter, max_new_tokens=9, seed=list(range(7))) | options
    one = specjax.generate(target, MANY, **options)
    many = specjax.generate_all(target, MANY, batch_size=4, num_refilled=2, **options)
    assert many.token_ids == one.token_ids and many.finish_reasons == one.finish_reasons
    np.testing.assert_array_equal(many.stats.num_emitted, one.stats.num_emitted)


def test_a_journal_of_other_options_raises(target, tmp_path):
    run = lambda **options: specjax.generate_all(  # noqa: E731
        target, PROMPTS, batch_size=2, journal=tmp_path / "journal", **options
    )
    run(max_new_tokens=3)
    with pytest.raises(ValueError, match="which differs in config; run that"):
        run(max_new_tokens=4)
    with pytest.raises(ValueError, match="which differs in drafter; run that"):
        run(max_new_tokens=3, drafter=specjax.drafters.prompt_lookup(2))
    with pytest.raises(ValueError, match="which differs in sources; run that"):
        specjax.generate_all(
            target, [*PROMPTS, "x"], batch_size=2, journal=tmp_path / "journal", max_new_tokens=3
        )
    with pytest.raises(ValueError, match="`batch_size` must be.*got 0"):
        specjax.generate_all(target, PROMPTS, batch_size=0)


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(prompts=[]), r"`prompts` must be.*got \[\]"),
        (dict(prompts="one string"), "non-empty list"),
        (dict(num_samples=0), "`num_samples` must be.*got 0"),
        (dict(prompts=["a" * 600]), r"prompts\[0\] must have at most 512 tokens, got 601"),
        (dict(decoder_prefix=["a", "b", "c"]), "`decoder_prefix` must be.*got 3"),
        (dict(decoder_prefix=5), "`decoder_prefix` must be one text, or one per prompt .2., got 5"),
        (dict(on_round=5), "`on_round` must be a function, got 5"),
        (dict(temperature=-1.0), "`temperature` must be"),
        (dict(max_new_tokens=-2), "`max_new_tokens` must be"),
        (dict(num_beams=4, guided_grammar="x"), "`guided_grammar` is not supported.*`num_beams` is not supp"),
        (dict(stop=["a", ""]), "`stop` must be"),
        (dict(eos_ids=[99]), r"`eos_ids` must be a list of whole numbers in 0..30, got \[99\]"),
    ],
)
def test_generate_raises_for_an_invalid_argument_by_name(target, options, words):
    with pytest.raises(ValueError, match=words):
        specjax.generate(target, **(dict(prompts=PROMPTS) | options))


def test_generate_raises_for_a_draft_with_another_tokenizer(target):
    """The first id that differs is named."""
    other = random_model(1, Letters([*PIECES[:4], "c", "b", *PIECES[6:]]))
    with pytest.raises(ValueError, match="got 'c' for id 4, which is 'b' in the target"):
        specjax.generate(target, PROMPTS, drafter=drafters.from_model(other, 2))


def test_long_source_is_cut_when_asked(target):
    ids, mask = api.encode_sources(target, ["a" * 600], truncate=True)
    assert ids.shape == (1, texts.MAX_SOURCE_LENGTH) and mask.all()
    assert ids[0, -1] == CONFIG.eos_id


def test_stop_string_cuts_text_ids_and_log_probs_alike(target):
    """At the token that completes it, wherever in a block; the earliest stop decides."""
    drafter = ModelDrafter(target.network, 4)  # everything is accepted
    options = dict(drafter=drafter, max_new_tokens=12, eos_ids=[])
    whole = specjax.generate(target, PROMPTS, **options)
    for row, ids in enumerate(whole.token_ids):
        decoded = [target.tokenizer.decode(ids[:n], skip_special_tokens=True) for n in range(len(ids) + 1)]
        for start in range(1, len(decoded[-1]) - 1):
            stop = decoded[-1][start : start + 2]
            end = next(n for n, text in enumerate(decoded) if stop in text)
            if end > 10:  # the last round drafts less: the limit is near
                continue
            output = specjax.generate(target, [PROMPTS[row]], stop=[stop, "?!"], **options)
            assert output.texts[0] == decoded[end]
            assert output.token_ids[0] == ids[:end]
            assert len(output.log_probs[0]) == len(output.processed_log_probs[0]) == end
            assert output.finish_reasons == ["stop"]
            assert output.stats.num_emitted.tolist() == [end]
            # Rounds of four drafts, all of them accepted, and a bonus token.
            assert output.stats.accepted.sum() == output.stats.tested.sum() == end - end // 5


def test_row_that_stops_does_not_end_its_neighbours(target):
    """Rows without the string go on; their end token or limit decides."""
    drafter = ModelDrafter(target.network, 4)
    whole = specjax.generate(target, PROMPTS, drafter=drafter, max_new_tokens=12, eos_ids=[])
    stop = next(
        whole.texts[0][i : i + 3] for i in range(9) if whole.texts[0][i : i + 3] not in whole.texts[1]
    )
    shown = []
    output = specjax.generate(
        target, PROMPTS, drafter=drafter, max_new_tokens=12, eos_ids=[], stop=stop, on_round=shown.append
    )
    assert output.finish_reasons == ["stop", "length"]
    assert output.texts[1] == whole.texts[1] and output.texts[0].endswith(stop)
    for row in range(2):
        assert [token for round_ in shown for token in round_[row]] == output.token_ids[row]


def test_any_of_several_end_tokens_ends_a_row(target):
    whole = specjax.generate(target, PROMPTS, max_new_tokens=8, eos_ids=[])
    ends = [whole.token_ids[0][3], whole.token_ids[1][5]]
    output = specjax.generate(target, PROMPTS, max_new_tokens=8, eos_ids=ends)
    for ids, all_ids in zip(output.token_ids, whole.token_ids, strict=True):
        assert ids == all_ids[: 1 + min(all_ids.index(end) for end in ends if end in all_ids)]
    assert output.finish_reasons == ["eos"] * 2


def test_ids_beyond_the_tokenizer_are_never_emitted(target):

    class Short(Letters):
        def get_vocab(self):
            return {piece: i for i, piece in enumerate(self.pieces[:20])}

    free = specjax.generate(target, PROMPTS, max_new_tokens=12, eos_ids=[])
    assert max(map(max, free.token_ids)) >= 20
    short = Model(target.network, Short())
    for temperature in (0.0, 1.0):
        output = specjax.generate(short, PROMPTS, max_new_tokens=12, temperature=temperature)
        assert max(map(max, output.token_ids)) < 20


def test_options_of_a_prompt_hold_for_its_samples(target):
    """Per-row options are repeated with the prompts."""
    config = specjax.GenerationConfig(temperature=[0.0, 1.0], top_k=[1, 5], max_new_tokens=6)
    output = specjax.generate(target, PROMPTS, config=config, num_samples=3)
    assert len({tuple(ids) for ids in output.token_ids[:3]}) == 1
    assert len({tuple(ids) for ids in output.token_ids[3:]}) > 1


# ---- long sources


def test_sources_of_any_length_are_read_when_asked(target, drafter):
    """Padding to 2,048 does not change the other row."""
    prompts = ["ab. " * 375 + "c", "a b"]
    long = dict(max_source_length=2000, max_new_tokens=6)
    plain = specjax.generate(target, prompts, **long)
    assert specjax.generate(target, prompts, drafter=drafter, **long).token_ids == plain.token_ids
    assert specjax.generate(target, prompts[1:], max_new_tokens=6).token_ids == plain.token_ids[1:]
    assert api.encode_sources(target, prompts, max_source_length=2000)[0].shape == (2, 2048)
    of_model = dataclasses.replace(target, max_source_length=2000)
    assert specjax.generate_all(of_model, prompts, max_new_tokens=6).token_ids == plain.token_ids
    cut = specjax.generate(target, prompts, truncate=True, max_new_tokens=6)
    first = [prompts[0][:511], prompts[1]]
    assert cut.token_ids == specjax.generate(target, first, max_new_tokens=6).token_ids


def test_all_sources_that_are_too_long_are_named(target):
    prompts = ["a" * 20, "b", "c" * 30]
    with pytest.raises(
        ValueError, match=r"prompts\[2\] must have at most 16 tokens, got 31 .and 1 more: pr.*0"
    ):
        specjax.generate(target, prompts, max_source_length=16)
    with pytest.raises(ValueError, match="`max_source_length` must be a whole number"):
        specjax.generate(target, prompts, max_source_length=0)


# ---- streams and threads


@pytest.mark.parametrize(
    "options", [{}, dict(temperature=1.0, seed=4), dict(stop=["e"]), dict(max_new_tokens=0)]
)
def test_stream_gives_the_text_of_generate_in_pieces(target, options):
    drafter = drafters.from_model(random_model(1), num_draft=2)
    options = dict(drafter=drafter, max_new_tokens=12) | options
    whole = specjax.generate(target, PROMPTS[:1], **options)
    pieces = specjax.stream(target, PROMPTS[0], **options)
    assert pieces.output is None
    texts, output = list(pieces), pieces.output
    assert list(pieces) == [] and pieces.output is output
    assert "".join(texts) == whole.texts[0] and all(texts)
    assert len(texts) > 1 or len(whole.texts[0]) < 4
    assert output.token_ids == whole.token_ids and output.finish_reasons == whole.finish_reasons


def test_stream_that_is_left_runs_no_further_round(target):
    with mock.patch.object(decode, "jitted_step", wraps=decode.jitted_step) as step:
        for _ in specjax.stream(target, PROMPTS[0], max_new_tokens=12, eos_ids=[]):
            if step.call_count >= 3:
                break
    assert step.call_count == 3


def test_compile_ahead_leaves_nothing_to_compile(target):
    options = dict(drafter=drafters.from_model(random_model(1), num_draft=2), max_new_tokens=12)
    options |= dict(temperature=0.5)
    assert specjax.compile_ahead(target, batch_size=2, longest_source=20, **options) == (16, 32)
    assert specjax.compile_ahead(target, longest_source=9, streaming=True, **options) == (16,)
    num_compiled = decode.jitted_generate._cache_size(), decode.jitted_step._cache_size()
    for prompts, seed in ((PROMPTS[:2], 3), ([PROMPTS[0], "a" * 19], [5, 6])):
        specjax.generate(target, prompts, seed=seed, **options | dict(temperature=0.7))
    assert len("".join(specjax.stream(target, PROMPTS[0][:4], **options | dict(temperature=0.7)))) > 0
    assert (decode.jitted_generate._cache_size(), decode.jitted_step._cache_size()) == num_compiled
    specjax.generate(target, PROMPTS[:1] * 5, **options)  # another batch size
    assert decode.jitted_generate._cache_size() > num_compiled[0]
    with pytest.raises(ValueError, match="`batch_size` must be a whole number of at least 1, got 0"):
        specjax.compile_ahead(target, batch_size=0)
    with pytest.raises(ValueError, match="`max_source_length` must be"):
        specjax.compile_ahead(target, longest_source=-1)


def test_stream_checks_when_it_is_called(target):
    with pytest.raises(ValueError, match="`prompt` must be one text"):
        specjax.stream(target, PROMPTS)
    with pytest.raises(ValueError, match="`temperature` must be"):
        specjax.stream(target, PROMPTS[0], temperature=-1)
    with pytest.raises(ValueError, match="`num_samples` must be left out of a stream"):
        specjax.stream(target, PROMPTS[0], num_samples=2)


class Cleaned:
    """A tokenizer of bytes, two of which may make a character, that joins "n't" to the word before it."""

    clean_up_tokenization_spaces = True

    def decode(self, ids, skip_special_tokens):
        assert skip_special_tokens
        return bytes(ids).decode(errors="replace").replace(" n't", "n't")


def test_settled_text_is_never_taken_back():
    ids = list("Äs do n't  go, ß".encode())
    whole, given = Cleaned().decode(ids, skip_special_tokens=True), ""
    for end in range(len(ids) + 1):
        text = texts.settled_text(Cleaned(), ids[:end])
        assert whole.startswith(text)
        given = max(given, text, key=len)
    assert given == "Äs don't  go,"


def test_threads_that_share_a_model_equal_sequential_calls(target, drafter):
    """Lengths, options and prompts differ, so programs are compiled and run at the same time."""
    calls = [
        dict(prompts=[PROMPTS[i % 2], "xyz" * (1 + i)], max_new_tokens=4 + i, temperature=i % 3, seed=i)
        for i in range(6)
    ]
    run = lambda call: specjax.generate(target, drafter=drafter, **call).token_ids  # noqa: E731
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        together = list(pool.map(run, calls * 2))
    assert together == [run(call) for call in calls] * 2


def always_the_same(logits, history):
    """A custom logits processor."""
    del history
    return logits.at[..., 5].add(1.0)


def test_journal_knows_the_options_that_outputs_depend_on(target, tmp_path):
    options = dict(max_new_tokens=6, batch_size=2, num_refilled=1, journal=tmp_path / "journal")
    lists = dict(suppress_tokens=range(6, 9), bad_words_ids=((5, 4), [4]), logit_bias={9: 1.5, 3: -1})
    own = dict(logits_processor=always_the_same, no_repeat_ngram_size=2, frequency_penalty=[0.5, 0.0, 1.0])
    prompts = [*PROMPTS, "xyz"]
    outputs = specjax.generate_all(target, prompts, **lists, **own, **options)
    assert outputs.token_ids == specjax.generate_all(target, prompts, **lists, **own, **options).token_ids
    assert outputs.token_ids == specjax.generate(target, prompts, **lists, **own, max_new_tokens=6).token_ids
    with pytest.raises(ValueError, match="belongs to another run, which differs in config;"):
        specjax.generate_all(target, prompts, **lists, **options)
