"""Random weights that speak: ``python -m benchmarks.agreement_weights JOB.json`` makes a checkpoint memorise texts.

A model with random weights prefers one of 256,000 words to the next by less than rounding to bfloat16 moves their
logits, so which one it says is decided by the order of sums. A trained model has reasons. `memorise` gives a random
one reasons, too: the vocabulary's rows are fitted until each prompt is continued by a text of its own, every word of
it preferred by half of `MARGIN` or more on one device in float32. All other weights stay random, and every word
depends on what all layers make of all words before it.
"""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"
os.environ["JAX_PLATFORMS"] = "cpu"
sys.modules["tensorflow"] = sys.modules["tensorflow_text"] = None  # type: ignore[assignment]

import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402

QUIETER, LOUDER = 4, 6
"""Powers of two of `temper`."""
MARGIN = 6.0
"""What is fitted: how much a memorised word's logit is above all others, before Gemma 2's soft cap."""
ROUNDS = 8
"""Fits at most; changing a row changes what later positions see."""
ROWS, LAST_NORM = "layers/reversible_embedding/vars/0", "layers/rms_normalization/vars/0"


def temper(source: str) -> None:
    """Divide the vocabulary's rows, multiply the last norm's weights, in the file.

    With tied random rows a token's own row is the likeliest next one, whatever the layers say: every model would
    repeat its prompt's last token, and agree. With small rows the layers decide; the last norm then brings logits
    back to the size of a real model's, which is what an absolute tolerance needs. Both factors are powers of two.
    """
    rows = stored(source, ROWS)
    for start in range(0, len(rows), 1 << 14):
        rows[start : start + (1 << 14)] -= QUIETER << 7  # the exponent's lowest bit
    norm = stored(source, LAST_NORM).view(ml_dtypes.bfloat16)
    norm[:] = 2.0**LOUDER * (1 + norm.astype(np.float32)) - 1  # Gemma adds 1 to what is stored


def stored(source: str, name: str) -> np.ndarray:
    """A bfloat16 tensor in its file, writable, as bits."""
    from shardload.loaders import open_manifest

    tensor = open_manifest(source).tensors[name]
    place: Any = tensor.storage
    return np.memmap(place.path, np.uint16, "r+", offset=place.offset, shape=tensor.shape)


def continuations(prompts: list[list[int]], length: int, vocabulary: int) -> list[list[int]]:
    """As many words for each prompt, no word twice, none of any prompt."""
    used = {word for prompt in prompts for word in prompt} | set(range(256))
    free = np.setdiff1d(np.arange(vocabulary), sorted(used))
    chosen = np.random.default_rng(1).choice(free, len(prompts) * length, replace=False)
    return [[int(word) for word in row] for row in chosen.reshape(len(prompts), length)]


def memorise(source: str, prompts: list[list[int]], texts: list[list[int]]) -> list[float]:
    """Fit the vocabulary's rows in the file until each prompt is continued by its text.

    A word's row moves along that combination of hidden states which sees its own position and no other memorised
    one: the pseudo-inverse of those states, so it is the smallest change that does it.

    Returns:
        The smallest margin before each round.

    Raises:
        RuntimeError: `ROUNDS` were not enough.
    """
    import shardload
    from benchmarks.agreement_child import forward

    model = shardload.load(source, mesh="1x1", dtype="float32")
    rows = stored(source, ROWS).view(ml_dtypes.bfloat16)
    table = rows.astype(np.float32)
    chosen = np.array([word for text in texts for word in text])
    embeddings, smallest = model.backbone.token_embedding.embeddings, []
    whole = [prompt + text for prompt, text in zip(prompts, texts, strict=True)]
    ends = np.cumsum([len(sequence) for sequence in whole])
    before = np.concatenate([np.arange(end - len(text), end) - 1 for end, text in zip(ends, texts, strict=True)])
    for _ in range(ROUNDS):
        found = forward(model, whole, part=model.backbone)[before].astype(np.float64)
        logits = found.astype(np.float32) @ table.T
        at = np.arange(len(chosen))
        own = logits[at, chosen].copy()
        logits[at, chosen] = -np.inf
        missing = MARGIN - (own - logits.max(axis=1))
        smallest.append(float(MARGIN - missing.max()))
        if smallest[-1] >= MARGIN / 2:
            return smallest
        change = np.linalg.pinv(found) * np.maximum(missing, 0)
        rows[chosen] = (table[chosen] + change.T).astype(ml_dtypes.bfloat16)
        table[chosen] = rows[chosen]
        embeddings.assign(table)
    raise RuntimeError(f"words are still preferred by {smallest[-1]:.2f} only; before each round: {smallest}")


def main() -> None:
    """Run the job named on the command line."""
    import jax

    job = json.loads(Path(sys.argv[1]).read_text())
    jax.config.update("jax_num_cpu_devices", math.prod(map(int, job["mesh"].split("x"))))
    rows = stored(job["source"], ROWS)
    texts = continuations(job["prompts"], job["new_tokens"], len(rows))
    print(json.dumps({"margins": memorise(job["source"], job["prompts"], texts), "texts": texts}))


if __name__ == "__main__":
    main()
