"""The commands about checkpoints: list what is in them, what SOURCE can be, and find damage and differences."""

from __future__ import annotations

from dataclasses import asdict, astuple
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from shardload.console import completion, jax_setup, listing, options, streams
from shardload.console.new_files import check_new_files, saver, written
from shardload.errors import SourceError
from shardload.progress import on_stderr
from shardload.reports import printable
from shardload.reports.aligned import aligned
from shardload.synth import MAX_SEED
from shardload.synth import synth as write_checkpoint
from shardload.units import FLOATS, json_number


def inspect(
    source: options.SourceArgument,
    *,
    match: Annotated[
        str | None,
        typer.Option("--match", metavar="GLOB", help="Only tensors whose names match, for example '*/attention/*'."),
    ] = None,
    format: options.FormatOption = None,
    html: options.InspectHtmlOption = None,
    json: options.Json = False,
) -> None:
    """List the tensors of a checkpoint, reading headers only.

    One line per tensor: name, shape, dtype, bytes, file, and position in the file.

    Examples:
    $ shardload inspect model.weights.h5

    $ shardload inspect gemma3_270m --match '*norm*' --json

    $ shardload inspect gemma3_270m --html tensors.html
    """
    check_new_files({"--html": html}, reads=[source])
    with streams.results() as out:
        jax_setup.set_up_jax(note=streams.note)
        from shardload.resolve.opening import open_source

        manifest = open_source(source, format and str(format), verify=False).manifest
        with written((html, saver(partial(manifest.to_html, match=match)))):
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
            autocompletion=lambda: ((s.name, s.what) for s in completion.known_architectures()),
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
            autocompletion=lambda: FLOATS,
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
        jax_setup.set_up_jax(note=streams.note)
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
        jax_setup.set_up_jax(note=streams.note)
        found = completion.known(presets=presets)
        if json:
            out.json({"sources": [asdict(source) for source in found]})
        else:
            rows = [("name", "kind", "what"), *(tuple(map(printable, astuple(s))) for s in found)]
            out.text(aligned(rows, width=out.width))


def steps(
    directory: Annotated[
        str, typer.Argument(metavar="DIR", help="Where OrbaxCheckpoint saves its steps.", show_default=False)
    ],
    *,
    json: options.Json = False,
) -> None:
    """List the steps a training run has saved.

    One line per step: number, epoch, metrics, size, age, whether it is the best, and damage visible without reading its
    data. `shardload verify` reads every byte.

    Examples:
    $ shardload steps checkpoints

    $ shardload steps checkpoints --json
    """
    with streams.results() as out:
        jax_setup.set_up_jax(note=streams.note)
        from shardload.processes.watchdog import written_since
        from shardload.runs.listing import list_steps, why_no_steps
        from shardload.runs.step_list import steps_table
        from shardload.stores.local import without_file_scheme

        found = list_steps(directory)
        if not found and (why := why_no_steps(directory)):
            raise SourceError(f"{directory} contains no steps{why}")
        failures = written_since(without_file_scheme(directory), max((info.saved_s for info in found), default=0.0))
        if json:
            out.json({"directory": directory, "steps": [_facts(info) for info in found], "failures": failures})
        elif not found:
            out.text(
                f"{printable(directory)} contains no steps yet: each will be a folder in it, named by its number\n"
            )
        else:
            out.text(steps_table(found, width=out.width))
        # The oldest failure: later ones are mostly its consequences.
        if failures and not json:
            out.text(f"since then: {printable(str(failures[0]['cause']))}\n")


def verify(
    source: Annotated[
        str, typer.Argument(metavar="PATH", help="A step, a folder of steps, or any checkpoint.", show_default=False)
    ],
    *,
    cache: options.CacheOption = None,
    cache_size: options.CacheSizeOption = None,
    json: options.Json = False,
    no_progress: options.NoProgress = False,
    log_json: options.LogJson = False,
) -> None:
    """Read a checkpoint to its end and say whether it is whole.

    Steps saved by shardload are compared with the digests saved with them. Other checkpoints have no digests, so it
    checks only that everything is there and can be read. The exit code is 1 when something is damaged.

    Examples:
    $ shardload verify checkpoints

    $ shardload verify model.safetensors --json
    """
    with options.use_cache(cache, cache_size), streams.results() as out:
        jax_setup.set_up_jax(note=streams.note)
        from shardload import verifying

        with on_stderr(enabled=not no_progress, as_json=log_json) as progress:
            progress.start(0, f"Preparing {source}")
            verdicts = verifying.verify(source, progress=progress)
        if json:
            out.json({"source": source, "checkpoints": [v.to_json() for v in verdicts]})
        else:
            out.text(f"{verdicts}\n" if verdicts else "")
    if not all(v.is_good for v in verdicts):
        raise typer.Exit(1)


def diff(
    first: options.SourceArgument,
    second: Annotated[str, typer.Argument(metavar="OTHER", help="What to compare it with.", show_default=False)],
    *,
    cache: options.CacheOption = None,
    cache_size: options.CacheSizeOption = None,
    html: options.DiffHtmlOption = None,
    json: options.Json = False,
    no_progress: options.NoProgress = False,
    log_json: options.LogJson = False,
) -> None:
    """Say which tensors of two checkpoints differ, and by how much.

    Tensors are matched by name, or by the model's weights if the formats name them differently. They are compared bit
    for bit, or as numbers if their dtypes differ. The exit code is 1 when anything differs.

    Examples:
    $ shardload diff checkpoints/100 checkpoints/200

    $ shardload diff model.gguf ./gemma-preset --json

    $ shardload diff checkpoints/100 checkpoints/200 --html differences.html
    """
    check_new_files({"--html": html}, reads=[first, second])
    with options.use_cache(cache, cache_size), streams.results() as out:
        jax_setup.set_up_jax(note=streams.note)
        from shardload import comparing

        with on_stderr(enabled=not no_progress, as_json=log_json) as progress:
            found = comparing.diff(first, second, progress=progress)
        with written((html, saver(found.to_html))):
            if json:
                out.json(found.to_json())
            else:
                for note in found.notes:
                    streams.note(note)
                out.text(found.table(width=out.width))
    if found.differences:
        raise typer.Exit(1)


def _facts(info: Any) -> dict[str, Any]:
    return {
        "step": info.step,
        "path": info.where,
        "epoch": info.epoch,
        "batch": info.batch,
        "metrics": {name: json_number(value) for name, value in info.metrics.items()},
        "bytes": info.n_bytes,
        "saved_unix_s": info.saved_s or None,  # unknown of a plain step of Orbax in a bucket
        "best": info.best,
        "left_out": info.recorded.left_out,
        "digests": info.ours,
        "problems": info.problems,
    }
