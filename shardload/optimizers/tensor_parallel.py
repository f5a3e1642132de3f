"""An optimizer with the interface of Keras pull request 21792. It trains like the optimizer that it wraps.

The pull request proposed an optimizer that keeps a shard of its state for each device, and copies each shard into the
optimizer of one shard of the model. With arrays that are sharded over a mesh, this is not needed: there is one model
with one gradient for each weight, and XLA adds up gradients where a mesh axis splits the sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import keras

from shardload.errors import MeshError, UsageError
from shardload.keras_bridge.optimizer_slots import SlotSpread, set_spread, variable_layout
from shardload.keras_bridge.variables import recording
from shardload.optimizers.sharding import SlotReport, spread_slots
from shardload.sharding.layout import Layout
from shardload.units import check_kind, plural


@keras.saving.register_keras_serializable(package="shardload")
class TensorParallelOptimizer(keras.optimizers.Optimizer):  # type: ignore[misc]
    """Train with another optimizer whose state is split over the devices of the model's mesh.

    Updates, variables and saved state are those of ``base_optimizer``. The interface is that of Keras pull request
    21792, for programs that were written for it. `shardload.shard_optimizer` does the same without a wrapper.

    Examples:
        ```python
        shardload.load_weights(model, "model.weights.h5", mesh="1x8", items="weights")
        model.compile(shardload.optimizers.TensorParallelOptimizer("adam"), "mse")
        model.fit(x, y)
        ```

    Args:
        base_optimizer: An optimizer of Keras, its name, or its configuration.
        device_count: Number of devices that split the state, which `build` checks: all devices of the mesh, or those of
            its axes that split weights. By default, it is not checked.
        shard_optimizer_states: Whether slots are split over every axis of the mesh that divides them, the batch axis
            included (ZeRO-1). Otherwise they follow their weights.
        tensor_parallel_config: Not used: the layouts of weights say how they are split. Kept for callers that pass it.
        name: By default the name of ``base_optimizer``.

    Raises:
        UsageError: If ``base_optimizer`` is not an optimizer.
        MeshError: When built, if ``device_count`` does not fit the mesh.
    """

    def __init__(
        self,
        base_optimizer: Any,
        device_count: int | None = None,
        shard_optimizer_states: bool = True,
        tensor_parallel_config: Any = None,
        name: str | None = None,
    ) -> None:
        base = base_optimizer
        if isinstance(base, (str, dict)):
            with suppress(KeyError, TypeError, ValueError):  # Keras knows none of that name
                base = keras.optimizers.get(base)
        if not isinstance(base, keras.optimizers.Optimizer):
            raise UsageError(
                f"Cannot use base_optimizer={base!r:.60}: expected an optimizer of Keras, its name or its configuration"
            )
        check_kind("name", name, str | None, "the name of the optimizer")
        check_kind("shard_optimizer_states", shard_optimizer_states, bool, "True or False")
        # Keras demands a rate here; the property `learning_rate` returns that of the base optimizer.
        super().__init__(learning_rate=0.0, name=name or base.name)
        # The attribute's name in Keras' LossScaleOptimizer, by which `optimizers_in` finds wrapped optimizers.
        self.inner_optimizer = base
        self.device_count = device_count
        self.shard_optimizer_states = shard_optimizer_states
        self.tensor_parallel_config = tensor_parallel_config
        self._report: SlotReport | None = None
        self._is_unchecked = False
        if shard_optimizer_states:
            set_spread(base, SlotSpread("every"))

    @property
    def base_optimizer(self) -> Any:
        """The optimizer that computes the updates and has the state."""
        return self.inner_optimizer

    def build(self, variables: Sequence[Any]) -> None:
        """Create the slots: split like their weights, and with ``shard_optimizer_states`` over further mesh axes."""
        if self.built:
            return
        # A load creates slots without values, to fill them on the mesh that it brings: `state_layouts` knows it.
        self._is_unchecked = recording()
        if not self._is_unchecked:
            self._check_device_count(map(variable_layout, variables))
        # The base first: if it refuses the variables, this optimizer does not count as built.
        self.inner_optimizer.build(variables)
        super().build(variables)
        if not self._is_unchecked:
            self._spread()

    @property
    def slot_report(self) -> SlotReport | None:
        """How the slots are split over the mesh; ``None`` until they exist and the weights are on a mesh."""
        if self._report is None:
            self._spread()
        return self._report

    def _spread(self) -> None:
        weights = self._trainable_variables if self.built and self.shard_optimizer_states else ()
        if any(variable_layout(v) is not None for v in weights):
            self._report = spread_slots(self.inner_optimizer, SlotSpread("every"))

    def state_layouts(self, layout_of: Callable[[Any], Layout | None]) -> dict[int, Layout]:
        """Check ``device_count`` before weights move to another mesh; return {}, as this class has no state to move."""
        if self.built:
            self._check_device_count(map(layout_of, self._trainable_variables))
        return {}

    def _check_once(self) -> None:
        """Before the first update, check ``device_count`` if the mesh was unknown when the slots were created."""
        if self._is_unchecked:
            self._check_device_count(map(variable_layout, self._trainable_variables))
            self._is_unchecked = False

    def _check_device_count(self, layouts: Iterable[Layout | None]) -> None:
        mesh = next((layout.mesh for layout in layouts if layout is not None), None)
        # Both counts make sense to a caller: the devices that split slots, and those that split weights.
        split = 1 if mesh is None else mesh.size // math.prod(map(mesh.axis_size, mesh.batch_axes))
        counts = {1 if mesh is None else mesh.size, split}
        if self.device_count is not None and self.device_count not in counts:
            where = "no mesh" if mesh is None else f"the mesh {mesh}"
            expected = " or ".join(map(str, sorted(counts)))
            raise MeshError(
                f"Cannot split the state of {self.name!r} over {plural(self.device_count, 'device')}: its weights "
                f"are on {where}, expected device_count={expected}. Leave out device_count, or use another mesh"
            )

    @property
    def variables(self) -> list[Any]:
        """The variables of the base optimizer; only these are updated and saved."""
        return list(self.inner_optimizer.variables)

    @property
    def iterations(self) -> Any:
        """The number of updates of the base optimizer."""
        return self.inner_optimizer.iterations

    @property
    def learning_rate(self) -> Any:
        """The learning rate of the base optimizer."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        self.inner_optimizer.learning_rate = value

    def apply_gradients(self, grads_and_vars: Sequence[Any], **kwargs: Any) -> Any:
        """Update weights from pairs of a gradient and its weight.

        Raises:
            UsageError: If the argument has a list of pairs for each shard of a model, as the optimizer of Keras pull
                request 21792 takes it.
        """
        # There, callers also pass the shards of the model by keyword.
        pairs = list(grads_and_vars)
        if kwargs or (pairs and isinstance(pairs[0], list)):
            raise UsageError(
                "Cannot apply a list of gradients for each shard: the mesh has one model, expected one gradient for "
                "each weight. Call apply_gradients(zip(gradients, model.trainable_variables))"
            )
        return super().apply_gradients(pairs)

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Update weights, as the base optimizer does; the first call builds it."""
        if trainable_variables is not None and not self.built:
            self.build(list(trainable_variables))
        self._check_once()
        self.inner_optimizer.apply(grads, trainable_variables)

    def stateless_apply(self, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        """Return updated weights and state, as the base optimizer does."""
        self._check_once()
        return self.inner_optimizer.stateless_apply(optimizer_variables, grads, trainable_variables)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> Any:
        """Update one weight, as the base optimizer does."""
        return self.inner_optimizer.update_step(gradient, variable, learning_rate)

    def scale_loss(self, loss: Any) -> Any:
        """Scale the loss if the base optimizer does, as for float16."""
        return self.inner_optimizer.scale_loss(loss)

    def finalize_variable_values(self, var_list: Any) -> None:
        """Assign the moving averages of the weights, if the base optimizer keeps any, to the weights."""
        self.inner_optimizer.finalize_variable_values(var_list)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments, for saved models; ``tensor_parallel_config`` is not among them."""
        return {
            "base_optimizer": keras.saving.serialize_keras_object(self.inner_optimizer),
            "device_count": self.device_count,
            "shard_optimizer_states": self.shard_optimizer_states,
            "name": self.name,
        }

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> TensorParallelOptimizer:
        """Create an optimizer from a configuration that `get_config` returned."""
        base = keras.saving.deserialize_keras_object(dict(config["base_optimizer"]), custom_objects=custom_objects)
        return cls(**{**config, "base_optimizer": base})
