"""How much host memory a load may use for reading, decoding, encoding and uploading: its budget."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from shardload.errors import BudgetError
from shardload.manifest import Manifest, Tensor
from shardload.transfer.encoding import divided_dim
from shardload.transfer.geometry import regions
from shardload.transfer.load_plan import BUDGET_PARTS, Binding, local_bounds
from shardload.units import exact_bytes

MIN_BLOCK_BYTES = 4 << 10
"""A small budget shortens blocks to this many bytes (one page), but no further: a budget without room for sixteen such
blocks is refused."""
DEFAULT_HOST_MEMORY = 256 << 20
"""Default host-memory budget in bytes, for reading, decoding and uploading: enough to keep every thread busy with
several blocks. A larger budget makes loading faster onto a GPU (docs/performance/gpu.md), and not onto CPU devices."""
SCRATCH_BYTES = 64 << 20
"""Most bytes of scratch (each thread's own buffer) for all threads together: 8 MiB for each of eight threads. If a
thread needs more, fewer threads run."""
_CHECKING_BYTES = SCRATCH_BYTES + (64 << 20)
"""Most bytes that a verified or remote load takes for scratch, and for units (MiB of files) that it keeps for later
blocks or requests in advance."""


def staged_whole(manifest: Manifest, bindings: Sequence[Binding], positions: tuple[int, ...]) -> Mapping[str, int]:
    """Return the bytes of host memory that variables take which are encoded as a whole, by the name of their tensor.

    It is the memory of their boxes and of what is computed from these. Variables of one tensor are in memory together.
    """
    found = Counter[str]()
    for binding in bindings:
        tensor = manifest.tensors.get(binding.view.tensor)
        if binding.encoding is None or tensor is None:
            continue
        if divided_dim(binding.encoding, binding.view, tensor) is None:
            staged = sum(box.size for box in local_bounds(binding.layout, binding.view.shape, positions))
            computed = sum(math.prod(output.shape) * output.dtype.itemsize for output in binding.outputs)
            found[binding.view.tensor] += staged * binding.dtype.itemsize + computed
    return found


def host_memory_budget(
    tensors: Sequence[Tensor], whole: Mapping[str, int], asked: int | None, *, through_units: bool, uploads: bool
) -> int:
    """Return the budget of a load that was ``asked`` for, or the default one; raise `BudgetError` if it is too small.

    ``whole`` has the bytes of what is encoded as a whole, by the name of its tensor (`staged_whole`).
    """
    needs = {tensor.name: least_budget(tensor, through_units=through_units, uploads=uploads) for tensor in tensors}
    # A fifth more, for the block that is read.
    encoding = max((_with_scratch(n * 5 // 4, through_units=through_units) for n in whole.values()), default=0)
    least = max(encoding, *needs.values(), 0)
    # A default may grow to what a chunk needs; a budget that the user stated is a promise, so too little is an error.
    if asked is None:
        return max(DEFAULT_HOST_MEMORY, least)
    if asked < BUDGET_PARTS * MIN_BLOCK_BYTES:
        raise BudgetError(
            f"Cannot load with a host-memory budget of {exact_bytes(asked)}: expected room for {BUDGET_PARTS} "
            f"blocks. Raise it to at least {BUDGET_PARTS * MIN_BLOCK_BYTES >> 10}KiB"
        )
    if asked < encoding:
        name = max(whole, key=whole.__getitem__)
        raise BudgetError(
            f"Cannot quantise the weights in tensor {name!r} with a host-memory budget of {exact_bytes(asked)}: the "
            f"order of their elements in the file requires {exact_bytes(whole[name])} at once. Raise the budget to at "
            f"least {exact_bytes(encoding)}"
        )
    if asked < least:
        tensor = next(tensor for tensor in tensors if needs[tensor.name] == least)
        chunk = max(region.size for region in regions(tensor)) * tensor.dtype.itemsize
        raise BudgetError(
            f"Cannot load tensor {tensor.name!r} with a host-memory budget of {exact_bytes(asked)}: its chunks "
            f"decode as a whole, to {exact_bytes(chunk)} each. Raise the budget to at least {exact_bytes(least)}"
        )
    return asked


def least_budget(tensor: Tensor, *, through_units: bool, uploads: bool) -> int:
    """Return the smallest host-memory budget, in bytes, with which every chunk of a tensor can be decoded.

    It is 0 if no chunk has to be decoded as a whole. Other things take their share of the budget first. What they leave
    must have room for the encoded bytes of a chunk and twice its decoded bytes:

    * ``through_units``: bytes are verified or come from a remote store. The threads' scratch memory and the parts of
      files that are kept or requested in advance then take half of the budget, but at most 128 MiB (`_CHECKING_BYTES`).
    * Otherwise, scratch memory takes a quarter of the budget, but at most 64 MiB (`SCRATCH_BYTES`).
    * ``uploads``: shards are filled in host memory and then copied to devices. They get half of what is left, so twice
      the decoded size of a chunk is added.
    """
    most = max((region.unpacking_bytes(tensor.dtype) for region in regions(tensor)), default=0)
    if not most:
        return 0
    # Twice a chunk's shards, as they get half of what is left.
    if uploads:
        most += 2 * max(region.size for region in regions(tensor)) * tensor.dtype.itemsize
    return _with_scratch(most, through_units=through_units)


def _with_scratch(n_bytes: int, *, through_units: bool) -> int:
    """Return the budget of which scratch, and the units of a remote or verified load, leave ``n_bytes``."""
    # The shares that `least_budget` describes, solved for the budget.
    if through_units:
        return min(2 * n_bytes, n_bytes + _CHECKING_BYTES) + (2 << 20)
    return min(n_bytes * 4 // 3, n_bytes + SCRATCH_BYTES)
