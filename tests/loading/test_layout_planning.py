"""Layouts planned from an architecture alone: search, the smallest mesh, and a compiled step that is over the limit."""

import re
from dataclasses import replace

import jax
import keras
import pytest
from small_family import published

import shardload
from shardload.errors import DoesNotFitError, LayoutError
from shardload.parallel import CompiledStep, LayoutPlan
from shardload.pipeline import layout_planning
from shardload.pipeline.layout_planning import StepSpec, plan_layouts
from shardload.pipeline.request import PlanRequest
from shardload.resolve.architectures import lookup, scaled

MIB = 2**20
TRAINED = StepSpec("adamw", batch=8, sequence=32)


@pytest.fixture(autouse=True)
def tiny(monkeypatch, tmp_path):
    """A small architecture that has no weights."""
    monkeypatch.setenv("SHARDLOAD_HOME", str(tmp_path))
    with published("tiny", scaled(lookup("gemma2_2b")[1], 0.02)):
        yield


def request(limit=None, mesh="2x4"):
    return PlanRequest(source="tiny", mesh=mesh, device_memory_bytes=limit)


@pytest.fixture
def compiled_to(monkeypatch):
    """Let every compiled step need so many times the memory that was planned for it; return the plans compiled."""
    plans = []

    def set_ratio(ratio):
        monkeypatch.setattr(layout_planning, "choose", lambda model, mesh, plan: plans.append(plan) or plan)
        monkeypatch.setattr(layout_planning, "compile_step", lambda model, plan, *rest, **options: step(plan, ratio))
        return plans

    return set_ratio


def step(plan, ratio):
    total = int(plan.device.total * ratio)
    return CompiledStep(plan.mesh, "training", "cpu", total, 0, 0, 0, 0, 0, (), 0.0)


def test_no_weights_are_needed_and_the_notes_say_so():
    found = plan_layouts(request(), TRAINED)
    assert found.smallest is None and found.compiled is None
    assert found.plan.training and found.plan.device.slots > 0
    assert any(note.startswith("planned from the architecture") for note in found.notes)
    assert LayoutPlan.from_json(found.to_json()["plan"]) == found.plan


@pytest.mark.parametrize(
    ("dtype", "said"),
    [(None, "bfloat16, the dtype of the checkpoint"), ("mixed_bfloat16", "float32, as dtype mixed_bfloat16 asks")],
)
def test_a_note_names_the_dtypes_that_a_training_step_counts(dtype, said):
    asked = replace(request(), dtype=dtype)
    found = plan_layouts(asked, TRAINED)
    assert f"weights, gradients and slots count in {said}: --dtype changes it" in found.notes
    assert not any(" count in " in note for note in plan_layouts(asked, StepSpec(batch=8, sequence=32)).notes)


def test_the_model_is_traced_once_for_every_limit_and_mesh(compiled_to, monkeypatch):
    traces, make_jaxpr = [], jax.make_jaxpr
    monkeypatch.setattr(jax, "make_jaxpr", lambda step: traces.append(step) or make_jaxpr(step))
    limit = int(plan_layouts(request(), TRAINED).plan.device.total * 1.1)
    assert len(traces) == 1
    planned = plan_layouts(request(limit), TRAINED).plan.device.total
    assert len(traces) == 2
    plans = compiled_to(1.1 * limit / planned)  # the first plan is over the limit, so a second is searched
    found = plan_layouts(request(limit), replace(TRAINED, compile=True))
    assert len(plans) == 2 and found.smallest is not None
    assert len(traces) == 3


def test_a_step_that_compiles_within_the_limit_is_taken_at_once(compiled_to):
    plans = compiled_to(0.9)
    found = plan_layouts(request(16 * MIB), replace(TRAINED, compile=True))
    assert len(plans) == 1 and found.compiled.fits(16 * MIB)
    assert found.smallest.mesh.size <= found.plan.mesh.size


def test_a_step_over_the_limit_is_searched_again_with_less(compiled_to):
    limit = int(plan_layouts(request(16 * MIB), TRAINED).plan.device.total)
    plans = compiled_to(1.25)
    found = plan_layouts(request(limit), replace(TRAINED, compile=True))
    assert len(plans) > 1 and found.compiled.fits(limit)
    assert plans[-1].device.total <= limit / 1.25 < plans[0].device.total
    assert found.plan.device_memory_bytes == limit
    assert [a.planned_bytes for a in found.plan.compiled.attempts] == [p.device.total for p in plans[:-1]]
    assert f"before it, {found.plan.compiled.attempts[0]}" in found.summary()


def test_a_step_that_never_fits_says_what_was_compiled(compiled_to):
    plans = compiled_to(100)
    with pytest.raises(DoesNotFitError, match=r"For cpu, a plan for .* compiled to .* too much"):
        plan_layouts(request(16 * MIB), replace(TRAINED, compile=True))
    assert 1 < len(plans) <= 4


def test_a_plan_that_does_not_fit_names_the_smallest_mesh_that_does():
    with pytest.raises(DoesNotFitError, match=r"on batch=1,model=1 needs at most .* It fits on \d+x\d+") as raised:
        plan_layouts(request(4 * MIB, mesh="1x1"), TRAINED)
    mesh = re.search(r"fits on (\d+x\d+) with the same batch of 8:", str(raised.value))[1]
    assert plan_layouts(request(4 * MIB, mesh=mesh), TRAINED).plan.device.total <= 4 * MIB < raised.value.least_bytes


def test_a_batch_that_the_model_fixes_is_planned_and_another_is_refused(tmp_path):
    layers = [keras.Input((64,), batch_size=6), keras.layers.Dense(128)]
    keras.Sequential(layers).save(tmp_path / "fixed.keras")
    asked = PlanRequest(source=tmp_path / "fixed.keras", mesh="4x2")
    report = plan_layouts(asked, StepSpec(compile=True))
    assert report.plan.inputs == "float32[6, 64]" and "a batch of 6 does not divide" in report.plan.notes[0]
    with pytest.raises(LayoutError, match=r"with batch=8: its inputs are float32\[6, 64\].*\(--batch\)"):
        plan_layouts(asked, StepSpec(batch=8))


def test_a_plan_of_layouts_belongs_to_its_mesh_in_a_report(tmp_path):
    plan = plan_layouts(request(), StepSpec()).plan
    plan.save(tmp_path / "plan.json")
    for layout in (plan, tmp_path / "plan.json"):
        fits = shardload.plan("tiny", mesh="2x4", layout=layout, device_memory_bytes="2MiB").fits
        assert (fits.fits, fits.smallest_mesh) == (True, None)


def test_the_optimizers_of_this_package_have_names_too():
    counted = plan_layouts(request(), replace(TRAINED, train="rekls")).plan
    assert counted.training and counted.device.slots > 3 * counted.device.weights


def test_a_plan_of_a_load_says_that_it_compares_weights_alone():
    found = shardload.plan("tiny", mesh="1x2", layout="search", device_memory_bytes="2MiB")
    assert found.fits.per_device_max < 2 * MIB
    assert any(note.startswith("device memory and the smallest mesh cover weights alone") for note in found.notes)
    assert not any("weights alone" in note for note in shardload.plan("tiny", mesh="1x2", layout="search").notes)
