"""Restoring a training step against Orbax v1: the same state, saved as columns on 1x8, onto three meshes.

Ours is verified: every MiB that is read is compared with its digest. The peer's best setting reads the very same
uncompressed step without checking anything; its default is a step of its own, compressed with zstd. Last, both read
that compressed step, which has no digests.

    python -m benchmarks.restore_orbax [--gb 1] [--pairs 7] [--json]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.measure import Comparison, compare, table, warm_files

ROWS, COLUMNS = 8192, 4096
MESHES = {"1x8 columns": ("1x8", 1), "2x4 columns": ("2x4", 1), "8x1 rows": ("8x1", 0)}


def state(n_bytes: int) -> dict[str, Any]:
    """Random float32 matrices of 128 MiB, each split by columns over eight devices."""
    import jax
    import numpy as np

    from shardload.sharding.layout import Layout
    from shardload.sharding.mesh import MeshSpec
    from shardload.transfer.execution import named_sharding

    spread = named_sharding(Layout.split(MeshSpec.parse("1x8"), 2, dim=1, axis="model"), jax.devices()[:8])
    rng = np.random.default_rng(0)
    names = (f"layer_{i}" for i in range(max(1, n_bytes // (4 * ROWS * COLUMNS))))
    return {name: {"kernel": jax.device_put(rng.random((ROWS, COLUMNS), np.float32), spread)} for name in names}


def save(folder: Path, tree: dict[str, Any]) -> tuple[Path, Path]:
    """A step of ours, and one as Orbax saves by default."""
    from orbax.checkpoint import v1 as ocp

    from shardload.loaders.orbax import saving as orbax_writer
    from shardload.runs.digests import Digests
    from shardload.runs.publish import Root, Staging

    staging = Staging.begin(Root(folder / "ours", create=True), 1)
    orbax_writer.start_save(staging.path, {"pytree": tree}).result()
    Digests.compute(staging.path).write(staging.path)
    ocp.save_checkpointables(folder / "theirs", {"pytree": tree})
    return staging.publish(), folder / "theirs"


def wanted(step: Path, mesh: str, dim: int) -> dict[str, Any]:
    """Every matrix of a step, by name, split along ``dim`` over the mesh's longer axis."""
    import jax

    from shardload.loaders import open_manifest
    from shardload.sharding.layout import Layout
    from shardload.sharding.mesh import MeshSpec
    from shardload.transfer.execution import named_sharding

    spec = MeshSpec.parse(mesh)
    layout = Layout.split(spec, 2, dim=dim, axis=spec.axes[dim] if mesh == "8x1" else "model")
    spread = named_sharding(layout, jax.devices()[:8])
    every = open_manifest(str(step)).tensors.values()
    return {t.name: jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=spread) for t in every if len(t.shape) == 2}


def ours(step: Path, targets: dict[str, Any]) -> dict[str, Any]:
    """Open, check and load a step; one without digests is only opened and loaded."""
    import jax

    import shardload

    arrays: dict[str, Any] = jax.block_until_ready(shardload.load_arrays(step, targets))
    return arrays


def theirs(folder: Path, shardings: dict[str, Any]) -> dict[str, Any]:
    """The same through Orbax."""
    import jax
    from orbax.checkpoint import v1 as ocp

    found = ocp.load_checkpointables(folder, {"pytree": shardings})["pytree"]
    arrays: dict[str, Any] = jax.block_until_ready(found)
    return arrays


def measure(folder: Path, n_bytes: int, *, pairs: int) -> list[Comparison]:
    """Three comparisons per mesh: with the peer's best setting, with its default, and of that default's step."""
    import numpy as np

    step, default = save(folder, state(n_bytes))
    warm_files([p for p in folder.rglob("*") if p.is_file()])
    found = []
    for title, (mesh, dim) in MESHES.items():
        targets = wanted(step, mesh, dim)
        shardings = {name.split("/")[0]: {"kernel": target} for name, target in targets.items()}
        check, peer = ours(step, targets), theirs(step, shardings)
        for name, array in check.items():
            if not np.array_equal(np.asarray(array), np.asarray(peer[name.split("/")[0]]["kernel"])):
                raise AssertionError(f"{name} differs between the loaders")
        size = sum(a.nbytes for a in check.values())
        del check, peer
        for kind, mine, place in (("best", step, step), ("default", step, default), ("zstd", default, default)):
            one, two = partial(ours, mine, targets), partial(theirs, place, shardings)
            found.append(compare(f"{title}, {kind}", one, two, n_bytes=size, pairs=pairs, warm_bytes=3 * size))
    return found


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--gb", type=float, default=1.07)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    with tempfile.TemporaryDirectory(prefix="shardload-bench-") as folder:
        found = measure(Path(folder), int(options.gb * 1e9), pairs=options.pairs)
    if options.json:
        print(json.dumps([c.summary() | {"runs": c.runs()} for c in found]))
    else:
        print(table(found, a="shardload", b="orbax"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
