"""Several devices or processes decode the same tokens as one device."""

import concurrent.futures
import dataclasses
import json
import re
import socket

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import specjax
from experiments.lib import compare
from specjax import analysis, api, decode, drafters, loading, sharding
from specjax.models import convert, t5
from tests import meshes
from tests.training import tiny

ALL = list(meshes.RUNS)
MESHES = {"2x4": ["model, greedy", "model, mixed"], "8x1": ["eagle, greedy"], "1x8": ["tree, mixed"]}

EIGHT_DEVICES = """
import json, pathlib, sys
from specjax import sharding
from tests import meshes

directory, found = pathlib.Path(sys.argv[1]), {}
for shape, names in json.loads(sys.argv[2]).items():
    mesh = None if shape == "1" else sharding.make_mesh(*map(int, shape.split("x")))
    found[shape] = meshes.decode(directory, mesh, names)
print(json.dumps(found))
"""

TWO_PROCESSES = """
import json, pathlib, sys
import jax
from specjax import sharding
from tests import meshes

sharding.join_processes(sys.argv[2], 2, int(sys.argv[3]))
assert (jax.process_count(), jax.device_count(), jax.local_device_count()) == (2, 4, 2)
directory, mesh = pathlib.Path(sys.argv[1]), sharding.make_mesh(2, 2)
rounds = []
found = {
    "whole": meshes.decode(directory, mesh, ["eagle, greedy"]),
    "by rounds": meshes.decode(directory, mesh, ["model, mixed"], on_round=rounds.append, stop="zz"),
}
try:
    sharding.make_mesh(1, 2)
except ValueError as error:
    found["error"] = str(error)
print(json.dumps(found))
"""


def result(process):
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads(process.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("models")
    meshes.write(path)
    return path


@pytest.fixture(scope="module")
def found(directory):
    return result(tiny.run_program(EIGHT_DEVICES, directory, json.dumps({"1": ALL} | MESHES), num_devices=8))


def assert_equal_outputs(one, other):
    assert one
    for name, ours in one.items():
        theirs = other[name]
        for part in ("ids", "reasons", "accepted"):
            assert ours[part] == theirs[part], (name, part)
        np.testing.assert_allclose(ours["log_probs"], theirs["log_probs"], atol=1e-4)


@pytest.mark.slow
def test_rows_differ_and_drafts_are_both_accepted_and_rejected(found):
    for name, output in found["1"].items():
        assert len({str(row) for row in output["ids"]}) == len(meshes.PROMPTS), name
    assert len(set(found["1"]["model, mixed"]["accepted"])) > 2


@pytest.mark.slow
@pytest.mark.parametrize("shape", MESHES)
def test_eight_devices_decode_what_one_does(found, shape):
    """Chain, tree and heads, greedy and beside sampled rows, with the same seeds: the same tokens."""
    assert_equal_outputs(found[shape], found["1"])


@pytest.mark.slow
def test_two_processes_decode_what_one_does(found, directory):
    """Each holds half of every array's parts, and gets the whole result; also round by round."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        run = lambda i: tiny.run_program(TWO_PROCESSES, directory, coordinator, i, num_devices=2)  # noqa: E731
        first, second = map(result, pool.map(run, range(2)))
    assert first == second
    assert_equal_outputs(first["whole"], found["1"])
    assert_equal_outputs(first["by rounds"], found["1"])
    assert "must be 4, the devices of 2 processes, got 1 * 2" in first["error"]


def prepare(target, drafter=None):
    """Returns the request of `meshes.PROMPTS`."""
    ids, mask = api.encode_sources(target, meshes.PROMPTS)
    return decode.prepare(target.network, ids, mask, drafter=drafter, max_new_tokens=12)


def test_cache_is_divided_by_rows_and_heads(directory):
    """After prefill, and in the compiled program: no device ever holds more of it."""
    mesh = sharding.make_mesh(1, 2)
    target = meshes.load(directory / "target", mesh)
    request = prepare(target, meshes.load_drafter(directory, target, "model"))
    cache = decode.jitted_prefill(request.program, **request.inputs).cache
    slots = request.program.num_slots
    for array in (*cache.keys, *cache.values, *cache.cross_keys, *cache.cross_values):
        assert array.sharding.shard_shape(array.shape)[:2] == (8, 4)
    compiled = decode.jitted_generate.trace(*request).lower().compile().as_text()
    held = {tuple(map(int, m)) for m in re.findall(rf"f32\[(\d+),(\d+),4,{slots}\]", compiled)}
    assert held == {(8, 4)}


@pytest.mark.slow
def test_many_prompts_on_a_mesh_get_what_they_get_on_one_device(directory, found):
    prompts, limits = ([*rows, *rows[:3]] for rows in (meshes.PROMPTS, meshes.NUM_NEW))
    alone = found["1"]["model, greedy"]
    target = meshes.load(directory / "target", sharding.make_mesh(2, 1))
    drafter = meshes.load_drafter(directory, target, "model")
    many = specjax.generate_all(target, prompts, batch_size=4, drafter=drafter, max_new_tokens=limits)
    assert many.token_ids == [*alone["ids"], *alone["ids"][:3]]
    assert many.finish_reasons == [*alone["reasons"], *alone["reasons"][:3]]
    with pytest.raises(ValueError, match="`source_ids` must have a multiple of 2 rows .*, got 1;"):
        specjax.generate_all(target, prompts, batch_size=4, num_refilled=1)


# ---- loading


@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
@pytest.mark.parametrize("name", ["target", "draft"])  # with an index of two shards, and one file
def test_loading_onto_a_mesh_gives_the_same_arrays(directory, name, shape):
    one, mesh = meshes.load(directory / name), sharding.make_mesh(*shape)
    for rules in (sharding.T5_RULES, sharding.REPLICATED):
        many = meshes.load(directory / name, mesh, rules)
        jax.tree.map(np.testing.assert_array_equal, many.params, one.params)
        expected = sharding.param_shardings(one.params, mesh, rules)
        jax.tree.map(lambda x, place: x.sharding == place or 1 / 0, many.params, expected)
        assert many.mesh == mesh and many.network.config == one.network.config


def test_a_process_reads_the_parts_of_its_devices_only(directory, monkeypatch):
    """Both halves belong to this process: each is read once, the full tensor never."""
    read, original = [], convert._Checkpoint.read_part

    def read_part(self, tensor, index):
        part = original(self, tensor, index)
        read.append(part.size)
        return part

    monkeypatch.setattr(convert._Checkpoint, "read_part", read_part)
    params = meshes.load(directory / "target", sharding.make_mesh(1, 2)).params
    assert sum(read) == sum(x.size for x in jax.tree.leaves(params))
    assert max(read) == params["embedding"].size // 2


# ---- errors


def test_rows_that_the_mesh_does_not_divide_raise(directory):
    target = meshes.load(directory / "target", sharding.make_mesh(2, 1))
    with pytest.raises(ValueError, match="must have a multiple of 2 rows .*'data', got 3"):
        specjax.generate(target, ["a", "b", "c"])


def test_heads_that_the_mesh_does_not_divide_raise():
    config = dataclasses.replace(meshes.CONFIG, num_heads=5)
    with pytest.raises(
        ValueError, match="bias/table .*, 5.: axis 1 is not divisible by the 2 devices .*'model'"
    ):
        loading.outline(config, sharding.make_mesh(1, 2))


def test_drafter_on_another_mesh_raises(directory):
    target = meshes.load(directory / "target", sharding.make_mesh(2, 1))
    drafter = drafters.from_model(meshes.load(directory / "draft"), 2)
    with pytest.raises(ValueError, match="be on the target's mesh, .*, got one device; .*mesh=target.mesh"):
        specjax.generate(target, meshes.PROMPTS, drafter=drafter)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("host:1", 2, None), "must be given together, got .'host:1', 2, None.;"),
        (("host:1", 2, 2), "`process_id` must be in 0..1, got 2"),
    ],
)
def test_processes_that_cannot_be_joined_raise(arguments, words):
    with pytest.raises(ValueError, match=words):
        sharding.join_processes(*arguments)


def test_an_empty_cache_takes_its_heads_from_the_rules():
    mesh = sharding.make_mesh(1, 2)
    assert sharding.of_cache(mesh).spec == P("data", "model")
    assert sharding.of_cache(mesh, sharding.REPLICATED).spec == P("data")


def test_eight_bits_decode_on_a_mesh(directory):
    """The draft is the target's own weights in eight bits."""
    target = meshes.load(directory / "target", sharding.make_mesh(2, 1))
    drafter = drafters.from_model(specjax.int8(target), 2)
    outputs = [specjax.generate(target, meshes.PROMPTS, drafter=d, max_new_tokens=6) for d in (None, drafter)]
    assert outputs[0].token_ids == outputs[1].token_ids


# ---- what a device holds, and programs for devices that are not here


def test_memory_of_a_device_is_that_of_the_arrays_on_it(directory):
    mesh = sharding.make_mesh(1, 2)
    target = meshes.load(directory / "target", mesh)
    program, inputs = prepare(target)
    cache = decode.jitted_prefill(program, **inputs).cache

    def held(tree):
        return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))

    num_rows, num_source = inputs["source_ids"].shape
    sizes = dict(batch_size=num_rows, num_source=num_source, num_slots=cache.num_slots, num_new=1)
    for params in (target.params, loading.outline(target.config, mesh).params):  # arrays, or shapes alone
        memory = analysis.memory_per_device(target.config, params, target.network.cache_sharding, **sizes)
        assert memory.params == held(target.params)
        assert memory.cache == held((cache.keys, cache.values))
        assert memory.cross == held((cache.cross_keys, cache.cross_values))
        assert memory.logits == 2 * num_rows * target.config.vocab_size // 2 * 4


def test_the_margin_of_a_near_tie_is_found_on_a_mesh(directory):
    """The report of differing rows asks for single rows, which a mesh would not divide."""
    row, before, target = 6, [5, 9, 4], meshes.load(directory / "target", sharding.make_mesh(2, 1))
    found = compare.margin(prepare(target), before, row)
    one = meshes.load(directory / "target")
    ids, mask = (x[row : row + 1] for x in api.encode_sources(one, meshes.PROMPTS))
    apply = jax.jit(lambda params, *x: t5.T5(one.config).apply({"params": params}, *x))
    logits = apply(one.params, ids, mask, np.array([[one.config.start_id, *before]]))
    second, best = np.sort(logits[0, -1])[-2:]
    assert found == pytest.approx(best - second, abs=1e-4) and found > 1e-3
