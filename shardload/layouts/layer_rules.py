"""Layout rules that users write for their own layer classes; they win over what `roles` derives.

    @shardload.layout_rule(Experts)
    def split_experts(layer):
        return {"gate": (0, 2), "router": ()}

A rule speaks of dims, not of mesh axes, so it holds on every mesh: the first dim that divides evenly is split.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import keras

from shardload.errors import LayoutError, UsageError
from shardload.layouts import model_variables
from shardload.layouts.role_layouts import Dim, Wants

LayerRule = Callable[[Any], Mapping[str, Sequence[int]]]
"""From a built layer to variable name → dims to split, best first; an empty sequence keeps a variable replicated."""
R = TypeVar("R", bound=LayerRule)

# By class, for the life of the process: `layout_rule` decorates functions at module level.
_rules: dict[type, LayerRule] = {}


def layout_rule(layer_class: type) -> Callable[[R], R]:
    """Register a function that says which dims of a layer's own variables ``layout="auto"`` splits.

    The function receives each layer of ``layer_class``, or of a subclass without a rule of its own, built but maybe
    without values. It returns, by the name of a variable (``variable.name``), the dims to split, best first: the first
    one that divides by the mesh axis is split, and any choice but the first is a fallback in the report. An empty
    tuple keeps the variable replicated. Variables that it does not mention get their layout as before. Optimizer slots
    follow their variables. A later rule for the same class replaces the earlier one. In a run of several processes,
    register it in each of them.

    Args:
        layer_class: A subclass of `keras.layers.Layer`.

    Returns:
        A decorator that returns the function unchanged.

    Raises:
        UsageError: When ``layer_class`` is not a class of layers.
    """
    if not (isinstance(layer_class, type) and issubclass(layer_class, keras.layers.Layer)):
        raise UsageError(
            f"Cannot register a layout rule for {layer_class!r:.80}: expected a subclass of keras.layers.Layer. "
            "Write @shardload.layout_rule(MyLayer)"
        )

    def register(rule: R) -> R:
        if not callable(rule) or isinstance(rule, type):
            raise UsageError(
                f"Cannot register {rule!r:.80} as a layout rule: expected a function of the layer. "
                "Write @shardload.layout_rule(MyLayer) above def my_rule(layer)"
            )
        _rules[layer_class] = rule
        return rule

    return register


def roles_by_layer_rules(layers: Iterable[Any]) -> dict[int, Wants]:
    """Return the roles that users' layer rules give to the variables of layers, by ``id(variable)``."""
    by_id = {}
    for layer in layers:
        rule = f"rule for {type(layer).__name__}"
        for key, dims in _dims_by_rule(layer).items():
            by_id[key] = Wants(rule, tuple(Dim(d, f"elements of dim {d}") for d in dims), even_small=True)
    return by_id


def _dims_by_rule(layer: Any) -> dict[int, tuple[int, ...]]:
    """Return the dims that a user's rule names for a layer's own variables, by ``id(variable)``."""
    # The most derived class with a rule decides, as method lookup does.
    rule = next((_rules[c] for c in type(layer).__mro__ if c in _rules), None)
    own = [] if rule is None else model_variables.own_variables(layer)
    if rule is None or not own:  # a model may keep layers that it never built
        return {}
    named = {v.name: v for v in own}
    try:
        answer = {name: _as_dims(dims) for name, dims in rule(layer).items()}
    except Exception as error:  # of any kind: the rule is the user's code
        raise LayoutError(
            f"{_title(layer)} failed: {type(error).__name__}: {error}. A rule returns {{variable name: (dim, …)}}"
        ) from error
    for name, dims in answer.items():
        if name not in named:
            raise LayoutError(
                f"{_title(layer)} names the variable {name!r}, but the layer has {', '.join(named)}. "
                "A rule names a layer's own variables; for those of its sub-layers, use a rules file"
            )
        if sum(v.name == name for v in own) > 1:
            raise LayoutError(
                f"{_title(layer)} names {name!r}, but several variables of the layer have that name. Rename all but one"
            )
        _check_dims(layer, named[name], dims)
    return {id(named[name]): dims for name, dims in answer.items()}


def _as_dims(dims: Any) -> tuple[int, ...]:
    if not isinstance(dims, list | tuple):  # a set has no order, and a dict would hide the axes it names
        raise TypeError(f"dims are a tuple or a list, not {dims!r:.80}")
    # `operator.index` takes NumPy's integers and refuses floats. Booleans are integers too: `_check_dims` refuses them.
    return tuple(d if isinstance(d, bool) else operator.index(d) for d in dims)


def _check_dims(layer: Any, variable: Any, dims: tuple[int, ...]) -> None:
    rank = len(variable.shape)
    if any(isinstance(d, bool) or not 0 <= d < rank for d in dims) or len(set(dims)) < len(dims):
        raise LayoutError(
            f"{_title(layer)} gives {variable.name!r} the dims {dims}, but its shape is {tuple(variable.shape)}: "
            f"expected {f'different integers from 0 to {rank - 1}' if rank else 'no dims'}"
        )


def _title(layer: Any) -> str:
    return f"The layout rule for {type(layer).__name__} ({getattr(layer, 'path', None) or layer.name})"
