"""Where pieces of a variable go: `shardload.transfer.placement`."""

import numpy as np
import pytest

from shardload.manifest import View
from shardload.sharding.layout import Bounds, Layout
from shardload.sharding.mesh import MeshSpec
from shardload.transfer.placement import Chunk, VariableTransfer, stacked_dim
from shardload.transfer.planning import Binding, BlockPiece, local_bounds
from shardload.transfer.scratch import BlockMemory, copy

MESH = MeshSpec.parse("2x4")
ROWS, COLUMNS = 16, 24
U16 = np.dtype(np.uint16)
VIEWS = {
    "as stored": View("t", 0, (ROWS, COLUMNS), (COLUMNS, 1)),
    "transposed": View("t", 0, (COLUMNS, ROWS), (1, COLUMNS)),
    "part of a row": View("t", 4, (ROWS, 8), (COLUMNS, 1)),
    "three dims": View("t", 0, (ROWS, 4, 6), (COLUMNS, 6, 1)),
    "three dims, heads first": View("t", 0, (4, ROWS, 6), (6, COLUMNS, 1)),
    "one number for all": View("t", 3, (8, 8), (0, 1)),
}


def chunk_of(view, dims):
    spec = [() for _ in view.shape]
    for dim, axis in dims.items():
        spec[dim] = (axis,)
    target = Binding("v", view, U16, Layout(MESH, tuple(spec)))
    shards = local_bounds(target.layout, view.shape, tuple(range(8)))
    chunk = Chunk(VariableTransfer(target, shards, U16), Bounds.whole(view.shape))
    chunk.take_memory()
    return chunk


def filled(chunk, piece, *, stacked):
    """The shards of a chunk after one piece was copied into them."""
    for _, buffer in chunk.buffers.values():
        buffer[...] = 0
    stack = chunk.stack
    if not stacked:
        chunk.stack = None
    parts = chunk.parts(piece)
    chunk.stack = stack
    memory = np.arange(1, ROWS * COLUMNS + 1, dtype=U16).view(np.uint8)
    for part in parts:
        copy(part.target, BlockMemory(memory, U16, 0).source(part))
    return len(parts), [buffer.copy() for _, buffer in chunk.buffers.values()]


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("dims", [{0: "model"}, {1: "model"}, {0: "batch"}, {0: "batch", 1: "model"}, {}])
def test_a_piece_goes_to_the_same_places_however_it_is_divided(name, dims):
    view = VIEWS[name]
    chunk = chunk_of(view, dims)
    assert (chunk.stack is not None) == (len(dims) == 1)
    whole = Bounds.whole(view.shape)
    boxes = [whole, *(Bounds((a, *whole.start[1:]), (b, *whole.stop[1:])) for a, b in ((0, 1), (1, 4), (3, 4)))]
    boxes += [Bounds((*whole.start[:-1], a), (*whole.stop[:-1], b)) for a, b in ((0, 1), (1, 4), (5, 6))]
    for box in boxes:
        piece = BlockPiece(0, box, view)
        apart, wanted = filled(chunk, piece, stacked=False)
        together, found = filled(chunk, piece, stacked=True)
        assert all((a == b).all() for a, b in zip(found, wanted, strict=True))
        assert together <= apart


def test_columns_of_rows_are_one_part():
    chunk = chunk_of(VIEWS["as stored"], {1: "model"})
    (part,) = chunk.parts(BlockPiece(0, Bounds((2, 0), (5, COLUMNS)), VIEWS["as stored"]))
    assert part.target.shape == (4, 3, 6) and part.view.strides == (6, COLUMNS, 1)


@pytest.mark.parametrize(
    ("starts", "shape", "dim"),
    [
        ([(0, 0), (0, 4)], (2, 4), 1),
        ([(2, 0), (4, 0), (6, 0)], (2, 4), 0),
        ([(0, 0)], (2, 4), None),
        ([(0, 0), (0, 8)], (2, 4), None),  # a gap
        ([(0, 4), (0, 0)], (2, 4), None),  # the other way round
        ([(0, 0), (2, 4)], (2, 4), None),
        ([(0, 0), (0, 4)], (0, 4), None),  # nothing in them
    ],
)
def test_which_boxes_follow_each_other(starts, shape, dim):
    boxes = tuple(Bounds(at, tuple(a + n for a, n in zip(at, shape, strict=True))) for at in starts)
    assert stacked_dim(boxes) == dim
