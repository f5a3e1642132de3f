"""The functions that commands use from the rest of shardload, imported only on use.

Tests replace these functions with fakes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardload.loading import Loaded
    from shardload.manifest import Manifest
    from shardload.pipeline.layout_planning import LayoutReport
    from shardload.progress import Progress
    from shardload.reports import PlanReport
    from shardload.sharding.mesh import MeshSpec


def find(source: str, *, weights: bool = True) -> None:
    """Make ``source`` available locally (assemble or download it), or raise if it does not exist.

    Without ``weights``, an architecture or a configuration is enough.
    """
    from shardload.resolve import resolve
    from shardload.stores.remote import location_of

    # Checkpoints in stores are read in place.
    if location_of(source) is None:
        resolve(source, weights=weights)


def load(source: str, **options: Any) -> Loaded:
    """Load ``source``; for several processes, the report has the bytes read by all, and the highest staging peak."""
    from shardload.loading import LoadRequest, run

    # A prompt uses the checkpoint's own tokenizer, so the model needs no preprocessor.
    loaded = run(LoadRequest(source=source, **options), preprocessor=False)
    if not loaded.shares:
        return loaded
    # Bytes add up over processes. A budget of host memory is that of one process, so the highest peak counts.
    total = replace(
        loaded.report.bytes,
        needed=sum(share.bytes.needed for share in loaded.shares),
        read=sum(share.bytes.read for share in loaded.shares),
    )
    highest = max((share.host_bytes for share in loaded.shares), key=lambda host: host.peak_staging)
    return replace(loaded, report=replace(loaded.report, bytes=total, host_bytes=highest))


def plan(source: str, *, mesh: MeshSpec | None, **options: Any) -> PlanReport:
    """Plan the load of ``source``; onto one device if ``mesh`` is ``None``."""
    from shardload import loading

    return loading.plan(source, mesh="1x1" if mesh is None else str(mesh), **options)


def plan_layouts(
    source: str,
    *,
    mesh: MeshSpec | None,
    train: str | None,
    batch: int | None,
    sequence: int | None,
    compile: bool,
    **options: Any,
) -> LayoutReport:
    """Search layouts for the model of ``source``; onto one device if ``mesh`` is ``None``."""
    from shardload.pipeline.layout_planning import StepSpec, plan_layouts
    from shardload.pipeline.request import PlanRequest

    request = PlanRequest(source=source, mesh="1x1" if mesh is None else str(mesh), **options)
    return plan_layouts(request, StepSpec(train, batch, sequence, compile))


def why_no_steps(directory: str) -> str:
    """Return a hint about a folder without steps; may be empty."""
    from shardload.steps.listing import why_no_steps

    return why_no_steps(directory)


def inspect(source: str, *, format: str | None = None) -> Manifest:
    """Open ``source`` and read its headers."""
    from shardload.resolve.opening import open_source

    return open_source(source, format, verify=False).manifest


def check_tokenizer(source: str, *, format: str | None = None) -> None:
    """Raise if ``source`` has no tokenizer for a prompt; called before the load, which may take minutes."""
    from shardload.text.sources import tokenizer

    tokenizer(source, format=format)


def generate(loaded: Any, prompt: str, *, max_new_tokens: int) -> Iterable[str]:
    """Continue ``prompt``; yield pieces of the new text (one piece, for now)."""
    from shardload.text.generation import generate as continue_text

    return [continue_text(loaded.model, prompt, max_new_tokens=max_new_tokens)]


def synth(name: str, **options: Any) -> str:
    """Write a synthetic checkpoint; return its path."""
    from shardload.synth import synth as write

    return str(write(name, **options))


def steps(directory: str) -> list[Any]:
    """Return the steps of a run, ascending."""
    from shardload.steps.listing import list_steps

    return list_steps(directory)


def failures_since(directory: str, steps: list[Any]) -> list[Any]:
    """Return the failures that ended a run of several processes after its last step, oldest first."""
    from shardload.processes.watchdog import written_since
    from shardload.stores.local import without_file_scheme

    return written_since(without_file_scheme(directory), max((info.saved_s for info in steps), default=0.0))


def verify(source: str, *, progress: Progress) -> list[Any]:
    """Read ``source`` completely; return a verdict for each checkpoint in it."""
    from shardload.verifying import verify as read_all

    progress.start(0, f"Preparing {source}")
    return read_all(source, progress=progress)


def convert(source: str, target: str, **options: Any) -> Any:
    """Write ``source`` in another format; return the report."""
    from shardload.converting import convert as write

    return write(source, target, **options)


def diff(first: str, second: str, *, progress: Progress) -> Any:
    """Compare two checkpoints, tensor by tensor."""
    from shardload.comparing import diff as compare

    return compare(first, second, progress=progress)
