r"""Layouts by rule: a regular expression that matches whole variable paths, and the axes that split each dim.

Rules come from a TOML file, a mapping, a ``keras.distribution.LayoutMap``, or a KerasHub backbone's
``get_layout_map``. A file reads::

    default = "auto"                  # or "replicated": for variables no rule matches

    [[rule]]
    variable = 'decoder_block_\d+/attention/(query|key|value)/kernel'
    spec = ["model", "-", "-"]        # one entry per dim: an axis, "-", or two axes as "fsdp+model"

It is an error if a rule matches nothing, or if two rules match one variable. A dim that does not divide evenly is split
otherwise, with a note. A LayoutMap may also have rules for outputs of layers (``dense/output``), not for variables.

Layer rules (`layout_rule`) are users' functions for classes of layers instead.
"""

from __future__ import annotations

import difflib
import operator
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import keras
from jax.sharding import PartitionSpec

from shardload.errors import LayoutError, UsageError, public_name
from shardload.keras_bridge.distributions import variable_axes
from shardload.layouts import model_variables
from shardload.layouts.choice import VariableLayout
from shardload.layouts.role_layouts import Dim, LayoutRole, Wants, as_far_as_it_divides
from shardload.sharding.layout import Layout, Spec, spec_from_axes
from shardload.sharding.mesh import MeshSpec
from shardload.units import plural

_DEFAULTS = ("auto", "replicated")


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule: which mesh axes split each dim of the variables whose path matches a pattern."""

    pattern: str
    """The exact path of a variable, or a regular expression that must match the whole path."""
    spec: Spec
    is_open: bool = False
    """Whether ``spec`` may have fewer entries than a variable has dims; the last dims then stay whole."""

    @property
    def is_of_outputs(self) -> bool:
        """Whether the rule is for the output of a layer, whose path Keras ends with ``/output``."""
        return self.pattern.rstrip("$").endswith("output")


@dataclass(frozen=True, slots=True)
class RuleSet:
    """All layout rules of one origin, and the default for variables that none matches: ``auto`` or ``replicated``."""

    origin: str
    """Where the rules come from, as text for error messages: a file's path, or ``the LayoutMap``."""
    rules: tuple[Rule, ...]
    default: str = "replicated"


def read_rules(path: Path) -> RuleSet:
    """Read layout rules from a TOML file: ``[[rule]]`` tables, and ``default`` for variables that no rule matches."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise LayoutError(f"Cannot read the layout rules {path}: {error}") from error
    # Any key left after these two is a mistake.
    default, entries = content.pop("default", "auto"), content.pop("rule", [])
    if content or default not in _DEFAULTS or not isinstance(entries, list) or not entries:
        raise LayoutError(
            f"The layout rules {path} need [[rule]] tables and may have default = 'auto' or 'replicated'; "
            f"found keys {sorted(content)}, default {default!r}, rule {entries!r:.80}"
        )
    made = []
    for entry in entries:
        spec = entry["spec"] if isinstance(entry, dict) and set(entry) == {"variable", "spec"} else None
        if not isinstance(spec, list) or not all(isinstance(axes, str) for axes in spec):
            raise LayoutError(
                f"A rule in {path} must be variable = 'regular expression' and spec = ['axis' or '-', one per dim]; "
                f"found {entry!r}"
            )
        made.append(Rule(str(entry["variable"]), tuple(map(_as_axes, spec))))
    return RuleSet(str(path), tuple(made), default)


def from_mapping(rules: Mapping[str, Any], *, origin: str = "the layout") -> RuleSet:
    """Return the rules in a user's mapping: ``{pattern of paths: one mesh axis or None for each dim}``."""
    for pattern, spec in rules.items():
        if (
            not isinstance(pattern, str)
            or not isinstance(spec, tuple | list | PartitionSpec)
            or not all(map(_is_axis, spec))
        ):
            raise LayoutError(
                f"Cannot use {{{pattern!r}: {spec!r:.80}}} as a rule of {origin}: expected the path of a variable and "
                "a mesh axis or None for each of its dims, such as {'dense/kernel': (None, 'model')}"
            )
    # A PartitionSpec may leave out dims at the end, as in JAX; a tuple has one entry per dim, so that a typo is found.
    made = (Rule(p, tuple(map(_as_axes, spec)), isinstance(spec, PartitionSpec)) for p, spec in rules.items())
    return RuleSet(origin, tuple(made), "auto")


def _is_axis(axis: Any) -> bool:
    return axis is None or isinstance(axis, str) or (isinstance(axis, tuple) and all(map(_is_axis, axis)))


def _as_axes(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if axes is None or axes in ("-", ""):
        return ()
    return tuple(axes.split("+")) if isinstance(axes, str) else axes


def by_distribution(
    distribution: Any, variables: Iterable[Any], *, mesh: MeshSpec, roles: Mapping[int, LayoutRole]
) -> dict[int, VariableLayout]:
    """Return the layouts that a Keras distribution gives to variables, by ``id(variable)``; replace uneven splits."""
    rule = type(distribution).__name__
    wanted = {id(v): Layout(mesh, spec_from_axes(variable_axes(distribution, v))) for v in variables}
    return {id(v): as_far_as_it_divides(v, roles[id(v)], wanted[id(v)], rule=rule) for v in variables}


def from_layout_map(layout_map: Any, mesh: MeshSpec, *, origin: str) -> RuleSet:
    """Return the rules in a ``keras.distribution.LayoutMap``; raise if it was made for another mesh."""
    device_mesh = layout_map.device_mesh
    if device_mesh is not None:
        names, sizes = tuple(device_mesh.axis_names), tuple(device_mesh.shape)
        if (names, sizes) != (mesh.axes, mesh.sizes):
            raise LayoutError(
                f"Cannot use {origin} on the mesh {mesh}: it was made for {MeshSpec(names, sizes)}. Make it for {mesh}"
            )
    # What no rule of a LayoutMap matches is replicated, as in Keras; other rules leave it to "auto".
    return RuleSet(origin, tuple(Rule(key, spec_from_axes(layout_map[key].axes)) for key in layout_map))


def apply(
    rules: RuleSet, variables: Iterable[Any], *, mesh: MeshSpec, roles: Mapping[int, LayoutRole]
) -> dict[int, VariableLayout]:
    """Return the layouts of variables that a rule matches, by ``id(variable)``; raise if a rule matches no variable."""
    variables = list(variables)
    used: set[str] = set()
    placed: dict[int, VariableLayout] = {}
    for variable in variables:
        # The exact path takes precedence over expressions, as in Keras.
        matching = [rule for rule in rules.rules if rule.pattern == variable.path][:1] or [
            rule for rule in rules.rules if _compiled(rule, rules.origin).fullmatch(variable.path)
        ]
        if len(matching) > 1:
            raise LayoutError(
                f"Two rules of {rules.origin} match the variable {variable.path}: {matching[0].pattern!r} and "
                f"{matching[1].pattern!r}. Narrow one of them, or add a rule with the exact path, which takes "
                "precedence"
            )
        for rule in matching:
            used.add(rule.pattern)
            placed[id(variable)] = _place(rule, variable, mesh=mesh, role=roles[id(variable)], origin=rules.origin)
    for rule in rules.rules:
        # Keras would silently replicate the variable that a misspelt rule is meant for.
        if rule.pattern not in used and not rule.is_of_outputs:
            raise LayoutError(_matches_nothing(rule, [v.path for v in variables], rules.origin))
    return placed


def check_output_rules(layout_map: Any, paths: Sequence[str] | None) -> None:
    """Raise if a rule for layers' outputs (``dense/output``) matches none of ``paths``; ``None``: they are unknown."""
    if paths is None:
        return
    for rule in (Rule(key, ()) for key in layout_map):
        if rule.is_of_outputs and not _matches_any(rule, paths):
            raise LayoutError(_matches_nothing(rule, paths, "the LayoutMap", of="outputs"))


def unmatched(layout_map: Any, paths: Sequence[str]) -> tuple[str, ...]:
    """Return a note, no error, for each rule that matches no variable: a LayoutMap may serve several models."""
    rules = [Rule(key, ()) for key in layout_map or ()]
    return tuple(
        _matches_nothing(rule, paths, "the distribution's LayoutMap")
        for rule in rules
        if not rule.is_of_outputs and not _matches_any(rule, paths)
    )


def _matches_any(rule: Rule, paths: Sequence[str]) -> bool:
    return any(rule.pattern == path or _compiled(rule, "the LayoutMap").fullmatch(path) for path in paths)


def _compiled(rule: Rule, origin: str) -> re.Pattern[str]:
    try:
        return re.compile(rule.pattern)
    except re.error as error:
        raise LayoutError(f"The rule {rule.pattern!r} of {origin} is not a regular expression: {error}") from error


def _place(rule: Rule, variable: Any, *, mesh: MeshSpec, role: LayoutRole, origin: str) -> VariableLayout:
    shape = tuple(variable.shape)
    spec = (*rule.spec, *((),) * (len(shape) - len(rule.spec))) if rule.is_open else rule.spec
    if len(spec) != len(shape):
        raise LayoutError(
            f"The rule {rule.pattern!r} of {origin} has {plural(len(rule.spec), 'entry')}, but {variable.path} has "
            f"shape {shape}. Write one entry per dim"
        )
    try:
        wanted = Layout(mesh, spec)
    except LayoutError as error:
        raise LayoutError(f"The rule {rule.pattern!r} of {origin} does not fit the mesh: {error}") from error
    return as_far_as_it_divides(variable, role, wanted, rule=rule.pattern)


def _matches_nothing(rule: Rule, paths: Sequence[str], origin: str, *, of: str = "variables") -> str:
    partly = [p for p in paths if re.search(rule.pattern, p)]
    # Rules match whole paths, so most that match nothing match a part of one: show those first.
    close = partly[:3] or difflib.get_close_matches(rule.pattern, paths, n=3, cutoff=0.3)
    near = f"; {'it matches only a part of' if partly else 'the nearest are'} {', '.join(close)}" if close else ""
    return (
        f"The rule {rule.pattern!r} of {origin} matches none of the model's {len(paths)} {of}{near}. "
        f"A rule must match the whole path of {'a variable' if of == 'variables' else 'an output'}. "
        "Correct it or remove it"
    )


# ---- rules for classes of layers ---------------------------------------------------------------------

_LayerRule = Callable[[Any], Mapping[str, Sequence[int]]]
"""A user's function: takes a built layer, and returns ``{variable name: dims to split, best first}``. An empty sequence
keeps the variable replicated."""
_R = TypeVar("_R", bound=_LayerRule)

# By class, for the life of the process: `layout_rule` decorates functions at module level.
_rules: dict[type, _LayerRule] = {}


def layout_rule(layer_class: type) -> Callable[[_R], _R]:
    """Register a function that says which dims of a layer's own variables ``layout="auto"`` splits.

    The function takes a built layer of ``layer_class``, or of a subclass without a rule of its own; its variables may
    have no values yet. It returns a dict: the name of a variable (``variable.name``) → its dims to split, best first.
    The first dim whose length the size of the mesh axis divides is split; the report lists it as a fallback if it is
    not the best. An empty tuple keeps the variable replicated. Variables that are not in the dict, and optimizer slots,
    get their layouts as usual. A later rule for the same class replaces the earlier one. In a run of several processes,
    register it in each of them.

    Examples:
        ```python
        class Experts(keras.layers.Layer):
            def build(self, shape):
                self.gate = self.add_weight(shape=(8, shape[-1], 4), name="gate")

        @shardload.layout_rule(Experts)
        def split_experts(layer):
            return {"gate": (0, 2)}  # one expert on each device, or else the last dim
        ```

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

    def register(rule: _R) -> _R:
        if not callable(rule) or isinstance(rule, type):
            raise UsageError(
                f"Cannot register {rule!r:.80} as a layout rule: expected a function of the layer. "
                "Write @shardload.layout_rule(MyLayer) above def my_rule(layer)"
            )
        _rules[layer_class] = rule
        return rule

    return register


def roles_by_layer_rules(layers: Iterable[Any]) -> dict[int, Wants]:
    """Ask users' functions (`layout_rule`) which dims to split; return the answers (roles) by ``id(variable)``."""
    by_id = {}
    for layer in layers:
        # The most derived class with a rule decides, as method lookup does.
        rule = next((_rules[c] for c in type(layer).__mro__ if c in _rules), None)
        own = [] if rule is None else model_variables.own_variables(layer)
        if rule is None or not own:  # a model may keep layers that it never built
            continue
        kind, named = type(layer).__name__, {v.name: v for v in own}
        title = f"The layout rule for {kind} ({getattr(layer, 'path', None) or layer.name})"
        try:
            answer = {name: _as_dims(dims) for name, dims in rule(layer).items()}
        except Exception as error:  # of any kind: the rule is the user's code
            raise LayoutError(
                f"{title} failed: {public_name(error)}: {error}. A rule returns {{variable name: (dim, …)}}"
            ) from error
        for name, dims in answer.items():
            if name not in named:
                raise LayoutError(
                    f"{title} names the variable {name!r}, but the layer has {', '.join(named)}. "
                    "A rule names a layer's own variables; for those of its sub-layers, use a rules file"
                )
            if sum(v.name == name for v in own) > 1:
                raise LayoutError(
                    f"{title} names {name!r}, but several variables of the layer have that name. Rename all but one"
                )
            rank = len(named[name].shape)
            if any(isinstance(d, bool) or not 0 <= d < rank for d in dims) or len(set(dims)) < len(dims):
                raise LayoutError(
                    f"{title} gives {name!r} the dims {dims}, but its shape is {tuple(named[name].shape)}: expected "
                    f"{f'different integers from 0 to {rank - 1}' if rank else 'no dims'}"
                )
            wanted = tuple(Dim(d, f"elements of dim {d}") for d in dims)
            by_id[id(named[name])] = Wants(f"rule for {kind}", wanted, even_small=True)
    return by_id


def _as_dims(dims: Any) -> tuple[int, ...]:
    if not isinstance(dims, list | tuple):  # a set has no order, and a dict would hide the axes it names
        raise TypeError(f"dims are a tuple or a list, not {dims!r:.80}")
    # `operator.index` takes NumPy's integers and refuses floats. Booleans are integers too, and refused later.
    return tuple(d if isinstance(d, bool) else operator.index(d) for d in dims)
