"""Several processes load a model with an adapter together: each gets the bits that one process would have."""

import pytest
from process_runs import shards_told
from transformers_cross import adapters, folders

import shardload

WAYS = ("read", "late", "kept")


@pytest.mark.slow
def test_processes_get_the_bits_of_one(tmp_path):
    fixture = folders.read_family(adapters.FAMILY, adapters.FIXTURES)["gemma3_text, every linear"]
    base, _ = adapters.build(fixture, tmp_path)
    shardload.convert(base, tmp_path / "preset", to="preset")
    one, two = (shards_told(n, "2x4", WAYS, tmp_path, module="adapters_child") for n in (1, 2))
    assert one == two
