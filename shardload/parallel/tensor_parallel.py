"""A Keras model, tensor parallel on one axis, with the interface of the TensorParallelKeras proposals for Keras.

    tp = TensorParallelKeras(model, device_count=4)
    tp.compile(…) ─► model.compile(…)      every method is the wrapped model's own,
    tp.fit(…)     ─► model.fit(…)          which `AutoShardDistribution.shard` has bound to a mesh of 1 x 4
    tp(x)         ─► model(x)

There is one model and one value of each variable, spread over the devices: no copy per device, no gathering of
outputs, no second optimizer.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypedDict

import jax
import keras
import numpy as np

from shardload.errors import BackendError, MeshError, UnsupportedError, UsageError
from shardload.keras_bridge import Model
from shardload.keras_bridge.binding import binding_of
from shardload.keras_bridge.caller import warn_caller
from shardload.keras_bridge.model_state import state_of
from shardload.keras_bridge.variables import has_value, value_of
from shardload.layout_checks.placement import SetupReport, bytes_by_device, check_setup
from shardload.layout_search.layout_plan import LayoutPlan
from shardload.layouts.choice import LayoutChoice
from shardload.layouts.collectives import device_id, devices_of, list_devices
from shardload.parallel.choosing import given_plan, mesh_for, tensor_parallel_mesh
from shardload.parallel.distribution import AutoShardDistribution
from shardload.sharding.mesh import planned_mesh
from shardload.typing import LayoutLike
from shardload.units import check_kind, plural

_OTHER_BACKENDS = ("torch", "pytorch", "tensorflow", "horovod", "nccl")
"""Values of ``distributed_backend`` that the TensorParallelKeras proposals have, but that do not run on JAX."""
_OF_THE_MODEL = """
compile fit evaluate predict train_on_batch test_on_batch predict_on_batch compute_loss compute_metrics
get_metrics_result reset_metrics summary get_layer quantize export save_weights load_weights
"""
"""Methods that call the wrapped model's method of the same name, as it may differ from that of `keras.Model`."""


class ParallelismInfo(TypedDict):
    """Devices, bytes and layouts of a model, as `TensorParallelKeras.get_parallelism_info` returns them."""

    world_size: int
    """Number of devices."""
    device_ids: list[str]
    """Ids of the devices, in the order of the shards."""
    distributed_backend: str
    """What moves data between devices: always ``jax``."""
    mesh: str
    sharding_strategy: str
    """How layouts were chosen: ``auto``, ``search``, ``rules``, …"""
    split_weights: int
    replicated_weights: int
    weight_bytes: int
    """Bytes of all weights, each counted once."""
    weight_bytes_per_device: int
    """Bytes of weights that were found on the device that has most of them."""
    other_bytes_per_device: int
    """Bytes of optimizer slots and metrics on the device that has most."""
    fallbacks: list[str]
    """For each variable that did not get the layout of its rule, a line that says why."""


def _of_model(name: str) -> Callable[..., Any]:
    @functools.wraps(getattr(keras.Model, name))
    def method(self: TensorParallelKeras, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.model, name)(*args, **kwargs)

    return method


@keras.saving.register_keras_serializable(package="shardload")
class TensorParallelKeras(keras.Model):  # type: ignore[misc]
    """A model whose weights are split over devices along one axis, as Megatron splits them.

    Use it as the model itself: ``compile``, ``fit``, ``evaluate``, ``predict``, ``save``, and ``generate`` if the model
    has it, are the model's own and run on all devices. Every attribute that this class lacks is the model's, too.
    ``save_weights`` writes the same files as the plain model, which is the attribute ``model``, on the same devices.

    ``keras.saving.load_model`` knows this class once it is imported: ``from shardload import TensorParallelKeras``.

    Examples:
        ```python
        model = shardload.TensorParallelKeras(build_model(), device_count=8)
        model.compile("adam", "mse")
        model.fit(x, y)
        print(model.get_parallelism_info())
        ```
    """

    # A flag rather than isinstance: packages below this one cannot import the class.
    is_its_model = True
    """Tells functions of this package, such as `shardload.restore`, to work on the plain model in ``model``."""

    def __init__(
        self,
        model: Model,
        device_count: int | None = None,
        device_ids: Sequence[Any] | None = None,
        distributed_backend: str = "auto",
        *,
        world_size: int | None = None,
        layout: LayoutLike = "auto",
        **kwargs: Any,
    ) -> None:
        """Split a built model over devices; its values move there.

        Args:
            model: A built Keras model, compiled or not.
            device_count: Number of devices; by default as many as a plan given as layout is for, else all.
            device_ids: Ids of the devices (``"gpu:0"``, 0), or `jax.Device`s, in the order of the shards.
            distributed_backend: ``"auto"`` or ``"jax"``; nothing else runs.
            world_size: Another name of ``device_count``.
            layout: How to choose layouts (see `shardload.parallel.choose`); a plan for one axis of any name.
            **kwargs: ``name`` and ``trainable``, as for every `keras.Model`.

        Raises:
            BackendError: When ``distributed_backend`` is one that does not run on JAX.
            UsageError: When the model is not built, or the arguments contradict each other.
            MeshError: When there are fewer devices.
            LayoutError: When a plan is for another number of devices, or for a mesh of several axes.
        """
        if not isinstance(distributed_backend, str) or distributed_backend not in ("auto", "jax"):
            if str(distributed_backend).lower() in _OTHER_BACKENDS:
                raise BackendError.of_tensor_parallelism(distributed_backend)
            raise UsageError(
                f"Cannot use distributed_backend={distributed_backend!r:.60}: XLA moves data between devices, so there "
                "is no other backend to choose, also not for simulated devices on CPU. Supported: 'auto', 'jax'"
            )
        if not isinstance(model, keras.Model):
            raise UsageError(f"Cannot wrap {model!r:.80}: expected a keras.Model")
        for argument, number in (("device_count", device_count), ("world_size", world_size)):
            check_kind(argument, number, int | np.integer | None, "a number of devices")
        if None not in (device_count, world_size) and device_count != world_size:
            raise UsageError(f"Cannot use device_count={device_count} and world_size={world_size}: give one of them")
        count, plan = world_size if device_count is None else device_count, given_plan(layout)
        wanted = count if plan is None or count is not None or device_ids is not None else plan.mesh.size
        devices = _devices(wanted, device_ids)
        # autocast=False: the wrapped model casts its inputs itself, to its own compute dtype.
        super().__init__(name=kwargs.pop("name", None) or f"tensor_parallel_{model.name}", autocast=False, **kwargs)
        self.distributed_backend = "jax"
        """Always ``jax``: XLA moves data between devices."""
        # For get_config. A plan itself, not the path of its file, which may be gone where the model is loaded.
        given = layout if plan is None else plan
        self._given: dict[str, Any] = {"device_count": count, "device_ids": device_ids, "layout": given}
        self._spread(model, devices)
        self.model = model
        """The wrapped model itself, split over the same devices."""
        self.built = True

    def _spread(self, model: Model, devices: Sequence[Any]) -> None:
        layout = self._given["layout"]
        distribution = AutoShardDistribution(mesh_for(layout, len(devices)), layout, devices=devices)
        distribution.shard(model)
        self.distribution = distribution
        """The `AutoShardDistribution` that chose the layouts of the model and moved its values there."""

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped model, and return its result."""
        return self.model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped model that this class lacks: ``optimizer``, ``generate``, ``inputs``."""
        model = vars(self).get("model")
        # `model` is missing while Keras' constructor runs. Private names are Keras' own state, which the two models
        # must not share.
        if model is None or name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(model, name)

    @property
    def world_size(self) -> int:
        """Number of devices."""
        return len(self.distribution.devices)

    @property
    def device_ids(self) -> list[str]:
        """Ids of the devices, in the order of the shards."""
        return [device_id(device) for device in self.distribution.devices]

    @property
    def layouts(self) -> LayoutChoice:
        """The layout of each variable of the wrapped model, with its reason."""
        return self.distribution.choice(self.model)

    def get_parallelism_info(self) -> ParallelismInfo:
        """Return devices, bytes on each device, and how layouts were chosen, as they are now."""
        choice, weights = self.layouts, self.model.variables
        # Counted on the devices, not taken from the plan.
        every, on_device = _most_bytes(state_of(self.model)), _most_bytes(weights)
        return ParallelismInfo(
            world_size=self.world_size,
            device_ids=self.device_ids,
            distributed_backend=self.distributed_backend,
            mesh=str(choice.mesh),
            sharding_strategy=choice.mode,
            split_weights=sum(not choice.of(v).is_replicated for v in weights),
            replicated_weights=sum(choice.of(v).is_replicated for v in weights),
            weight_bytes=sum(choice.by_id[id(v)].nbytes for v in weights),
            weight_bytes_per_device=on_device,
            other_bytes_per_device=every - on_device,
            fallbacks=[f"{found.variable}: {found.why}" for found in choice.fallbacks],
        )

    def auto_detect_parallelism(self) -> bool:
        """Spread the model over all devices of the platform that it is on, and return whether anything changed."""
        devices = tuple(devices_of(list_devices(self.distribution.devices[0].platform)))
        if devices == self.distribution.devices:
            return False
        self._spread(self.model, devices)
        self._given |= {"device_count": None, "device_ids": None}
        return True

    def validate_tensor_parallelism_setup(self, *args: Any, **kwargs: Any) -> SetupReport:
        """Check layouts and bytes on the devices, and the outputs against those of the replicated model.

        For the comparison, each device needs memory for the whole model.

        Args:
            *args: Sample inputs of the model; by default made from the inputs of a functional model.
            **kwargs: Sample inputs by name.

        Returns:
            The report, which is true if every check passed.
        """
        binding = binding_of(self.model)
        if binding is None:  # removed by another distribution, or by the user
            raise UsageError(
                f"Cannot check the model {self.model.name!r}: it is no longer bound to a mesh. Wrap it again"
            )
        return check_setup(self.model, self.layouts, binding, args, kwargs)

    # ---- Keras' saving -------------------------------------------------------------------------------

    @property
    def compiled(self) -> bool:
        """Whether the wrapped model is compiled."""
        model = vars(self).get("model")
        return model is not None and bool(model.compiled)

    @compiled.setter
    def compiled(self, _: bool) -> None:
        """Ignore what Keras' constructor sets: the wrapped model says whether it is compiled."""

    @property
    def metrics(self) -> list[Any]:
        """The metrics of the wrapped model."""
        return list(self.model.metrics)

    def get_compile_config(self) -> dict[str, Any]:
        """Return an empty dict to Keras' saving: `get_config` says how the wrapped model was compiled."""
        return {}

    def get_build_config(self) -> None:
        """Return ``None`` to Keras' saving: `get_config` says how the wrapped model was built."""

    def get_config(self) -> dict[str, Any]:
        """Return the configuration of the wrapped model, and the arguments given; raise if JSON cannot hold these."""
        layout = self._given["layout"]
        saved = layout.to_json() if isinstance(layout, LayoutPlan) else layout
        given = {**self._given, "layout": os.fspath(saved) if isinstance(saved, os.PathLike) else saved}
        try:
            json.dumps(given)
        except TypeError as error:
            raise UnsupportedError(
                f"Cannot save {self.name!r}: its layout or its devices have no configuration "
                f"({type(layout).__name__}). Save the plain model instead: wrapper.model.save(path)"
            ) from error
        return {"model": keras.saving.serialize_keras_object(self.model), "name": self.name, **given}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> TensorParallelKeras:
        """Build the wrapped model from a saved configuration, and wrap it.

        With fewer devices than it was saved on, it takes all of them and warns; a plan for more devices is dropped.
        """
        config, saved = dict(config), config["layout"]
        # Rules are a mapping too, but of lists: `format` marks a plan.
        if isinstance(saved, dict) and isinstance(saved.get("format"), str):
            config["layout"] = LayoutPlan.from_json(saved)
        model = keras.saving.deserialize_keras_object(config.pop("model"), custom_objects=custom_objects)
        planned = planned_mesh(config["layout"])
        wanted = max(config["device_count"] or 0, len(config["device_ids"] or ()), planned.size if planned else 0)
        # A saved model must load on a smaller machine: take all devices there, with a warning.
        if wanted > (here := len(jax.devices())):
            lost = ", with layout='auto': its plan is for more" if planned else ""
            warn_caller(f"{config['name']!r} was saved on {plural(wanted, 'device')}, and is loaded on {here}{lost}")
            config |= {"device_count": None, "device_ids": None} | ({"layout": "auto"} if planned else {})
        return cls(model, **config)


# On the class: `keras.Model` defines these methods, so `__getattr__` would never be asked for them.
for _name in _OF_THE_MODEL.split():
    setattr(TensorParallelKeras, _name, _of_model(_name))


def _most_bytes(variables: Iterable[Any]) -> int:
    """Return how many bytes of ``variables`` are on the device that has most of them."""
    return max(bytes_by_device(value_of(v) for v in variables if has_value(v)).values(), default=0)


def _devices(count: int | None, ids: Sequence[Any] | None) -> list[Any]:
    """Return the `jax.Device`s that ``device_count`` and ``device_ids`` ask for, in the order of the shards."""
    if ids is None:
        every = devices_of(list_devices())
        count = len(every) if count is None else tensor_parallel_mesh(count).size
        if count > len(every):
            raise MeshError(
                f"Cannot use device_count={count}: this process has {plural(len(every), 'device')}. Use fewer, or "
                "simulate them on the CPU: set JAX_PLATFORMS=cpu, and before JAX is first used, call "
                f"jax.config.update('jax_num_cpu_devices', {count})"
            )
        return every[:count]
    if not isinstance(ids, Iterable):
        raise UsageError(f"Cannot use device_ids={ids!r:.80}: expected a list of devices, or of ids such as 'cpu:0'")
    platform = jax.devices()[0].platform
    names = [f"{platform}:{given}" if isinstance(given, int) else given for given in ids]
    found = [devices_of(name)[0] if isinstance(name, str) else name for name in names]
    if count not in (None, len(found)) or not found:
        raise UsageError(
            f"Cannot use device_count={count} with device_ids={ids!r:.80}: give as many ids, or no device_count"
        )
    return found
