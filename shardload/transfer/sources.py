"""Chooses the `ByteSource` of a load: where its threads get the bytes of blocks."""

from __future__ import annotations

from shardload.stores.store import UNIT_BYTES
from shardload.transfer.byte_source import (
    IN_SCRATCH,
    ByteSource,
    CachedFileReads,
    FileReads,
    UnitReads,
    Verifier,
    source_kind,
)
from shardload.transfer.load_plan import LoadPlan
from shardload.transfer.range_reads import RangeReads

_MAX_AHEAD_BYTES = 64 << 20
"""Most bytes of memory for ranges of remote files (up to 4 MiB each) that were requested and are not yet used up.
Sixteen ranges fit. Each thread may need two of them: one for itself, and one that it shares with a neighbouring block.
With two threads, this leaves twelve ranges that are on their way."""


def byte_source(plan: LoadPlan, verifier: Verifier | None, *, threads: int) -> ByteSource:
    """Create the `ByteSource` that delivers the bytes of a plan to ``threads`` threads; raises like `source_kind`."""
    blocks = (block for block in plan.blocks if block.how in IN_SCRATCH)
    match source_kind(plan, verifier):
        case "files":
            return CachedFileReads(verifier) if plan.is_cached else FileReads(verifier)
        case "units":
            kept = max(1, min(threads + 2, plan.host_memory_bytes // (8 * UNIT_BYTES)))
            return UnitReads(blocks, kept_units=kept, verifier=verifier)
        case "ranges":
            limit = min(_MAX_AHEAD_BYTES, plan.host_memory_bytes // 4)
            return RangeReads(blocks, limit_bytes=limit, threads=threads, verifier=verifier)
