"""Several processes load quantised folders together, and save what they have: each has the bits of one process."""

import numpy as np
import pytest
import quantised_folders
from process_runs import shards_told
from quantised_child import WAYS

import shardload

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["2x4", "1x8"])
def test_processes_get_the_bits_of_one(mesh, tmp_path):
    for way, (method, _) in WAYS.items():
        entries = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "head_dim": 16, **SIZES}
        quantised_folders.write(tmp_path / way, method, **entries)
    one, two = (shards_told(n, mesh, WAYS, tmp_path, module="quantised_child") for n in (1, 2))
    assert one == two
    for way, (_, options) in WAYS.items():
        wanted = shardload.load(tmp_path / way, mesh="1x3", dtype="float32", **options)
        restored = shardload.load(tmp_path / f"{way}, steps", mesh="1x3")
        for a, b in zip(restored.weights, wanted.weights, strict=True):
            assert a.value.sharding == b.value.sharding
            assert np.asarray(a.value).tobytes() == np.asarray(b.value).tobytes(), (way, a.path)
