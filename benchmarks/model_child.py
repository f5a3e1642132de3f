"""One build + load in this process: ``python -m benchmarks.model_child peer|ours SOURCE DTYPE [OPTIONS]``.

    --defaults     give only the source, load the task, and turn a prompt into token ids; one device, with TensorFlow
    --mesh         with --defaults: on the same 1x8 mesh, in the same layout and dtype, as without
    --cache=FOLDER use JAX's compilation cache
    --cold         remove the source's files from the page cache first

Prints one JSON object: wall seconds, CPU-seconds and the peak resident bytes above what the imports took.
Both sides spread the model over the same eight CPU devices in the same layout, which is worked out beforehand,
outside the timing, for the peer (it takes none or a fixed map; ours works it out inside the timing).
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

SIDE, SOURCE, DTYPE, *FLAGS = sys.argv[1:]
DEFAULTS = "--defaults" in FLAGS
os.environ["KERAS_BACKEND"] = "jax"
if not DEFAULTS:  # a backbone needs none of it
    sys.modules["tensorflow"] = sys.modules["tensorflow_text"] = None  # type: ignore[assignment]

import jax  # noqa: E402

ON_MESH = not DEFAULTS or "--mesh" in FLAGS
jax.config.update("jax_num_cpu_devices", 8 if ON_MESH else 1)
for flag in FLAGS:
    if flag.startswith("--cache="):
        jax.config.update("jax_compilation_cache_dir", flag.partition("=")[2])
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

import keras  # noqa: E402
import keras_hub  # noqa: E402
import keras_hub.src.utils.transformers.preset_loader  # noqa: E402 - imported on first use, on the peer's side before
import numpy as np  # noqa: E402

import shardload  # noqa: E402
from benchmarks.measure import memory_status, reset_peak_memory, warm_memory  # noqa: E402
from shardload import loaders  # noqa: E402
from shardload.hub import building  # noqa: E402
from shardload.parallel import choose  # noqa: E402
from shardload.sharding.mesh import MeshSpec  # noqa: E402

MESH = MeshSpec.parse("1x8")
WARM_BYTES = 8 << 30
"""More than either side takes; see `warm_memory`. Without it, first touches take several times as long as the load."""


def distribute(source: str, dtype: str | None) -> tuple[Any, Any]:
    """Set the distribution that shardload chooses, by hand; return the headers, and the backbone without values."""
    import re

    manifest = loaders.open_manifest(source)
    with shardload.abstract():
        model: Any = building.build_model(manifest, dtype=dtype, task=False)
    chosen = choose(model, MESH)
    mesh = keras.distribution.DeviceMesh((1, 8), ["batch", "model"], [f"cpu:{i}" for i in range(8)])
    layout_map = keras.distribution.LayoutMap(mesh)
    for variable in model.variables:
        axes = [a[0] if a else None for a in chosen.layouts[id(variable)].spec]
        layout_map[re.escape(variable.path)] = keras.distribution.TensorLayout(axes)
    keras.distribution.set_distribution(keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name="batch"))
    return manifest, model


def peer(source: str, dtype: str) -> Callable[[], object]:
    """Keras' own way: a ModelParallel distribution, build, then load."""
    manifest, model = distribute(source, dtype)
    config = model.get_config()
    name = model.__class__.__name__

    def run() -> object:
        cls = getattr(keras_hub.models, name)
        if manifest.format == "hf-safetensors":
            return cls.from_preset(source, dtype=dtype)
        backbone = cls.from_config({**config, "dtype": dtype})
        backbone.load_weights(Path(source) / "model.weights.h5")
        return backbone

    return run


def ours(source: str, dtype: str) -> Callable[[], object]:
    """The same through shardload, layout choice included."""
    load = shardload.load  # imports what it needs
    return lambda: load(source, mesh="1x8", dtype=dtype)


def ready(load: Callable[[str], object]) -> Callable[[], object]:
    """The task as it comes, and one prompt as token ids."""

    def run() -> object:
        task = load(SOURCE)
        found = task.preprocessor.generate_preprocess(["The capital of France is"])  # type: ignore[attr-defined]
        assert np.asarray(found["token_ids"])[0, 0] == 2  # not with jnp, which would compile a program to index
        return task

    return run


def read(path: Path) -> None:
    """Read a file into the page cache, without a large allocation of our own; or drop it from there."""
    with path.open("rb") as file:
        if "--cold" in FLAGS:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            return
        while file.read(1 << 22):
            pass


def main() -> None:
    """Time one side."""
    if DEFAULTS:
        ours_too = partial(shardload.load, mesh="1x8") if ON_MESH else shardload.load
        if ON_MESH and SIDE == "peer":
            distribute(SOURCE, DTYPE)
        theirs = keras_hub.models.CausalLM.from_preset
        run = ready({"peer": partial(theirs, dtype=DTYPE) if ON_MESH else theirs, "ours": ours_too}[SIDE])
    else:
        run = {"peer": peer, "ours": ours}[SIDE](SOURCE, DTYPE)
    jax.device_put(0, jax.devices()[0]).block_until_ready()
    os.sync()  # only clean pages can be dropped
    for path in Path(SOURCE).rglob("*"):
        if path.is_file():
            read(path)
    gc.collect()
    warm_memory(WARM_BYTES)
    reset_peak_memory()  # the kernel hands the peak of the parent process down to its children
    before, cpu, wall = memory_status()["rss_bytes"], time.process_time(), time.perf_counter()
    model = run()
    jax.block_until_ready([v.value for v in model.weights])  # type: ignore[attr-defined]
    print(
        json.dumps(
            {
                "weight_bytes": sum(v.value.nbytes for v in model.weights),  # type: ignore[attr-defined]
                "wall_s": time.perf_counter() - wall,
                "cpu_s": time.process_time() - cpu,
                "peak_bytes": memory_status()["peak_rss_bytes"] - before,
            }
        )
    )


if __name__ == "__main__":
    main()
