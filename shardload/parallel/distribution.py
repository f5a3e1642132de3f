"""A ``keras.distribution.Distribution`` that chooses the layouts of whole models.

Keras asks a distribution for the layout of each variable while the variable is created, before its model is known::

    with dist.scope(): model = build()      provisional layouts, by shape (or by a LayoutMap's rules)
    dist.shard(model)                       layouts of the whole model; existing values and slots move to them
    model = dist.build(build)               both at once: no value exists before its layout is known

`AutoShardDistribution.shard` binds the model to the mesh (`shardload.keras_bridge.binding`), so that its methods run
there with or without an open scope.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import keras

from shardload.errors import UsageError, suggests_arguments
from shardload.keras_bridge import Model, Variable, abstraction, distributions
from shardload.keras_bridge.binding import MeshParallel, bind
from shardload.keras_bridge.calls import build_by_calling, output_paths
from shardload.keras_bridge.entry_points import EntryCall, calls_to
from shardload.keras_bridge.quantised_gradients import int8_gradients
from shardload.keras_bridge.training import batches_laid_out_singly
from shardload.keras_bridge.variables import sharding_of
from shardload.layout_search.searching import search
from shardload.layouts.choice import LayoutChoice
from shardload.layouts.role_layouts import by_shape, lay_out
from shardload.layouts.rules import check_output_rules
from shardload.parallel.choosing import check_layout, choose
from shardload.sharding.devices import has_mesh, resolve_devices
from shardload.sharding.mesh import MeshSpec, planned_mesh
from shardload.typing import LayoutLike, MeshLike


class AutoShardDistribution(keras.distribution.ModelParallel):  # type: ignore[misc]
    """A distribution that chooses the layouts of any Keras model, without a hand-written map.

    Inside `scope`, a new variable gets a provisional layout: that of a LayoutMap's rule, else its largest dim that
    the mesh divides is split. Keras computes the initial values of small variables (below about 250 MiB / devices) one
    by one, whole on the default device, and then spreads them; larger ones are computed in their layout. `shard` then
    moves the values to the layouts chosen for the model. `build` creates every value in its chosen layout at once.

    Under its scope, `shardload.load` and `shardload.load_weights` load into layouts chosen in the same way, and
    KerasHub's ``from_preset`` works as under every distribution. Inside `shardload.fast`, it skips initial values.

    Examples:
        ```python
        distribution = shardload.AutoShardDistribution("data=2,model=4")
        model = distribution.build(build_model)  # each shard is initialised on its device
        model.fit(x, y, batch_size=32)
        ```
    """

    lays_out_each_batch = True  # as in `MeshParallel`

    @suggests_arguments
    def __init__(
        self,
        mesh: MeshLike | MeshSpec | None = None,
        layout: LayoutLike = "auto",
        *,
        axes: str | None = None,
        devices: Sequence[Any] | None = None,
        auto_shard_dataset: bool = True,
        device_memory_bytes: int | None = None,
        batch: int | None = None,
    ) -> None:
        """Describe the mesh and how to choose layouts on it.

        Args:
            mesh: ``"2x4"``, ``"data=2,model=4"``, sizes, a `MeshSpec`, a `keras.distribution.DeviceMesh` or a
                `jax.sharding.Mesh`. By default that of the layout if it has one, else all devices along ``model``.
            layout: As in `shardload.parallel.choose`: ``"auto"``, ``"search"``, ``"keras_hub"``, rules, a LayoutMap
                (whose rules for activations, ``dense/output``, count too), a plan, or the path of a rules file or a
                plan.
            axes: Names for a mesh given as sizes, joined by commas.
            devices: `jax.Device`s in mesh order; by default the mesh's own, else JAX's first ones.
            auto_shard_dataset: Whether Keras splits datasets over processes, as in `keras.distribution.Distribution`.
            device_memory_bytes: With ``layout="search"``, the limit that plans keep on each device; see
                `shardload.parallel.search`.
            batch: With ``layout="search"``, the rows of a batch over all devices, if `shard` gets no sample inputs.

        Raises:
            LayoutError: When ``layout`` is the name of no layout and no file, or a file of no plan.
            MeshError: When the mesh cannot be made.
            UsageError: When ``device_memory_bytes`` or ``batch`` is given without ``layout="search"``.
        """
        for name, value in (("device_memory_bytes", device_memory_bytes), ("batch", batch)):
            if value is not None and not (isinstance(layout, str) and layout == "search"):
                raise UsageError(
                    f"Cannot plan with {name}={value!r} and layout={layout!r:.60}: only a search takes it. Pass "
                    'layout="search", or leave it out'
                )
        check_layout(layout)
        if mesh is None and has_mesh(layout):
            mesh = cast("MeshLike", layout)
        elif mesh is None:
            mesh = planned_mesh(layout)
        placed = resolve_devices(mesh, axes=axes, devices=devices)
        spec, found = placed.mesh, placed.devices
        rules = distributions.activation_layouts(layout) if _is_layout_map(layout) else None
        self._on_mesh = MeshParallel(spec, found, {}, batch_axes=spec.batch_axes, activations=rules)
        device_mesh = self._on_mesh.device_mesh
        self._rules: Any = layout if _is_layout_map(layout) else keras.distribution.LayoutMap(device_mesh)
        super().__init__(
            # Empty: `get_variable_layout` applies the rules, after a variable's own layout.
            layout_map=keras.distribution.LayoutMap(device_mesh),
            batch_dim_name=self._on_mesh.batch_dim_name,
            auto_shard_dataset=auto_shard_dataset,
        )
        self.mesh = spec
        """The mesh, as axis names and sizes."""
        self.devices: tuple[Any, ...] = found
        """`jax.Device`s in mesh order."""
        self.device_memory_bytes = device_memory_bytes
        """Most bytes on each device that a plan may need, if layouts are found by a search."""
        self.batch = batch
        """Rows of the batch that a search plans for, if `shard` gets no sample inputs."""
        self.layout_of_models = layout
        """The argument ``layout``: `shard` and `build` pass it to `shardload.parallel.choose`, for each model."""
        # Weak keys: the distribution may live for the whole program, and must not keep its models alive.
        self._choices: weakref.WeakKeyDictionary[Model, LayoutChoice] = weakref.WeakKeyDictionary()

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Make this the distribution of the code in the block; batches that do not divide evenly are replicated."""
        with batches_laid_out_singly(), int8_gradients(), super().scope():
            yield

    def get_data_layout(self, data_shape: Sequence[int]) -> Any:
        """Return the layout of a batch: the first dim split over the batch axes that divide it, or replicated."""
        return self._on_mesh.get_data_layout(data_shape)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The mesh axes that split the batch."""
        return self._on_mesh.batch_axes

    @property
    def num_model_replicas(self) -> int:
        """Number of parts into which the batch is split."""
        return self._on_mesh.num_model_replicas

    def get_variable_layout(self, variable: Variable) -> Any:
        """Return the `NamedSharding` that a variable already has, else a provisional one, until `shard` chooses."""
        # Once `shard` has chosen a layout, it stays, however often Keras asks.
        own = sharding_of(variable)
        if own is not None:
            return own
        # `LayoutMap.__getitem__` returns None where no rule matches.
        by_rule = self._rules[variable.path]
        if by_rule is not None:
            return keras.distribution.TensorLayout(by_rule.axes, self.device_mesh).backend_layout
        if self.layout_of_models == "replicated" or _is_layout_map(self.layout_of_models):
            return self._on_mesh.replicated(len(variable.shape))
        return self._on_mesh.sharding(lay_out(variable, by_shape(variable), self.mesh).layout)

    def get_tensor_layout(self, path: str) -> Any:
        """Return the layout that a LayoutMap gives to the output of a layer; ``None`` leaves it to XLA."""
        return self._on_mesh.get_tensor_layout(path)

    def shard(self, model: Model, *args: Any, **kwargs: Any) -> Model:
        """Choose layouts for a model and move its values there; optimizer slots follow their variable.

        Afterwards the model's own methods (fit, predict, evaluate, generate, …) run on the mesh.

        Args:
            model: Any Keras model. A variable without a value (`shardload.abstract`) stays without one.
            *args: Sample inputs, needed for a model that is not built: it is built without computing anything, and
                initialised in its layouts. Only shapes and dtypes count.
            **kwargs: Sample inputs by name.

        Returns:
            The same model.

        Raises:
            UsageError: When the model is not built and there are no sample inputs.
            LayoutError: When a rule of the layout cannot be applied, or matches nothing.
        """
        # Bind before values are computed: a model that was just built is then initialised in its layouts.
        if not isinstance(model, keras.Model):
            raise UsageError(f"Cannot shard {model!r:.80}: expected a keras.Model")
        new: list[Variable] = []
        if not (model.built and model.variables):
            if not args and not kwargs:
                raise UsageError(
                    f"Cannot shard the model {model.name!r}: it is not built, so it has no variables yet. Pass sample "
                    "inputs, shard(model, x), or call model.build(input_shape) first"
                )
            new = build_by_calling(model, args, kwargs)
        layout = self.layout_of_models
        if isinstance(layout, str) and layout == "search":
            # A plan for what the model is compiled for, and the inputs it is shown.
            layout = search(
                model,
                self.mesh,
                inputs=args[0] if args else None,
                arguments=kwargs,
                batch=None if args else self.batch,
                optimizer=getattr(model, "optimizer", None),
                device_memory_bytes=self.device_memory_bytes,
            )
        choice = choose(model, self.mesh, layout)
        # Rules for outputs match paths that only a call shows, so they are checked apart from those for variables.
        if _is_layout_map(self.layout_of_models):
            check_output_rules(self.layout_of_models, output_paths(model, args, kwargs))
        bind(
            model,
            mesh=choice.mesh,
            devices=self.devices,
            layouts=choice.layouts,
            batch_axes=choice.batch_axes,
            activations=choice.activations,
            uses=choice.uses,
            gather_dtypes=choice.gather_dtypes,
            remat=choice.remat,
            call_layouts=choice.call_layouts,
        )
        abstraction.initialise(new)
        self._choices[model] = choice
        return model

    def build(self, make: Callable[[], Model], *args: Any, **kwargs: Any) -> Model:
        """Build a model without values, choose its layouts, and initialise it there, each shard on its device.

        Initial values equal those of an ordinary model, bit for bit.

        Args:
            make: Returns the model; may compile it. It must not load weights.
            *args: Sample inputs, if ``make`` returns a model that is not built; only their shapes and dtypes count.
            **kwargs: Sample inputs by name.

        Raises:
            UsageError: When ``make`` loads weights, or the model is not built and there are no sample inputs.
            LayoutError: As in `shard`.
        """
        # Weights that `make` loads would be lost: its variables have no values to load into.
        with abstraction.abstract(), calls_to(_refuse_weights):
            model = make()
        self.shard(model, *args, **kwargs)
        abstraction.initialise(model)
        return model

    def choice(self, model: Model) -> LayoutChoice:
        """Return the layouts that `shard` chose for a model, and the reason for each.

        Raises:
            UsageError: When this distribution has not sharded it.
        """
        if model not in self._choices:
            raise UsageError(
                f"Cannot show the layouts of {model.name!r}: this distribution has not sharded it. Call shard(model)"
            )
        return self._choices[model]


def _is_layout_map(layout: Any) -> bool:
    return isinstance(layout, keras.distribution.LayoutMap)


def _refuse_weights(call: EntryCall) -> Any:
    if call.kind == "layer" or call.arguments.get("load_weights") is False:
        return call.original()
    raise UsageError(
        f"Cannot run {call.text} inside build(): it loads weights, and the model has no values yet. "
        "Use shardload.load(source, mesh=distribution), or call it under distribution.scope(), then shard(model)"
    )
