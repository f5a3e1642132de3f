"""Transfer against Orbax v1's own safetensors loader: same file, same layout, same devices.

python -m benchmarks.transfer_orbax [--gb 1] [--pairs 7] [--layouts mix] [--json]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmarks.checkpoint import command, open_safetensors, targets_for
from benchmarks.measure import Comparison, compare
from benchmarks.transfer_floor import planned, transfer


def load(path: Path, layout: str, devices: list[Any], threads: int) -> dict[str, Any]:
    """The file through shardload, planning and all."""
    plan, manifest, _ = planned(path, layout, times=1)
    return transfer(plan, manifest, devices, threads)


def orbax_load(path: Path, layout: str, devices: list[Any]) -> dict[str, Any]:
    """The file through Orbax into the same shardings."""
    import jax
    from orbax.checkpoint import v1 as ocp

    from shardload.transfer.execution import named_sharding

    wanted = {
        t.name: jax.ShapeDtypeStruct(t.view.shape, t.dtype, sharding=named_sharding(t.layout, devices))
        for t in targets_for(open_safetensors(path), layout)
    }
    context = ocp.Context()
    context.checkpoint_layout = ocp.options.CheckpointLayout.SAFETENSORS
    with context:
        arrays: dict[str, Any] = ocp.load(path, wanted)
    return jax.block_until_ready(arrays)


def check_equal(path: Path, layout: str, devices: list[Any], threads: int) -> None:
    """Both loaders give the same bits in the same places, or the comparison means nothing."""
    import numpy as np

    ours = load(path, layout, devices, threads)
    for name, theirs in orbax_load(path, layout, devices).items():
        same = np.array_equal(np.asarray(theirs).view(np.uint16), np.asarray(ours[name]).view(np.uint16))
        if not same or not theirs.sharding.is_equivalent_to(ours[name].sharding, theirs.ndim):
            raise AssertionError(f"{name} differs between the loaders")


def measure(path: Path, layouts: list[str], *, pairs: int, threads: int) -> list[Comparison]:
    """One comparison per layout."""
    import jax

    devices, n_bytes = jax.devices()[:8], open_safetensors(path).nbytes
    found = []
    for layout in layouts:
        check_equal(path, layout, devices, threads)
        ours, theirs = (
            (lambda at=layout: load(path, at, devices, threads)),
            (lambda at=layout: orbax_load(path, at, devices)),
        )
        found.append(compare(layout, ours, theirs, n_bytes=n_bytes, pairs=pairs, warm_bytes=4 * n_bytes))
    return found


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    return command(argv, str(__doc__), peer="orbax", pairs=7, layouts="mix", measure=measure)


if __name__ == "__main__":
    sys.exit(main())
