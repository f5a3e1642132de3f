"""Does a sharded model say what the unsharded one says? ``python -m benchmarks.agreement``.

For each model, dtype and mesh a fresh process loads, runs the forward pass and generates greedily, for one prompt
(fewer than the batch axis of 2x4 and 8x1) and for eight; everything is compared with the mesh 1x1::

    model       weights                                                    why
    gemma3      the real Gemma 3 270M                                      1 KV head, hidden 640
    gemma2_2b   random, exact architecture (`shardload synth`)             4 KV heads, soft caps, post norms
    gemma_2b    random, exact architecture                                 1 KV head

Random models memorise a text for each prompt first (`benchmarks.agreement_weights`); without (``--forgetful``) what
they say hangs on rounding. Random checkpoints of 5 GB are written one at a time and deleted.

Memory (both are the CPU platform's doing): float32 needs the weights once, as replicas share host memory; for
bfloat16 XLA keeps float32 copies of weights in use, one for each simulated device that holds them, which is what
``--vocabulary`` and ``--layers`` are for. A run that would use up the machine's memory is stopped and reported as such.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"
os.environ["JAX_PLATFORMS"] = "cpu"
sys.modules["tensorflow"] = sys.modules["tensorflow_text"] = None  # type: ignore[assignment]

import numpy as np  # noqa: E402

from benchmarks.agreement_weights import temper  # noqa: E402

MODELS = ("gemma3", "gemma2_2b", "gemma_2b")
MESHES = ("1x8", "2x4", "8x1", "1x3")
DTYPES = ("float32", "bfloat16")
TOLERANCE = 1e-4
"""Largest difference of float32 logits allowed."""
SPARE_BYTES = 1_500_000_000
"""Memory left to everyone else; below it a run is stopped."""
TEXTS = (
    "The capital of France is",
    "The capital of Japan is the city of",
    "Water boils at",
    "One, two, three, four,",
    "def fibonacci(n):",
    "Once upon a time there was a",
    "La capitale de la France est",
    "E = mc",
)
DEMO_IDS = [2, 651, 6037, 576, 6081, 603]
"""The first of `TEXTS` in the vocabulary of Gemma 1 and 2, which random checkpoints do not bring along."""
# Hoisting turns all bfloat16 weights into float32 at once before the first step of a generation.
XLA_FLAGS = "--xla_disable_hlo_passes=while-loop-invariant-code-motion"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    model: str
    mesh: str
    dtype: str
    seconds: float
    logits_difference: float = 0.0
    """Largest over both batches, against 1x1."""
    logits_largest: float = 0.0
    rounding: float | None = None
    """Largest difference of 1x1 from 1x1 in float32: what the dtype alone costs."""
    one_prompt: str = "-"
    """``equal``, or where the tokens part (prompt@step) and by how much 1x1 preferred its own there."""
    eight_prompts: str = "-"
    largest_margin: float = 0.0
    """The largest of those margins; within twice ``logits_difference`` it was a tie but for rounding."""
    distinct_tokens: int = 0
    """How many different tokens 1x1 made for eight prompts: whether equality says anything."""
    fallbacks: int = 0
    peak_gb: float = 0.0
    """Peak resident memory of the process."""
    failure: str = ""

    @property
    def passed(self) -> bool:
        """float32: logits within tolerance, all tokens equal. bfloat16: one prompt equal, others part at ties only."""
        if self.failure or self.one_prompt not in ("equal", "-"):
            return False
        if self.dtype == "float32":
            return self.logits_difference <= TOLERANCE and self.eight_prompts in ("equal", "-")
        return self.largest_margin <= 2 * self.logits_difference


def compare(ours: Any, reference: Any) -> dict[str, Any]:
    """Numbers of a `Row` from two files of `benchmarks.agreement_child`."""
    one, eight = _partings(ours, reference, "one"), _partings(ours, reference, "all")
    return {
        "logits_difference": _difference(ours, reference),
        "logits_largest": float(np.abs(reference["logits_all"]).max()),
        "one_prompt": _verdict(one),
        "eight_prompts": _verdict(eight),
        "largest_margin": max([margin for _, _, margin in [*(one or ()), *(eight or ())]], default=0.0),
        "distinct_tokens": len(np.unique(reference["tokens_all"])) if "tokens_all" in reference else 0,
    }


def _difference(a: Any, b: Any) -> float:
    return max(float(np.abs(a[name] - b[name]).max()) for name in ("logits_one", "logits_all"))


def _partings(ours: Any, reference: Any, batch: str) -> list[tuple[int, int, float]] | None:
    """(prompt, first differing step, 1x1's margin there) of each prompt that differs; ``None`` if none was run."""
    if f"tokens_{batch}" not in reference:
        return None
    differs = ours[f"tokens_{batch}"] != reference[f"tokens_{batch}"]
    first = [(row, int(steps.argmax())) for row, steps in enumerate(differs) if steps.any()]
    return [(row, step, float(reference[f"margins_{batch}"][row, step])) for row, step in first]


def _verdict(partings: list[tuple[int, int, float]] | None) -> str:
    if not partings:
        return "-" if partings is None else "equal"
    return "differ: " + ", ".join(f"{row}@{step} margin {margin:.3f}" for row, step, margin in partings)


def measure(model: str, source: str, options: argparse.Namespace) -> Iterator[Row]:
    """Every mesh and dtype of one model."""
    prompts = real_prompts(source) if model == "gemma3" else random_prompts()
    with tempfile.TemporaryDirectory(prefix="agreement-") as name:
        folder = Path(name)
        for dtype in options.dtypes:
            job = {"source": source, "dtype": dtype, "prompts": prompts, "new_tokens": options.new_tokens}
            reference = _child({**job, "mesh": "1x1"}, folder)
            for mesh in options.meshes:
                found = _child({**job, "mesh": mesh}, folder) if not reference["failure"] else reference
                yield _row(label(model, options), mesh, dtype, found, folder)


def label(model: str, options: argparse.Namespace) -> str:
    """The model, and in what it is smaller than the real one."""
    smaller = [f"{n} {what}" for n, what in ((options.layers, "layers"), (options.vocabulary, "words")) if n]
    return f"{model} ({', '.join(smaller)})" if smaller and model != "gemma3" else model


def _row(model: str, mesh: str, dtype: str, found: dict[str, Any], folder: Path) -> Row:
    head = {"model": model, "mesh": mesh, "dtype": dtype, "seconds": found["wall_s"]}
    if found["failure"]:
        return Row(**head, failure=found["failure"])
    exact = folder / "1x1-float32.npz"
    with np.load(folder / f"{mesh}-{dtype}.npz") as ours, np.load(folder / f"1x1-{dtype}.npz") as reference:
        rounding = _difference(reference, np.load(exact)) if exact.exists() else None
        sizes = {"fallbacks": found["fallbacks"], "peak_gb": found["peak_rss_bytes"] / 1e9}
        return Row(**head, **sizes, **compare(ours, reference), rounding=rounding)


def _child(job: dict[str, Any], folder: Path, *, module: str = "agreement_child") -> dict[str, Any]:
    """Run one job, stopping it before it takes the machine's last memory; ``failure`` says what went wrong."""
    described = folder / "job.json"
    described.write_text(json.dumps({**job, "out": str(folder / f"{job['mesh']}-{job.get('dtype')}.npz")}))
    command = [sys.executable, "-m", f"benchmarks.{module}", str(described)]
    began, failure = time.perf_counter(), ""
    with (folder / "errors").open("w+") as errors, (folder / "found").open("w+") as found:
        child = subprocess.Popen(command, stdout=found, stderr=errors, env={**os.environ, "XLA_FLAGS": XLA_FLAGS})
        try:
            while child.poll() is None:
                if _available_bytes() < SPARE_BYTES and not failure:
                    failure = (
                        f"stopped, as the machine's memory was nearly used up; it held {_resident_gb(child.pid):.1f} GB"
                    )
                    child.kill()
                time.sleep(0.2)
        finally:
            child.kill()
            child.wait()
        wall_s = time.perf_counter() - began
        if child.returncode:
            errors.seek(0)
            last = (errors.read().strip().splitlines() or [f"exit status {child.returncode}"])[-1]
            return {"failure": failure or last, "wall_s": wall_s}
        found.seek(0)
        return {**json.loads(found.read().splitlines()[-1]), "failure": "", "wall_s": wall_s}


def _available_bytes() -> int:
    line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    return int(line.split()[1]) << 10


def _resident_gb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e9


@contextlib.contextmanager
def source_of(model: str, options: argparse.Namespace) -> Iterator[str]:
    """The real Gemma 3, or a random checkpoint that is gone afterwards."""
    if model == "gemma3":
        yield "gemma3_270m"
        return
    from shardload import synth
    from shardload.families import Family, register, unregister
    from shardload.resolve.architectures import lookup

    smaller = {"num_hidden_layers": options.layers, "vocab_size": options.vocabulary}
    config = {**lookup(model)[1], **{k: v for k, v in smaller.items() if v}}
    register(Family(name="agreement", title="Agreement", sizes={"agreement": config}))
    try:
        with tempfile.TemporaryDirectory(prefix="agreement-") as folder:
            path = str(synth.synth("agreement", directory=folder))
            temper(path)
            if options.new_tokens and not options.forgetful:
                job = {"source": path, "mesh": "1x1", "prompts": random_prompts(), "new_tokens": options.new_tokens}
                found = _child(job, Path(folder), module="agreement_weights")
                if found["failure"]:
                    raise SystemExit(f"{model} could not memorise its texts: {found['failure']}")
                print(f"{model}: margins before each round of memorising: {found['margins']}", file=sys.stderr)
            yield path
    finally:
        unregister("agreement")


def real_prompts(source: str) -> list[list[int]]:
    """`TEXTS` as token ids of the checkpoint's own tokenizer."""
    from shardload.loaders import open_manifest
    from shardload.resolve import resolve
    from shardload.text.sources import tokenizer_of

    tokenizer = tokenizer_of(open_manifest(resolve(source).path))
    return [tokenizer.encode(text) for text in TEXTS]


def random_prompts() -> list[list[int]]:
    """The demo's prompt and seven as long as it, for weights that know no language."""
    return [DEMO_IDS, *([2, *row] for row in np.random.default_rng(0).integers(3, 30_000, size=(7, 5)).tolist())]


def line(row: Row) -> str:
    """One line of the table, for people."""
    head = f"{row.model:<36}{row.mesh:<6}{row.dtype:<10}"
    if row.failure:
        return head + row.failure
    tokens = f"one: {row.one_prompt}; eight: {row.eight_prompts}"
    numbers = f"{row.logits_difference:>10.2e}{row.rounding or 0:>10.2e}{row.logits_largest:>8.2f}"
    return f"{head}{numbers}{row.fallbacks:>6}{row.distinct_tokens:>10}{row.seconds:>7.0f}{row.peak_gb:>6.1f}  {tokens}"


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.agreement", description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=MODELS, action="append", help="these models (default: all)")
    parser.add_argument("--mesh", dest="meshes", choices=MESHES, action="append", help="these meshes (default: all)")
    parser.add_argument("--dtype", dest="dtypes", choices=DTYPES, action="append", help="these dtypes (default: both)")
    parser.add_argument("--layers", type=int, help="fewer layers for the random models, all dims exact")
    parser.add_argument("--vocabulary", type=int, help="a smaller vocabulary for the random models")
    parser.add_argument("--new-tokens", type=int, default=16, help="tokens to generate (default: 16; 0: none)")
    parser.add_argument("--forgetful", action="store_true", help="random models as they come, without memorised texts")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    options.meshes, options.dtypes = options.meshes or MESHES, options.dtypes or DTYPES
    return options


def main() -> int:
    """Print the table as it comes; 1 when something disagrees."""
    options = parse()
    if not options.json:
        print(
            f"{'model':<36}{'mesh':<6}{'dtype':<10}{'|Δlogit|':>10}{'rounding':>10}{'|logit|':>8}{'fall.':>6}{'distinct':>10}",
            end="",
        )
        print(f"{'s':>7}{'GB':>6}  tokens against 1x1")
    passed = True
    for model in options.only or MODELS:
        with source_of(model, options) as source:
            for row in measure(model, source, options):
                print(json.dumps(dataclasses.asdict(row)) if options.json else line(row), flush=True)
                passed = passed and row.passed
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
