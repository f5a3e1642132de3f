"""How the processes of a run load arrays together: what each was asked for, and what they compare.

    devices that mesh= and the targets name    the call
    of this process only, or none at all       local: no other process takes part
    of one other process only                  local: it raises an error, as nothing can be loaded there from here
    of several processes, or not known yet     joint: all processes make it, and it succeeds or fails on all
    (a size as mesh=, a function as targets)

An array on devices of its own process is compared by their numbers on that process, so that each process may load a
copy of its own in the same call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, get_args

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding

from shardload import processes
from shardload.errors import UsageError
from shardload.pipeline.array_reader import is_rule, takes
from shardload.pipeline.array_targets import (
    KINDS,
    SCALARS,
    Placed,
    TensorNamesArgument,
    WantedArray,
    array_layout,
    mesh_devices_of,
)
from shardload.pipeline.source_facts import owners_topic, source_topics
from shardload.processes.agreement import Facts, Topic
from shardload.processes.joint_call import Alone, Call, joint
from shardload.progress import Progress, ProgressLike, as_progress
from shardload.resolve.opening import OpenedSource
from shardload.sharding.devices import named_devices
from shardload.transfer.owners import OwnerChoice, Replicas
from shardload.typing import MeshLike, PathLike
from shardload.units import byte_count, check_choice, check_kind, check_no_iterator, is_function, plain_dtype_name


@dataclass(frozen=True, kw_only=True)
class ArraysRequest:
    """One call of `shardload.load_arrays`: its arguments, under the same names."""

    compared_names: ClassVar[tuple[str, ...]] = ("names", "strict", "replicas")
    """Names of arguments that are compared as passed; of the others, the arrays that follow from them are."""

    source: PathLike
    targets: Any
    mesh: MeshLike | None = None
    names: TensorNamesArgument = None
    transpose: Mapping[str, Sequence[int]] | Callable[[str, tuple[int, ...]], Sequence[int] | None] | None = None
    dtype: Any = None
    strict: bool = True
    format: str | None = None
    host_memory_bytes: int | str | None = None
    progress: ProgressLike = None
    replicas: Replicas = "auto"

    @cached_property
    def reporter(self) -> Progress:
        """The object that shows the load's progress."""
        return as_progress(self.progress)

    @cached_property
    def budget_bytes(self) -> int | None:
        """Most bytes of tensors in host memory at once; ``None`` lets the plan choose."""
        wanted = self.host_memory_bytes
        return None if wanted is None else byte_count("host_memory_bytes", wanted)

    @cached_property
    def float_dtype(self) -> str | None:
        """Name of the dtype of floating-point arrays whose target states none; ``None``: that of their tensor."""
        also = tuple(sorted(name for name in dir(jax.numpy) if name.startswith("float8")))
        return None if self.dtype is None else plain_dtype_name(self.dtype, doing="load", also=also)

    def check(self) -> None:
        """Raise if an argument is of the wrong kind or out of range: none of them should fail after a download."""
        _ = self.reporter, self.budget_bytes, self.float_dtype
        check_no_iterator("targets", self.targets)
        for argument, value, given, told in (
            ("names", self.names, ("name",), "the name of a target"),
            ("transpose", self.transpose, ("name", ()), "the name of a target and the shape of its tensor"),
        ):
            if not (value is None or is_function(value) or isinstance(value, Mapping)):
                raise UsageError(f"Cannot use {argument}={value!r:.60}: expected a mapping or a function")
            if callable(value) and not takes(value, *given):
                raise UsageError(f"Cannot call the function {argument}: expected one that takes {told}")
        check_kind("strict", self.strict, bool, "True or False")
        check_choice("replicas", self.replicas, get_args(Replicas))


@contextmanager
def joint_arrays(request: ArraysRequest) -> Iterator[Call]:
    """Yield the `Call` by which processes that load arrays together wait for each other; one alone never waits."""
    if not processes.are_several() or _is_local(request):
        request.check()
        yield Alone()
    else:
        compared = {name: getattr(request, name) for name in request.compared_names}
        with joint("load_arrays", request.source, compared) as call:
            request.check()
            yield call


def _is_local(request: ArraysRequest) -> bool:
    """Whether the devices that a call names are known and belong to one process: others take no part in it."""
    try:
        found = _owners(request)
    except Exception:  # a wrong argument: the call itself raises the error, on all processes
        return False
    return found is not None and len(found) <= 1


def _owners(request: ArraysRequest) -> set[int] | None:
    """Return the processes whose devices a call names; ``None`` if it names none of them yet."""
    found: set[int] = set()
    if request.mesh is not None:
        if (named := named_devices(request.mesh, None)) is None:  # a size: the devices of all processes
            return None
        found = {device.process_index for device in named}
    targets = request.targets
    if is_rule(targets) and not isinstance(targets, KINDS):  # a function, whose results are known with the headers
        return found or None
    for leaf in jax.tree.leaves(targets, is_leaf=lambda leaf: isinstance(leaf, KINDS)):
        owners = _owners_of(leaf)
        if owners is None and request.mesh is None:
            return None
        found |= owners or frozenset()
    return found


def _owners_of(target: Any) -> frozenset[int] | None:
    """Return the processes whose devices a target names; ``None`` if it needs the devices of a mesh."""
    if isinstance(target, jax.Device):
        return frozenset({target.process_index})
    if isinstance(target, (np.ndarray, np.generic, *SCALARS)) or (callable(target) and not isinstance(target, KINDS)):
        return frozenset()  # of the host, or a part of a module that stays as it is
    sharding = target if isinstance(target, Sharding) else getattr(target, "sharding", None)
    if isinstance(sharding, NamedSharding):
        return _owners_in(sharding.mesh) if isinstance(sharding.mesh, jax.sharding.Mesh) else None
    return frozenset(device.process_index for device in sharding.device_set) if sharding is not None else None


@functools.lru_cache(maxsize=64)
def _owners_in(mesh: jax.sharding.Mesh) -> frozenset[int]:
    return frozenset(device.process_index for device in mesh.devices.flat)


def array_topics(
    opened: OpenedSource, wanted: Sequence[WantedArray], choices: Mapping[str, OwnerChoice]
) -> list[Topic]:
    """Return what must be equal on all processes before the first byte is read, in the order to compare."""
    same = "the same on every process"
    ordered = sorted(wanted, key=lambda one: one.name)
    meshes: dict[Any, int] = {}
    for one in ordered:
        if not _is_on_host(one):
            meshes.setdefault(mesh_devices_of(one.sharding), len(meshes))

    def layouts() -> Facts:
        return {f"Array {one.name!r}": _layout(one, meshes) for one in ordered}

    return [
        Topic("the meshes", lambda: {f"Mesh {i}": _mesh(found) for found, i in meshes.items()}, f"Pass {same}"),
        *source_topics(opened.manifest, opened.checker),
        Topic("the arrays", lambda: {f"Array {one.name!r}": _array(one) for one in ordered}, f"Request {same}"),
        Topic("the layouts", layouts, f"Use {same}"),
        owners_topic({f"Array {name!r}": choices[name] for name in sorted(choices)}),
    ]


def _is_on_host(one: WantedArray) -> bool:
    return one.on_host or one.finish in SCALARS


def _mesh(found: Any) -> str:
    own = {device: i for i, device in enumerate(jax.local_devices())}
    if all(device in own for device in found.devices):
        return f"{found.mesh}, devices {', '.join(str(own[device]) for device in found.devices)} of each process"
    return f"{found.mesh}, devices {', '.join(str(device.id) for device in found.devices)}"


def _array(one: WantedArray) -> str:
    views = (f"{part.box.start} from {part.view}" for part in one.stored.parts)
    return f"{one.dtype} {one.shape}: {'; '.join(views)}"


def _layout(one: WantedArray, meshes: Mapping[Any, int]) -> str:
    if _is_on_host(one):
        return "in host memory"
    placed: Placed = one.sharding
    found = mesh_devices_of(placed)
    memory = "" if placed.memory_kind is None else f" in {placed.memory_kind}"
    return f"{array_layout(one.name, one.shape, placed, found.mesh)} on mesh {meshes[found]}{memory}"
