"""Whatever a ``config.json`` says, loading ends well or in an error of ours: soon, and without taking memory for it."""

import copy
import functools
import json
import time
import tracemalloc
from pathlib import Path

import hub_folders
import pytest
from fuzz_child import status
from fuzzing import FULL_CASES, PATIENCE, anything, number
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import shardload
from shardload.errors import ShardloadError
from shardload.hub import building

pytestmark = pytest.mark.filterwarnings("ignore")  # a configuration of nonsense earns Keras' and NumPy's warnings

PEAK_BYTES, RESIDENT_BYTES = 24 << 20, 192 << 20
"""Python's objects for a model of some forty layers; and beside them JAX's, with what the first cases import."""
ARCHITECTURES = ["gemma2", "bert", "llama"]
NAMED = ["num_hidden_layers", "hidden_size", "head_dim", "vocab_size", "num_attention_heads", "intermediate_size"]
hostile = st.one_of(
    st.sampled_from([-1, 0, 1, 3, 1 << 20, 1 << 31, 1 << 40, 1 << 63, 1 << 70, 10**300]),
    st.sampled_from([-0.5, 0.5, 1e30, 1e308, float("nan"), float("inf"), float("-inf")]),
    st.sampled_from([None, True, "", "32", "🙂", "x" * 5000, [], [[]], [2], {}, {"a": {"b": [None, {}]}}]),
    anything,
)


@st.composite
def configs(draw):
    """A good configuration with one to four values replaced, taken out or put in."""
    config = copy.deepcopy(hub_folders.config_of(draw(st.sampled_from(ARCHITECTURES))))
    for _ in range(draw(st.integers(1, 4))):
        key = draw(st.sampled_from(NAMED) | st.sampled_from(sorted(config)))
        match draw(st.integers(0, 4)):
            case 0:
                config.pop(key, None)
            case 1:
                other = draw(st.sampled_from(["text_config", "dtype", "quantization_config", "rope_scaling"]))
                config[other] = draw(hostile)
            case _:
                config[key] = draw(hostile)
    return config


@functools.cache
def weights(architecture, root):
    """The weights that go with the good configuration, made once."""
    model = building.build_model(hub_folders.described(root / architecture, architecture), dtype="float32")
    return hub_folders.write(root / architecture, architecture, model, unwanted=False) / "model.safetensors"


def outcome(folder):
    """``None`` where it loads, else our error; any other error is the test's."""
    try:
        shardload.load(folder, mesh="1x2")
    except ShardloadError as error:
        assert str(folder) in str(error) or "config" in str(error), error
        return error
    return None


def measured(folder):
    """The outcome, and processor seconds, bytes of Python's objects and resident bytes it took."""
    Path("/proc/self/clear_refs").write_text("5")  # the resident peak starts anew from here
    resident = status("VmRSS")
    tracemalloc.start()
    began = time.process_time()
    try:
        ended, seconds = outcome(folder), time.process_time() - began
        return ended, seconds, tracemalloc.get_traced_memory()[1], status("VmHWM") - resident
    finally:
        tracemalloc.stop()


def test_a_hostile_configuration_ends_soon(request, tmp_path_factory):
    cases = number(request, 10, FULL_CASES * 12 // 100)
    root = tmp_path_factory.mktemp("hostile")
    folders = {a: weights(a, root).parent for a in ARCHITECTURES}
    good = {a: hub_folders.config_of(a) for a in ARCHITECTURES}
    for architecture in ARCHITECTURES:
        assert outcome(folders[architecture]) is None, good[architecture]
    ends = []

    same = {"derandomize": True, "database": None, "suppress_health_check": [*HealthCheck]}

    # Making a failure smaller would take minutes.
    @settings(max_examples=cases, deadline=None, phases=[Phase.generate], **same)
    @given(config=configs(), home=st.sampled_from(ARCHITECTURES))
    def run(config, home):
        folder = folders.get(str(config.get("model_type")), folders[home])
        (folder / "config.json").write_text(json.dumps(config))
        error, seconds, peak, resident = measured(folder)
        if seconds >= PATIENCE or peak >= PEAK_BYTES or resident >= RESIDENT_BYTES:
            error, seconds, peak, resident = measured(folder)  # imports and compilations are no cost of a configuration
        assert seconds < PATIENCE, config
        assert peak < PEAK_BYTES, f"{peak >> 20} MiB for {config}"
        assert resident < RESIDENT_BYTES, f"{resident >> 20} MiB for {config}"
        ends.append(error is None)

    run()
    assert cases * 0.2 < ends.count(False) < len(ends)


@pytest.mark.parametrize("layers", [1 << 40, 1e308, "9" * 30, float("inf"), float("nan")], ids=str)
@pytest.mark.parametrize("part", [None, "vision_config"])
def test_more_layers_than_tensors_are_refused_before_any_is_built(layers, part, tmp_path):
    folder = weights("llama", tmp_path).parent
    config = hub_folders.config_of("llama")
    (config if part is None else config.setdefault(part, {}))["num_hidden_layers"] = layers
    (folder / "config.json").write_text(json.dumps(config))
    assert "num_hidden_layers=" in str(outcome(folder))
