"""Collectives on sharded arrays, also inside `jax.shard_map`. Other functions cut arrays and find devices by id.

    array with a NamedSharding   ─► shard_map over its own mesh ─► an array that keeps its split on other axes
    inside an enclosing shard_map ─► the plain primitive of `jax.lax`

Each collective is defined by what every device has: its shard goes in, and its shard of the result comes out. An array
that is replicated over an axis has equal shards there: its sum over the axis is the array times the size of the axis.

No function uses `pmap`, which ignores the mesh. The names of the functions are those of Keras pull request 21792.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias, cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardload.errors import LayoutError, MeshError, UnsupportedError, UsageError
from shardload.keras_bridge.caller import warn_caller
from shardload.sharding.layout import Spec, spec_from_axes
from shardload.units import check_kind, is_integer, plural

_Op: TypeAlias = Literal["sum", "mean", "max", "min"]
_Axes: TypeAlias = str | Sequence[str]
_REDUCE: dict[str, Callable[..., Any]] = {
    "sum": jax.lax.psum,
    "mean": jax.lax.pmean,
    "max": jax.lax.pmax,
    "min": jax.lax.pmin,
}


def all_reduce(
    x: Any, op: _Op = "sum", axis_name: _Axes = "model", mesh: Mesh | None = None, *, spec: PartitionSpec | None = None
) -> Any:
    """Combine the shards along mesh axes, element by element; all devices along these axes get the result.

    Examples:
        ```python
        from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

        mesh = Mesh(jax.devices(), ("model",))
        shards = jax.device_put(np.ones((8, 16), "float32"), NamedSharding(mesh, P("model")))
        print(shardload.parallel.all_reduce(shards, "sum", "model").shape)  # (1, 16)
        ```

    Args:
        x: An array of any shape. Its dims that are split over ``axis_name`` become as short as one shard. If it is
            replicated over ``axis_name``, all shards are equal: ``"sum"`` multiplies them by the size of the axes,
            and the other operations change nothing.
        op: ``"sum"``, ``"mean"``, ``"max"`` or ``"min"``. The last two have no derivative.
        axis_name: One mesh axis, or several, over which to combine.
        mesh: The mesh to put ``x`` on if it is on none yet; such an array counts as replicated.
        spec: Inside `jax.jit`, where shardings are not known: how ``x`` is split over ``mesh``.

    Returns:
        The combined array, replicated over ``axis_name``, split over other axes as before. If called inside a
        `jax.shard_map` over these axes, what the function of `jax.lax` (`jax.lax.psum`) returns.

    Raises:
        UsageError: When ``op`` is unknown, or the mesh or the sharding of ``x`` cannot be found.
        MeshError: When the mesh has no such axis.
        UnsupportedError: When a derivative of ``"max"`` or ``"min"`` is needed.
    """
    if not isinstance(op, str) or op not in _REDUCE:
        raise UsageError(f"Cannot reduce by op={op!r:.60}. Choose {', '.join(_REDUCE)}")
    axes, derivative = _names(axis_name), None if op in ("sum", "mean") else f"all_reduce(op={op!r})"
    return _on_mesh(x, partial(_REDUCE[op], axis_name=axes), axes=axes, mesh=mesh, spec=spec, derivative=derivative)


def all_gather(
    x: Any, axis: int, axis_name: _Axes = "model", mesh: Mesh | None = None, *, spec: PartitionSpec | None = None
) -> Any:
    """Concatenate the shards along mesh axes; all devices along these axes get the result.

    Examples:
        ```python
        from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

        mesh = Mesh(jax.devices(), ("model",))
        shards = jax.device_put(np.ones((8, 16), "float32"), NamedSharding(mesh, P("model")))
        whole = shardload.parallel.all_gather(shards, axis=0, axis_name="model")  # (8, 16) on each device
        ```

    Args:
        x: An array. If dim ``axis`` is split over ``axis_name`` only, its values stay as they are and it becomes
            replicated. If ``x`` is replicated over ``axis_name``, the result contains it once per device.
        axis: The dim along which shards are concatenated; negative ones count from the end.
        axis_name: One mesh axis, or several, over which to concatenate.
        mesh: The mesh to put ``x`` on if it is on none yet; such an array counts as replicated.
        spec: Inside `jax.jit`, where shardings are not known: how ``x`` is split over ``mesh``.

    Raises:
        UsageError: When there is no such dim, or the mesh or the sharding of ``x`` cannot be found.
        MeshError: When the mesh has no such axis.
    """
    _check_array("x", x)
    axes, dim = _names(axis_name), _dim(x, axis)
    local = partial(jax.lax.all_gather, axis_name=axes, axis=dim, tiled=True)
    return _on_mesh(x, local, axes=axes, mesh=mesh, spec=spec)


def reduce_scatter(
    x: Any,
    axis: int,
    axis_name: _Axes = "model",
    mesh: Mesh | None = None,
    *,
    op: Literal["sum", "mean"] = "sum",
    spec: PartitionSpec | None = None,
) -> Any:
    """Add the shards along mesh axes; every device along these axes gets one part of the sum.

    Examples:
        ```python
        from jax.sharding import Mesh

        mesh = Mesh(jax.devices(), ("model",))
        copies = np.ones((8, 16), "float32")  # the same on each device
        parts = shardload.parallel.reduce_scatter(copies, axis=0, axis_name="model", mesh=mesh)  # 8 × copies, split
        ```

    Args:
        x: An array; the length of dim ``axis`` of a shard is divisible by the size of the axes.
        axis: The dim along which the sum is divided; negative ones count from the end.
        axis_name: One mesh axis, or several, over which to add.
        mesh: The mesh to put ``x`` on if it is on none yet; such an array counts as replicated.
        op: ``"sum"`` or ``"mean"``.
        spec: Inside `jax.jit`, where shardings are not known: how ``x`` is split over ``mesh``.

    Returns:
        The sum (or mean) of the shards, split over ``axis_name`` along dim ``axis``, and over other axes as before.

    Raises:
        UsageError: When ``op`` is unknown, there is no such dim, or the mesh or the sharding of ``x`` cannot be found.
        MeshError: When the mesh has no such axis.
        LayoutError: When the dim is not divisible.
    """
    if not isinstance(op, str) or op not in ("sum", "mean"):
        raise UsageError(f"Cannot reduce_scatter by op={op!r:.60}. Choose sum or mean")
    _check_array("x", x)
    axes, dim = _names(axis_name), _dim(x, axis)

    def local(shard: Any) -> Any:
        parts = math.prod(jax.lax.axis_size(name) for name in axes)
        if shard.shape[dim] % parts:
            raise LayoutError(
                f"Cannot divide dim {dim} of shards of shape {tuple(shard.shape)} into {plural(parts, 'part')}, one "
                f"for each device along {', '.join(axes)}"
            )
        # JAX has no scattered mean: divide the sum.
        found = jax.lax.psum_scatter(shard, axes, scatter_dimension=dim, tiled=True)
        return found / parts if op == "mean" else found

    return _on_mesh(x, local, axes=axes, mesh=mesh, spec=spec, scattered=dim)


def split_tensor_for_parallelism(tensor: Any, index: int, device_count: int, dim: int) -> Any:
    """Cut an array along a dim into ``device_count`` parts, as `numpy.array_split` does, and return one of them.

    Examples:
        ```python
        part = shardload.parallel.split_tensor_for_parallelism(np.ones((8, 10)), index=0, device_count=4, dim=1)
        print(part.shape)  # (8, 3): 10 columns are 3 + 3 + 2 + 2
        ```

    Args:
        tensor: A NumPy or JAX array.
        index: Which part, from 0.
        device_count: How many parts. If they do not divide the dim, the first ones have one element more.
        dim: The dim to cut; negative ones count from the end.

    Raises:
        UsageError: When there is no such dim or part.
    """
    _check_array("tensor", tensor)
    dim = _dim(tensor, dim)
    for name, value, least in (("device_count", device_count, 1), ("index", index, 0)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
            raise UsageError(
                f"Cannot split a tensor with {name}={value!r:.60}: expected an integer of at least {least}"
            )
    if index >= device_count:
        raise UsageError(f"Cannot return part {index} of {device_count}: parts are counted from 0")
    size, more = divmod(int(tensor.shape[dim]), int(device_count))
    start = index * size + min(index, more)
    return tensor[(slice(None),) * dim + (slice(start, start + size + (index < more)),)]


# ---- what they share -----------------------------------------------------------------------------


def _names(axis_name: _Axes) -> tuple[str, ...]:
    several = isinstance(axis_name, Iterable) and not isinstance(axis_name, str)
    names: tuple[Any, ...] = tuple(axis_name) if several else (axis_name,)
    if not names or not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise UsageError(
            f"Cannot use axis_name={axis_name!r:.60}: expected the name of a mesh axis, or a list of different names"
        )
    return names


def _check_array(argument: str, x: Any) -> None:
    check_kind(argument, x, jax.Array | np.ndarray | np.generic | complex | float | int, "an array")


def _dim(x: Any, axis: int) -> int:
    rank = np.ndim(x)
    # Booleans are integers in Python, but a dim True is a mistake.
    if isinstance(axis, bool) or not isinstance(axis, int | np.integer) or not -rank <= axis < rank:
        raise UsageError(f"Cannot use dim {axis!r:.60} of an array of shape {tuple(np.shape(x))}")
    return int(axis) % rank


def _is_manual(axes: tuple[str, ...]) -> bool:
    """Whether this code is inside a `jax.shard_map` that runs it once per device along all of ``axes``."""
    # Inside shard_map, the axes that it maps over are "manual": code sees one device's shard along them.
    manual = set(jax.sharding.get_abstract_mesh().manual_axes)
    missing = [axis for axis in axes if axis not in manual]
    if missing and len(missing) < len(axes):
        raise MeshError(
            f"Cannot run over {', '.join(axes)}: the enclosing shard_map has {', '.join(sorted(manual))} only. "
            f"Add {', '.join(missing)} to its axis_names, or remove it from the axis_name of this call"
        )
    return set(axes) <= manual


def _on_mesh(
    x: Any,
    local: Callable[[Any], Any],
    *,
    axes: tuple[str, ...],
    mesh: Mesh | None,
    spec: PartitionSpec | None,
    scattered: int | None = None,
    derivative: str | None = None,
) -> Any:
    """Run ``local``, a function of one shard that is a collective over ``axes``, on every device's shard of ``x``.

    ``scattered`` is the dim along which the results of these devices are parts of one array; without it, their results
    are equal. If ``local`` has no derivative, ``derivative`` is its name for the error message.
    """
    if _is_manual(axes):
        return local(x)
    check_kind("mesh", mesh, Mesh | None, "a jax.sharding.Mesh")
    check_kind("spec", spec, PartitionSpec | tuple | None, "a jax.sharding.PartitionSpec")
    _check_array("x", x)

    def mapped(x: Any) -> Callable[[Any], Any]:
        on, split = _placed(x, mesh, spec)
        if unknown := [name for name in axes if name not in on.axis_names]:
            raise MeshError(
                f"Cannot run over {unknown[0]!r}: the mesh has the axes {', '.join(map(str, on.axis_names))}"
            )
        # Behind the axes that split a scattered dim already: each of their shards is cut further.
        kept = (tuple(name for name in names if name not in axes) for names in split)
        out = tuple(names + axes if dim == scattered else names for dim, names in enumerate(kept))
        specs = {"in_specs": _as_spec(split), "out_specs": _as_spec(out)}
        # Without the check of replication, which does not know that all_gather returns the same everywhere.
        return cast("Callable[[Any], Any]", jax.shard_map(local, mesh=on, check_vma=False, **specs))

    # A derivative is taken of an array whose sharding is known only here: to functions that JAX differentiates, it is
    # hidden. So forward and backward are given together.
    run: Any = jax.custom_vjp(lambda x: mapped(x)(x))

    def forward(x: Any) -> tuple[Any, Any]:
        if derivative is not None:
            raise UnsupportedError(
                f"Cannot differentiate {derivative}: it has no derivative. Use all_gather, then reduce with jax.numpy"
            )
        x = _onto(x, mesh, spec)  # below, jax.grad has hidden that the array is on one device
        return cast("tuple[Any, Any]", jax.vjp(mapped(x), x))

    run.defvjp(forward, lambda pull_back, cotangent: pull_back(cotangent))
    return run(_onto(x, mesh, spec))


def _onto(x: Any, mesh: Mesh | None, spec: PartitionSpec | None) -> Any:
    """Put an array that is on no mesh yet onto ``mesh``, split as ``spec`` says; return any other array unchanged."""
    # A tracer has no devices: `_placed` reads its sharding, or the caller's.
    if isinstance(x, jax.core.Tracer) or (isinstance(x, jax.Array) and isinstance(x.sharding, NamedSharding)):
        return x
    if mesh is None:
        raise UsageError(
            f"Cannot find the mesh of an array of shape {tuple(np.shape(x))}: it has no NamedSharding. Pass mesh=, or "
            "place it with jax.device_put first"
        )
    return jax.device_put(x, NamedSharding(mesh, spec or PartitionSpec()))


def _placed(x: Any, mesh: Mesh | None, spec: PartitionSpec | None) -> tuple[Mesh, Spec]:
    """Return an array's mesh, and which of its axes split each dim; inside `jax.jit`, the caller passes both."""
    if isinstance(x, jax.core.Tracer):
        sharding = jax.typeof(x).sharding
        # Axes of type Auto, JAX's default, hide the sharding inside jit. Guessing "replicated" would add a gather.
        if any(kind == jax.sharding.AxisType.Explicit for kind in sharding.mesh.axis_types):
            return sharding.mesh, _split(sharding.spec, np.ndim(x))
        if mesh is None or spec is None:
            raise UsageError(
                "Cannot find the sharding of an array inside jax.jit. Pass mesh= and spec=, or call this in a "
                "jax.shard_map or outside jax.jit"
            )
        return mesh, _split(spec, np.ndim(x))
    # A contradiction is an error: to move the array here would hide a transfer.
    if mesh is not None and mesh != x.sharding.mesh:
        raise UsageError(
            f"Cannot use mesh={mesh}: the array is on {x.sharding.mesh}. Leave mesh out, or move the array"
        )
    own = _split(x.sharding.spec, x.ndim)
    if spec is not None and _split(spec, x.ndim) != own:
        raise UsageError(
            f"Cannot use spec={spec}: the array is split by {x.sharding.spec}. Leave spec out, or move the array"
        )
    return x.sharding.mesh, own


def _split(spec: PartitionSpec, rank: int) -> Spec:
    found = spec_from_axes(spec)
    if len(found) > rank:
        raise UsageError(
            f"Cannot split an array of {plural(rank, 'dim')} by {spec}: it has {plural(len(found), 'entry')}"
        )
    return (*found, *((),) * (rank - len(found)))


def _as_spec(split: Spec) -> PartitionSpec:
    return PartitionSpec(*(names[0] if len(names) == 1 else names or None for names in split))


# ---- devices by id, as in `keras.distribution` and in proposals for tensor parallelism in Keras -------


def list_devices(device_type: str | None = None) -> list[str]:
    """Return the ids (``cpu:0``) of all devices, including those that belong to other processes.

    Examples:
        ```python
        print(shardload.parallel.list_devices())  # ['cpu:0', 'cpu:1', …]
        ```

    Args:
        device_type: ``"cpu"``, ``"gpu"`` or ``"tpu"``; JAX's default platform otherwise.

    Raises:
        MeshError: When there is no such platform here.
    """
    return [device_id(device) for device in _devices(device_type)]


def get_best_devices(count: int = 1, device_type: str | None = None) -> list[str]:
    """Return the ids of the first ``count`` devices, which are near each other: JAX lists devices by locality.

    Warns and returns all of them if there are fewer; returns an empty list for a count below one.

    Examples:
        ```python
        print(shardload.parallel.get_best_devices(2))  # ['cpu:0', 'cpu:1']
        ```

    Raises:
        MeshError: When there is no such platform here.
    """
    found = list_devices(device_type)
    if not is_integer(count):
        raise UsageError(f"Cannot use count={count!r:.60}: expected a number of devices")
    if count > len(found):
        warn_caller(f"{plural(count, 'device')} were requested, but there are only {len(found)}")
    return found[: max(0, count)]


def devices_of(ids: str | Sequence[str]) -> list[Any]:
    """Return the `jax.Device`s with the given ids, such as ``["cpu:0", "cpu:1"]``, or with one id.

    Examples:
        ```python
        first, second = shardload.parallel.devices_of(["cpu:0", "cpu:1"])
        ```

    Raises:
        MeshError: When there is no device with one of the ids.
    """
    every_id: list[Any] = [ids] if isinstance(ids, str) or not isinstance(ids, Iterable) else list(ids)
    if not all(isinstance(wanted, str) for wanted in every_id):
        raise UsageError(f"Cannot use the devices {ids!r:.60}: expected ids such as 'cpu:0', or a list of them")
    found = []
    for wanted in every_id:
        platform, _, number = wanted.lower().partition(":")
        every = {device_id(device): device for device in _devices(platform)}
        if (key := f"{platform}:{number}") not in every:
            raise MeshError(f"Cannot find the device {wanted!r}. There are {', '.join(every)}")
        found.append(every[key])
    return found


def device_id(device: Any) -> str:
    """Return the id of a `jax.Device` in the form that Keras uses: platform and number, ``cpu:0``."""
    return f"{device.platform}:{device.id}"


def _devices(device_type: str | None) -> list[Any]:
    if not isinstance(device_type, str | None):
        raise UsageError(f"Cannot use device_type={device_type!r:.60}: expected 'cpu', 'gpu' or 'tpu'")
    try:
        return list(jax.devices(device_type and device_type.lower()))
    except RuntimeError as error:
        raise MeshError(f"Cannot list devices of type {device_type!r}: {error}") from error
