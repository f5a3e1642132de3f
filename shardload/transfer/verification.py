"""Verify the bytes of a transfer, if the checkpoint has digests.

A unit is a MiB of a file, with one digest. Staged and packed blocks come from units that are verified as they are read
(`verified_reads`). Everything else is verified by a separate read first: decoded tensors, and all blocks if the budget
has no room for whole units.
"""

from __future__ import annotations

from collections.abc import Iterable

from shardload.errors import BudgetError
from shardload.manifest import Decoded, Tensor
from shardload.stores.location import Location
from shardload.stores.store import UNIT_BYTES
from shardload.transfer.planning import Block, LoadPlan
from shardload.transfer.prefetch import MAX_AHEAD_BYTES, MIN_BUDGET_BYTES, PrefetchedReads
from shardload.transfer.regions import regions
from shardload.transfer.verified_reads import VerifiedReads
from shardload.transfer.verifier import Verifier
from shardload.units import exact_bytes

VERIFIED_BUDGET_BYTES = 4 * UNIT_BYTES
"""Smallest budget with room for units; with less, bytes are read a second time to verify them."""


_READ_HERE = ("staged", "packed")
"""Block kinds whose bytes pass through scratch memory."""


class TransferVerification:
    """The verification of one transfer.

    Args:
        verifier: Compares units with their digests.
        plan: The blocks to read.
    """

    def __init__(self, verifier: Verifier, plan: LoadPlan) -> None:
        self.verifier, self.plan = verifier, plan
        self.verified: VerifiedReads | PrefetchedReads | None = None
        self._before = verifier.bytes_checked

    @property
    def thread_bytes(self) -> int:
        """Memory that verification takes per thread."""
        return UNIT_BYTES if self.plan.host_memory_bytes >= VERIFIED_BUDGET_BYTES else 0

    def begin(self, threads: int) -> int:
        """Prepare for ``threads`` threads; return the bytes of memory they share."""
        staged = (block for block in self.plan.blocks if block.how in _READ_HERE)
        if any(path.store.is_checked for path in self.plan.files):
            return self._begin_remote(staged, threads)
        if not self.thread_bytes:
            return 0
        kept = max(1, min(threads + 2, self.plan.host_memory_bytes // (8 * UNIT_BYTES)))
        self.verified = VerifiedReads(self.verifier, staged, kept_units=kept)
        return kept * UNIT_BYTES

    def _begin_remote(self, blocks: Iterable[Block], threads: int) -> int:
        budget = self.plan.host_memory_bytes
        if budget < MIN_BUDGET_BYTES:
            raise BudgetError(
                f"Cannot load from a remote store with a host-memory budget of {exact_bytes(budget)}. Raise it to at "
                f"least {MIN_BUDGET_BYTES >> 20}MiB"
            )
        limit = min(MAX_AHEAD_BYTES, budget // 4)
        self.verified = PrefetchedReads(blocks, limit_bytes=limit, threads=threads)
        return limit

    def close(self) -> None:
        """Cancel requests in flight."""
        if isinstance(self.verified, PrefetchedReads):
            self.verified.close()

    def before(self, block: Block, tensor: Tensor) -> None:
        """Verify a block before it is read, unless it is verified while it is read.

        Raises:
            DamagedError: When its bytes do not match their digest.
        """
        if isinstance(tensor.storage, Decoded):
            check_tensor(self.verifier, tensor)
        # Inline and unwritten chunks too: they are in a header, somewhere in the file, so all of it is verified.
        elif not block.read_bytes or not self._is_verified(block):
            _check(self.verifier, block.path, block.offset, block.read_bytes)

    def after(self, block: Block) -> None:
        """Release units kept for a block that has been moved."""
        if self.verified is not None and self._is_verified(block):
            self.verified.release(block)

    def read_bytes(self) -> int:
        """Return the bytes read from files; call it after the transfer."""
        # Verified blocks count as the whole units that were read for them; all others were read a second time.
        used = sum(block.read_bytes for block in self.plan.blocks if not self._is_verified(block))
        return used + self.verifier.bytes_checked - self._before

    def _is_verified(self, block: Block) -> bool:
        return self.verified is not None and block.how in _READ_HERE


def check_tensor(verifier: Verifier, tensor: Tensor) -> None:
    """Verify everything a tensor is read from; for a decoded tensor, whole files.

    Raises:
        DamagedError: When a digest does not match.
    """
    if isinstance(tensor.storage, Decoded):
        for path in tensor.storage.reader.paths:
            verifier.check(path, 0, path.size)
    else:
        for region in regions(tensor):
            _check(verifier, region.path, region.offset, region.stored_bytes(tensor.dtype))


def _check(verifier: Verifier, path: Location, offset: int, n_bytes: int) -> None:
    """Verify a range; an empty tensor is stored in the headers, somewhere in that file."""
    start, stop = (offset, offset + n_bytes) if n_bytes else (0, path.size)
    verifier.check(path, start, stop)
