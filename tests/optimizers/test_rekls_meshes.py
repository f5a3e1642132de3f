"""REKLS on meshes: the same bits for every way to split a variable, sharded state, dealt-out decompositions."""

import re
from collections import Counter

import jax
import numpy as np
import pytest
from rekls_runs import mesh_of, same, trained, values, weight

from shardload.optimizers import state_bytes
from shardload.optimizers.rekls_setup import SLOTS
from shardload.parallel import collectives_in
from shardload.sharding.mesh import MeshSpec

SPLITS = {
    "(16, 32)/0": ((16, 32), ("model", None)), "(32, 16)/1": ((32, 16), (None, "model")),
    "(96, 200)/0": ((96, 200), ("model", None)), "(96, 200)/1": ((96, 200), (None, "model")),
    "(24, 40)/none": ((24, 40), (None, None)),
}  # fmt: skip


def run(shape, spec, mesh, **options):
    variables = [weight(shape, mesh=mesh, spec=spec)]
    optimizer = trained(variables, **options)
    return optimizer, variables, values(optimizer, variables)


@pytest.mark.sample(2)
@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("case", SPLITS)
def test_the_same_bits_for_every_split(case, devices):
    shape, spec = SPLITS[case]
    mesh = mesh_of(devices)
    optimizer, variables, found = run(shape, spec, mesh)
    _, _, whole = run(shape, (), mesh)
    assert same(found, whole)
    assert variables[0].value.sharding.is_equivalent_to(jax.sharding.NamedSharding(mesh, jax.P(*spec)), 2)
    assert optimizer.counts().steps == 5 and np.isfinite(found[0]).all()


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_dealt_out_as_repeated(devices):
    shapes = [(16, 32), (32, 16), (24, 32), (16, 40)]
    found = []
    for decompositions in ("dealt", "repeated"):
        variables = [weight(s, mesh=mesh_of(devices), spec=("model", None), seed=i) for i, s in enumerate(shapes)]
        found.append(values(trained(variables, decompositions=decompositions), variables))
    assert same(*found)


def several(mesh, spec):
    shapes = [(16, 32), (32, 16), (24, 32), (16, 40), (32, 16)]
    return [weight(shape, mesh=mesh, spec=spec, seed=seed) for seed, shape in enumerate(shapes)]


@pytest.mark.parametrize("whole_bytes", [1, 30_000])
def test_batches_change_no_bits_of_state(whole_bytes):
    parts, together = several(mesh_of(8), ("model", None)), several(mesh_of(8), ("model", None))
    found, expected = trained(parts, whole_bytes=whole_bytes), trained(together)
    assert same(values(found, []), values(expected, []))
    for one, other in zip(parts, together, strict=True):  # XLA fuses the last products and sums in its own ways
        np.testing.assert_allclose(np.asarray(one.value), np.asarray(other.value), rtol=0, atol=5e-7)


def test_the_same_bits_for_every_split_in_batches():
    found = []
    for spec in (("model", None), (None, "model"), ()):
        variables = several(mesh_of(8), spec)
        found.append(values(trained(variables, whole_bytes=30_000), variables))
    assert same(found[0], found[1]) and same(found[0], found[2])


@pytest.mark.parametrize(
    ("spec", "sizes"),
    [
        (("model", None), (8,)), ((), (8,)), (("data", "model"), (2, 4)), ((None, ("model", "data")), (2, 4)),
        ((None, "data"), (2, 4)),
    ],
)  # fmt: skip
def test_matrices_that_are_dealt_out_have_the_state_of_those_that_are_not(spec, sizes):
    found = []
    for decompositions in ("dealt", "repeated"):
        variables = [weight((16, 24), mesh=mesh_of(*sizes), spec=spec, seed=seed) for seed in range(9)]
        optimizer = trained(variables, steps=3, decompositions=decompositions)
        found.append((values(optimizer, []), [np.asarray(v.value) for v in variables]))
    assert same(found[0][0], found[1][0])
    np.testing.assert_allclose(found[0][1], found[1][1], rtol=0, atol=5e-7)


def test_each_device_gets_only_the_matrices_that_it_updates():
    variables = [weight((128, 192), mesh=mesh_of(8), spec=(None, "model"), seed=seed) for seed in range(8)]
    optimizer = trained(variables, steps=0)
    program = compiled(optimizer, variables)
    one, weights = state_bytes((128, 192)), 4 * 128 * 192
    moved = Counter()
    for collective in collectives_in(program.as_text(), MeshSpec.parse("8", axes="model")):
        moved[collective.kind] += collective.total_bytes
    assert moved.keys() == {"all-to-all", "all-reduce"} and moved["all-reduce"] < 16
    assert moved["all-to-all"] == 2 * (one + weights) + weights  # there and back, and the gradient
    assert 0.5 < program.memory_analysis().temp_size_in_bytes / (3 * one) < 1.1 < optimizer.update_bytes / (3 * one)


@pytest.mark.parametrize(("spec", "sizes"), [((), (8,)), ((None, "model"), (2, 4))])
def test_matrices_that_are_not_split_over_all_devices_are_not_dealt_out(spec, sizes):
    variables = [weight((16, 24), mesh=mesh_of(*sizes), spec=spec, seed=seed) for seed in range(8)]
    assert "all-to-all(" not in compiled(trained(variables, steps=0), variables).as_text()


def test_what_fails_on_one_device_is_counted_once():
    variables = [weight((16, 24), mesh=mesh_of(8), spec=("model", None), seed=seed) for seed in range(8)]
    optimizer = trained(variables)
    large = np.full((16, 24), 1e30, "float32")
    optimizer.apply([large if place == 3 else np.ones((16, 24), "float32") for place in range(8)], variables)
    assert optimizer.counts().kept_eigenpairs == 2 and optimizer.counts().skipped_steps == 0
    assert all(np.isfinite(np.asarray(v.value)).all() for v in variables)


def compiled(optimizer, variables):
    state, weights = [v.value for v in optimizer.variables], [v.value for v in variables]
    return jax.jit(optimizer.stateless_apply, donate_argnums=(0, 2)).lower(state, weights, weights).compile()


@pytest.mark.parametrize(("whole_bytes", "together"), [(1, 1), ("1.5MiB", 2), ("1GiB", 6)])
def test_one_batch_is_whole_at_a_time(whole_bytes, together):
    mesh = mesh_of(8)
    variables = [weight((128, 192), mesh=mesh, spec=(None, "model"), seed=i) for i in range(6)]
    optimizer = trained(variables, steps=0, whole_bytes=whole_bytes)
    assert optimizer.update_bytes == max(2 * together, 3) * state_bytes((128, 192))
    needed = compiled(optimizer, variables).memory_analysis().temp_size_in_bytes
    assert 0.6 < needed / (2 * together * state_bytes((128, 192))) < 1.2


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("shape", "spec", "sizes"),
    [
        ((32, 64), ("data", None), (8, 1)), ((32, 64), ("data", "model"), (2, 4)),
        ((32, 64), ("model", "data"), (2, 4)), ((32, 64), (("data", "model"), None), (2, 4)),
        ((32, 64), (None, "model"), (2, 4)), ((16, 8, 4), (None, "model", None), (2, 4)),
        ((8, 4, 16), ("model", None, "data"), (2, 4)), ((8, 16, 4), ("model", "data", None), (2, 4)),
    ],
)  # fmt: skip
def test_fsdp_two_axes_and_heads(shape, spec, sizes):
    mesh = mesh_of(*sizes)
    optimizer, _, found = run(shape, spec, mesh)
    _, _, whole = run(shape, (), mesh)
    assert same(found, whole)
    parts = int(np.prod([mesh.shape[a] for axes in spec for a in ([axes] if isinstance(axes, str) else axes or [])]))
    split = [v for v in optimizer.variables if v.shape and v.name != "learning_rate"]
    assert len(split) == 8
    for state in split:
        assert state.value.addressable_shards[0].data.size * parts == state.value.size


def test_one_device_has_the_factors_of_a_mesh():
    alone, on_mesh = [weight((24, 40))], [weight((24, 40), mesh=mesh_of(8), spec=("model", None))]
    one, other = trained(alone, steps=2), trained(on_mesh, steps=2)
    for slot in ("left_factors", "right_factors", "momentums", "velocities"):
        ours, theirs = np.asarray(getattr(one, slot)[0].value), np.asarray(getattr(other, slot)[0].value)
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5 * np.abs(theirs).max())
    np.testing.assert_allclose(alone[0].value, np.asarray(on_mesh[0].value), atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "spec"),
    [((64, 128), ("model", None)), ((64, 128), (None, "model")), ((16, 8, 24), ("model", None, None))],
)
def test_bytes_per_device(shape, spec):
    optimizer = trained([weight(shape, mesh=mesh_of(8), spec=spec)], steps=1)
    slots = [getattr(optimizer, slot)[0].value for slot in SLOTS]
    held = [sum(x.addressable_shards[i].data.nbytes for x in slots) for i in range(8)]
    m, n = (24, 128) if len(shape) == 3 else shape
    assert set(held) == {4 * (2 * m * n + 2 * m * m + 2 * n * n + m + n) // 8}
    assert held[0] == state_bytes(shape, [8 if axis else 1 for axis in spec])


def test_a_step_gathers_and_does_nothing_else_across_devices():
    variables = [weight((64, 128), mesh=mesh_of(8), spec=("model", None))]
    optimizer = trained(variables, steps=0)

    state, weights = [v.value for v in optimizer.variables], [v.value for v in variables]
    text = jax.jit(optimizer.stateless_apply).lower(state, weights, weights).compile().as_text()
    found = Counter(re.findall(r" = (?:\([^)]*\)|\S+) (all-\w+|reduce-scatter|collective-permute)(?:-start)?\(", text))
    # G, M, V; old values and vectors of two sides; two factors. One reduction has the new values and vectors of both
    # sides, one whether gradients are finite, one whether the matrix had a gradient before.
    assert found == {"all-gather": 9, "all-reduce": 3}
