"""The commands that load, plan and convert: read options, set JAX up, call functions of shardload, write results.

The docstring of a command is its help text: a description, then examples to copy.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from shardload.console import completion, failures, jax_setup, listing, options, search_options, streams
from shardload.console.launch import alone_among_several
from shardload.console.new_files import check_new_files, saver, written
from shardload.interrupts import exit_at_once
from shardload.progress import on_stderr
from shardload.reports import printable
from shardload.stores.clients import is_bucket
from shardload.stores.local import local_target, working_folder
from shardload.units import format_seconds

_TEXT = "\n\t"
"""Control characters that generated text may contain when it is printed; others could control the terminal, and are
escaped."""
_MORE = "These are the weights only. For activations too, add --layout search; for a training step, --train adamw\n"


def load(
    source: options.SourceArgument,
    *,
    mesh: options.MeshOption = None,
    axes: options.AxesOption = None,
    layout: options.LayoutOption = "auto",
    dtype: options.DtypeOption = None,
    quantize: options.QuantizeOption = None,
    quantized: options.QuantizedOption = options.QuantizedChoice.DEQUANTIZE,
    host_memory: options.HostMemory = None,
    strict: options.Strict = True,
    ignore: options.Ignore = None,
    atomic: options.Atomic = False,
    compile: options.Compile = True,
    step: options.StepOption = "latest",
    prompt: options.Prompt = None,
    max_new_tokens: options.MaxNewTokens = None,
    warm_up: options.WarmUpOption = False,
    io: options.IoOption = options.IoChoice.BUFFERED,
    cache: options.CacheOption = None,
    cache_size: options.CacheSizeOption = None,
    replicas: options.ReplicasOption = options.ReplicasChoice.AUTO,
    platform: options.PlatformOption = None,
    distributed: options.Distributed = False,
    coordinator_address: options.CoordinatorAddress = None,
    num_processes: options.NumProcesses = None,
    process_id: options.ProcessId = None,
    initialization_timeout: options.InitializationTimeout = None,
    format: options.FormatOption = None,
    ignore_config: options.IgnoreConfig = None,
    adapter: options.AdapterOption = None,
    html: options.HtmlOption = None,
    json: options.Json = False,
    no_progress: options.NoProgress = False,
    log_json: options.LogJson = False,
) -> None:
    """Load a checkpoint onto a mesh and report what went where.

    Examples:
    $ shardload load gemma3_270m --mesh 1x8 --prompt "The capital of France is"

    $ shardload load ./gemma-2-2b --mesh 2x4 --dtype bfloat16 --json

    $ shardload load gemma3_270m --mesh 1x8 --quantize int8 --prompt "The capital of France is"

    $ shardload load ./gemma-2-2b --adapter ./my-lora --mesh 1x8

    With --distributed, processes that one launcher started (srun, mpirun) load together. With --num-processes, run the
    same command in each process, with its own --process-id. Each process reads what its devices need, or, as --replicas
    says, each byte is read by one process; process 0 reports for all.
    """
    # What the options alone can say is wrong comes first, before seconds of imports.
    spec, which = options.mesh_option(mesh, axes, layout), options.step(step)
    adapters = options.adapters(adapter)
    processes = options.processes(
        coordinator_address,
        num_processes,
        process_id,
        distributed=distributed,
        initialization_timeout=initialization_timeout,
    )
    _check_together(spec, processes, prompt, max_new_tokens, warm_up=warm_up)
    reports = processes is None or processes.is_first  # the others print neither notes nor results
    # Of several processes one writes, perhaps on another machine.
    writes = processes is None or processes.process_id == 0
    check_new_files(
        {"--html": html}, reads=[source, options.layout_file(layout), *(adapters or ())], check_folders=writes
    )
    new_tokens = max_new_tokens or 32
    note = streams.note if reports else lambda text: None
    if processes is None and (alone := alone_among_several(os.environ)) is not None:
        note(alone)
    with options.use_cache(cache, cache_size), streams.results() as out:
        jax_setup.set_up_jax(note=note)
        # May download, and has a folder to clean up: Ctrl-C raises here. What follows writes nothing, so it just exits.
        completion.make_available(source)
        with exit_at_once(partial(out.interrupted, as_json=json)):
            processes = jax_setup.provide_devices(
                spec,
                platform=platform,
                note=note,
                processes=processes,
                give_up=lambda error: failures.tell(error, json_wanted=json, stdout=out.stream),
            )
            reports = processes is None or processes.is_first  # only JAX may have been able to tell
            words: Any = None
            if prompt is not None:
                from shardload.text.prompts import tokenizer_for_prompt

                # Raises now if there is none, or the prompt is too long, not later.
                words = tokenizer_for_prompt(source, prompt, max_new_tokens=new_tokens, format=format and str(format))
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
                    replicas=replicas.value,
                    progress=progress,
                    io=io.value,
                    quantize=quantize,
                    quantized=quantized.value,
                    adapter=adapters,
                    warm_up={"generate": {"prompts": prompt, "max_new_tokens": new_tokens, "tokenizer": words}}
                    if warm_up
                    else None,
                )
                # A prompt uses the checkpoint's own tokenizer, so the model needs no preprocessor.
                loaded = _summed(loading.run(request, preprocessor=False))
            if not reports:
                return
            report = loaded.report
            if not json:
                out.table(report)
                out.text(listing.of_processes(loaded.shares))
            text = ""
            if prompt is not None:
                from shardload.text import generation

                text = generation.generate(loaded.model, prompt, max_new_tokens=new_tokens, tokenizer=words)
                # The same numbers, and when the text was there.
                ready = loading.report(loaded.model).seconds.ready
                report = replace(report, seconds=replace(report.seconds, ready=ready))
                if not json:
                    rule = ("─" if out.unicode else "-") * 40
                    if ready is not None:
                        out.text(f"Ready {format_seconds(ready)} after the load began\n")
                    out.text(f"\n{rule}\n{printable(prompt + text, keep=_TEXT)}\n")
        # After the block that exits on Ctrl-C: it would leave an unfinished file beside the page, and add a second
        # object to one that is being written.
        with written((html, saver(report.to_html))):
            if json:
                shares = {"processes": [asdict(share) for share in loaded.shares]} if loaded.shares else {}
                generated = {"generated": {"prompt": prompt, "text": text}} if prompt is not None else {}
                out.json({**report.to_json(), **shares, **generated})


def _summed(loaded: Any) -> Any:
    """Return a load's result with a report for all processes: the sum of bytes read, the highest memory peak."""
    if not loaded.shares:
        return loaded
    # A budget of host memory is that of one process, so the highest peak counts.
    needed, read = (sum(getattr(share.bytes, name) for share in loaded.shares) for name in ("needed", "read"))
    highest = max((share.host_bytes for share in loaded.shares), key=lambda host: host.peak_staging)
    total = replace(loaded.report.bytes, needed=needed, read=read)
    return replace(loaded, report=replace(loaded.report, bytes=total, host_bytes=highest))


def _check_together(
    spec: Any, processes: Any, prompt: str | None, max_new_tokens: int | None, *, warm_up: bool
) -> None:
    """Raise if options of `load` exclude each other, or if one is given without another that it requires."""
    if max_new_tokens is not None and prompt is None:
        raise typer.BadParameter("It requires --prompt, which is missing.", param_hint="--max-new-tokens")
    if warm_up and prompt is None:
        raise typer.BadParameter("It requires --prompt, which is missing.", param_hint="--warm-up")
    if prompt == "":
        raise typer.BadParameter("The prompt is empty.", param_hint="--prompt")
    if processes is not None and prompt is not None:
        raise typer.BadParameter(
            "Several processes cannot generate text. Leave out --prompt, or --num-processes and --distributed.",
            param_hint="--prompt",
        )
    if processes is not None and spec is None:
        raise typer.BadParameter("A mesh is required with several processes.", param_hint="--mesh")


def plan(
    source: options.SourceArgument,
    *,
    mesh: options.MeshOption = None,
    axes: options.AxesOption = None,
    layout: options.PlanLayoutOption = None,
    dtype: search_options.PlanDtypeOption = None,
    quantize: options.QuantizeOption = None,
    quantized: options.QuantizedOption = options.QuantizedChoice.DEQUANTIZE,
    host_memory: options.HostMemory = None,
    device_memory: options.DeviceMemory = None,
    kv_cache: options.KvCacheOption = None,
    hosts: options.Hosts = None,
    replicas: options.ReplicasOption = options.ReplicasChoice.AUTO,
    train: search_options.TrainOption = None,
    batch: search_options.BatchOption = None,
    sequence: search_options.SequenceOption = None,
    microbatches: search_options.MicrobatchesOption = None,
    remat: search_options.RematOption = search_options.RematChoice.AUTO,
    sequence_parallel: search_options.SequenceParallelOption = search_options.SequenceParallelChoice.AUTO,
    devices: search_options.DevicesOption = None,
    fused_attention: search_options.FusedAttentionOption = False,
    compile: search_options.CompileStepOption = False,
    save_plan: search_options.SavePlanOption = None,
    svg: search_options.SvgOption = None,
    html: options.HtmlOption = None,
    ignore: options.Ignore = None,
    format: options.FormatOption = None,
    ignore_config: options.IgnoreConfig = None,
    json: options.Json = False,
    no_progress: options.NoProgress = False,
    log_json: options.LogJson = False,
) -> None:
    """Plan a load, or search for layouts, without reading tensors.

    No device is needed: the mesh may be larger than this machine. No weights are needed either: the name of an
    architecture (see `shardload sources`) or a config.json is enough.

    With --layout search, or any of --train, --batch, --sequence, --compile, --save-plan and --svg, it searches for the
    layouts that make a step fastest, within --device-memory if that is given. If that is needed to fit, blocks compute
    values again in the backward pass (--remat), and the model axis splits sequences (--sequence-parallel).

    With --device-memory the exit code is 1 when the weights, with the cache of --kv-cache, or the step, do not fit.

    Examples:
    $ shardload plan gemma2_27b --mesh 4x8 --device-memory 16GiB

    $ shardload plan llama3.1_8b --mesh 1x8 --device-memory 16GiB --kv-cache 8x8192

    $ shardload plan llama3.1_405b --mesh 64x64 --hosts 512

    $ shardload plan gemma2_2b --mesh 2x4 --train adamw --batch 8 --sequence 512 --device-memory 16GiB

    $ shardload plan llama3.1_405b --mesh 8x64 --train adamw --batch 8 --sequence 4096 --device-memory 80GiB

    $ shardload plan llama3.1_8b --mesh auto --devices 8 --train adamw --batch 8 --sequence 4096 --device-memory 80GiB
    """
    spec = options.mesh_option(search_options.searched_mesh(mesh, devices, batch), axes, layout)
    steps = {"train": train, "batch": batch, "sequence": sequence, "compile": compile}
    for_training = {
        "microbatches": microbatches,
        "remat": remat != search_options.RematChoice.AUTO,
        "sequence-parallel": sequence_parallel != search_options.SequenceParallelChoice.AUTO,
    }
    if given := [f"--{name}" for name, value in for_training.items() if value and train is None]:
        raise typer.BadParameter(
            f"{given[0]} is for a training step. Add --train with an optimizer.", param_hint=given[0]
        )
    searched = _searched(layout, {**steps, "fused-attention": fused_attention, "save-plan": save_plan, "svg": svg})
    keeps = "keep" if quantized == options.QuantizedChoice.KEEP else None
    excluded = {"hosts": (hosts, "no reads"), "quantize": (quantize, "floats"), "quantized": (keeps, "floats")}
    _check_excluded(excluded if searched else {}, cached=train is not None and kv_cache is not None)
    on_mesh = "1x1" if spec is None else str(spec)
    check_new_files(
        {"--save-plan": save_plan, "--svg": svg, "--html": html}, reads=[source, options.layout_file(layout)]
    )
    with streams.results() as out:
        jax_setup.set_up_jax(note=streams.note)
        # Compiling needs as many devices as the mesh has, simulated ones. A plan needs none, but must not take any.
        if compile:
            jax_setup.provide_devices(spec, platform=jax_setup.Platform.CPU, note=streams.note)
        os.environ["JAX_PLATFORMS"] = "cpu"  # a plan must not occupy a TPU that is in use for training
        completion.make_available(source, weights=False)
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
                    kv_cache=kv_cache,
                    format=format and str(format),
                    ignore_config=tuple(ignore_config or ()),
                    progress=progress,
                )
                found: Any = plan_layouts(
                    request,
                    StepSpec(
                        train,
                        batch,
                        sequence,
                        compile,
                        remat.value,
                        microbatches or 1,
                        sequence_parallel.for_search,
                        fused_attention,
                        devices,
                    ),
                )
            else:
                from shardload import loading

                found = loading.plan(
                    source,
                    mesh=on_mesh,
                    layout=layout or "auto",
                    dtype=dtype,
                    host_memory_bytes=host_memory,
                    device_memory_bytes=device_memory,
                    hosts=hosts,
                    kv_cache=kv_cache,
                    ignore=ignore or (),
                    format=format and str(format),
                    ignore_config=tuple(ignore_config or ()),
                    replicas=replicas.value,
                    quantize=quantize,
                    quantized=quantized.value,
                )
        files = [(html, saver(found.plan.to_html if searched else found.to_html))]
        if searched:
            files = [(save_plan, found.plan.save), (svg, saver(found.plan.to_svg)), *files]
        with written(*files):
            if json:
                out.json(found.to_json())
            elif searched:
                out.text(found.summary(ascii_only=not out.unicode) + "\n")
            else:
                out.table(found)
                out.text(_MORE)
    if not searched and found.fits is not None and not found.fits.fits:
        raise typer.Exit(1)


def _check_excluded(given: dict[str, tuple[Any, str]], *, cached: bool) -> None:
    """Raise if options of `plan` exclude each other: ``given`` with a search, a KV cache (``cached``) with training."""
    for name, (value, why) in given.items():
        if value is not None:
            raise typer.BadParameter(f"A search for layouts plans {why}: leave --{name} out.", param_hint=f"--{name}")
    if cached:
        raise typer.BadParameter("A step of training keeps no KV cache: leave --kv-cache out.", param_hint="--kv-cache")


def _searched(layout: str | None, asked: dict[str, Any]) -> bool:
    """Whether `plan` is to search for layouts; raise if an option for the search comes with another ``--layout``."""
    given = [f"--{name}" for name, value in asked.items() if value]
    if given and layout not in (None, "search"):
        raise typer.BadParameter(
            f"{given[0]} searches for layouts. Leave out --layout {layout}.", param_hint="--layout"
        )
    return bool(given) or layout == "search"


def convert(
    source: options.SourceArgument,
    target: options.TargetArgument,
    *,
    to: options.To = None,
    dtype: options.DtypeOption = None,
    host_memory: options.ConvertMemory = None,
    max_shard_size: options.MaxShardSize = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing checkpoint at TARGET.")] = False,
    ignore: options.Ignore = None,
    ignore_config: options.IgnoreConfig = None,
    merge_lora: Annotated[bool, typer.Option("--merge-lora", help="Merge LoRA adapters into their kernels.")] = False,
    base: Annotated[
        str | None,
        typer.Option(
            "--base", metavar="SOURCE", help="Source of the missing weights, for a step with some weights only."
        ),
    ] = None,
    adapter: options.AdapterOption = None,
    cache: options.CacheOption = None,
    cache_size: options.CacheSizeOption = None,
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

    $ shardload convert ./gemma-2-2b tuned --to safetensors --adapter ./my-lora
    """
    adapters = options.adapters(adapter)
    if not is_bucket(target):
        local_target(target)  # before seconds of imports
    with options.use_cache(cache, cache_size), streams.results() as out, _way_on(target):
        jax_setup.set_up_jax(note=streams.note)
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
                adapter=adapters,
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


@contextlib.contextmanager
def _way_on(target: str) -> Iterator[None]:
    """Inside the block, Ctrl-C's exception gets a note on how to go on, unless the conversion has given it one."""
    try:
        yield
    except KeyboardInterrupt as error:
        if not getattr(error, "__notes__", ()):
            home = working_folder(Path(target))
            again = "Start the same conversion again"
            kept = f"The finished part of an earlier run is in {home}. {again} to continue."
            error.add_note(kept if home.exists() else f"Nothing was written. {again}.")
        raise
