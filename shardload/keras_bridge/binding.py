"""Bind a model to a mesh: `bind` it once, then use it as usual.

Keras keeps one distribution per thread, for all code that the thread runs next. Instead, a bound model opens its own
``ModelParallel`` scope around each of its public methods, and closes it afterwards::

    bind(a, mesh=1x8)   bind(b, mesh=2x4)      plain c
    a.fit()  ─► [scope a] ─► back to the user's own distribution, or none
    b.generate() ─► [scope b]                  c.fit() ─► no scope

The methods are wrapped on the instance, not on a class: there is no global state, other models are unaffected, and
Keras saves, pickles or clones a plain model, because it never looks at instance attributes. `copy.deepcopy` asks the
instance, so a deep copy is bound too. Sub-models (a task's backbone) are bound with the model.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import keras
import numpy as np
from keras.src.utils.jax_utils import is_in_jax_tracing_scope

from shardload.errors import LayoutError, MeshError
from shardload.keras_bridge import Model, Variable, abstraction, layer_layouts, recomputation
from shardload.keras_bridge.gathered_use import Use, gathering
from shardload.keras_bridge.layer_layouts import CallLayouts
from shardload.keras_bridge.model_records import record_first_result
from shardload.keras_bridge.model_state import (
    models_in,
    refresh_derived,
    slot_layouts,
    slots_of,
    state_of,
    variables_of,
)
from shardload.keras_bridge.optimizer_slots import variable_layout
from shardload.keras_bridge.quantised_gradients import int8_gradients
from shardload.keras_bridge.recomputation import Recompute
from shardload.keras_bridge.saving import zeros_stored
from shardload.keras_bridge.training import batches_laid_out_singly
from shardload.keras_bridge.variables import (
    has_value,
    is_abstract,
    pending_of,
    relocate,
    set_sharding,
    sharding_of,
    value_of,
)
from shardload.keras_bridge.xla_faults import avoiding_xla_faults
from shardload.sharding.layout import Layout, Spec
from shardload.sharding.mesh import MeshSpec
from shardload.transfer.placement import named_sharding
from shardload.units import plural

METHODS = (
    "fit",
    "evaluate",
    "predict",
    "train_on_batch",
    "test_on_batch",
    "predict_on_batch",
    "generate",
    "score",
    "compile",
    "quantize",
    "enable_lora",
    "call",
)
"""Methods of a bound model that run in the scope of its distribution; ``call`` is what ``model(...)`` runs."""
_RESULTS = ("predict", "evaluate", "generate", "train_on_batch", "test_on_batch", "predict_on_batch")
"""Methods whose return ends ``seconds.ready`` of a load's report. Not ``fit``, which returns after its last epoch."""
_COMPILED = ("train_function", "test_function", "predict_function", "generate_function")
"""Attributes in which Keras and KerasHub keep compiled steps, which are valid only for the mesh they were made on."""
_ATTRIBUTE = "_shardload_binding"

_Layouts = Mapping[int, Layout] | Sequence[Layout]
"""``id(variable)`` → layout; or a list of layouts, one for each variable that `model_state.variables_of` returns."""


class MeshParallel(keras.distribution.ModelParallel):  # type: ignore[misc]
    """The Keras distribution of a bound model, which `bind` has put on a mesh; set while one of its methods runs.

    Each variable has a layout of its own. A batch is split over those of the batch axes that divide it; the results are
    the same as without.
    """

    lays_out_each_batch = True  # tells `training` to choose a layout for each batch

    def __init__(
        self,
        mesh: MeshSpec,
        devices: Sequence[jax.Device],
        by_path: Mapping[str, Any],
        *,
        batch_axes: tuple[str, ...],
        activations: Callable[[str], Any] | None,
    ) -> None:
        # First, as the base class asks for the number of replicas.
        self.mesh, self.batch_axes = mesh, batch_axes
        device_mesh = keras.distribution.DeviceMesh(mesh.sizes, list(mesh.axes), devices=np.array(devices))
        # An empty map, as each variable has its own layout; the base class needs the map for its mesh only.
        batch_axis = (*batch_axes, *mesh.axes)[0]
        super().__init__(layout_map=keras.distribution.LayoutMap(device_mesh), batch_dim_name=batch_axis)
        self._devices, self._by_path, self.activations = tuple(devices), by_path, activations

    def get_variable_layout(self, variable: Variable) -> Any:
        """Return a variable's layout: its own, else that of a bound variable with its path, else a replicated one.

        Keras' ``quantize`` replaces a kernel by a new variable with the same path and no layout. If it also has the
        same shape, it gets the layout that was chosen for the old kernel.
        """
        own, shape = sharding_of(variable), tuple(variable.shape)
        if own is not None:
            return own
        # `quantize` replaces a kernel by a new variable with the same path, which belongs in the same place.
        namesake_shape, sharding = self._by_path.get(variable.path, (None, None))
        return sharding if namesake_shape == shape else self.replicated(len(shape))

    @property
    def num_model_replicas(self) -> int:
        """Number of parts into which the batch is split; Keras knows one batch axis only."""
        return math.prod(map(self.mesh.axis_size, self.batch_axes))

    def get_data_layout(self, data_shape: Sequence[int]) -> Any:
        """Return the layout of a batch: its first dim is split over those of the batch axes that divide it.

        An axis for sequences splits its second dim in the same way.
        """
        # Keras asks with dims that it does not know.
        return _BatchLayout(self.mesh.of_batch([n or 1 for n in data_shape], self.batch_axes), self)

    def get_tensor_layout(self, path: str) -> Any:
        """Return the layout that was chosen in `bind` for the layer output at ``path``; ``None`` leaves it to XLA."""
        found = None if self.activations is None else self.activations(path)
        # A PartitionSpec may leave dims to XLA, which works in compiled code only.
        if isinstance(found, jax.sharding.PartitionSpec):
            return jax.sharding.NamedSharding(self.replicated(0).mesh, found) if is_in_jax_tracing_scope() else None
        return found and keras.distribution.TensorLayout(found.axes, self.device_mesh)

    def replicated(self, rank: int) -> jax.sharding.NamedSharding:
        """Return the sharding that stores an array of ``rank`` dims whole on every device of the mesh."""
        return self.sharding(Layout.replicated(self.mesh, rank))

    def sharding_of_spec(self, spec: Spec) -> jax.sharding.NamedSharding:
        """Return the JAX sharding for the mesh axes that split each dim of an array."""
        return self.sharding(Layout(self.mesh, spec))

    def sharding(self, layout: Layout) -> jax.sharding.NamedSharding:
        """Return the JAX sharding for a layout (which says what splits each dim) on the devices of this mesh."""
        return named_sharding(layout, self._devices)


class _BatchLayout(keras.distribution.TensorLayout):  # type: ignore[misc]
    """The layout of a batch, whose dims are split over any number of axes; Keras' own class knows one for a dim."""

    def __init__(self, spec: Spec, distribution: MeshParallel) -> None:
        super().__init__([axes[0] if axes else None for axes in spec], distribution.device_mesh)
        self._sharding = distribution.sharding_of_spec(spec)

    @property
    def backend_layout(self) -> jax.sharding.NamedSharding:
        """The JAX sharding of the batch."""
        return self._sharding


@dataclass(frozen=True, slots=True)
class ModelBinding:
    """A bound model's mesh, and the Keras distribution that is set while one of its methods runs."""

    mesh: MeshSpec
    devices: tuple[jax.Device, ...]
    """Devices of the mesh, in the order of their positions in it."""
    distribution: MeshParallel = field(repr=False)
    uses: Mapping[int, Use] = field(default_factory=dict, repr=False)
    """``id(variable)`` → `Use`: the shardings in which it is stored, and in which the model computes with it."""

    remat: Mapping[str, Recompute] = field(default_factory=dict, repr=False)
    """What blocks of the model recompute in the backward pass, by the name of their class."""
    call_layouts: tuple[CallLayouts, ...] = field(default=(), repr=False)
    """The layouts at both ends of layers, if activations are split along their sequence."""

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Inside the block, the model's distribution is set in this thread; afterwards, the previous one is again."""
        with batches_laid_out_singly(), int8_gradients(), self.distribution.scope():
            yield

    @property
    def is_open(self) -> bool:
        """Whether this thread is inside `scope` already, as in a method that another method of the model calls."""
        return keras.distribution.distribution() is self.distribution


def bind(
    model: Model,
    *,
    mesh: MeshSpec,
    devices: Sequence[jax.Device],
    layouts: _Layouts,
    values: Literal["move", "keep"] = "move",
    batch_axes: tuple[str, ...] | None = None,
    activations: Callable[[str], Any] | None = None,
    uses: Mapping[int, Layout] | None = None,
    gather_dtypes: Mapping[int, str] | None = None,
    remat: Mapping[str, Recompute] | None = None,
    call_layouts: Sequence[CallLayouts] = (),
) -> ModelBinding:
    """Bind a model to a mesh, so that all its methods run there. Binding again replaces the mesh.

    Optimizer slots follow their weight; variables that ``layouts`` does not mention (seeds, metrics, learning rates)
    are replicated. ``values="keep"`` leaves values where they are, for a load that is about to replace them.
    ``activations`` returns, for the path of a layer's output, its ``TensorLayout`` or `jax.sharding.PartitionSpec`, or
    ``None`` to leave it to XLA. ``uses`` maps ``id(variable)`` to its layout while the model computes, and
    ``gather_dtypes`` to the dtype in which it is gathered for that, if it is not its own. ``remat`` says what blocks of
    the model recompute in the backward pass, by the name of their class, and ``call_layouts`` how single layers lay out
    their inputs and outputs.
    """
    if len(devices) != mesh.size or len(set(devices)) != len(devices):
        raise MeshError(
            f"Cannot bind the model to {mesh}: expected {plural(mesh.size, 'different device')}, got {list(devices)}"
        )
    batch_axes = mesh.batch_axes if batch_axes is None else batch_axes
    shardings = _shardings(model, mesh, devices, layouts, batch_axes=batch_axes)
    # Everything that can fail comes first, so that an error leaves the old binding.
    unbind(model)
    distribution = MeshParallel(mesh, devices, _by_path(shardings), batch_axes=batch_axes, activations=activations)
    found = {id(variable): sharding for variable, sharding in shardings}
    dtypes = gather_dtypes or {}
    used = {
        key: Use(named_sharding(layout, devices), found[key], dtypes.get(key, ""))
        for key, layout in (uses or {}).items()
    }
    binding = ModelBinding(mesh, tuple(devices), distribution, used, dict(remat or {}), tuple(call_layouts))
    for variable, sharding in shardings:
        (relocate if values == "move" else set_sharding)(variable, sharding)
    # `Normalization` computes with constants made from its variables, which are still on the old devices.
    refresh_derived(model)
    _install_all(model, binding)
    return binding


def unbind(model: Model) -> None:
    """Remove a model's binding to a mesh; its variables stay where they are. Does nothing if the model is not bound."""
    recomputation.remove(model)
    layer_layouts.undo_layouts(model)
    for part in models_in(model):
        if _ATTRIBUTE in vars(part):
            for name in (*METHODS, "stateless_call", "__deepcopy__", _ATTRIBUTE):
                part.__dict__.pop(name, None)
            forget_compiled(part)


@contextmanager
def unscoped(model: Model) -> Iterator[None]:
    """Inside the block, ``model(...)`` of a bound model runs in the distribution set in the thread, not in its own."""
    parts = [part for part in models_in(model) if _ATTRIBUTE in vars(part)]
    calls = [part.__dict__.pop("call", None) for part in parts]
    try:
        yield
    finally:
        for part, call in zip(parts, calls, strict=True):
            if call is not None:
                part.__dict__["call"] = call


@dataclass(frozen=True, slots=True)
class BindingSnapshot:
    """A model's binding to a mesh and its variables' shardings, not values, to restore after a temporary change."""

    model: Model
    binding: ModelBinding | None
    shardings: tuple[tuple[Variable, Any], ...]

    @classmethod
    def of(cls, model: Model) -> BindingSnapshot:
        """Record how ``model`` is bound to a mesh now, if it is, and how each of its variables is sharded."""
        found = tuple((v, sharding_of(v)) for v in state_of(model))
        return cls(model, binding_of(model), found)

    def restore(self) -> None:
        """Restore the recorded binding and shardings; values stay on the devices where they are now."""
        unbind(self.model)
        for variable, sharding in self.shardings:
            set_sharding(variable, sharding)
        if self.binding is not None:
            _install_all(self.model, self.binding)


def binding_of(model: Model) -> ModelBinding | None:
    """Return a model's binding to a mesh; ``None`` if it is not bound."""
    return vars(model).get(_ATTRIBUTE)


def _shardings(
    model: Model, mesh: MeshSpec, devices: Sequence[jax.Device], layouts: _Layouts, *, batch_axes: tuple[str, ...]
) -> list[tuple[Variable, jax.sharding.NamedSharding]]:
    if isinstance(layouts, Mapping):
        given = layouts
    else:
        variables = variables_of(model)
        if len(variables) != len(layouts):
            count = plural(len(variables), "variable")
            got = plural(len(layouts), "layout")
            raise LayoutError(f"Cannot bind {model.name!r}: got {got} for {count}. Pass one layout for each variable")
        given = {id(v): layout for v, layout in zip(variables, layouts, strict=True)}
    weight_of = {id(slot): weight for slot, weight in slots_of(model)}
    spread = slot_layouts(model, lambda v: given.get(id(v)), batch_axes=batch_axes)
    chosen = {**spread, **given}
    found = []
    for variable in state_of(model):
        # In this order: the layout given for it, that of spread slots, its weight's, else replicated.
        owner = weight_of.get(id(variable), variable)
        layout = chosen.get(id(variable), chosen.get(id(owner)))
        layout = layout or Layout.replicated(mesh, len(variable.shape))
        if layout.mesh != mesh or not layout.divides(tuple(variable.shape)):
            raise LayoutError(
                f"Cannot bind variable {variable.path!r} of shape {tuple(variable.shape)}: its layout is {layout} of "
                f"{layout.mesh}, expected a layout of {mesh} whose split dims divide the shape"
            )
        found.append((variable, named_sharding(layout, devices)))
    return found


def _by_path(shardings: Sequence[tuple[Variable, Any]]) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Return variable path → (shape, sharding), to place variables that later replace these; omit ambiguous paths."""
    found: dict[str, tuple[tuple[int, ...], Any]] = {}
    ambiguous = set()
    for variable, sharding in shardings:
        entry = (tuple(variable.shape), sharding)
        if found.setdefault(variable.path, entry) != entry:
            ambiguous.add(variable.path)
    return {path: entry for path, entry in found.items() if path not in ambiguous}


def _install_all(model: Model, binding: ModelBinding) -> None:
    # Sub-models too: a user may call `model.backbone.predict(…)`.
    for part in models_in(model):
        _install(part, binding)
    # First, as what is recomputed is laid out, too.
    if binding.call_layouts:
        sharding, kept = binding.distribution.sharding_of_spec, "matmuls" in binding.remat.values()
        layer_layouts.lay_out_calls(model, binding.call_layouts, sharding, products_kept=kept)
    if binding.remat:
        recomputation.install(model, binding.remat, binding.uses)


def _install(model: Model, binding: ModelBinding) -> None:
    for name in METHODS:
        method = getattr(model, name, None)
        # Into __dict__, because Keras tracks attributes that setattr sets.
        if callable(method):
            model.__dict__[name] = _scoped(model, binding, method)
    # Layers that recompute gather weights themselves.
    if binding.uses and not binding.remat:
        model.__dict__["stateless_call"] = gathering(model, binding.uses, model.stateless_call)
    model.__dict__["__deepcopy__"] = _deepcopy(model, binding)
    model.__dict__[_ATTRIBUTE] = binding
    forget_compiled(model)


def forget_compiled(model: Model) -> None:
    """Drop a model's compiled steps, because they were compiled for other shardings of its variables."""
    for name in _COMPILED:
        if getattr(model, name, None) is not None:
            setattr(model, name, None)


def _scoped(model: Model, binding: ModelBinding, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        # It also runs inside traces (a user's own training step), where no value can be moved.
        is_call = method.__name__ == "call"
        with avoiding_xla_faults(binding.distribution if is_call else None):
            if binding.is_open:
                return method(*args, **kwargs)
            if not is_call:
                _adopt(model, binding)
            with binding.scope():
                found = method(*args, **kwargs)
        if method.__name__ in _RESULTS:
            record_first_result(model)
        return found

    return run


def _layout_of(variable: Variable, sharding: Any, mesh: MeshSpec) -> Layout:
    return Layout.of_spec(mesh, () if sharding is None else sharding.spec, len(variable.shape))


def _deepcopy(model: Model, binding: ModelBinding) -> Callable[[dict[int, Any]], Model]:
    """Return a ``__deepcopy__`` for a bound model: Keras copies the model, then the copy is bound to the same mesh."""

    def deepcopy(memo: dict[int, Any]) -> Model:
        variables = variables_of(model)
        # By position: the copy has other variables, in the same order.
        layouts = [_layout_of(v, sharding_of(v), binding.mesh) for v in variables]
        used = {i: binding.uses[id(v)].used for i, v in enumerate(variables) if id(v) in binding.uses}
        dtypes = {i: binding.uses[id(v)].dtype for i, v in enumerate(variables) if id(v) in binding.uses}
        uses = {i: _layout_of(variables[i], sharding, binding.mesh) for i, sharding in used.items()}
        with zeros_stored():
            make, arguments = model.__reduce__()
        with binding.scope():
            copied = memo[id(model)] = make(*arguments)
        distribution = binding.distribution
        bind(
            copied,
            mesh=binding.mesh,
            devices=binding.devices,
            layouts=layouts,
            batch_axes=distribution.batch_axes,
            activations=distribution.activations,
            uses={id(v): uses[i] for i, v in enumerate(variables_of(copied)) if i in uses},
            gather_dtypes={id(v): dtypes[i] for i, v in enumerate(variables_of(copied)) if i in dtypes},
            remat=binding.remat,
            call_layouts=binding.call_layouts,
        )
        return copied

    return deepcopy


def _adopt(model: Model, binding: ModelBinding) -> None:
    """Move variables created since `bind` (by a new optimizer, LoRA, new seeds) onto the mesh, before a method runs."""
    slots = {id(slot): weight for slot, weight in slots_of(model)}
    spread = slot_layouts(model, variable_layout, batch_axes=binding.distribution.batch_axes)
    for variable in state_of(model):
        sharding = sharding_of(variable)
        if sharding is None and id(variable) in spread:
            sharding = named_sharding(spread[id(variable)], binding.devices)
        if sharding is None:
            # A slot follows its weight.
            weight = slots.get(id(variable))
            there = value_of(variable).sharding if has_value(variable) else None
            if weight is not None:
                sharding = sharding_of(weight)
            elif isinstance(there, jax.sharding.NamedSharding) and there.device_set == set(binding.devices):
                sharding = there
            else:
                sharding = binding.distribution.get_variable_layout(variable)
        relocate(variable, sharding)
        # Learning rates and seeds are known without a checkpoint, and the method that runs next reads them.
        if is_abstract(variable) and pending_of(variable).exact:
            abstraction.initialise([variable])
