"""Options that several commands share, and parsers for their values."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from shardload.console import completion
from shardload.console.jax_setup import Platform
from shardload.console.launch import DEFAULT_WAIT_S, Processes, detected
from shardload.errors import MeshError, UsageError, did_you_mean
from shardload.loaders.registry import names as format_names
from shardload.sharding.mesh import MeshSpec, planned_mesh
from shardload.stores.local import local_target
from shardload.units import FLOATS, KV_CACHE, dtype_name, parse_bytes

FormatName: Any = StrEnum("FormatName", {name: name for name in format_names()})  # type: ignore[misc]  # known when it runs
"""Values of the option ``--format`` of commands that read a checkpoint: the names of all formats."""


_TARGETS = ("preset", "h5", "safetensors", "orbax")
_READ_ONLY = {"keras-h5", "keras-legacy-h5", "keras-sharded-h5", "keras-archive", "keras-hub-preset"}
_READ_ONLY |= {"hf-safetensors", "gguf", "numpy", "flax-msgpack"}
"""Formats of shardload that `convert` cannot write, or writes under a name of `_TARGETS`."""
_WRITTEN = dict.fromkeys((*_TARGETS, *(name for name in format_names() if name not in _READ_ONLY)))
ConvertFormat: Any = StrEnum("ConvertFormat", {name: name for name in _WRITTEN})  # type: ignore[misc]  # as above
"""Values of ``shardload convert --to``. Formats of other packages are included; `convert` refuses read-only ones."""


class SynthFormat(StrEnum):
    """Values of ``shardload synth --format``: the formats in which it writes random weights."""

    H5 = "h5"
    SAFETENSORS = "safetensors"
    PRESET = "preset"


class IoChoice(StrEnum):
    """Values of ``--io``: how local files are read."""

    AUTO = "auto"
    BUFFERED = "buffered"
    DIRECT = "direct"


class ReplicasChoice(StrEnum):
    """Values of ``--replicas``: how processes that load together get bytes that several of them need."""

    AUTO = "auto"
    READ = "read"
    BROADCAST = "broadcast"


class QuantizedChoice(StrEnum):
    """Values of ``--quantized``: what becomes of weights that are quantised in a Hugging Face folder."""

    DEQUANTIZE = "dequantize"
    KEEP = "keep"


def dtype(text: str, *, known: Sequence[str] = FLOATS) -> str:
    """Parse ``--dtype``: return the canonical name of a floating-point dtype, ``bfloat16`` for ``bf16``."""
    # dtype_name knows every dtype of a tensor, but weights are loaded in a floating-point one.
    try:
        name = str(dtype_name(text))
    except UsageError:
        name = ""
    if name not in known:
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(known)} (or bf16, fp16, fp32)")
    return name


def layout(text: str | None) -> str | None:
    """Check ``--layout``: the name of a layout, or of an existing file, which is read later."""
    names = [name for name, _ in completion.LAYOUTS]
    if text is None or text in names or Path(text).exists():
        return text
    known = f"{', '.join(names[:-1])} or {names[-1]}"
    raise typer.BadParameter(f"{text!r} is not {known}, and no file has that name.{did_you_mean(text, names)}")


def layout_file(text: str | None) -> str | None:
    """Return ``--layout`` if it is a file; ``None`` if it is the name of a layout."""
    return None if text in [name for name, _ in completion.LAYOUTS] else text


def scale(factor: float) -> float:
    """Check ``--scale``, a factor to shrink an architecture by: above 0 and at most 1."""
    # Written like this, it refuses NaN too.
    if not 0 < factor <= 1:
        raise typer.BadParameter(f"{factor:g} is not in the range from 0 (excluded) to 1")
    return factor


def quantize(text: str) -> str:
    """Parse ``--quantize``; the library refuses modes of Keras that it does not support, and says why."""
    if not re.fullmatch(r"int8|int4(/-1|/0*[1-9][0-9]*)?|float8|gptq|awq", text):
        raise typer.BadParameter(f"{text!r} is not int8, int4 or int4/BLOCK, such as int4/64.")
    return text


def size(text: str) -> int:
    """Parse the value of an option that is a number of bytes, such as ``2GiB``."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


_AGE = re.compile(r"(\d+)(s|min|h|d|w)")
_AGE_UNITS_S = {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 604800}


def age(text: str) -> float:
    """Parse an option that is a time, such as ``30d``; return seconds."""
    if (match := _AGE.fullmatch(text.strip())) is None:
        raise typer.BadParameter(f"{text!r} is not a time like 30d, 12h or 90min")
    return float(int(match[1]) * _AGE_UNITS_S[match[2]])


def use_cache(directory: str | None, n_bytes: int | None) -> AbstractContextManager[None]:
    """Use the cache of ``--cache``, with the size of ``--cache-size``, in a ``with`` block."""
    from shardload.stores.cache_choice import DEFAULT_SIZE, FOLDER_VARIABLE, SIZE_VARIABLE, cache

    folder = directory or os.environ.get(FOLDER_VARIABLE)
    if n_bytes is not None and not folder:
        raise typer.BadParameter(
            f"It is only for a cache: add --cache DIR, or set {FOLDER_VARIABLE}.", param_hint="--cache-size"
        )
    if not folder or (directory is None and n_bytes is None):
        return nullcontext()
    return cache(folder, size=n_bytes or os.environ.get(SIZE_VARIABLE) or DEFAULT_SIZE)


def size_as_typed(text: str) -> str:
    """Check that an option is a valid size; return its text, because the API parses it itself, and checks the unit."""
    size(text)
    return text


def _is_folder(path: Path) -> bool:
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:  # a name that is too long, a folder that may not be read, a link to itself
        raise typer.BadParameter(f"{str(path)!r}: {error.strerror or error}") from None


def new_file(ending: str) -> Callable[[Path | None], Path | None]:
    """Return the check of an option that names a file to write: its name ends in ``ending``, and its folder exists."""

    def check(path: Path | None) -> Path | None:
        if path is not None:
            if path.suffix != ending:
                raise typer.BadParameter(f"{str(path)!r} does not end in {ending}")
            local_target(path)
            if _is_folder(path) or not _is_folder(path.absolute().parent):
                raise typer.BadParameter(f"{str(path)!r} is not a file in an existing folder")
            # What the link names is replaced, perhaps a file of the checkpoint.
            if path.is_file() and (real := path.resolve()).suffix != ending:
                raise typer.BadParameter(f"{str(path)!r} is a link to {str(real)!r}, which does not end in {ending}")
        return path

    return check


def kv_cache(text: str | None) -> str | None:
    """Check ``--kv-cache``: rows and tokens, ``8x4096``, or tokens alone; return its text, which the API parses."""
    if text is None or KV_CACHE.fullmatch(text):
        return text
    raise typer.BadParameter(f"{text!r} is not rows and tokens, such as 8x4096")


def mesh_option(mesh: str | None, axes: str | None, layout: str | None) -> MeshSpec | None:
    """Parse ``--mesh`` and ``--axes``; without them, return the mesh of the plan in the file ``--layout``, if any."""
    if mesh is None:
        if axes is not None:
            raise typer.BadParameter("--axes names the axes of --mesh, which is missing.", param_hint="--axes")
        return planned_mesh(layout)
    try:
        return MeshSpec.parse(mesh, axes=axes)
    except MeshError as error:
        hint = "--mesh" if axes is None else "--axes or --mesh"
        raise typer.BadParameter(str(error), param_hint=hint) from None


def step(text: str) -> int | str:
    """Parse ``--step``: the number of a step, ``latest`` or ``best``."""
    if text in ("latest", "best"):
        return text
    # int() accepts more than a number of digits: "+1", " 1 ", "1_000" and digits of other scripts.
    if not (text.isascii() and text.isdecimal()):
        raise typer.BadParameter(f"{text!r} is not a number, latest or best.", param_hint="--step")
    return int(text)


def processes(
    coordinator_address: str | None,
    num_processes: int | None,
    process_id: int | None,
    *,
    distributed: bool = False,
    initialization_timeout: int | None = None,
) -> Processes | None:
    """Return which of several processes this is, from options named as in JAX; ``None`` if it loads alone.

    With ``distributed``, what is not given comes from the environment of the launcher.
    """
    given = [coordinator_address, num_processes, process_id]
    if not distributed and given == [None] * 3:
        if initialization_timeout is not None:
            raise typer.BadParameter("It is only for several processes.", param_hint="--initialization-timeout")
        return None
    if not distributed and None in given:
        raise typer.BadParameter(
            "Pass all three of --coordinator-address, --num-processes and --process-id, or none. With --distributed, "
            "the launcher tells those that are missing.",
            param_hint="--coordinator-address",
        )
    # From the right, because an IPv6 address has colons of its own.
    host, _, port = (coordinator_address or "host:1").rpartition(":")
    if not (host and port.isascii() and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise typer.BadParameter(
            f"{coordinator_address!r} is not an address like host:1234.", param_hint="--coordinator-address"
        )
    if process_id is not None and num_processes is not None and process_id >= num_processes:
        raise typer.BadParameter(
            f"{process_id} is not less than the number of processes, {num_processes}; processes are numbered from 0.",
            param_hint="--process-id",
        )
    if distributed:
        found = detected(coordinator_address, num_processes, process_id, os.environ)
    else:
        found = Processes(coordinator_address, num_processes, process_id)
    return replace(found, initialization_timeout=initialization_timeout or DEFAULT_WAIT_S)


SourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="A file or folder, or a name: see `shardload sources`.",
        autocompletion=completion.source_names,
        show_default=False,
    ),
]
StepOption = Annotated[
    str,
    typer.Option("--step", metavar="STEP", help="Which step of a folder of training steps: a number, latest or best."),
]
MeshOption = Annotated[
    str | None,
    typer.Option(
        "--mesh",
        metavar="MESH",
        help="Mesh to spread the weights over: 1x8, or data=2,model=4. All devices along `model` by default.",
        autocompletion=lambda: completion.MESHES,
    ),
]
AxesOption = Annotated[
    str | None, typer.Option("--axes", metavar="NAMES", help="Names of the axes of --mesh 1x8; batch,model by default.")
]
LayoutOption = Annotated[
    str,
    typer.Option(
        "--layout",
        metavar="LAYOUT",
        help="How variables are split: auto, replicated, keras_hub (its layout map), search, or the file of a plan or "
        "of rules.",
        autocompletion=lambda: completion.LAYOUTS,
        callback=layout,
    ),
]
PlanLayoutOption = Annotated[
    str | None,
    typer.Option(
        "--layout",
        metavar="LAYOUT",
        help="As for load. By default auto, or search if a step is planned.",
        autocompletion=lambda: completion.LAYOUTS,
        callback=layout,
    ),
]


def _html(what: str) -> Any:
    return typer.Option("--html", metavar="FILE.html", callback=new_file(".html"), help=f"Write a page {what}.")


HtmlOption = Annotated[
    Path | None, _html("with a bar for each device, and a tree of variables: how each is split, and why")
]
InspectHtmlOption = Annotated[Path | None, _html("with bars for dtypes and files, and a tree of tensors")]
DiffHtmlOption = Annotated[Path | None, _html("with bars for what differs, and a tree of tensors that do")]
DtypeOption = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="DTYPE",
        parser=dtype,
        help="Dtype of the weights: bfloat16, float16 or float32. The checkpoint's own by default.",
        autocompletion=lambda: FLOATS,
    ),
]
QuantizeOption = Annotated[
    str | None,
    typer.Option(
        "--quantize",
        metavar="MODE",
        parser=quantize,
        help="Quantise the weights while they are read: int8, int4 (in blocks of 128), or int4/BLOCK. As Keras does.",
        autocompletion=lambda: ("int8", "int4", "int4/64"),
    ),
]
QuantizedOption = Annotated[
    QuantizedChoice,
    typer.Option(
        "--quantized",
        help="Weights that are quantised in a Hugging Face folder: dequantize them, or keep their codes packed.",
    ),
]
TargetArgument = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="A folder to create, NAME.weights.h5, or NAME.weights.json, also at s3:// or gs://.",
        show_default=False,
    ),
]
To = Annotated[
    ConvertFormat | None,
    typer.Option("--to", help="Format of TARGET; required unless its name is that of a Keras file."),
]
ConvertMemory = Annotated[
    int | None,
    typer.Option(
        "--host-memory",
        metavar="SIZE",
        parser=size,
        help="Most host memory used for tensors: 2GiB, 256MiB. 512MiB by default.",
    ),
]
MaxShardSize = Annotated[
    int | None,
    typer.Option(
        "--max-shard-bytes",
        metavar="SIZE",
        parser=size,
        help="Most bytes of tensors in one file, where there are several: 2GiB. 5 GB by default.",
    ),
]
HostMemory = Annotated[
    int | None,
    typer.Option(
        "--host-memory",
        metavar="SIZE",
        parser=size,
        help="Most host memory used for staging: 2GiB, 512MiB. 256MiB by default.",
    ),
]
Strict = Annotated[
    bool,
    typer.Option("--strict/--no-strict", help="Fail when variables are missing, tensors unused, or shapes differ."),
]
Atomic = Annotated[bool, typer.Option("--atomic", help="All or nothing, as always for a newly built model.")]
Compile = Annotated[
    bool,
    typer.Option(
        "--compile/--no-compile", help="Compile a model that was saved compiled, and load its optimizer's state."
    ),
]
Prompt = Annotated[
    str | None, typer.Option("--prompt", metavar="TEXT", help="Text to continue when the model is loaded.")
]
MaxNewTokens = Annotated[
    int | None,
    typer.Option("--max-new-tokens", metavar="N", min=1, help="Tokens to generate for --prompt; 32 by default."),
]
IoOption = Annotated[
    IoChoice,
    typer.Option(
        "--io", help="Read local files through the page cache (buffered), past it (direct), or as a probe finds faster."
    ),
]
CacheOption = Annotated[
    str | None,
    typer.Option(
        "--cache",
        metavar="DIR",
        help="Folder that keeps what is read from remote stores, for the next start. SHARDLOAD_CACHE by default.",
    ),
]
CacheSizeOption = Annotated[
    int | None,
    typer.Option(
        "--cache-size",
        metavar="SIZE",
        parser=size,
        help="Most bytes in the folder of --cache: 200GiB. SHARDLOAD_CACHE_SIZE or 100GiB by default.",
    ),
]
WarmUpOption = Annotated[
    bool,
    typer.Option("--warm-up", help="Compile what --prompt needs while the weights are read."),
]
DeviceMemory = Annotated[
    str | None,
    typer.Option(
        "--device-memory",
        metavar="SIZE",
        parser=size_as_typed,
        help="Memory of one device: 16GiB. Says whether the weights fit, and on which smallest mesh they do. A search "
        "uses no more.",
    ),
]
KvCacheOption = Annotated[
    str | None,
    typer.Option(
        "--kv-cache",
        metavar="ROWSxTOKENS",
        callback=kv_cache,
        help="Count the KV cache of generation, in what fits too: 8x4096 is 8 sequences of 4096 tokens.",
    ),
]
Hosts = Annotated[
    int | None,
    typer.Option(
        "--hosts",
        metavar="N",
        min=1,
        help="Say what each of N hosts reads, which share the mesh's devices equally, in its order.",
    ),
]
ReplicasOption = Annotated[
    ReplicasChoice,
    typer.Option(
        "--replicas",
        help="How processes get bytes that several of them need: each reads them, or one reads and broadcasts them.",
    ),
]
PlatformOption = Annotated[
    Platform | None,
    typer.Option(
        "--platform", help="Devices to use; cpu simulates as many as the mesh needs. JAX's choice by default."
    ),
]
Distributed = Annotated[
    bool,
    typer.Option(
        "--distributed",
        help="Load together with the other processes that Slurm, MPI, Kubernetes or a Cloud TPU started.",
    ),
]
CoordinatorAddress = Annotated[
    str | None,
    typer.Option(
        "--coordinator-address",
        metavar="HOST:PORT",
        help="Load with several processes, which connect to this address; process 0 runs on its host.",
    ),
]
NumProcesses = Annotated[
    int | None,
    typer.Option("--num-processes", metavar="N", min=1, max=1 << 16, help="Number of processes that load together."),
]
ProcessId = Annotated[
    int | None, typer.Option("--process-id", metavar="I", min=0, help="Number of this process, from 0.")
]
InitializationTimeout = Annotated[
    int | None,
    typer.Option(
        "--initialization-timeout",
        metavar="SECONDS",
        min=1,
        max=1 << 20,
        help="How long to wait for all processes to connect: 300 by default.",
    ),
]
FormatOption = Annotated[
    FormatName | None,
    typer.Option("--format", help="Format to read, if a file's ending is misleading or a folder contains several."),
]
IgnoreConfig = Annotated[
    list[str] | None,
    typer.Option(
        "--ignore-config",
        metavar="FIELD",
        help="Field of config.json to ignore if the model cannot express it: rope_scaling. May be repeated.",
    ),
]
AdapterOption = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        metavar="FOLDER",
        help="Folder of a PEFT adapter (LoRA) to merge while reading; FOLDER=0.5 weights it. May be repeated.",
    ),
]
Ignore = Annotated[
    list[str] | None,
    typer.Option(
        "--ignore",
        metavar="NAME",
        help="Tensors to leave out although the model may need them; may contain * and ?. May be repeated.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")]
NoProgress = Annotated[
    bool, typer.Option("--no-progress", help="No progress: no bar on a terminal, no line every 10 s elsewhere.")
]
LogJson = Annotated[
    bool, typer.Option("--log-json", help="Progress as one JSON object every 10 s on stderr, even on a terminal.")
]


def adapters(given: list[str] | None) -> dict[str, float] | None:
    """Return the values of --adapter as folder → weight; ``None`` without any."""
    found: dict[str, float] = {}
    for text in given or ():
        folder, sign, weight = text.rpartition("=")
        try:
            pair = (folder, float(weight)) if sign and folder else (text, 1.0)
        except ValueError:  # a folder with "=" in its name
            if Path(folder).is_dir() and not Path(text).exists():
                raise typer.BadParameter(f"{weight!r} is no number.", param_hint="--adapter") from None
            pair = (text, 1.0)
        if pair[0] in found:
            raise typer.BadParameter(f"{pair[0]!r} is given twice.", param_hint="--adapter")
        found[pair[0]] = pair[1]
    return found or None
