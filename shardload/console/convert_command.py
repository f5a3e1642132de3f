"""The command that writes a checkpoint in another format."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from shardload.console import jax_setup, options, streams
from shardload.progress import on_stderr
from shardload.stores.local import local_target, working_folder

Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET", help="A folder to create, NAME.weights.h5, or NAME.weights.json.", show_default=False
    ),
]
To = Annotated[
    options.ConvertFormat | None,
    typer.Option("--to", help="Format of TARGET; required unless its name is that of a Keras file."),
]
HostMemory = Annotated[
    int | None,
    typer.Option(
        "--host-memory",
        metavar="SIZE",
        parser=options.size,
        help="Most host memory used for tensors: 2GiB, 256MiB. 512MiB by default.",
    ),
]
MaxShardSize = Annotated[
    int | None,
    typer.Option(
        "--max-shard-bytes",
        metavar="SIZE",
        parser=options.size,
        help="Most bytes of tensors in one file, where there are several: 2GiB. 5 GB by default.",
    ),
]
MergeLora = Annotated[bool, typer.Option("--merge-lora", help="Merge LoRA adapters into their kernels.")]
Base = Annotated[
    str | None,
    typer.Option("--base", metavar="SOURCE", help="Source of the missing weights, for a step with some weights only."),
]


@contextlib.contextmanager
def _way_on(target: str) -> Iterator[None]:
    """Say how to go on after an interruption before anything was written, during imports or checks."""
    try:
        yield
    except KeyboardInterrupt as error:
        if not getattr(error, "__notes__", ()):
            home = working_folder(Path(target))
            if home.exists():
                kept = f"The finished part of an earlier run is in {home}. Start the same conversion again to continue."
            else:
                kept = "Nothing was written. Start the same conversion again."
            error.add_note(kept)
        raise


def convert(
    source: options.Source,
    target: Target,
    *,
    to: To = None,
    dtype: options.DtypeOption = None,
    host_memory: HostMemory = None,
    max_shard_size: MaxShardSize = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing checkpoint at TARGET.")] = False,
    ignore: options.Ignore = None,
    ignore_config: options.IgnoreConfig = None,
    merge_lora: MergeLora = False,
    base: Base = None,
    json: options.Json = False,
    no_progress: options.NoProgress = False,
    log_json: options.LogJson = False,
) -> None:
    """Write a checkpoint in another format, bit for bit.

    h5 is a KerasHub preset (or Keras' own files), safetensors a Hugging Face folder, orbax an Orbax checkpoint. TARGET
    appears when it is complete. After an interruption, the same command continues where it stopped.

    Examples:
    $ shardload convert gemma2_9b gemma2-hf --to safetensors

    $ shardload convert checkpoints/400 trained.weights.h5

    $ shardload convert model.gguf gemma3.weights.json --max-shard-bytes 2GiB

    $ shardload convert checkpoints/400 tuned --to safetensors --merge-lora --base model.gguf
    """
    local_target(target)  # before seconds of imports
    with streams.results() as out, _way_on(target):
        jax_setup.prepare(note=streams.note)
        from shardload import converting

        # Left out if not given: the default is that of `shardload.convert`.
        memory = {} if host_memory is None else {"host_memory_bytes": host_memory}
        chosen: Any = to.value if to else None  # a choice that typer has checked
        with on_stderr(enabled=not no_progress, as_json=log_json) as progress:
            progress.start(0, f"Preparing {source}")
            report = converting.convert(
                source,
                target,
                to=chosen,
                dtype=dtype,
                max_shard_bytes=max_shard_size,
                overwrite=overwrite,
                ignore=tuple(ignore or ()),
                ignore_config=tuple(ignore_config or ()),
                merge_lora=merge_lora,
                base=base,
                progress=progress,
                **memory,
            )
        for note in report.notes:
            streams.note(note)
        if json:
            out.json(report.to_json())
            return
        # The lines after the first one are the notes, which are on stderr already.
        out.text(f"{str(report).splitlines()[0]}\n")
