"""What a user asked for: the arguments of one call, checked before anything is opened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast, get_args

from shardload.hub import fidelity
from shardload.mapping import Items
from shardload.pipeline import arguments
from shardload.progress import ProgressLike, as_progress
from shardload.sharding.devices import device_list, has_mesh, mesh_of
from shardload.sharding.planned_mesh import planned_mesh
from shardload.typing import DTypeLike, LayoutLike, MeshLike, PathLike
from shardload.units import UNIT_NEEDED, check_choice, check_kind, check_names

OnFailure = Literal["raise", "tell", "restore"]
"""``raise``: only the error, as the caller has no model yet; ``tell``: add the state of the model to the error;
``restore``: keep the old values until the new ones are complete, and restore them."""

_COMPARED: tuple[str, ...] = ("step", "items", "rename", "names", "strict", "atomic", "fallback", "ignore")
_COMPARED += ("ignore_config", "task", "compile", "safe_mode", "custom_objects")
"""Mesh, layout and dtype are missing: they may be written in several ways, so their effect is compared later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """One call of `shardload.load`, `load_weights`, `plan` or `restore`: their arguments, under the same names."""

    function: Literal["load", "load_weights", "plan", "restore"] = "load"
    """The function that was called."""
    source: PathLike
    """A checkpoint; for `restore`, the folder of the steps."""
    model: Any = None
    """The model to fill; `load` and `plan` build one."""
    mesh: MeshLike | None = None
    axes: str | None = None
    layout: LayoutLike | None = None
    """``None``: the model's current layout, ``"auto"`` if it has none."""
    devices: Sequence[Any] | None = None
    dtype: DTypeLike | None = None
    host_memory_bytes: int | str | None = None
    device_memory_bytes: int | str | None = None
    strict: bool = True
    ignore: Sequence[str] = ()
    ignore_config: Sequence[str] = ()
    names: Mapping[str, str] | None = None
    task: bool = True
    custom_objects: Mapping[str, Any] | None = None
    safe_mode: bool = True
    compile: bool = True
    atomic: bool = False
    format: str | None = None
    progress: ProgressLike = None
    step: int | str = "latest"
    items: Items = "all"
    optimizer: Any = None
    rename: Mapping[str, str] | None = None
    fallback: str | None = None
    as_keras: bool = False
    """Follow Keras' rules: accept tensors that the model does not use, and build no slots that Keras would not."""

    @property
    def builds(self) -> bool:
        """Whether the model is built from the checkpoint's description."""
        return self.function in ("load", "plan")

    @property
    def compared(self) -> dict[str, Any]:
        """The arguments that must be written equally on all processes."""
        return {name: getattr(self, name) for name in _COMPARED}

    @property
    def on_failure(self) -> OnFailure:
        """What to do with a half-loaded model."""
        if self.builds:
            return "raise"
        return "restore" if self.atomic else "tell"

    @property
    def budget(self) -> int | None:
        """Most bytes staged in host memory; ``None`` leaves it to the plan."""
        return arguments.byte_count("host_memory_bytes", self.host_memory_bytes)

    @property
    def device_memory(self) -> int | None:
        """Bytes of one device, if given."""
        return arguments.byte_count("device_memory_bytes", self.device_memory_bytes)

    def _check_kinds(self) -> None:
        """Refuse values that would fail later, or count as true."""
        # Text such as "no" is true, and would turn on what it says is off.
        for name in ("strict", "task", "compile", "safe_mode", "atomic"):
            check_kind(name, getattr(self, name), bool, "True or False")
        for name in ("names", "rename"):
            check_names(name, getattr(self, name))
        check_kind("custom_objects", self.custom_objects, Mapping | None, "a mapping")
        check_kind("axes", self.axes, str | None, "text such as 'data,model'")

    def checked(self) -> LoadRequest:
        """Return the request with its arguments in one form each: sizes as bytes, dtypes by name.

        A distribution or layout map given as mesh is the layout too, and a layout with a mesh of its own is the mesh.

        Raises:
            UsageError: When an argument is of the wrong kind or out of range.
            BackendError: When Keras does not run on JAX.
            UnsupportedError: When the model is not built, or has no weights.
        """
        check_choice("fallback", self.fallback, (None, "previous"))
        some = ("all", "weights") if self.function == "load_weights" else get_args(Items)
        check_choice("items", self.items, some)
        self._check_kinds()
        dtype = arguments.float_dtype(self.dtype)
        host_memory_bytes = self.budget
        device_memory_bytes = arguments.byte_count("device_memory_bytes", self.device_memory_bytes, least=UNIT_NEEDED)
        # Keras' `load_weights` (``as_keras``) fills models whose layers are only partly built.
        if self.builds:
            arguments.check_backend()
        else:
            arguments.check_model(self.model, built=not self.as_keras)
        # What has both a mesh and layouts may be passed as either argument, and then stands for both.
        mesh, layout = self.mesh, self.layout
        if layout is None and has_mesh(mesh):
            layout = cast("LayoutLike", mesh)
        elif mesh is None and self.devices is None and has_mesh(layout) and mesh_of(layout) is not None:
            mesh = cast("MeshLike", layout)
        elif mesh is None:
            mesh = cast("MeshLike", planned_mesh(layout))
        return replace(
            self,
            mesh=mesh,
            layout=layout,
            dtype=dtype,
            host_memory_bytes=host_memory_bytes,
            device_memory_bytes=device_memory_bytes,
            devices=device_list(self.devices),
            progress=as_progress(self.progress),
            ignore=arguments.patterns(self.ignore),
            ignore_config=fidelity.check_names(self.ignore_config),
        )
