"""Keras' own tests of saving and loading, from the installed wheel, inside `shardload.fast`.

They pass; docs/reference/fast.md has the differences, and the reasons for which calls go to Keras.
"""

import re

import pytest
from keras_suite import SRC, run

MODULES = {
    "saving/saving_lib_test.py": 52,
    "saving/saving_api_test.py": 39,
    "callbacks/model_checkpoint_test.py": 2,
    "callbacks/orbax_checkpoint_test.py": 12,
}
"""And how many calls at least are made by shardload, so that it is not Keras that passes its own tests."""
DIFFERENT = {
    "SavingBattleTest::test_legacy_load_skips_missing_nested_containers": (
        "the wheel lacks the file the test reads, so it fails with Keras as well",
        "fixture missing",
    )
}
"""Tests that fail, why they may, and what their error must contain."""
BY_KERAS = (
    "the model has not been built",
    "The model '.*' has no weights",
    "does not fit the model",
    "objects_to_skip is given",
    "its source is a BytesIO",
    "it is an HDF5 file of Keras 2",
    "the step contains no configuration of a model",
    "could not be deserialized properly",
    "Requested the deserialization of a `Lambda` layer",
    "decompression bomb",
    "declares \\d+ bytes, but stores none",
    "is damaged HDF5: .*file signature not found",
)
"""Why calls go to Keras in these tests; docs/reference/fast.md says more."""


@pytest.fixture(scope="module")
def results_of(tmp_path_factory):
    """Results by module: one process for all of them, as the imports take longer than most tests."""
    return run(MODULES, tmp_path_factory.mktemp("suite"), plugin="fast_suite_plugin")


@pytest.mark.full
@pytest.mark.parametrize("module", MODULES)
def test_a_module_of_keras_passes_but_for_what_is_listed(module, results_of):
    results = results_of[module]
    failed = {name: found["why"] for name, found in results.items() if found["outcome"] == "failed"}
    assert failed.keys() == DIFFERENT.keys() & results.keys()
    assert {name: why for name, why in failed.items() if DIFFERENT[name][1] not in why} == {}
    calls = [call for found in results.values() for call in found["calls"]]
    assert sum(call["by"] == "shardload" for call in calls) >= MODULES[module]
    assert [call for call in calls if call["why"] and not re.search("|".join(BY_KERAS), call["why"])] == []


def test_what_is_listed_exists():
    written = "".join((SRC / module).read_text() for module in MODULES)
    assert all(f"def {name.rpartition('::')[2]}(" in written for name in DIFFERENT)
