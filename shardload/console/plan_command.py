"""`shardload plan`: what a load would do, and a search for the layouts of a step."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import typer

from shardload.console import jax_setup, known_sources, options, streams
from shardload.errors import WriteError
from shardload.interrupts import exit_at_once
from shardload.progress import on_stderr

MORE = "These are the weights only. For activations too, add --layout search; for a training step, --train adamw\n"


def plan(
    source: options.Source,
    *,
    mesh: options.Mesh = None,
    axes: options.Axes = None,
    layout: options.PlanLayout = None,
    dtype: options.DtypeOption = None,
    host_memory: options.HostMemory = None,
    device_memory: options.DeviceMemory = None,
    train: options.Train = None,
    batch: options.Batch = None,
    sequence: options.Sequence = None,
    compile: options.CompileStep = False,
    save_plan: options.SavePlan = None,
    svg: options.Svg = None,
    ignore: options.Ignore = None,
    format: options.FormatOption = None,
    ignore_config: options.IgnoreConfig = None,
    json: options.Json = False,
    no_progress: options.NoProgress = False,
    log_json: options.LogJson = False,
) -> None:
    """Say what a load would do, or plan layouts, without reading tensors.

    No device is needed: the mesh may be larger than this machine. No weights are needed either: the name of an
    architecture (see `shardload sources`) or a config.json is enough.

    With --layout search, or any of --train, --batch, --sequence, --compile, --save-plan and --svg, it searches for the
    layouts that make a step fastest, within --device-memory if that is given.

    With --device-memory the exit code is 1 when the weights, or the step, do not fit.

    Examples:
    $ shardload plan gemma2_27b --mesh 4x8 --device-memory 16GiB

    $ shardload plan gemma2_2b --mesh 2x4 --train adamw --batch 8 --sequence 512 --device-memory 16GiB
    """
    spec = options.mesh_spec(mesh, axes, layout)
    steps = {"train": train, "batch": batch, "sequence": sequence, "compile": compile}
    searched = _searched(layout, {**steps, "save-plan": save_plan, "svg": svg})
    on_mesh = "1x1" if spec is None else str(spec)
    with streams.results() as out:
        jax_setup.prepare(note=streams.note)
        # Compiling needs as many devices as the mesh has, simulated ones. A plan needs none, but must not take any.
        if compile:
            jax_setup.provide_devices(spec, platform=jax_setup.Platform.CPU, note=streams.note)
        jax_setup.stay_off_accelerators()
        known_sources.fetch(source, weights=False)
        with (
            exit_at_once(partial(out.interrupted, as_json=json)),
            on_stderr(enabled=not no_progress, as_json=log_json) as progress,
        ):
            progress.start(0, f"Planning {source}")
            if searched:
                from shardload.pipeline.layout_planning import StepSpec, plan_layouts
                from shardload.pipeline.request import PlanRequest

                # A search chooses layouts itself, and plans no staging.
                request = PlanRequest(
                    source=source,
                    mesh=on_mesh,
                    dtype=dtype,
                    device_memory_bytes=device_memory,
                    format=format and str(format),
                    ignore_config=tuple(ignore_config or ()),
                    progress=progress,
                )
                found: Any = plan_layouts(request, StepSpec(train, batch, sequence, compile))
            else:
                from shardload import loading

                found = loading.plan(
                    source,
                    mesh=on_mesh,
                    layout=layout or "auto",
                    dtype=dtype,
                    host_memory_bytes=host_memory,
                    device_memory_bytes=device_memory,
                    ignore=ignore or (),
                    format=format and str(format),
                    ignore_config=tuple(ignore_config or ()),
                )
        if searched:
            _write(found.plan, save_plan, svg)
        _show(out, found, searched=searched, as_json=json)
    if not searched and found.fits is not None and not found.fits.fits:
        raise typer.Exit(1)


def _searched(layout: str | None, asked: dict[str, Any]) -> bool:
    """Return whether to search for layouts.

    Raises:
        typer.BadParameter: When another layout is given together with an option of the search.
    """
    given = [f"--{name}" for name, value in asked.items() if value]
    if given and layout not in (None, "search"):
        raise typer.BadParameter(
            f"{given[0]} searches for layouts. Leave out --layout {layout}.", param_hint="--layout"
        )
    return bool(given) or layout == "search"


def _write(plan: Any, save_plan: Path | None, svg: Path | None) -> None:
    for path, write in ((save_plan, plan.save), (svg, lambda path: path.write_text(plan.to_svg()))):
        if path is None:
            continue
        try:
            write(path)
        except WriteError:
            raise
        except OSError as error:
            raise WriteError(f"Cannot write {str(path)!r}: {error.strerror or error}.") from error
        streams.note(f"wrote {path}")


def _show(out: streams.Results, found: Any, *, searched: bool, as_json: bool) -> None:
    if as_json:
        out.json(found.to_json())
    elif searched:
        out.text(found.summary(ascii_only=not out.unicode) + "\n")
    else:
        out.table(found)
        out.text(MORE)
