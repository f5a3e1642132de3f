"""Call a model without values, to learn the order of its layers or to build it; call it as a pure function.

`sole_consumers`, `arguments_of_call`   the graph that Keras keeps of functional and sequential models
`build_by_calling`, `output_paths`      a call on sample inputs: to build a model, or to learn its outputs' paths
`stateless`, `run_forward`              the model as a pure function of its variables' values, on any mesh
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import jax
import keras
from keras.src.backend.common import global_state
from keras.src.backend.jax.core import compute_output_spec
from keras.src.distribution.distribution_lib import Distribution

from shardload.keras_bridge import Model, Variable
from shardload.keras_bridge.abstraction import abstract, is_abstract
from shardload.keras_bridge.binding import BindingSnapshot, MeshParallel, unbind, unscoped
from shardload.keras_bridge.gathered_use import Use, gathering
from shardload.keras_bridge.layer_layouts import CallLayouts, laid_out
from shardload.keras_bridge.model_state import state_of
from shardload.keras_bridge.recomputation import Recompute, recomputing
from shardload.keras_bridge.recording import UNINITIALISED, unregistered, without_computing


def arguments_of_call(model: Model) -> frozenset[str] | None:
    """Return the names of the arguments that a model's ``call`` uses; ``None`` if it may use any.

    The ``call`` of a functional or sequential model takes ``**kwargs``. Of these it uses the context arguments of Keras
    (``call_context_args``) that its layers declare.
    """
    taken = inspect.signature(model.call).parameters
    names = {name for name, p in taken.items() if p.kind is not p.VAR_KEYWORD}
    if len(names) < len(taken):
        if not model.call.__module__.startswith("keras.src.models"):
            return None
        for layer in model._flatten_layers():
            names |= set(getattr(layer, "_call_context_args", ()))
    return frozenset(names)


def sole_consumers(model: Model) -> Iterator[tuple[Any, Any]]:
    """Yield (layer, next layer) where only the next layer reads the output of the first, in call order.

    Both layers are called once; the first has a single output, which the model does not return. A model that is
    neither functional nor sequential has no such pairs. A layout may split both kernels of a pair for one all-reduce.
    """
    # A Sequential model keeps its graph in a functional model.
    graph = getattr(model, "_functional", None) or model
    if not isinstance(graph, keras.Model) or not hasattr(graph, "_nodes_by_depth"):
        return
    # Keras counts depth from the outputs, so the greatest depth is called first.
    nodes = [node for depth in sorted(graph._nodes_by_depth, reverse=True) for node in graph._nodes_by_depth[depth]]
    calls = Counter(id(node.operation) for node in nodes)
    read_by: dict[int, list[Any]] = {}
    for node in nodes:
        for tensor in () if node.is_input else node.input_tensors:
            read_by.setdefault(id(tensor), []).append(node.operation)
    returned = {id(tensor) for tensor in graph.outputs}
    for node in nodes:
        if node.is_input or calls[id(node.operation)] > 1 or len(node.outputs) != 1:
            continue
        readers = read_by.get(id(node.outputs[0]), [])
        if len(readers) == 1 and id(node.outputs[0]) not in returned and calls[id(readers[0])] == 1:
            yield node.operation, readers[0]


class _OutputPaths(Distribution):  # type: ignore[misc]
    """A distribution without layouts that records the paths of layer outputs for which Keras asks for a layout."""

    def __init__(self) -> None:
        super().__init__(device_mesh=None)
        self.found: list[str] = []

    def get_tensor_layout(self, path: str) -> None:
        self.found.append(path)

    def get_variable_layout(self, variable: Variable) -> Any:
        return None


def build_by_calling(model: Model, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Variable]:
    """Build a model by tracing a call on sample inputs; return the variables that this created, all without values."""
    before = {id(v) for v in state_of(model)}

    def traced(leaf: Any) -> Any:
        return jax.numpy.zeros(leaf.shape, leaf.dtype) if _is_tensor(leaf) else leaf

    def call() -> None:
        given, named = jax.tree.map(traced, (tuple(args), dict(kwargs)))
        model(*given, **named)

    with abstract():
        without_computing(call)
    return [v for v in state_of(model) if id(v) not in before and is_abstract(v)]


def output_paths(model: Model, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str] | None:
    """Return the paths of layer outputs whose layout Keras asks a distribution for, in call order.

    They are found by tracing a call on the given inputs; without any, on the model's own symbolic inputs. The result is
    ``None`` if the model has none either, as a subclassed model.
    """
    if not args and not kwargs:
        try:
            args = (model.input,)
        except (AttributeError, ValueError):
            return None

    def described(leaf: Any) -> Any:
        return keras.KerasTensor(leaf.shape, str(leaf.dtype)) if _is_tensor(leaf) else leaf

    args, kwargs = jax.tree.map(described, (tuple(args), dict(kwargs)))
    recorder = _OutputPaths()
    # A bound model would open its own distribution, and Keras would ask that one.
    with recorder.scope(), unscoped(model):
        compute_output_spec(model, *args, **kwargs)
    return list(dict.fromkeys(recorder.found))


def _is_tensor(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


@contextmanager
def stateless(model: Model, distribution: MeshParallel | None = None) -> Iterator[None]:
    """Inside the block, the model's ``stateless_call`` uses ``distribution``, not the thread's or the model's own.

    The model's variables keep values and layouts. A bound model is unbound inside the block and bound again afterwards.
    Keras' list of uninitialised variables is set aside, too: ``stateless_call`` would trace their initialisers.
    """
    before, bound = keras.distribution.distribution(), BindingSnapshot.of(model)
    waiting = unregistered()
    try:
        # The methods of a bound model would open its own distribution inside this one.
        if bound.binding is not None:
            unbind(model)
        keras.distribution.set_distribution(distribution)
        yield
    finally:
        keras.distribution.set_distribution(before)
        if bound.binding is not None:
            bound.restore()
        # Drop what the block put on the list, then put back what was there before.
        unregistered()
        global_state.get_global_attribute(UNINITIALISED, [], set_to_default=True).extend(waiting)


def run_forward(
    model: Model,
    state: Any,
    inputs: Any,
    *,
    training: bool,
    uses: Mapping[int, Use] | None = None,
    remat: Mapping[str, Recompute] | None = None,
    call_layouts: Sequence[CallLayouts] = (),
    **kwargs: Any,
) -> tuple[Any, list[Any], Any]:
    """Call ``model`` as a pure function; return its outputs, new non-trainable values, and losses.

    ``state`` has the variables' values, under ``trainable`` and ``non_trainable``; ``uses`` tells which weights are
    stored split and gathered for the call, ``remat`` what blocks recompute in the backward pass, and ``call_layouts``
    how layers lay out their inputs and outputs, on the mesh of the distribution that is in effect.
    """
    if model._call_has_training_arg:
        kwargs["training"] = training
    call = gathering(model, uses, model.stateless_call) if uses and not remat else model.stateless_call
    with ExitStack() as stack:
        if call_layouts:
            on, kept = keras.distribution.distribution(), "matmuls" in (remat or {}).values()
            stack.enter_context(laid_out(model, call_layouts, on.sharding_of_spec, products_kept=kept))
        if remat:
            stack.enter_context(recomputing(model, remat, uses or {}))
        found: tuple[Any, list[Any], Any] = call(
            state["trainable"], state["non_trainable"], inputs, return_losses=True, **kwargs
        )
    return found


def scaled_loss(optimizer: Any, values: Sequence[Any], loss: Any) -> Any:
    """Return the loss to differentiate: the given loss, multiplied by the optimizer's loss scale if it has one.

    ``values`` are those of ``optimizer.variables``, in order; a ``LossScaleOptimizer`` keeps its scale in one of them.
    """
    with keras.StatelessScope(state_mapping=list(zip(optimizer.variables, values, strict=True))):
        return optimizer.scale_loss(loss)
