"""A process that saves step after step until it is killed. Arguments: root, and "orbax" to write arrays with Orbax."""

import itertools
import os
import sys
from pathlib import Path

from step_folders import fill

from shardload.runs.digests import Digests
from shardload.runs.listing import list_steps
from shardload.runs.publish import Staging, remove_stale, remove_step


def save(root, step, *, orbax):
    staging = Staging.begin(root, step)
    if orbax:
        from shardload.loaders.orbax.saving import start_save

        start_save(staging.path, {"pytree": ARRAYS}, step=step).result()
    else:
        fill(staging.path, step=step, n_bytes=200_000)
    Digests.compute(staging.path).write(staging.path)
    staging.publish()


def main(root, kind):
    remove_stale(root)
    for step in itertools.count(max((info.step for info in list_steps(root)), default=-1) + 1):
        save(root, step, orbax=kind == "orbax")
        sys.stdout.write(f"{step}\n")
        sys.stdout.flush()
        if step >= 4 and (root / str(step - 4)).exists():
            remove_step(root, step - 4)


if __name__ == "__main__":
    if sys.argv[2] == "orbax":
        os.environ["JAX_PLATFORMS"] = "cpu"
        import jax.numpy as jnp

        ARRAYS = {"a": jnp.arange(1 << 20, dtype=jnp.float32), "b": {"c": jnp.float32(3)}}
    main(Path(sys.argv[1]), sys.argv[2])
