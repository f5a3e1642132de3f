"""Reservations say which part of which tensor an array is, and which tensors were computed with."""

import resource

import keras
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardload.errors import LimitError, UnsupportedError
from shardload.manifest import Extent, Tensor, View
from shardload.mapping.placeholders import CASTS as CASTS_TO_VIEWS
from shardload.mapping.placeholders import Reservations, tensors_behind
from shardload.stores.local import located


def tensor(name="t", shape=(6, 4), dtype="float32"):
    return Tensor(name, shape, np.dtype(dtype), Extent(located("/nowhere"), 0))


def reserved(*args):
    reservations = Reservations()
    return reservations, reservations.make(tensor(*args))


def replay(view, source):
    flat = source.reshape(-1)
    return np.lib.stride_tricks.as_strided(flat[view.offset :], view.shape, [s * flat.itemsize for s in view.strides])


VIEWS = {
    "whole": lambda x: x,
    "transposed": np.transpose,
    "reshaped": lambda x: np.reshape(x.T, (4, 2, 3)),
    "sliced": lambda x: x[1::2, 1:3],
    "row": lambda x: x[2],
    "element": lambda x: x[2, 3, ...],
    "plain": lambda x: np.asarray(x).T,
    "same cast": lambda x: x.astype("float32"),
    "copied": lambda x: np.swapaxes(x.copy(), 0, 1),
    "flat": lambda x: x.ravel()[3:],
    "new dims": lambda x: x[:, None, :, None],
    "empty": lambda x: x[3:3],
}


@pytest.mark.parametrize("hook", VIEWS.values(), ids=VIEWS)
def test_views_are_exact(hook):
    reservations, array = reserved()
    real = np.arange(24, dtype="float32").reshape(6, 4)
    np.testing.assert_array_equal(replay(reservations.locate(hook(array)), real), hook(real))
    del array
    reservations.close()
    assert not reservations.used


COMPUTED = {
    "cast": lambda x: x.astype("float16"),
    "reversed": lambda x: x[::-1],
    "broadcast": lambda x: np.broadcast_to(x, (2, 6, 4)),
    "bits": lambda x: x.view("int32"),
    "sum": lambda x: x + 1,
    "scaled by an array": lambda x: np.arange(4.0) * x,
    "product": lambda x: x @ x.T,
    "stacked": lambda x: np.stack([x, x]),
    "concatenated": lambda x: np.concatenate([x, x], axis=-1),
    "reshaped with a copy": lambda x: np.reshape(x.T, (6, 4)),
    "copied unseen": np.array,
    "mean": lambda x: x.mean(axis=0),
    "compared": lambda x: x > 0,
}


@pytest.mark.parametrize("hook", COMPUTED.values(), ids=COMPUTED)
def test_computing_has_the_right_shape_and_is_noticed(hook):
    reservations, array = reserved()
    result, real = hook(array), hook(np.zeros((6, 4), "float32"))
    assert (result.shape, result.dtype) == (real.shape, real.dtype)
    assert reservations.locate(result) is None
    name = result is not None and tensors_behind(result)
    assert name in (frozenset(), {"t"})


@pytest.mark.parametrize("kind", ["cast", "sum", "product", "stacked", "copied unseen", "mean", "compared"])
def test_what_was_read_is_used(kind):
    reservations, array = reserved()
    COMPUTED[kind](array)
    del array
    reservations.close()
    assert reservations.used == {"t"}


CASTS = {
    "astype": lambda x, to: x.astype(to),
    "np.astype": lambda x, to: np.astype(x, np.dtype(to)),
    "np.asarray": lambda x, to: np.asarray(x, dtype=to),
    "np.array": lambda x, to: np.array(x, dtype=to),
    "keras.ops.cast": keras.ops.cast,
}


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16", "float64", "float8_e4m3fn"])
@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
def test_casts_between_floating_dtypes_are_views_where_asked(cast, stored):
    reservations = Reservations("viewed")
    array = reservations.make(tensor("t", (6, 4), stored))
    with CASTS_TO_VIEWS.applied():
        results = [cast(array.T, to) for to in ("float16", "bfloat16", "float32", np.float64)]
    assert {reservations.locate(each) for each in results} == {View("t", 0, (4, 6), (1, 4))}
    del array, results
    reservations.close()
    assert not reservations.used
    assert "t" in reservations.rounding


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
@pytest.mark.parametrize(("stored", "to"), [("float32", "int32"), ("int32", "float16"), ("float32", "bool")])
def test_other_casts_are_computed(cast, stored, to):
    reservations = Reservations("viewed")
    array = reservations.make(tensor("t", (6, 4), stored))
    with CASTS_TO_VIEWS.applied():
        result = cast(array, to)
    assert reservations.locate(result) is None and result.dtype == to
    assert reservations.used == {"t"} and not reservations.rounding


def test_what_is_kept_is_used():
    reservations, array = reserved()
    kept = array[0]
    del array
    reservations.close()
    assert reservations.used == {"t"}
    assert kept.sum() == 0  # the range outlives its registration


def test_neighbours_are_told_apart():
    reservations = Reservations()
    arrays = [reservations.make(tensor(f"t{n}", (n + 1,), "int8")) for n in range(200)]
    assert [reservations.locate(a).tensor for a in arrays] == [f"t{n}" for n in range(200)]


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, "int8", "bool", "float64"])
def test_every_dtype(dtype):
    reservations, array = reserved("t", (3, 5), dtype)
    assert array.dtype == dtype and reservations.locate(array.T).strides == (1, 5)


@pytest.mark.parametrize("shape", [(), (0, 3), (1, 1)])
def test_small_shapes(shape):
    reservations, array = reserved("t", shape)
    assert reservations.locate(array).shape == shape


def test_more_than_an_address_space_is_refused():
    with pytest.raises(UnsupportedError, match=r"^Cannot map t of shape .* more than a process can address"):
        reserved("t", (1 << 50, 1 << 10))


def test_a_limit_on_memory_is_named_with_its_way_out():
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 40, before[1]))
    try:
        with pytest.raises(LimitError, match=r"^Cannot map t of .*ulimit -v allows .* 1048576 MiB.* unlimited"):
            reserved("t", (1 << 42,), "int8")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_chain_of_views(data):
    real = np.arange(60, dtype="int32").reshape(3, 4, 5)
    reservations, array = reserved("t", (3, 4, 5), "int32")
    for _ in range(data.draw(st.integers(1, 4))):
        match data.draw(st.sampled_from(["transpose", "slice", "merge"])):
            case "transpose":
                order = data.draw(st.permutations(range(array.ndim)))
                array, real = array.transpose(order), real.transpose(order)
            case "slice":
                index = tuple(slice(data.draw(st.integers(0, n)), n, data.draw(st.integers(1, 3))) for n in array.shape)
                array, real = array[index], real[index]
            case "merge":
                array, real = array.reshape(-1), real.reshape(-1)
    view = reservations.locate(array)
    if view is None:
        assert reservations.used == {"t"}
    else:
        np.testing.assert_array_equal(replay(view, np.arange(60, dtype="int32")), real)
