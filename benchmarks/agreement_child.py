"""One model on one mesh, in a process of its own: ``python -m benchmarks.agreement_child JOB.json``.

Loads it, runs its forward pass and its greedy generation on one prompt and on all of them, and writes logits and
tokens to ``out`` as an ``.npz``, the rest to standard output as one JSON object. On the mesh 1x1 it also writes by
how much each generated token won over the runner-up: that says what a difference elsewhere is worth.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"
os.environ["JAX_PLATFORMS"] = "cpu"
sys.modules["tensorflow"] = sys.modules["tensorflow_text"] = None  # type: ignore[assignment]

import jax  # noqa: E402
import keras  # noqa: E402
import numpy as np  # noqa: E402

from benchmarks.measure import memory_status  # noqa: E402
from shardload.keras_bridge.binding import binding_of  # noqa: E402


def forward(model: Any, prompts: list[list[int]], *, part: Any = None) -> np.ndarray:
    """Logits in float32 of every real token of every prompt, one row a token, from one compiled call.

    Not ``predict``: it hands the weights back as results, which makes a copy for each simulated device.

    Args:
        model: What was loaded.
        prompts: Token ids.
        part: The part of the model whose outputs are wanted instead: its backbone gives hidden states.
    """
    part = part or model
    longest = max(map(len, prompts))
    tokens = np.zeros((len(prompts), longest), np.int32)
    mask = np.zeros((len(prompts), longest), np.bool_)
    for row, ids in enumerate(prompts):
        tokens[row, : len(ids)], mask[row, : len(ids)] = ids, True
    weights = [[v.value for v in of] for of in (part.trainable_variables, part.non_trainable_variables)]
    binding = binding_of(model)
    with binding.scope():
        data = {
            name: keras.distribution.distribute_tensor(
                keras.ops.convert_to_tensor(value), binding.distribution.get_data_layout(value.shape)
            )
            for name, value in (("token_ids", tokens), ("padding_mask", mask))
        }
        outputs = jax.jit(lambda weights, data: part.stateless_call(*weights, data)[0])(weights, data)
        return np.asarray(outputs)[mask].astype(np.float32)


def margins(model: Any, prompts: list[list[int]], added: list[list[int]]) -> np.ndarray:
    """Logit of the likeliest token over that of the second, after each prefix of the generated text."""
    found = []
    for prompt, new in zip(prompts, added, strict=True):
        best = np.sort(np.partition(forward(model, [prompt + new]), -2, axis=-1)[:, -2:], axis=-1)
        found.append((best[:, 1] - best[:, 0])[len(prompt) - 1 : -1])
    return np.stack(found)


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Everything measured about one model on one mesh; arrays go to the file ``out``."""
    import shardload
    from shardload.text import generation

    generation.LENGTH_STEP = 1  # each position beyond those asked for would cost a step over all weights
    began = time.perf_counter()
    model = shardload.load(job["source"], mesh=job["mesh"], dtype=job["dtype"])
    loaded = memory_status()
    seconds = {"load": time.perf_counter() - began}
    arrays: dict[str, np.ndarray] = {}
    for name, prompts in (("one", job["prompts"][:1]), ("all", job["prompts"])):
        began = time.perf_counter()
        arrays[f"logits_{name}"] = forward(model, prompts)
        seconds[f"forward_{name}"] = time.perf_counter() - began
        if job["new_tokens"]:
            added = generation.generate_ids(model, prompts, max_new_tokens=job["new_tokens"])
            arrays[f"tokens_{name}"] = np.array(added)
            if job["mesh"] == "1x1":
                arrays[f"margins_{name}"] = margins(model, prompts, added)
        seconds[name] = time.perf_counter() - began
    np.savez(job["out"], **arrays)
    report = shardload.report(model)
    return {
        "parameters": report.parameters,
        "fallbacks": len(report.layout.fallbacks),
        "sharded": report.layout.sharded,
        "seconds": seconds,
        "loaded_rss_bytes": loaded["rss_bytes"],
        "peak_rss_bytes": memory_status()["peak_rss_bytes"],
    }


def main() -> None:
    """Run the job named on the command line."""
    job = json.loads(Path(sys.argv[1]).read_text())
    jax.config.update("jax_num_cpu_devices", math.prod(map(int, job["mesh"].split("x"))))
    print(json.dumps(run(job)))


if __name__ == "__main__":
    main()
