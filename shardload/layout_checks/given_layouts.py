"""The layouts that a caller hands to a check: a choice for the same model object, or a plan to choose by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardload.errors import LayoutError, UsageError, require_callable_with
from shardload.layout_search.layout_plan import LayoutPlan
from shardload.layout_search.plan_matching import choose_by_plan
from shardload.layouts.choice import LayoutChoice
from shardload.layouts.model_variables import check_model
from shardload.units import is_function, plural

GivenLayouts = LayoutChoice | LayoutPlan | Callable[[Any], LayoutChoice | LayoutPlan]
"""A choice, a plan, or a function from the model to one."""


def choice_for(model: Any, given: GivenLayouts) -> LayoutChoice:
    """Return the layouts of the weights of a model.

    Args:
        model: A Keras model.
        given: As for `shardload.parallel.check_numbers`.

    Raises:
        LayoutError: When a choice is for another model object, or a plan is for another model.
        UsageError: When it is something else.
    """
    check_model(model, to="take layouts for")
    match given:
        case LayoutChoice():
            return _checked(model, given)
        case LayoutPlan():
            return choose_by_plan(model, given.mesh, given)
        case _ if is_function(given):
            require_callable_with(given, model, name="choice")
            return choice_for(model, given(model))
    raise UsageError(
        f"Cannot take layouts from {given!r:.80}: expected a LayoutChoice or a LayoutPlan. Call "
        "shardload.parallel.choose(model, mesh, layout)"
    )


def _checked(model: Any, choice: LayoutChoice) -> LayoutChoice:
    """Return the choice if it has every weight: one that is missing would count as replicated and pass any check."""
    weights = list(model.weights)
    # By path as well: Python reuses the id of a variable that is gone.
    strange = [v for v in weights if (found := choice.by_id.get(id(v))) is None or found.path != v.path]
    if not strange:
        return choice
    what = (
        "they are for another model object"
        if len(strange) == len(weights)
        else f"they were chosen before {plural(len(strange), 'weight')} existed, such as {strange[0].path!r}"
    )
    raise LayoutError(
        f"Cannot use these layouts for the model {model.name!r}: {what}. Call shardload.parallel.choose(model, mesh, "
        "layout) for this one"
    )
