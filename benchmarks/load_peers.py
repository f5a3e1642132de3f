"""A safetensors file into sharded arrays: `shardload.load_arrays` against what others call.

    orbax      Orbax v1's own safetensors loader
    whole      `safe_open`: every tensor as a whole, then `jax.device_put` with the sharding
    slices     `safe_open`: each device's part by `get_slice`, then `jax.make_array_from_single_device_arrays`

Everything is timed, from opening the file: same file, same shardings, same eight devices, in turn.

    python -m benchmarks.load_peers [--gb 1] [--pairs 7] [--layouts mix] [--json]
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.checkpoint import command, open_safetensors, targets_for
from benchmarks.measure import Comparison, compare


def ours(path: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """The file through shardload."""
    import jax

    import shardload

    arrays: dict[str, Any] = jax.block_until_ready(shardload.load_arrays(path, wanted))
    return arrays


def orbax(path: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """The file through Orbax into the same shardings."""
    import jax
    from orbax.checkpoint import v1 as ocp

    context = ocp.Context()
    context.checkpoint_layout = ocp.options.CheckpointLayout.SAFETENSORS
    with context:
        arrays: dict[str, Any] = jax.block_until_ready(ocp.load(path, wanted))
    return arrays


def whole(path: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """Whole tensors on the host, spread by JAX."""
    import jax
    from safetensors import safe_open

    with safe_open(path, framework="np") as file:
        arrays = {name: jax.device_put(file.get_tensor(name), want.sharding) for name, want in wanted.items()}
    found: dict[str, Any] = jax.block_until_ready(arrays)
    return found


def slices(path: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """Only what each device needs, as one writes it by hand."""
    import jax
    from safetensors import safe_open

    arrays = {}
    with safe_open(path, framework="np") as file:
        for name, want in wanted.items():
            part = file.get_slice(name)
            places = want.sharding.addressable_devices_indices_map(want.shape)
            shards = [jax.device_put(part[index], device) for device, index in places.items()]
            arrays[name] = jax.make_array_from_single_device_arrays(want.shape, want.sharding, shards)
    found: dict[str, Any] = jax.block_until_ready(arrays)
    return found


PEERS = {"orbax": orbax, "whole": whole, "slices": slices}


def shardings(path: Path, layout: str) -> dict[str, Any]:
    """The shape, dtype and sharding of every array."""
    import jax

    from shardload.transfer.execution import named_sharding

    return {
        t.name: jax.ShapeDtypeStruct(t.view.shape, t.dtype, sharding=named_sharding(t.layout, jax.devices()[:8]))
        for t in targets_for(open_safetensors(path), layout)
    }


def check_equal(path: Path, wanted: dict[str, Any]) -> None:
    """All give the same bits in the same places, or the comparison means nothing."""
    import numpy as np

    mine = ours(path, wanted)
    for peer, load in PEERS.items():
        for name, theirs in load(path, wanted).items():
            same = np.array_equal(np.asarray(theirs).view(np.uint16), np.asarray(mine[name]).view(np.uint16))
            if not same or not theirs.sharding.is_equivalent_to(mine[name].sharding, theirs.ndim):
                raise AssertionError(f"{name} differs between shardload and {peer}")


def measure(path: Path, layouts: list[str], *, pairs: int, threads: int) -> list[Comparison]:
    """One comparison per layout and peer; shardload chooses its own number of threads."""
    del threads
    n_bytes, found = open_safetensors(path).nbytes, []
    for layout in layouts:
        wanted = shardings(path, layout)
        check_equal(path, wanted)
        for peer, load in PEERS.items():
            sides = partial(ours, path, wanted), partial(load, path, wanted)
            warm = 3 * n_bytes
            found.append(compare(f"{layout}, {peer}", *sides, n_bytes=n_bytes, pairs=pairs, warm_bytes=warm))
    return found


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    return command(argv, str(__doc__), peer="the peer", pairs=7, layouts="mix", measure=measure)


if __name__ == "__main__":
    sys.exit(main())
