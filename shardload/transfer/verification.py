"""What a transfer does to use only bytes that are as they were saved, where a checkpoint has digests.

Staged and packed blocks come from units that were checked as they were read (`verified_reads`). What cannot is
checked by a read of its own first: decoded tensors, and everything under a budget that has no room for whole units.
"""

from __future__ import annotations

from collections.abc import Iterable

from shardload.errors import BudgetError
from shardload.manifest import Decoded, Tensor
from shardload.stores import file_access
from shardload.stores.file_access import UNIT_BYTES
from shardload.transfer.planning import Block, LoadPlan
from shardload.transfer.prefetch import MAX_AHEAD_BYTES, MIN_BUDGET_BYTES, AheadReads, reads_remote
from shardload.transfer.regions import regions
from shardload.transfer.verified_reads import VerifiedReads
from shardload.transfer.verifier import Verifier

VERIFIED_BUDGET_BYTES = 4 * UNIT_BYTES
"""From here on there is room for units; a smaller budget has what it reads read once more to be checked."""


_READ_HERE = ("staged", "packed")
"""Ways to move a block that pass its bytes through scratch memory."""


class TransferVerification:
    """The checks of one transfer.

    Args:
        verifier: Knows the digests.
        plan: What will be read.
    """

    def __init__(self, verifier: Verifier, plan: LoadPlan) -> None:
        self.verifier, self.plan = verifier, plan
        self.verified: VerifiedReads | AheadReads | None = None
        self._before = verifier.bytes_checked

    @property
    def thread_bytes(self) -> int:
        """Memory each thread takes for them."""
        return UNIT_BYTES if self.plan.host_memory_bytes >= VERIFIED_BUDGET_BYTES else 0

    def begin(self, threads: int) -> int:
        """Get ready for so many threads; returns the bytes of memory all of them share."""
        staged = (block for block in self.plan.blocks if block.how in _READ_HERE)
        if reads_remote(self.plan.files):
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
                f"A host-memory budget of {budget} B leaves no room for what comes from a remote store. Give it at "
                f"least {MIN_BUDGET_BYTES >> 20}MiB"
            )
        limit = min(MAX_AHEAD_BYTES, budget // 4)
        self.verified = AheadReads(blocks, limit_bytes=limit, threads=threads)
        return limit

    def close(self) -> None:
        """Give up what is still being fetched."""
        if isinstance(self.verified, AheadReads):
            self.verified.close()

    def before(self, block: Block, tensor: Tensor) -> None:
        """Called before a block is read.

        Raises:
            DamagedError: When its bytes are not those that were saved.
        """
        if isinstance(tensor.storage, Decoded):
            check_tensor(self.verifier, tensor)
        elif not block.read_bytes or not self._is_verified(block):
            _check(self.verifier, block.path, block.offset, block.read_bytes)

    def after(self, block: Block) -> None:
        """Called when it was moved."""
        if self.verified is not None and self._is_verified(block):
            self.verified.release(block)

    def read_bytes(self) -> int:
        """Bytes read from files so far, in a transfer that is done."""
        used = sum(block.read_bytes for block in self.plan.blocks if not self._is_verified(block))
        return used + self.verifier.bytes_checked - self._before

    def _is_verified(self, block: Block) -> bool:
        return self.verified is not None and block.how in _READ_HERE


def check_tensor(verifier: Verifier, tensor: Tensor) -> None:
    """Check everything a tensor is read from; of a decoded one, whole files.

    Raises:
        DamagedError: When it is not what was saved.
    """
    if isinstance(tensor.storage, Decoded):
        for path in tensor.storage.reader.paths:
            verifier.check(path, 0, file_access.size_of(path))
    else:
        for region in regions(tensor):
            _check(verifier, region.path, region.offset, region.stored_bytes(tensor.dtype))


def _check(verifier: Verifier, path: str, offset: int, n_bytes: int) -> None:
    """What has no bytes of its own is kept in the headers, somewhere in that file."""
    start, stop = (offset, offset + n_bytes) if n_bytes else (0, file_access.size_of(path))
    verifier.check(path, start, stop)
