"""Steps of REKLS: against the form that decomposes twice on every device, and against AdamW in training.

    twice     one update of the matrices of Gemma-shaped blocks on 8 devices; the other side decomposes the old
              factors and the new ones on every device, as the PyTorch original does. With ``--blocks 8``, there are as
              many matrices of each kind as devices
    hands     the decompositions alone, on one device: the fullest of 8 hands, against all factors twice. Devices
              with cores of their own wait for this much; simulated ones share those of the machine
    share     a training step of a small Gemma on one device, with a decomposition every 1, 10 and 100 steps,
              against AdamW

Rounds are interleaved; ratios are medians over rounds.

    python -m benchmarks.rekls_steps [--rounds 7] [--width 192] [--blocks 1] [--only twice] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Threads of OpenBLAS wait for each other where several simulated devices decompose: a hundred times slower.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.measure import Row, interleave, rows_table
from shardload.keras_bridge.variables import relocate
from shardload.optimizers import REKLS
from shardload.optimizers.dealing import deal, decompose_repeated, gather_shards, shard
from shardload.optimizers.matrices import MatrixRules
from shardload.optimizers.rekls_math import Eigenpairs, eigenpairs
from shardload.optimizers.rekls_setup import partition_spec_of

DEVICES = 8
MODEL = "model"


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:DEVICES]), (MODEL,))


def block(width: int) -> dict[str, tuple[tuple[int, ...], tuple[str | None, ...]]]:
    """Shapes of the kernels of a Gemma 2 block, and how they are split."""
    head, hidden = width // 8, 4 * width
    return {
        "query": ((8, width, head), (MODEL, None, None)),
        "key": ((4, width, head), (None, MODEL, None)),
        "value": ((4, width, head), (None, MODEL, None)),
        "output": ((8, head, width), (MODEL, None, None)),
        "gate": ((width, hidden), (None, MODEL)),
        "up": ((width, hidden), (None, MODEL)),
        "down": ((hidden, width), (MODEL, None)),
    }


class TwiceOnEveryDevice(REKLS):
    """Keeps no eigenpairs: decomposes the old factors too, all of them on every device."""

    def update_all(self, gradients: Any, variables: Any, learning_rate: Any) -> None:
        factors = [v for v in (*self.left_factors, *self.right_factors) if v is not None]
        values = [v for v in (*self.left_values, *self.right_values) if v is not None]
        vectors = [v for v in (*self.left_vectors, *self.right_vectors) if v is not None]
        factor_specs = [partition_spec_of(v) for v in factors]
        pair_specs = [
            Eigenpairs(partition_spec_of(a), partition_spec_of(b)) for a, b in zip(values, vectors, strict=True)
        ]

        def local(shards: list[Any]) -> Any:
            whole = gather_shards(shards, factor_specs)
            old = [Eigenpairs(x[0], x) for x in whole]  # not used
            return shard(decompose_repeated(whole, old, lambda stack, _: eigenpairs(stack)), pair_specs)

        run = jax.shard_map(local, mesh=mesh(), in_specs=(factor_specs,), out_specs=pair_specs, check_vma=False)
        for a, b, pair in zip(values, vectors, run([v.value for v in factors]), strict=True):
            a.assign(pair.values)
            b.assign(pair.vectors)
        super().update_all(gradients, variables, learning_rate)


def update(optimizer: REKLS, width: int, blocks: int) -> Callable[[], Any]:
    """Return what takes a step with random gradients; the state goes on from step to step."""
    rng = np.random.default_rng(0)
    variables = []
    for name, (shape, spec) in [*block(width).items()] * blocks:
        variables.append(keras.Variable(rng.normal(size=shape).astype("float32"), name=name))
        relocate(variables[-1], NamedSharding(mesh(), PartitionSpec(*spec)))
    optimizer.build(variables)
    gradients = [jax.device_put(rng.normal(size=v.shape).astype("float32"), v.value.sharding) for v in variables]
    everywhere = NamedSharding(mesh(), PartitionSpec())
    state = [jax.device_put(v.value, v.value.sharding if v.shape else everywhere) for v in optimizer.variables]
    step = jax.jit(optimizer.stateless_apply)
    held = [[v.value for v in variables], state]

    def run() -> Any:
        held[:] = step(held[1], gradients, held[0])
        return jax.block_until_ready(held)

    return run


def twice(width: int, rounds: int, blocks: int) -> list[Row]:
    sides = {
        "dealt out, once": update(REKLS(), width, blocks),
        "the same, rank_tolerance=0": update(REKLS(rank_tolerance=0), width, blocks),
        "on every device, once": update(REKLS(decompositions="repeated"), width, blocks),
        "on every device, twice": update(TwiceOnEveryDevice(decompositions="repeated"), width, blocks),
    }
    runs = interleave(sides, rounds=rounds, between=lambda: None, warm_up=2)
    (name, ours), *others = runs.items()
    limits = {"on every device, twice": 0.5}
    return [Row(f"update: {name}", peer, ours, theirs, limits.get(peer)) for peer, theirs in others]


def hands(width: int, rounds: int) -> list[Row]:
    views = [MatrixRules().view("", shape) for shape, _ in block(width).values()]
    sizes = [side for view in views if view for side in view.factor_sides if side]
    rng = np.random.default_rng(0)
    factors = []
    for size in sizes:
        root = rng.normal(size=(size, size)).astype("float32")
        factors.append(jnp.asarray(root @ root.T))
    fullest = max(
        ([group.factors[i] for group in deal(sizes, DEVICES) for i in group.hands[d]] for d in range(DEVICES)),
        key=lambda hand: sum(sizes[i] ** 3 for i in hand),
    )

    def decomposed(which: list[int]) -> Callable[[], Any]:
        return lambda: [jax.block_until_ready(eigenpairs(factors[i])) for i in which]

    every = list(range(len(sizes)))
    runs = interleave(
        {"ours": decomposed(fullest), "theirs": decomposed(every + every)}, rounds=rounds, between=lambda: None
    )
    return [Row("fullest hand", "all factors twice", runs["ours"], runs["theirs"])]


def training(optimizer: Any, width: int, steps: int) -> Callable[[], Any]:
    """Return what trains a small Gemma for ``steps`` steps."""
    import keras_hub

    keras.utils.set_random_seed(0)
    model = keras_hub.models.GemmaBackbone(
        vocabulary_size=1024,
        num_layers=2,
        num_query_heads=8,
        num_key_value_heads=4,
        hidden_dim=width,
        intermediate_dim=8 * width,  # Keras Hub's is of gate and up together
        head_dim=width // 8,
    )
    model.compile(optimizer, "mse")
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 1024, (8 * steps, 128))
    x = {"token_ids": tokens, "padding_mask": np.ones_like(tokens)}
    y = np.zeros((len(tokens), 128, width), "float32")
    return lambda: model.fit(x, y, batch_size=8, verbose=0)


def share(width: int, rounds: int) -> list[Row]:
    found = []
    for frequency, steps in ((1, 2), (10, 10), (100, 100)):
        sides = {
            "ours": training(REKLS(precondition_frequency=frequency), width, steps),
            "theirs": training(keras.optimizers.AdamW(), width, steps),
        }
        runs = interleave(sides, rounds=max(2, rounds if steps < 100 else rounds // 2), between=lambda: None)
        found.append(Row(f"{steps} steps, frequency {frequency}", "AdamW", runs["ours"], runs["theirs"]))
    return found


def main(argv: list[str] | None = None) -> int:
    """Run the comparisons and print the table."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--blocks", type=int, default=1, help="for twice")
    parser.add_argument("--only", default="", help="only the comparisons whose name contains this")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    jax.config.update("jax_num_cpu_devices", DEVICES)
    comparisons = {"twice": partial(twice, blocks=options.blocks), "hands": hands, "share": share}
    rows = [
        row
        for name, compare in comparisons.items()
        if options.only in name
        for row in compare(options.width, options.rounds)
    ]
    print(json.dumps([row.summary() for row in rows]) if options.json else rows_table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
