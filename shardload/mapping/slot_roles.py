"""What each variable of an optimizer is, so that the state of one optimizer can continue in another.

    Adam          momentums of dense/kernel   ─►  first moment of dense/kernel    ◄─   AdamW
    RMSprop       momentums of dense/kernel   ─►  its own: it contains the learning rate

Optimizers of Keras use one attribute for different quantities: the momentum of SGD contains the learning rate, Adam's
is a mean of gradients. A step therefore stores the class of each optimizer. Of steps without it, attributes are
compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shardload.mapping.state_keys import INNER, Role

AVERAGE = "model_variables_moving_average"
"""The slots of ``use_ema``."""
RATE = "learning_rate"
WRAPPER = "wrapper/"
"""Before the variables of a ``LossScaleOptimizer``."""
_ADAM = {"momentums": "first moment", "velocities": "second moment", "velocity_hats": "largest second moment"}
_OWN: Mapping[str, str] = {}
_SHARED: Mapping[str, Mapping[str, str]] = {
    **dict.fromkeys(("Adam", "AdamW", "Nadam", "Lamb"), _ADAM),
    "Lion": {"momentums": "first moment"},
    "RMSprop": {"velocities": "second moment"},
    **dict.fromkeys(("Adadelta", "Adafactor", "Adagrad", "Adamax", "Ftrl", "Muon", "SGD", "ScheduleFreeAdamW"), _OWN),
}
"""The optimizers of Keras, with what their slots are where others have the same; all other slots are their own."""
KINDS = frozenset(_SHARED)
_BY_SUFFIX = {
    "average": AVERAGE,
    "gradient_accumulator": "accumulated_gradients",
    "momentum": "momentums",
    "velocity": "velocities",
    "velocity_hat": "velocity_hats",
}
_SCALARS = ("iteration", RATE, "step_counter", "dynamic_scale")
_OF_EVERY_CLASS = {AVERAGE, "accumulated_gradients"}
_MAY_BEGIN_LATER = {*_OF_EVERY_CLASS, "velocity_hats"}
"""Slots that are right from any step on, whatever the count of iterations."""
_OF_OPTIONS: Mapping[str, frozenset[str]] = {
    "RMSprop": frozenset({"momentums", "average_gradients"}),
    "SGD": frozenset({"momentums"}),
}
"""Slots of an option (``momentum=``, ``centered=``) of an optimizer that corrects no bias by its iterations."""
_WRAPPED = "inner_optimizer/"
_POSITION = re.compile(rf"^{INNER}\d+/")


@dataclass(frozen=True, slots=True)
class OptimizerForm:
    """What is needed to tell the variables of an optimizer apart."""

    kind: str | None = None
    """Its class in Keras, ``""`` for a class of others, ``None`` if not known."""
    is_wrapped: bool = False
    """Whether it is in a ``LossScaleOptimizer``, which has variables too."""


Forms = Mapping[str | None, OptimizerForm]
"""The forms of a model's optimizers, by `Role.optimizer`."""


def forms_of(roles: Iterable[Role], kinds: Mapping[str, str]) -> Forms:
    """Return the forms of optimizers whose variables have these roles.

    Args:
        roles: Of a whole model or step.
        kinds: Class by path of the optimizer, ``""`` for the compiled one.
    """
    found: dict[str | None, OptimizerForm] = {}
    for role in roles:
        if role.kind in ("slot", "optimizer"):
            before = found.get(role.optimizer, OptimizerForm(kinds.get(role.optimizer or "")))
            is_wrapped = before.is_wrapped or _name(role).startswith(_WRAPPED)
            found[role.optimizer] = OptimizerForm(before.kind, is_wrapped)
    return found


def kind_in(forms: Forms, role: Role) -> str | None:
    """Return the class of the optimizer that a variable belongs to, if known."""
    return forms.get(role.optimizer, OptimizerForm()).kind


def part_of(role: Role, forms: Forms) -> str:
    """Return the attribute of its optimizer that a variable is in, such as ``momentums`` or ``learning_rate``."""
    name, form = _name(role), forms.get(role.optimizer, OptimizerForm())
    # The wrapper has a count and a rate of its own, which Keras does not use.
    if form.is_wrapped and not name.startswith(_WRAPPED):
        return f"{WRAPPER}{name}"
    name = name.removeprefix(_WRAPPED)
    # The weights of an optimizer tell which of several it is, if it has any; its position may change.
    return name if role.of is None else _POSITION.sub(INNER, name)


def meaning_of(part: str, kind: str | None) -> str:
    """Return what the slots in an attribute are; equal for slots of two optimizers that can replace each other."""
    if not kind or part in _OF_EVERY_CLASS:
        return part
    return _SHARED.get(kind, _OWN).get(part, f"{kind} {part}")


def part_of_name(name: str) -> str:
    """Return `part_of` for a variable of an optimizer of which only the name is known: ``dense_kernel_velocity``."""
    found = (part for suffix, part in _BY_SUFFIX.items() if name.endswith(f"_{suffix}"))
    return name if name in _SCALARS else next(found, name)


def is_scalar(part: str) -> bool:
    """Whether a variable belongs to an optimizer as a whole, not to one of its weights."""
    return part in _SCALARS


def kind_of_name(name: str) -> str | None:
    """Return the class of an optimizer with a generated name, such as ``adam_w_1``; ``None`` for names of others."""
    plain = name.rstrip("0123456789").replace("_", "")
    return next((kind for kind in KINDS if kind.lower() == plain), None)


def is_core(part: str, kind: str | None) -> bool:
    """Whether the count of iterations is wrong for an optimizer in which slots of this kind start at zero.

    Args:
        part: As of `part_of`.
        kind: The class of the optimizer; inside of several, `part` states it.
    """
    own = part.removeprefix(INNER).partition("/")[0] if part.startswith(INNER) else kind
    return attribute_of(part) not in _MAY_BEGIN_LATER | _OF_OPTIONS.get(own or "", frozenset())


def attribute_of(part: str) -> str:
    """Return the attribute of the optimizer itself: ``momentums``, of ``inner_optimizers/Adam/momentums`` too."""
    return part.rpartition("/")[2] if part.startswith(INNER) else part


def _name(role: Role) -> str:
    prefix = "" if role.optimizer is None else f"optimizers/{role.optimizer}/"
    return (role.slot or role.key).removeprefix(prefix)
