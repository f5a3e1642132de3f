"""Variables that are computed from others while these are loaded (`shardload.transfer.encoding`): shards and boxes.

    Chunk (a complete box of the floats) ─► EncodedVariable.encode, on a thread ─► shards of codes, scales, …

On CPU devices, the shards' host memory becomes device memory. Where devices have memory of their own, the largest
output is uploaded box by box, and the others when they are complete.
"""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from shardload.sharding.layout import Bounds
from shardload.transfer.host_memory import arena, arena_bytes
from shardload.transfer.load_plan import Binding, local_bounds


class EncodedVariable:
    """The variables that are computed from one while it is loaded: their shards, filled box by box."""

    def __init__(self, binding: Binding, positions: tuple[int, ...]) -> None:
        assert binding.encoding is not None
        self.binding, self.encoding = binding, binding.encoding
        self._boxes = [local_bounds(out.layout, out.shape, positions) for out in binding.outputs]
        self.shards: list[dict[Bounds, NDArray[Any]]] = []
        self.boxes_left = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the shards of all outputs on this process."""
        shards = zip(self.binding.outputs, self._boxes, strict=True)
        return sum(arena_bytes([box.shape for box in boxes], out.dtype) for out, boxes in shards)

    def take_memory(self, *, first: bool) -> None:
        """Take memory for the shards of all outputs, or with ``first`` false, of all but the largest one."""
        for number, (output, boxes) in enumerate(zip(self.binding.outputs, self._boxes, strict=True)):
            memory = arena([box.shape for box in boxes], output.dtype) if first or number else []
            self.shards.append(dict(zip(boxes, memory, strict=False)))

    def encode(self, values: NDArray[Any], box: Bounds) -> list[dict[Bounds, tuple[Bounds, NDArray[Any]]]]:
        """Encode a box of the variable, and write the results to the shards.

        Returns those of the largest output, if its shards have no memory: the pieces of each shard to upload.
        """
        pieces = []
        for number, place, result in self.encoding.encode(values, box):
            for shard, memory in self.shards[number].items():
                if (both := shard.intersect(place)) is not None:
                    # The Ellipsis keeps rank 0 an array.
                    own: tuple[Any, ...] = (*both.relative_to(shard.start).slices, ...)
                    memory[own] = result[both.relative_to(place.start).slices]
            if not self.shards[number]:
                boxes, dtype = self._boxes[number], self.binding.outputs[number].dtype
                common = {shard: both for shard in boxes if (both := shard.intersect(place)) is not None}
                parts = {shard: result[both.relative_to(place.start).slices] for shard, both in common.items()}
                pieces.append({shard: (common[shard], part.astype(dtype)) for shard, part in parts.items()})
        return pieces
