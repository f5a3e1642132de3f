"""The commands: read options, prepare the process, call the engine, write results.

The docstring of a command is its help text: a description, then examples to copy.
"""

from __future__ import annotations

import os
from dataclasses import asdict, astuple, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from shardload.console import (
    completion,
    failures,
    jax_setup,
    known_sources,
    listing,
    options,
    streams,
)
from shardload.console.launch import alone_among_several
from shardload.interrupts import exit_at_once
from shardload.progress import on_stderr
from shardload.reports import printable
from shardload.synth import MAX_SEED
from shardload.synth import synth as write_checkpoint


def load(
    source: options.Source,
    *,
    mesh: options.Mesh = None,
    axes: options.Axes = None,
    layout: options.Layout = "auto",
    dtype: options.DtypeOption = None,
    host_memory: options.HostMemory = None,
    strict: options.Strict = True,
    ignore: options.Ignore = None,
    atomic: options.Atomic = False,
    compile: options.Compile = True,
    step: options.Step = "latest",
    prompt: options.Prompt = None,
    max_new_tokens: options.MaxNewTokens = None,
    platform: options.PlatformOption = None,
    distributed: options.Distributed = False,
    coordinator_address: options.CoordinatorAddress = None,
    num_processes: options.NumProcesses = None,
    process_id: options.ProcessId = None,
    initialization_timeout: options.InitializationTimeout = None,
    format: options.FormatOption = None,
    ignore_config: options.IgnoreConfig = None,
    json: options.Json = False,
    no_progress: options.NoProgress = False,
    log_json: options.LogJson = False,
) -> None:
    """Load a checkpoint onto a mesh and report what went where.

    With --distributed, processes that one launcher started (srun, mpirun) load together. With --num-processes, run the
    same command in each process, with its own --process-id. Each process reads what its devices need; process 0 reports
    for all.

    Examples:
    $ shardload load gemma3_270m --mesh 1x8 --prompt "The capital of France is"

    $ shardload load ./model.safetensors --mesh 2x4 --dtype bfloat16 --json
    """
    # What the options alone can say is wrong comes first, before seconds of imports.
    spec, which = options.mesh_spec(mesh, axes, layout), options.step(step)
    processes = options.processes(
        coordinator_address,
        num_processes,
        process_id,
        distributed=distributed,
        initialization_timeout=initialization_timeout,
    )
    _check_together(spec, processes, prompt, max_new_tokens)
    note = streams.note if processes is None or processes.is_first else _nothing
    if processes is None and (alone := alone_among_several(os.environ)) is not None:
        note(alone)
    with streams.results() as out:
        jax_setup.prepare(note=note)
        # May download, and has a folder to clean up: Ctrl-C raises here. What follows writes nothing, so it just exits.
        known_sources.fetch(source)
        with exit_at_once(partial(out.interrupted, as_json=json)):
            processes = jax_setup.provide_devices(
                spec,
                platform=platform,
                note=note,
                processes=processes,
                give_up=lambda error: failures.tell(error, json_wanted=json, stdout=out.stream),
            )
            reports = processes is None or processes.is_first
            if prompt is not None:
                from shardload.text.sources import tokenizer

                tokenizer(source, format=format and str(format))  # raises now if there is none, not minutes later
            with on_stderr(enabled=reports and not no_progress, as_json=log_json) as progress:
                # Keras is imported and the model built before the load knows its bytes.
                progress.start(0, f"Preparing {source}")
                from shardload import loading

                request = loading.LoadRequest(
                    source=source,
                    mesh=None if spec is None else str(spec),
                    layout=layout,
                    dtype=dtype,
                    host_memory_bytes=host_memory,
                    strict=strict,
                    ignore=ignore or (),
                    atomic=atomic,
                    compile=compile,
                    step=which,
                    format=format and str(format),
                    ignore_config=tuple(ignore_config or ()),
                    progress=progress,
                )
                # A prompt uses the checkpoint's own tokenizer, so the model needs no preprocessor.
                loaded = _summed(loading.run(request, preprocessor=False))
            if not reports:
                return
            if not json:
                out.table(loaded.report)
                out.text(listing.of_processes(loaded.shares))
            text = _generate(out, loaded, prompt, max_new_tokens=max_new_tokens or 32, shown=not json)
        # After the block that exits on Ctrl-C, which would add a second object to one that is being written.
        if json:
            out.json(_as_json(loaded, prompt, text))


def _summed(loaded: Any) -> Any:
    """Return what several processes loaded, with a report of all bytes read, and the highest staging peak."""
    if not loaded.shares:
        return loaded
    # A budget of host memory is that of one process, so the highest peak counts.
    needed, read = (sum(getattr(share.bytes, name) for share in loaded.shares) for name in ("needed", "read"))
    highest = max((share.host_bytes for share in loaded.shares), key=lambda host: host.peak_staging)
    total = replace(loaded.report.bytes, needed=needed, read=read)
    return replace(loaded, report=replace(loaded.report, bytes=total, host_bytes=highest))


def _as_json(loaded: Any, prompt: str | None, text: str) -> dict[str, Any]:
    processes = {"processes": [asdict(share) for share in loaded.shares]} if loaded.shares else {}
    generated = {"generated": {"prompt": prompt, "text": text}} if prompt is not None else {}
    return {**loaded.report.to_json(), **processes, **generated}


def _check_together(spec: Any, processes: Any, prompt: str | None, max_new_tokens: int | None) -> None:
    """Check the options of `load` that exclude or require each other."""
    if max_new_tokens is not None and prompt is None:
        raise typer.BadParameter("It requires --prompt, which is missing.", param_hint="--max-new-tokens")
    if prompt == "":
        raise typer.BadParameter("The prompt is empty.", param_hint="--prompt")
    if processes is not None and prompt is not None:
        raise typer.BadParameter(
            "Several processes cannot generate text. Leave out --prompt, or --num-processes and --distributed.",
            param_hint="--prompt",
        )
    if processes is not None and spec is None:
        raise typer.BadParameter("A mesh is required with several processes.", param_hint="--mesh")


def _nothing(_: str) -> None:
    """Drop a note: only process 0 prints notes."""


def _generate(out: streams.Results, loaded: Any, prompt: str | None, *, max_new_tokens: int, shown: bool) -> str:
    """Continue the prompt, if there is one, and return the new text; if ``shown``, print both."""
    if prompt is None:
        return ""
    from shardload.text import generation

    text = generation.generate(loaded.model, prompt, max_new_tokens=max_new_tokens)
    if shown:
        rule = ("─" if out.unicode else "-") * 40
        out.text(f"\n{rule}\n{printable(prompt + text, keep=_TEXT)}\n")
    return text


_TEXT = "\n\t"
"""Control characters that generated text may contain; others could control the terminal."""


def inspect(
    source: options.Source,
    *,
    match: Annotated[
        str | None,
        typer.Option("--match", metavar="GLOB", help="Only tensors whose names match, for example '*/attention/*'."),
    ] = None,
    format: options.FormatOption = None,
    json: options.Json = False,
) -> None:
    """List the tensors of a checkpoint, reading headers only.

    One line per tensor: name, shape, dtype, bytes, file, and position in the file.

    Examples:
    $ shardload inspect model.weights.h5

    $ shardload inspect gemma3_270m --match '*norm*' --json
    """
    with streams.results() as out:
        jax_setup.prepare(note=streams.note)
        from shardload.resolve.opening import open_source

        manifest = open_source(source, format and str(format), verify=False).manifest
        if json:
            out.json(listing.as_json(manifest, match=match))
        else:
            for note in manifest.notes:
                streams.note(note)
            out.text(listing.as_text(manifest, match=match, width=out.width))


def synth(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="An architecture, for example gemma2_9b.",
            autocompletion=completion.synthetic,
            show_default=False,
        ),
    ],
    *,
    format: Annotated[
        options.SynthFormat, typer.Option("--format", help="Format of the checkpoint.")
    ] = options.SynthFormat.PRESET,
    scale: Annotated[
        float,
        typer.Option(
            "--scale", metavar="FACTOR", callback=options.scale, help="Shrink the architecture: 0.01 is tiny."
        ),
    ] = 1.0,
    seed: Annotated[
        int, typer.Option("--seed", metavar="N", min=0, max=MAX_SEED, help="Seed of the random weights.")
    ] = 0,
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype",
            metavar="DTYPE",
            parser=options.dtype,
            help="Dtype of the weights: bfloat16, float16 or float32.",
            autocompletion=completion.dtypes,
        ),
    ] = "bfloat16",
    directory: Annotated[
        Path | None,
        typer.Option("--directory", metavar="DIR", help="Where to write; the local checkpoint root by default."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing, different checkpoint.")] = False,
    json: options.Json = False,
    no_progress: options.NoProgress = False,
    log_json: options.LogJson = False,
) -> None:
    """Write a checkpoint of an exact architecture with random weights.

    The weights depend on the seed only, so you can try any size, repeatedly, without a hub.

    Examples:
    $ shardload synth gemma2_9b --scale 0.01

    $ shardload synth gemma2_7b && shardload load gemma2_7b --mesh 1x8
    """
    with streams.results() as out:
        jax_setup.prepare(note=streams.note)
        kind: Any = str(format)  # a choice that typer has checked
        with on_stderr(enabled=not no_progress, as_json=log_json) as progress:
            path = write_checkpoint(
                name,
                format=kind,
                scale=scale,
                seed=seed,
                dtype=dtype,
                directory=directory,
                overwrite=overwrite,
                progress=progress,
            )
        if json:
            out.json({"name": name, "path": str(path)})
        else:
            out.text(f"{printable(str(path))}\n")


def sources(
    *,
    presets: Annotated[
        bool, typer.Option("--presets", help="Also list KerasHub's presets, which takes a few seconds.")
    ] = False,
    json: options.Json = False,
) -> None:
    """List the names that SOURCE can have on this machine.

    Checkpoints in the local root, weights installed by pip, aliases, and what `shardload synth` can write.

    Examples:
    $ shardload sources

    $ SHARDLOAD_HOME=/models shardload sources --json
    """
    with streams.results() as out:
        jax_setup.prepare(note=streams.note)
        found = known_sources.known(presets=presets)
        if json:
            out.json({"sources": [asdict(source) for source in found]})
        else:
            rows = [("name", "kind", "what"), *(tuple(map(printable, astuple(s))) for s in found)]
            out.text(listing.aligned(rows, width=out.width))
