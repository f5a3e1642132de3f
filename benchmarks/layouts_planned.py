"""Bytes that searched plans exchange against those of compiled programs: ``benchmarks.layouts --planned``.

For every model, mesh and step, a plan without a memory limit is compiled on shapes, and the summed result bytes of its
collectives are compared with those that the plan states::

    cases ─► a process that searches and compiles ─► rows ─► one line per model and step, then the exceptions
             (replaced if it dies or is too slow: that case becomes a row with an error)
"""

from __future__ import annotations

import gc
import json
import math
import multiprocessing
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.layouts import decoders, others

MESHES = ("1x8", "2x4", "8x1", "data=2,fsdp=2,model=2", "data=4,fsdp=2,model=1")
TOLERANCE = 0.05
"""A program is an exception if its bytes differ by more than this share of the planned ones."""
LIMIT_S = 1800
"""Seconds for one case; most take five, and a decoder of real width up to a minute."""
_OPTIMIZERS = {"forward": None, "gradients": "adamw"}
EXCEPTION_HEAD = """\
| model | mesh | step | ratio | collectives that differ: MiB planned / compiled (operations) |
|---|---|---|---|---|"""
_SHOWN = 8
"""How many different instructions `explained` lists for one kind of collective and its axes."""


@dataclass(frozen=True, slots=True)
class Case:
    """One program: a step of a model on a mesh."""

    model: str
    mesh: str
    """As `MeshSpec.parse` reads it."""
    step: str
    """``forward`` (inference) or ``gradients``."""
    batch: int = 16
    sequence: int = 128


def cases(only: str, meshes: Sequence[str], steps: Sequence[str], *, batch: int, sequence: int = 0) -> list[Case]:
    """Return the programs of all models whose name contains ``only``, a regular expression; large models last."""
    found = [(name, length) for name, length in model_lengths().items() if re.search(only, name)]
    return [Case(n, mesh, step, batch, sequence or length) for n, length in found for step in steps for mesh in meshes]


def model_lengths() -> dict[str, int]:
    """Return the names of all models with their numbers of tokens, from a process that ends: KerasHub takes 1 GB."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_lengths)


def _lengths() -> dict[str, int]:
    return {name: length for name, (_, length) in _models().items()}


def _models() -> dict[str, tuple[Callable[[], Any], int]]:
    """Return a builder and the number of tokens for every model by name."""
    from benchmarks.held_out_models import held_out

    short = {name: (make, 128) for name, make in (*held_out(), *others())}
    return short | {name: (make, 2048) for name, make in decoders()}


# ---- one case ----------------------------------------------------------------------------------------


def measured(case: Case, model: Any) -> dict[str, Any]:
    """Return planned and compiled bytes of one program, and its collectives, as an object for `json.dumps`."""
    from shardload.layout_search.tracing import input_specs
    from shardload.parallel import Hardware, choose, compile_step, search
    from shardload.sharding.mesh import MeshSpec

    inputs, mesh = input_specs(model, batch=case.batch, sequence=case.sequence), MeshSpec.parse(case.mesh)
    # XLA for CPU reduces whole sums, of which each device then takes its part.
    hardware = Hardware(reduce_scatter=False)
    plan = search(model, mesh, inputs=inputs, optimizer=_OPTIMIZERS[case.step], hardware=hardware)
    training = None if case.step == "forward" else case.step
    step = compile_step(model, choose(model, mesh, plan), inputs, training=training)
    return head(case) | {
        "planned_bytes": plan.exchanged_bytes,
        "compiled_bytes": step.collective_bytes,
        "planned": [{"kind": e.kind, "axes": e.axis, "count": e.count, "nbytes": e.nbytes} for e in plan.exchanges],
        "compiled": _instructions(step.collectives),
        "compile_s": round(step.compile_s, 1),
    }


def head(case: Case) -> dict[str, Any]:
    """Return what every row says, also if it has an error."""
    return {"model": case.model, "mesh": case.mesh, "step": case.step}


def _instructions(collectives: Iterable[Any]) -> list[dict[str, Any]]:
    """Return the collectives of a program, equal ones of the same operation together, largest first."""
    found = Counter[tuple[Any, ...]]()
    for one in collectives:
        found[one.kind, "+".join(one.axes), one.dtype, one.nbytes, one.operands, one.inside, one.source] += one.count
    names = ("kind", "axes", "dtype", "nbytes", "arrays", "inside", "source")
    rows = [dict(zip(names, key, strict=True)) | {"count": count} for key, count in found.items()]
    return sorted(rows, key=lambda row: -row["nbytes"] * row["count"])


# ---- all cases, in processes of their own ------------------------------------------------------------


def rows(
    wanted: Sequence[Case], *, limit_s: float = LIMIT_S, work: Callable[[Sequence[Case], Any], None] | None = None
) -> Iterator[dict[str, Any]]:
    """Measure cases in another process, and yield one row for each, in order.

    An exception, a process that dies and a case that takes longer than ``limit_s`` are rows with an ``error``.
    ``work`` takes the cases and a connection, and sends one row for each: by default, what `measured` returns.
    """
    left, context = list(wanted), multiprocessing.get_context("spawn")
    while left:
        ours, theirs = context.Pipe(duplex=False)
        worker = context.Process(target=work or _work, args=(tuple(left), theirs), daemon=True)
        worker.start()
        theirs.close()
        try:
            while left:
                row, error = received(ours, limit_s)
                yield row or head(left[0]) | {"error": error}
                del left[0]
                if row is None:
                    break
        finally:
            worker.kill()
            worker.join()
            ours.close()


def received(connection: Any, limit_s: float) -> tuple[dict[str, Any] | None, str]:
    """Return a row, or why there is none."""
    if not connection.poll(limit_s):
        return None, f"took longer than {limit_s:g} s"
    try:
        return connection.recv(), ""
    except EOFError:
        return None, "the process died"


def _work(wanted: Sequence[Case], connection: Any) -> None:
    # Models may print, and the table is the only thing on stdout.
    os.dup2(2, 1)
    import jax

    import shardload
    from shardload.sharding.mesh import MeshSpec

    jax.config.update("jax_num_cpu_devices", max(MeshSpec.parse(case.mesh).size for case in wanted))
    makers, name, model = _models(), "", None
    for case in wanted:
        try:
            if case.model != name:
                name, model = "", None
                jax.clear_caches()
                gc.collect()
                with shardload.abstract():
                    name, model = case.model, makers[case.model][0]()
            connection.send(measured(case, model))
        except Exception as error:
            connection.send(head(case) | {"error": f"{type(error).__name__}: {str(error)[:300]}"})


# ---- tables ------------------------------------------------------------------------------------------


def ratio(row: dict[str, Any]) -> float:
    """Return compiled bytes divided by planned bytes; of a row with an error NaN."""
    if "error" in row:
        return math.nan
    planned, compiled = row["planned_bytes"], row["compiled_bytes"]
    return compiled / planned if planned else math.inf if compiled else 1.0


def is_exception(row: dict[str, Any]) -> bool:
    """Whether planned and compiled bytes differ by more than the tolerance, or there are none."""
    return not abs(ratio(row) - 1) <= TOLERANCE


def cell(row: dict[str, Any]) -> str:
    """Return MiB planned and compiled with their ratio, which is bold if it is an exception."""
    if "error" in row:
        return "error"
    shown = f"**{ratio(row):.2f}**" if is_exception(row) else f"{ratio(row):.2f}"
    return f"{_mib(row['planned_bytes'])} / {_mib(row['compiled_bytes'])}, {shown}"


def _mib(nbytes: int) -> str:
    mib = nbytes / 2**20
    return "0" if not nbytes else f"{mib:,.1f}" if mib >= 1 else f"{mib:.2g}"


def table_head(meshes: Sequence[str]) -> str:
    """Return the first two lines of the table."""
    return "\n".join([f"| model | step | {' | '.join(meshes)} |", "|---" * (len(meshes) + 2) + "|"])


def table_line(found: Sequence[dict[str, Any]]) -> str:
    """Return the line of one model and step, from its rows on all meshes."""
    return f"| {found[0]['model']} | {found[0]['step']} | {' | '.join(map(cell, found))} |"


def exception_line(row: dict[str, Any]) -> str:
    """Return the line of a program that differs: its collectives that do, largest difference first."""
    start = f"| {row['model']} | {row['mesh']} | {row['step']} "
    if "error" in row:
        return f"{start}| | {row['error']} |"
    planned, compiled = _totals(row["planned"]), _totals(row["compiled"])
    keys = [key for key in {*planned, *compiled} if planned[key][1] != compiled[key][1]]
    keys.sort(key=lambda key: (-abs(planned[key][1] - compiled[key][1]), key))
    cells = [f"{kind} {axes} {_mib(planned[kind, axes][1])} / {_mib(compiled[kind, axes][1])}" for kind, axes in keys]
    found = [dict.fromkeys(_operation(one["source"]) for one in row["compiled"] if _key(one) == key) for key in keys]
    shown = [f"{cell} ({', '.join([*names][:3])})" if names else cell for cell, names in zip(cells, found, strict=True)]
    return f"{start}| {ratio(row):.2f} | {'; '.join(shown)} |"


def _key(collective: dict[str, Any]) -> tuple[str, str]:
    return collective["kind"], collective["axes"]


def _operation(source: str) -> str:
    """Return layer and primitive from JAX's name of an operation; of several operations, those of the first."""
    names = re.sub(r"jit\(\w*\)+/|checkpoint/|\b(?:jvp|transpose)\(|[()]", "", source).split(":")[0].split("/")
    named = [name for name in names if name and "->" not in name and name not in ("while", "body", "closed_call")]
    return "/".join(named[-2:]) or "added by XLA"


def explained(row: dict[str, Any]) -> str:
    """Return what a program exchanges per kind and axes against its plan, and by which operations where they differ."""
    title = f"{row['model']}, {row['mesh']}, {row['step']}"
    if "error" in row:
        return f"### {title}: {row['error']}"
    lines = [
        f"### {title}: {row['planned_bytes']:,} bytes planned, {row['compiled_bytes']:,} compiled ({ratio(row):.2f})",
        "",
        "| collective | axes | planned | compiled |",
        "|---|---|---|---|",
    ]
    planned, compiled = _totals(row["planned"]), _totals(row["compiled"])
    keys = sorted({*planned, *compiled})
    for kind, axes in keys:
        cells = [f"{count} x, {nbytes:,}" for count, nbytes in (planned[kind, axes], compiled[kind, axes])]
        lines.append(f"| {kind} | {axes} | {' | '.join(cells)} |")
    lines.append("")
    for key in keys:
        if planned[key][1] != compiled[key][1]:
            lines += _operations(row, key)
    return "\n".join(lines)


def _totals(found: Iterable[dict[str, Any]]) -> defaultdict[tuple[str, str], tuple[int, int]]:
    """Return the number of arrays and their bytes, per kind and axes: XLA puts several arrays into one instruction."""
    totals = defaultdict[tuple[str, str], tuple[int, int]](lambda: (0, 0))
    for one in found:
        count, nbytes = totals[_key(one)]
        # Of a plan, `nbytes` is the sum; of a program, that of one instruction.
        times = one["count"] if "arrays" in one else 1
        arrays = one.get("arrays", 1) * one["count"]
        totals[_key(one)] = (count + arrays, nbytes + one["nbytes"] * times)
    return totals


def _operations(row: dict[str, Any], key: tuple[str, str]) -> Iterator[str]:
    """Yield a line for each compiled instruction of one kind and axes, largest first, with JAX's name of its source."""
    found = [one for one in row["compiled"] if _key(one) == key]
    for one in found[:_SHOWN]:
        inside = f", in a {one['inside']}" if one["inside"] else ""
        arrays = f" of {one['arrays']} arrays" if one["arrays"] > 1 else ""
        source = one["source"] or "(added by XLA)"
        yield f"* {one['count']} x {key[0]} over {key[1]}{arrays}: {one['nbytes']:,} {one['dtype']}{inside}: {source}"
    if len(found) > _SHOWN:
        yield f"* and {len(found) - _SHOWN} more"


def compare(wanted: Sequence[Case], *, as_json: bool, explain: bool) -> None:
    """Print the table and its exceptions, or one JSON object per row."""
    if as_json:
        for row in rows(wanted):
            print(json.dumps(row), flush=True)
        return
    meshes = list(dict.fromkeys(case.mesh for case in wanted))
    print(f"MiB planned / compiled, compiled by planned\n\n{table_head(meshes)}")
    line, exceptions = list[dict[str, Any]](), list[dict[str, Any]]()
    for row in rows(wanted):
        line.append(row)
        if is_exception(row):
            exceptions.append(row)
        if len(line) == len(meshes):
            print(table_line(line), flush=True)
            line = []
    print(f"\n{len(exceptions)} of {len(wanted)} programs differ by more than {TOLERANCE:.0%}.")
    if exceptions:
        print(f"\n{EXCEPTION_HEAD}")
    for row in exceptions:
        print(exception_line(row))
    for row in exceptions if explain else ():
        print(f"\n{explained(row)}", flush=True)
