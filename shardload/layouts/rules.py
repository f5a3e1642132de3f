r"""Layouts by rule: a regular expression that matches whole variable paths, and the axes that split each dim.

Rules come from a TOML file, a mapping, a ``keras.distribution.LayoutMap``, or a KerasHub backbone's
``get_layout_map``. A file reads::

    default = "auto"                  # or "replicated": for variables no rule matches

    [[rule]]
    variable = 'decoder_block_\d+/attention/(query|key|value)/kernel'
    spec = ["model", "-", "-"]        # one entry per dim: an axis, "-", or two axes as "fsdp+model"

A rule without effect, or two rules for one variable, are errors; a dim that is not divisible is a fallback. Rules of a
layout map for the outputs of layers (``dense/output``) are for no variable: a bound model applies them to activations.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.sharding import PartitionSpec

from shardload.errors import LayoutError
from shardload.keras_bridge.distributions import variable_axes
from shardload.layouts.choice import VariableLayout
from shardload.layouts.role_layouts import Role, next_best
from shardload.sharding.layout import Layout, Spec
from shardload.sharding.mesh import MeshSpec
from shardload.units import plural

DEFAULTS = ("auto", "replicated")


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule."""

    pattern: str
    """A regular expression for the whole path, or the exact path."""
    spec: Spec
    is_open: bool = False
    """Whether dims without an entry are not split, as for a ``PartitionSpec``."""

    @property
    def is_of_outputs(self) -> bool:
        """Whether the rule is for the output of a layer, whose path Keras ends with ``/output``."""
        return self.pattern.rstrip("$").endswith("output")


@dataclass(frozen=True, slots=True)
class RuleSet:
    """Rules, and the default for variables without a matching rule."""

    origin: str
    """Where the rules come from, for messages."""
    rules: tuple[Rule, ...]
    default: str = "replicated"


def read_rules(path: Path) -> RuleSet:
    """Read a rules file.

    Raises:
        LayoutError: When it cannot be read, is not TOML, or a rule is malformed.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise LayoutError(f"Cannot read the layout rules {path}: {error}") from error
    # Any key left after these two is a mistake.
    default, entries = content.pop("default", "auto"), content.pop("rule", [])
    if content or default not in DEFAULTS or not isinstance(entries, list) or not entries:
        raise LayoutError(
            f"The layout rules {path} need [[rule]] tables and may have default = 'auto' or 'replicated'; "
            f"found keys {sorted(content)}, default {default!r}, rule {entries!r:.80}"
        )
    return RuleSet(str(path), tuple(_read_rule(entry, path) for entry in entries), default)


def _read_rule(entry: Any, path: Path) -> Rule:
    spec = entry["spec"] if isinstance(entry, dict) and set(entry) == {"variable", "spec"} else None
    if not isinstance(spec, list) or not all(isinstance(axes, str) for axes in spec):
        raise LayoutError(
            f"A rule in {path} must be variable = 'regular expression' and spec = ['axis' or '-', one per dim]; "
            f"found {entry!r}"
        )
    return Rule(str(entry["variable"]), tuple(map(_as_axes, spec)))


def from_mapping(rules: Mapping[str, Any], *, origin: str = "the layout") -> RuleSet:
    """Return the rules of a mapping: the pattern of a variable's path, and a mesh axis or ``None`` for each dim."""
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
    distribution: Any, variables: Iterable[Any], *, mesh: MeshSpec, roles: Mapping[int, Role]
) -> dict[int, VariableLayout]:
    """Return the layouts that a ``keras.distribution.Distribution`` gives to variables, by ``id(variable)``."""
    rule = type(distribution).__name__
    return {
        id(v): _placed(v, Layout(mesh, _tensor_spec(variable_axes(distribution, v))), role=roles[id(v)], rule=rule)
        for v in variables
    }


def from_layout_map(layout_map: Any, mesh: MeshSpec, *, origin: str) -> RuleSet:
    """Convert a ``keras.distribution.LayoutMap`` to rules."""
    device_mesh = layout_map.device_mesh
    if device_mesh is not None:
        names, sizes = tuple(device_mesh.axis_names), tuple(device_mesh.shape)
        if (names, sizes) != (mesh.axes, mesh.sizes):
            raise LayoutError(
                f"Cannot use {origin} on the mesh {mesh}: it was made for {MeshSpec(names, sizes)}. Make it for {mesh}"
            )
    # What no rule of a LayoutMap matches is replicated, as in Keras; other rules leave it to "auto".
    return RuleSet(origin, tuple(Rule(key, _tensor_spec(layout_map[key].axes)) for key in layout_map))


def _tensor_spec(axes: Sequence[Any]) -> Spec:
    return tuple(() if a is None else (a,) if isinstance(a, str) else tuple(a) for a in axes)


def apply(
    rules: RuleSet, variables: Iterable[Any], *, mesh: MeshSpec, roles: Mapping[int, Role]
) -> dict[int, VariableLayout]:
    """Return the layouts of variables with a matching rule, by ``id(variable)``; others are left to the default.

    Raises:
        LayoutError: When a rule matches nothing, two match one variable, a rule has the wrong number of dims,
            names an unknown axis, or is not a regular expression.
    """
    variables = list(variables)
    used: set[str] = set()
    placed: dict[int, VariableLayout] = {}
    for variable in variables:
        if (rule := _match(rules, variable.path)) is not None:
            used.add(rule.pattern)
            placed[id(variable)] = _place(rule, variable, mesh=mesh, role=roles[id(variable)], origin=rules.origin)
    for rule in rules.rules:
        # Keras would silently replicate the variable that a misspelt rule is meant for.
        if rule.pattern not in used and not rule.is_of_outputs:
            raise LayoutError(_matches_nothing(rule, [v.path for v in variables], rules.origin))
    return placed


def check_output_rules(layout_map: Any, paths: Sequence[str] | None) -> None:
    """Check that each rule for outputs of layers (``model/dense/output``) matches one of ``paths``, if known."""
    rules = [Rule(key, ()) for key in layout_map]
    for rule in rules if paths is not None else ():
        pattern = _compiled(rule, "the LayoutMap")
        if rule.is_of_outputs and not any(rule.pattern == p or pattern.fullmatch(p) for p in paths or ()):
            raise LayoutError(_matches_nothing(rule, list(paths or ()), "the LayoutMap", of="outputs"))


def unmatched(layout_map: Any, paths: Sequence[str]) -> tuple[str, ...]:
    """Return one sentence for each rule for variables that matches none of ``paths``.

    The layout map of a distribution may be for more models than one; ``None`` has no rules.
    """
    rules = [Rule(key, ()) for key in layout_map or ()]
    return tuple(
        _matches_nothing(rule, paths, "the distribution's LayoutMap")
        for rule in rules
        if not rule.is_of_outputs
        and not any(rule.pattern == p or _compiled(rule, "the LayoutMap").fullmatch(p) for p in paths)
    )


def _match(rules: RuleSet, path: str) -> Rule | None:
    """Return the rule for ``path``: the exact path takes precedence over expressions, as in Keras."""
    for rule in rules.rules:
        if rule.pattern == path:
            return rule
    matching = [rule for rule in rules.rules if _compiled(rule, rules.origin).fullmatch(path)]
    if len(matching) > 1:
        raise LayoutError(
            f"Two rules of {rules.origin} match the variable {path}: {matching[0].pattern!r} and "
            f"{matching[1].pattern!r}. Narrow one of them, or add a rule with the exact path, which takes precedence"
        )
    return matching[0] if matching else None


def _compiled(rule: Rule, origin: str) -> re.Pattern[str]:
    try:
        return re.compile(rule.pattern)
    except re.error as error:
        raise LayoutError(f"The rule {rule.pattern!r} of {origin} is not a regular expression: {error}") from error


def _place(rule: Rule, variable: Any, *, mesh: MeshSpec, role: Role, origin: str) -> VariableLayout:
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
    return _placed(variable, wanted, role=role, rule=rule.pattern)


def _placed(variable: Any, wanted: Layout, *, role: Role, rule: str) -> VariableLayout:
    if wanted.divides(tuple(variable.shape)):
        return VariableLayout.of(variable, wanted, rule)
    return next_best(variable, role, wanted, rule=rule)


def _matches_nothing(rule: Rule, paths: Sequence[str], origin: str, *, of: str = "variables") -> str:
    partly = [p for p in paths if re.search(rule.pattern, p)]
    # Rules match whole paths, so most that match nothing match a part of one: show those first.
    close = partly[:3] or difflib.get_close_matches(rule.pattern, paths, n=3, cutoff=0.3)
    hint = "it matches only a part of" if partly else "the nearest are"
    near = f"; {hint} {', '.join(close)}" if close else ""
    return (
        f"The rule {rule.pattern!r} of {origin} matches none of the model's {len(paths)} {of}{near}. "
        f"A rule must match the whole path of {'a variable' if of == 'variables' else 'an output'}. "
        "Correct it or remove it"
    )
