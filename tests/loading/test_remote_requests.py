"""How many requests a load from a store sends: one store serves a call, and nothing is asked for twice."""

import keras
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from object_server import served
from safetensors.numpy import save_file
from saved_steps import save_step

import shardload
from shardload.errors import TransferError
from shardload.runs.listing import list_steps

ARRAYS = 5
"""Arrays of 4 MiB in the file: 20 MiB of data."""


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    root = tmp_path_factory.mktemp("bucket")
    (root / "plain").mkdir()
    tensors = {f"t{i}": np.full((1024, 1024), i, np.float32) for i in range(ARRAYS)}
    save_file(tensors, root / "plain" / "model.safetensors")
    save_step(model(), root / "run", 7)
    return root


@pytest.fixture
def store(objects, monkeypatch):
    monkeypatch.setenv("SHARDLOAD_REMOTE_TIMEOUT", "1")
    with served(objects, monkeypatch) as server:
        yield server


def model():
    return keras.Sequential([keras.Input((64,)), keras.layers.Dense(32)])


def rows(name, shape):
    return P("model") if len(shape) == 2 else P()


@pytest.mark.parametrize("scheme", ["http", "s3", "gs"])
def test_a_file_needs_one_request_besides_its_data(store, scheme):
    shardload.load_arrays(f"{getattr(store, scheme)}/plain/model.safetensors", rows, mesh="1x8")
    assert others(store) == 1 and len(store.headers) <= 1 + 2 * ARRAYS


@pytest.mark.parametrize(("scheme", "more"), [("http", 5), ("s3", 3), ("gs", 3)])
def test_a_folder_needs_a_few_more(store, scheme, more):
    """Its list (an index page comes after a redirect), digests.json, and the header of the file."""
    store.has_index = True
    shardload.load_arrays(f"{getattr(store, scheme)}/plain", rows, mesh="1x8")
    assert others(store) <= more
    assert twice(store) <= {"plain"}


@pytest.mark.parametrize("address", ["plain", "nowhere"])
def test_a_server_without_lists_is_asked_for_each_usual_name_once(store, address):
    try:
        shardload.load_arrays(f"{store.http}/{address}", rows, mesh="1x8")
    except shardload.errors.SourceNotFoundError:
        assert address == "nowhere"
    assert twice(store) <= {address}


@pytest.mark.parametrize("scheme", ["http", "s3"])
def test_a_run_is_asked_for_its_newest_step_once(store, scheme):
    store.has_index = True
    shardload.load_weights(model(), f"{getattr(store, scheme)}/run")
    assert twice(store) <= {"run"}
    store.requests.clear()
    assert [info.step for info in list_steps(f"{getattr(store, scheme)}/run")] == [7]
    assert twice(store) <= {"run"}


def others(store):
    """Requests for something else than the data; ranges of these are of 2 to 4 MiB, as the server is fast or slow."""
    data = [wanted for _, key, wanted, _ in store.requests if key == "plain/model.safetensors" and wanted[1] > 262143]
    return len(store.headers) - len(data)


def twice(store):
    """Objects of which the same bytes were asked for more than once; the bucket's lists are not among them."""
    asked = [(key, wanted) for _, key, wanted, _ in store.requests if key is not None]
    return {key for key, wanted in asked if asked.count((key, wanted)) > 1}


@pytest.mark.parametrize("address", ["plain", "plain/model.safetensors"])
@pytest.mark.parametrize("scheme", ["http", "s3"])
def test_an_error_names_the_address_that_was_given(store, scheme, address):
    store.close()
    url = f"{getattr(store, scheme)}/{address}"
    with pytest.raises(TransferError, match=f"^{url} .*cannot be read: Connection refused"):
        shardload.load_arrays(url, rows, mesh="1x8")
