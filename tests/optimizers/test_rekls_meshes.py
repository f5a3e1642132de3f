"""REKLS on meshes: the same bits for every way to split a variable, sharded state, dealt-out decompositions."""

import re
from collections import Counter

import jax
import numpy as np
import pytest
from rekls_runs import mesh_of, same, trained, values, weight

from shardload.optimizers import state_bytes
from shardload.optimizers.state import SLOTS

SPLITS = {
    "(16, 32)/0": ((16, 32), ("model", None)),
    "(32, 16)/1": ((32, 16), (None, "model")),
    "(96, 200)/0": ((96, 200), ("model", None)),
    "(96, 200)/1": ((96, 200), (None, "model")),
    "(24, 40)/none": ((24, 40), (None, None)),
}


def run(shape, spec, mesh, **options):
    variables = [weight(shape, mesh=mesh, spec=spec)]
    optimizer = trained(variables, **options)
    return optimizer, variables, values(optimizer, variables)


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


def temporary_bytes(optimizer, variables):
    state, weights = [v.value for v in optimizer.variables], [v.value for v in variables]
    step = jax.jit(optimizer.stateless_apply, donate_argnums=(0, 2))
    return step.lower(state, weights, weights).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(("whole_bytes", "together"), [(1, 1), ("1.5MiB", 2), ("1GiB", 6)])
def test_one_batch_is_whole_at_a_time(whole_bytes, together):
    mesh = mesh_of(8)
    variables = [weight((128, 192), mesh=mesh, spec=(None, "model"), seed=i) for i in range(6)]
    optimizer = trained(variables, steps=0, whole_bytes=whole_bytes)
    assert optimizer.update_bytes == 2 * together * state_bytes((128, 192))
    assert 0.6 < temporary_bytes(optimizer, variables) / optimizer.update_bytes < 1.2


@pytest.mark.parametrize(
    ("shape", "spec", "sizes"),
    [
        ((32, 64), ("data", None), (8, 1)),
        ((32, 64), ("data", "model"), (2, 4)),
        ((32, 64), ("model", "data"), (2, 4)),
        ((32, 64), (("data", "model"), None), (2, 4)),
        ((32, 64), (None, "model"), (2, 4)),
        ((16, 8, 4), (None, "model", None), (2, 4)),
        ((8, 4, 16), ("model", None, "data"), (2, 4)),
        ((8, 16, 4), ("model", "data", None), (2, 4)),
    ],
)
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
    mesh = mesh_of(8)
    variables = [weight(shape, mesh=mesh, spec=spec)]
    optimizer = trained(variables, steps=1)
    slots = [getattr(optimizer, slot)[0].value for slot in SLOTS]
    held = [sum(x.addressable_shards[i].data.nbytes for x in slots) for i in range(8)]
    m, n = (24, 128) if len(shape) == 3 else shape
    assert set(held) == {4 * (2 * m * n + 2 * m * m + 2 * n * n + m + n) // 8}
    assert held[0] == state_bytes(shape, [8 if axis else 1 for axis in spec])


def test_a_step_gathers_and_does_nothing_else_across_devices():
    mesh = mesh_of(8)
    variables = [weight((64, 128), mesh=mesh, spec=("model", None))]
    optimizer = trained(variables, steps=0)

    def step(state, grads, weights):
        return optimizer.stateless_apply(state, grads, weights)

    state, weights = [v.value for v in optimizer.variables], [v.value for v in variables]
    text = jax.jit(step).lower(state, weights, weights).compile().as_text()
    found = Counter(re.findall(r" = (?:\([^)]*\)|\S+) (all-\w+|reduce-scatter|collective-permute)(?:-start)?\(", text))
    # G, M, V; old values and vectors of two sides; two factors. One reduction has the new values and vectors of both
    # sides, one whether gradients are finite, one whether the matrix had a gradient before.
    assert found == {"all-gather": 9, "all-reduce": 3}
