"""Several processes load a model with an adapter together: each gets the bits that one process would have."""

import pytest
from process_runs import Run, told
from transformers_cross import adapters, folders

import shardload

WAYS = ("read", "late", "kept")


@pytest.mark.slow
def test_processes_get_the_bits_of_one(tmp_path):
    fixture = folders.read_family(adapters.FAMILY, adapters.FIXTURES)["gemma3_text, every linear"]
    base, _ = adapters.build(fixture, tmp_path)
    shardload.convert(base, tmp_path / "preset", to="preset")

    def shards(processes):
        arguments = (processes, 8 // processes, "2x4", ",".join(WAYS), tmp_path)
        with Run(*arguments, module="adapters_child") as run:
            outputs = [one.communicate(timeout=240)[0] for one in run.started]
        found = {}
        for output in outputs:
            for line in told(output):
                found.setdefault(line["do"], {}).update(line["shards"])
        assert found.keys() == set(WAYS), outputs
        return found

    one, two = shards(1), shards(2)
    assert one == two and all(len(found) == 8 for found in one.values())
