"""Load a source into a sharded Keras model: the public functions.

Each function makes a request and runs it; `shardload.pipeline.load` shows the order of a load on one page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from shardload.errors import UnsupportedError, suggests_arguments
from shardload.keras_bridge.model_records import record_of
from shardload.keras_bridge.model_state import plain_model
from shardload.manifest import Manifest
from shardload.pipeline import load as pipeline
from shardload.pipeline.load import Loaded, joint_load
from shardload.pipeline.request import LoadRequest, LoadWeightsRequest, PlanRequest
from shardload.processes.joint_call import Call
from shardload.progress import ProgressLike
from shardload.resolve.adapters import can_merge, open_adapters
from shardload.text.generation import GenerationAhead
from shardload.text.preprocessor import TextInput
from shardload.text.sources import record_text_source
from shardload.typing import AdapterLike, DTypeLike, LayoutLike, MeshLike, PathLike

if TYPE_CHECKING:
    import keras

    from shardload.converting.adapter_plans import AdapterPlan
    from shardload.reports import LoadReport, PlanReport

__all__ = ["LoadRequest", "Loaded", "load", "load_weights", "plan", "report", "run"]


@suggests_arguments
def load(
    source: PathLike,
    *,
    mesh: MeshLike | None = None,
    axes: str | None = None,
    layout: LayoutLike | None = None,
    dtype: DTypeLike | None = None,
    host_memory_bytes: int | str | None = None,
    strict: bool = True,
    ignore: Sequence[str] = (),
    devices: Sequence[Any] | None = None,
    task: bool = True,
    custom_objects: Mapping[str, Any] | None = None,
    safe_mode: bool = True,
    compile: bool = True,
    atomic: bool = False,
    format: str | None = None,
    progress: ProgressLike = None,
    replicas: Literal["auto", "read", "broadcast"] = "auto",
    ignore_config: Sequence[str] = (),
    step: int | Literal["latest", "best"] = "latest",
    warm_up: Mapping[str, Any] | None = None,
    io: Literal["auto", "buffered", "direct"] = "buffered",
    quantize: str | keras.quantizers.QuantizationConfig | None = None,
    quantized: Literal["dequantize", "keep"] = "dequantize",
    adapter: AdapterLike | None = None,
) -> Any:
    """Build the model a checkpoint describes and load it straight into its layout.

    In a `jax.distributed` run, all processes make the call, and it succeeds or fails on all of them. A mesh of only
    this process's devices does not involve the other processes.

    Examples:
        ```python
        model = shardload.load("gemma3_270m", mesh="1x8", dtype="bfloat16")
        print(shardload.report(model))
        ```

    Args:
        source: A path, a name in the checkpoint root, a KerasHub preset or handle, or an alias.
        mesh: ``"1x8"``, ``"data=2,model=4"``, sizes, ``{"data": 2, "model": 4}``, a `jax.sharding.Mesh`, a
            `keras.distribution.DeviceMesh`, or a `keras.distribution.ModelParallel` or `DataParallel`, which is the
            layout too. By default that of a plan given as layout, else that of the distribution set in Keras, else all
            devices along one ``model`` axis.
        layout: ``"auto"``, ``"keras_hub"``, ``"replicated"``, ``"search"``, a `shardload.parallel.LayoutPlan`, the path
            of a rules file or of a saved plan, rules such as ``{"dense/kernel": (None, "model")}``, or a
            `keras.distribution.LayoutMap`, `ModelParallel` or `DataParallel`. By default the distribution set in Keras
            if ``mesh`` is not given either, else ``"auto"``.
        dtype: Dtype of the floating-point weights; the checkpoint's own by default.
        axes: Names for a mesh given as sizes, joined by commas; ``batch,model`` by default.
        host_memory_bytes: Most bytes staged in host memory, or text like ``"512MiB"``; 256 MiB by default, or the
            size of a compressed chunk if it needs more.
        strict: Refuse a checkpoint that lacks a weight of the model, has one that the model should use but does not,
            has another shape for one, or integers for floats. Tensors outside the model (buffers, heads, copies of
            the embedding: ``report.outside``) are always accepted. Otherwise layers whose shapes differ keep their
            values, or get their initial values, as with ``skip_mismatch`` in Keras, and the report says so.
        ignore: Names of tensors to skip even if the model needs them, with ``*`` and ``?``: ``"score.*"``.
        devices: Devices to use, in mesh order.
        task: Build the task if the checkpoint is one; the backbone otherwise.
        custom_objects: Classes in the checkpoint's configuration that Keras does not know.
        safe_mode: Refuse configurations that contain Python code.
        compile: Compile the model as it was saved, and load the state of its optimizer. If its class does not accept
            the stored ``compile`` configuration, the model is loaded uncompiled, with a warning.
        atomic: No effect here, as a new model is returned complete or not at all; see `load_weights`.
        format: Name of a format, to override a contradicting file ending, or to choose one of several in a
            folder.
        progress: ``True`` for a bar on a terminal or in a notebook, and a line every ten seconds elsewhere; ``"bar"``,
            ``"lines"`` or ``"json"`` (lines with a JSON object) for one of them; or an object as
            `shardload.progress.Progress`.
        ignore_config: Fields of a Hugging Face ``config.json`` (or of a GGUF header, under the same names) that the
            model may differ from, such as ``("rope_scaling",)``. Otherwise a field that changes what the model
            computes, and that KerasHub's class cannot express, is refused. The report lists what was ignored.
        step: Of a folder of training steps, the step to load: its number, ``"latest"`` or ``"best"``.
        warm_up: First steps of the model to compile while its weights are read, so that the first call is fast:
            ``{"predict": x}``, ``{"train": (x, y)}`` for `fit` and ``{"generate": "a prompt"}`` (or several prompts, or
            ``{"prompts": …, "max_new_tokens": …}``) for `shardload.generate`. ``x`` and ``y`` are one batch as the
            first call will get it; only shapes and dtypes count, so `jax.ShapeDtypeStruct` serves as well. The load
            returns when all is compiled. What cannot be compiled is a note in the report.
        io: How to read local files. ``"buffered"``: through the page cache, so that the next load finds them there.
            ``"direct"``: past it (``O_DIRECT``), which takes a fraction of the CPU time if they are not in the cache.
            ``"auto"``: directly, if they are not in the cache and a probe finds that faster. Remote and verified
            sources are read as usual; the report says how.
        replicas: How the processes of a `jax.distributed` run get bytes that several of them need. ``"read"``: each
            reads all that its devices need. ``"broadcast"``: each byte is read by one process, and the others get it
            from that process by collectives of JAX. ``"auto"``: as is expected to be faster.
        quantize: ``"int8"``, ``"int4"`` (in blocks of 128 weights), ``"int4/BLOCK"`` (``"int4/-1"``: one scale per
            output), or Keras' ``Int8QuantizationConfig`` or ``Int4QuantizationConfig``: quantise the weights on the
            host while they are read. The result equals, bit for bit, ``model.quantize`` after a full load, but no
            device ever stores the float kernels. Codes and scales follow the layouts of these. The state of an
            optimizer is not loaded.
        quantized: What becomes of the weights of a quantised Hugging Face folder. ``"dequantize"``: they are floats.
            ``"keep"``: the codes and scales of the folder fill Keras' packed layers (int4 in groups, GPTQ), which
            take as much memory as in the file; the rest stays floats. A weight whose codes Keras' layers cannot
            compute with is an error. Rules for layouts name the dims of the float kernels.
        adapter: The folder of a PEFT adapter (LoRA) to merge into the weights while they are read, a list of such
            folders, or a mapping from folders to weights, by which their products are multiplied. Sums are computed in
            float32 and rounded once. To keep an adapter as trainable LoRA, load the base model, then call
            `load_adapter`.

    Returns:
        The Keras task if the checkpoint is one, else the backbone, ready for predict, fit and generate. A task has the
        preprocessor that KerasHub makes from the checkpoint's tokenizer, so ``model.generate("text")`` works; set
        ``model.preprocessor = None`` to pass token ids. That of a GGUF file is made on first use. If KerasHub cannot
        make it, the report says why.

        `copy.deepcopy` copies the model on its mesh. Other copies (`clone_model`, `pickle`, a saved file that Keras
        loads) are plain models: whole, on one device.

    Raises:
        UsageError: When an argument is of the wrong kind or out of range.
        SourceNotFoundError: When the name resolves to nothing.
        SourceError: When the checkpoint contradicts itself.
        MismatchError: When checkpoint and model disagree and ``strict`` is set; when floats would become integers.
        BackendError: When Keras does not run on JAX.
        MeshError: When there are too few devices.
        LayoutError: When the layout cannot be applied.
        TransferError: When reading fails half-way.
        DisagreementError: When the processes of a `jax.distributed` run request different loads.
        ProcessFailedError: When it failed on another process with an error that is not from shardload.
        ProcessLostError: When another process ended, or does not respond for 15 s.
    """
    request = LoadRequest(
        source=source,
        mesh=mesh,
        axes=axes,
        layout=layout,
        dtype=dtype,
        host_memory_bytes=host_memory_bytes,
        strict=strict,
        ignore=ignore,
        devices=devices,
        task=task,
        custom_objects=custom_objects,
        safe_mode=safe_mode,
        compile=compile,
        atomic=atomic,
        format=format,
        progress=progress,
        replicas=replicas,
        ignore_config=ignore_config,
        step=step,
        warm_up=warm_up,
        io=io,
        quantize=quantize,
        quantized=quantized,
        adapter=adapter,
    )
    return run(request).model


def run(request: LoadRequest, *, preprocessor: bool = True) -> Loaded:
    """Load like `load`, but return the report and the manifest as well as the model.

    Args:
        request: The arguments of `load`, by the same names.
        preprocessor: Give a task its preprocessor, and say in the report why it has none.
    """
    # KerasHub takes a while to make a preprocessor, so that happens in a thread, during the build and the transfer.
    text = TextInput(task=request.task) if preprocessor else None
    late: list[AdapterPlan] = []

    def on_built(model: Any, manifest: Manifest) -> None:
        if text is not None:
            text.prepare(model, manifest)
        # Before weights are read: an adapter of another model is an error now.
        if request.adapters and not can_merge(manifest):
            from shardload.converting.adapter_plans import plan_adapters

            late.append(plan_adapters(model, open_adapters(request.adapters), merge=True))

    with joint_load(request) as call:
        hooks: dict[str, Any] = {} if text is None else {"on_opened": text.begin}
        loaded = _run(request, call, on_built=on_built, **hooks)
    for plan in late:
        from shardload.adapting import apply_plan

        loaded = _with_notes(loaded, f"adapters merged after the load: {apply_plan(plan)}")
    if text is None or (note := text.attach(loaded.model, loaded.manifest)) is None:
        return loaded
    return _with_notes(loaded, note)


def _with_notes(loaded: Loaded, *notes: str) -> Loaded:
    report = replace(loaded.report, notes=(*loaded.report.notes, *notes))
    record_of(loaded.model).report = report
    return replace(loaded, report=report)


@suggests_arguments
def load_weights(
    model: Any,
    source: PathLike,
    *,
    mesh: MeshLike | None = None,
    axes: str | None = None,
    layout: LayoutLike | None = None,
    names: Mapping[str, str] | None = None,
    host_memory_bytes: int | str | None = None,
    strict: bool = True,
    devices: Sequence[Any] | None = None,
    atomic: bool = False,
    format: str | None = None,
    progress: ProgressLike = None,
    replicas: Literal["auto", "read", "broadcast"] = "auto",
    ignore_config: Sequence[str] = (),
    items: Literal["all", "weights"] = "all",
    step: int | Literal["latest", "best"] = "latest",
    warm_up: Mapping[str, Any] | None = None,
    io: Literal["auto", "buffered", "direct"] = "buffered",
    quantize: str | keras.quantizers.QuantizationConfig | None = None,
) -> LoadReport:
    """Load weights into an existing model, live or built inside `shardload.abstract`.

    Examples:
        ```python
        with shardload.abstract():  # no memory for initial values
            model = build_model()
        report = shardload.load_weights(model, "model.weights.h5", mesh="2x4")
        ```

    Args:
        model: A built Keras model. If it is compiled and the checkpoint contains the state of its optimizer, the state
            is loaded too, whether the optimizer has trained before or not.
        source: As for `load`; also bare safetensors and h5 files.
        mesh: Mesh for the weights; by default that of a plan given as layout, else the model's current one (all devices
            for an abstract model).
        axes: As for `load`.
        layout: As for `load`; by default the model's current layouts (``"auto"`` for an abstract model).
        names: For bare files: tensor name → variable path, if they differ.
        host_memory_bytes: As for `load`.
        strict: As for `load`.
        devices: As for `load`.
        atomic: Keep the old values until all new ones are loaded, and restore them if the load fails; takes twice the
            memory.
        format: As for `load`.
        progress: As for `load`.
        ignore_config: As for `load`. Of a model you built yourself, only ``quantization_config`` is checked; other
            fields in which it differs are listed in the report.
        items: ``"weights"`` leaves the optimizer as it is; ``"all"`` also loads its state where the checkpoint has it,
            the learning rate included, and the report says so.
        step: As for `load`.
        warm_up: As for `load`.
        io: As for `load`.
        replicas: As for `load`.
        quantize: As for `load`, for a model built inside `shardload.abstract`. If the load fails, the model stays
            quantised, without values: build it again.

    Raises:
        LoadInterruptedError: When the load failed after it began to replace values; describes the current values.
        DisagreementError: As in `load`, like all other errors.
    """
    request = LoadWeightsRequest(
        model=plain_model(model),
        source=source,
        mesh=mesh,
        axes=axes,
        layout=layout,
        names=names,
        host_memory_bytes=host_memory_bytes,
        strict=strict,
        devices=devices,
        atomic=atomic,
        format=format,
        progress=progress,
        replicas=replicas,
        ignore_config=ignore_config,
        items=items,
        step=step,
        warm_up=warm_up,
        io=io,
        quantize=quantize,
    )
    return run_load_weights(request).report


def run_load_weights(request: LoadWeightsRequest) -> Loaded:
    """Run a request of `load_weights`, and return the model, the report and the manifest."""
    with joint_load(request) as call:
        return _run(request, call)


def _run(request: LoadRequest | LoadWeightsRequest, call: Call, **hooks: Any) -> Loaded:
    ahead = GenerationAhead()
    opener = partial(pipeline.open_requested, request)
    loaded = pipeline.run_load(request, call, opener=opener, lower={"generate": ahead.lower}, **hooks)
    # For `shardload.generate` and `tokenizer`, which are given the model only.
    record_text_source(loaded.model, loaded.manifest)
    ahead.keep_tokenizer(loaded.model)
    return loaded


@suggests_arguments
def plan(
    source: PathLike,
    *,
    mesh: MeshLike | None = None,
    axes: str | None = None,
    layout: LayoutLike | None = None,
    dtype: DTypeLike | None = None,
    host_memory_bytes: int | str | None = None,
    device_memory_bytes: int | str | None = None,
    hosts: int | None = None,
    kv_cache: tuple[int, int] | str | None = None,
    ignore: Sequence[str] = (),
    task: bool = True,
    format: str | None = None,
    ignore_config: Sequence[str] = (),
    replicas: Literal["auto", "read", "broadcast"] = "auto",
    quantize: str | keras.quantizers.QuantizationConfig | None = None,
    quantized: Literal["dequantize", "keep"] = "dequantize",
) -> PlanReport:
    """Plan a load from headers alone: which bytes are read and where they go; needs neither devices nor weights.

    Examples:
        ```python
        plan = shardload.plan("gemma2_9b", mesh="4x8", device_memory_bytes="16GiB")
        print(plan)
        print(plan.fits)
        ```

    Args:
        source: As for `load`. Where there are no weights, the name of an architecture that ``shardload synth`` knows,
            a folder with a model's configuration files, or the path of its ``config.json``; of a KerasHub preset, only
            the configuration is downloaded. The report's notes say so.
        mesh: As for `load`; need not exist. By default that of a plan given as layout, else that of the distribution
            set in Keras, else ``"1x1"``.
        axes: As for `load`.
        layout: As for `load`.
        dtype: As for `load`.
        host_memory_bytes: As for `load`.
        device_memory_bytes: Bytes of one device, or text like ``"16GiB"``: the report says whether the plan fits.
        hosts: Number of processes that load together, each with equally many devices, which follow each other in the
            mesh: the report says how much each of them reads, and how much it receives from others if each byte is
            read by one of them. One process by default.
        kv_cache: Rows and tokens of the KV cache that the model keeps while it generates, as text or as a pair:
            ``"8x4096"`` is 8 sequences of 4096 tokens, prompts included, ``"4096"`` is one. The report says how many
            bytes of it are on each device, and whether the plan fits with it. None by default.
        ignore: As for `load`.
        task: As for `load`.
        format: As for `load`.
        ignore_config: As for `load`.
        replicas: As for `load`, with ``hosts``.
        quantize: As for `load`: sizes are those of the quantised weights.
        quantized: As for `load`; with ``"keep"``, sizes are those of the codes and scales.
    """
    request = PlanRequest(
        source=source,
        mesh=mesh,
        axes=axes,
        layout=layout,
        dtype=dtype,
        host_memory_bytes=host_memory_bytes,
        device_memory_bytes=device_memory_bytes,
        hosts=hosts,
        kv_cache=kv_cache,
        ignore=ignore,
        task=task,
        format=format,
        ignore_config=ignore_config,
        replicas=replicas,
        quantize=quantize,
        quantized=quantized,
    )
    request.check()
    return pipeline.plan_load(request)


def report(model: Any) -> LoadReport:
    """Return the report of the last load into ``model``.

    Examples:
        ```python
        model = shardload.load("gemma3_270m", mesh="1x8")
        report = shardload.report(model)
        print(report.seconds, report.notes)
        ```

    Raises:
        UnsupportedError: When shardload loaded nothing into it in this process.
    """
    if (found := record_of(plain_model(model)).report) is None:
        raise UnsupportedError(
            f"Cannot report on the model {getattr(model, 'name', model)!r}: in this process, shardload loaded nothing "
            "into it"
        )
    return found
