"""Tables of many rows for few tokens are split over the batch axis, too, and the batch is moved to their rows."""

import keras
import numpy as np
import pytest

from shardload.parallel import check_numbers, choose, compile_step, search
from shardload.sharding.mesh import MeshSpec


def classifier(*, rows=1 << 16, tied=False):
    tokens = keras.Input((16,), dtype="int32")
    embedding = keras.layers.ReversibleEmbedding(rows, 64, name="table")
    y = keras.layers.Dense(64, activation="tanh")(embedding(tokens))
    if tied:
        y = embedding(y, reverse=True)
    return keras.Model(tokens, y), np.arange(8 * 16).reshape(8, 16) * 7 % rows


def table_of(plan):
    return next(v for v in plan.variables if v.path.startswith("table"))


@pytest.mark.parametrize(("mesh", "rows"), [("2x4", ("model", "batch")), ("8x1", ("batch",))])
def test_the_batch_moves_to_the_rows_and_the_program_exchanges_what_is_planned(mesh, rows):
    model, inputs = classifier()
    plan = search(model, MeshSpec.parse(mesh), inputs=inputs, optimizer="adam")
    assert table_of(plan).spec == (rows, ()) and table_of(plan).stored == ()
    assert "the batch is moved to its rows over batch" in plan.why("table/embeddings")
    choice = choose(model, plan.mesh, plan)
    step = compile_step(model, choice, inputs, training="gradients")
    assert step.collective_bytes == plan.exchanged_bytes < table_of(plan).nbytes / 40
    check_numbers(model, choice, inputs, training="adam", steps=2).raise_if_wrong()


@pytest.mark.parametrize("options", [{"rows": 64}, {"tied": True}])
def test_it_does_not_where_the_table_is_small_or_is_multiplied_with_tokens(options):
    model, inputs = classifier(**options)
    plan = search(model, MeshSpec.parse("2x4"), inputs=inputs, optimizer="adam")
    assert not any("batch" in axes for axes in table_of(plan).spec)


def test_it_does_not_for_inference():
    model, inputs = classifier()
    assert "batch" not in table_of(search(model, MeshSpec.parse("2x4"), inputs=inputs)).spec[0]
