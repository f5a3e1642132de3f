"""Arrays that consist of several tensors: stacked layers, fused kernels, padded vocabularies."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file
from stacked_models import llama_rules, llama_tensors, specs_of, stacked_by_hand

import shardload
from shardload import StoredAs
from shardload.errors import MismatchError, UsageError

MESHES = {"1x8": (1, 8), "2x4": (2, 4), "1x3": (1, 3)}


def mesh_of(name):
    sizes = MESHES[name]
    return jax.make_mesh(sizes, ("batch", "model"), devices=jax.devices()[: sizes[0] * sizes[1]])


def assert_equal(array, value):
    assert array.shape == value.shape and array.dtype == value.dtype
    for shard in array.addressable_shards:
        assert np.asarray(shard.data).tobytes() == np.ascontiguousarray(value[shard.index]).tobytes()


@pytest.fixture(scope="module")
def tensors():
    return llama_tensors()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tensors):
    path = tmp_path_factory.mktemp("llama")
    save_file(tensors, path / "model.safetensors")
    return path / "model.safetensors"


@pytest.mark.parametrize("name", MESHES)
def test_a_llama_whose_layers_are_stacked(folder, tensors, name):
    mesh, expected = mesh_of(name), stacked_by_hand(tensors)
    found = shardload.load_arrays(folder, specs_of(expected, mesh), mesh=mesh, names=llama_rules())
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert_equal(found[key], value)


def test_layers_of_two_kinds(folder, tensors):
    # As in Gemma 2: every second layer has local attention, and each kind is a stack of its own.
    mesh = mesh_of("2x4")
    rules = llama_rules(layers=range(0, 4, 2), where="local.") | llama_rules(layers=range(1, 4, 2), where="full.")
    expected = stacked_by_hand(tensors, layers=range(0, 4, 2), where="local.")
    expected |= stacked_by_hand(tensors, layers=range(1, 4, 2), where="full.")
    found = shardload.load_arrays(folder, specs_of(expected, mesh), mesh=mesh, names=rules)
    for key, value in expected.items():
        assert_equal(found[key], value)


def test_fused_kernels(folder, tensors):
    layers = [f"model.layers.{i}" for i in range(4)]
    q, k, v = (np.stack([tensors[f"{i}.self_attn.{x}_proj.weight"] for i in layers]) for x in "qkv")
    gate, up = (np.stack([tensors[f"{i}.mlp.{x}_proj.weight"] for i in layers]) for x in ("gate", "up"))
    grouped = [x.reshape(4, 2, -1, 4, 24) for x in (q, k, v)]  # by the two groups that share keys and values
    names = [f"model.layers.{{layer}}.self_attn.{x}_proj.weight" for x in "qkv"]
    both = [f"model.layers.{{layer}}.mlp.{x}_proj.weight" for x in ("gate", "up")]
    rules = {
        "rows": StoredAs(names, "out in -> layer out in", along="out"),
        "groups": StoredAs(names, "(kv n head) in -> layer (kv n head) in", along="n", sizes={"kv": 2, "head": 4}),
        "kv": StoredAs(names[1:], "(heads head) in -> in kv layer heads head", along="kv", sizes={"head": 4}),
        "halves": StoredAs(both, "out in -> in layer out", along="out"),
        "pairs": StoredAs(both, "out in -> in layer (out pair)", along="pair"),
    }
    expected = {
        "rows": np.concatenate([q, k, v], axis=1),
        "groups": np.concatenate(grouped, axis=2).reshape(4, 40, 24),
        "kv": np.stack([x.reshape(4, 2, 4, 24) for x in (k, v)]).transpose(4, 0, 1, 2, 3),
        "halves": np.concatenate([gate, up], axis=1).transpose(2, 0, 1),
        "pairs": np.stack([gate, up], axis=2).reshape(4, 80, 24).transpose(2, 0, 1),
    }
    for name in MESHES:
        mesh = mesh_of(name)
        targets = specs_of(expected, mesh) | {"pairs": P(None, None, "model" if name != "1x3" else None)}
        found = shardload.load_arrays(folder, targets, mesh=mesh, names=rules, strict=False)
        for key, value in expected.items():
            assert_equal(found[key], value)


def test_one_fused_tensor_for_several_arrays(tmp_path):
    fused = np.arange(3 * 20 * 8, dtype=np.uint16).reshape(3, 20, 8)
    save_file({f"layers.{i}.qkv": fused[i] for i in range(3)}, tmp_path / "m.safetensors")
    rows = {"q": slice(0, 12), "k": slice(12, 16), "v": slice(16, 20)}
    rules = {
        key: StoredAs("layers.{layer}.qkv", "(heads head) in -> layer heads head in", sizes={"head": 4}, take=take)
        for key, take in (("q", {"heads": slice(0, 3)}), ("k", {"heads": slice(3, 4)}), ("v", {"heads": slice(4, 5)}))
    }
    mesh = mesh_of("1x8")
    targets = dict.fromkeys("qkv", P(None, None, None, "model"))
    found = shardload.load_arrays(tmp_path / "m.safetensors", targets, mesh=mesh, names=rules)
    for key, part in rows.items():
        assert_equal(found[key], fused[:, part].reshape(3, -1, 4, 8))


def test_a_target_states_shape_and_dtype(folder, tensors):
    mesh, rules = mesh_of("1x8"), llama_rules()
    name = "decoder.layers.mlp.wi_0"
    sharding = NamedSharding(mesh, P(None, None, "model"))
    target = {name: jax.ShapeDtypeStruct((24, 4, 40), "uint32", sharding=sharding)}
    found = shardload.load_arrays(folder, target, names=rules.__getitem__, strict=False)[name]
    assert_equal(found, stacked_by_hand(tensors)[name].astype(np.uint32))
    wrong = {name: jax.ShapeDtypeStruct((24, 5, 40), "uint32", sharding=sharding)}
    with pytest.raises(MismatchError, match=r"target has shape \(24, 5, 40\), but by its rule, the tensors make up"):
        shardload.load_arrays(folder, wrong, names=rules.__getitem__, strict=False)


def test_arrays_of_numpy_and_narrower_integers(folder, tensors):
    name, rules = "decoder.layers.mlp.wi_0", llama_rules()
    expected = stacked_by_hand(tensors)
    targets = {name: np.zeros((24, 4, 40), np.uint16), "token_embedder": np.zeros((64, 24), np.float32)}
    found = shardload.load_arrays(folder, targets, names=rules.__getitem__, strict=False)
    assert np.array_equal(found[name], expected[name]) and isinstance(found[name], np.ndarray)
    assert np.array_equal(found["token_embedder"], expected["token_embedder"].astype(np.float32))
    with pytest.raises(MismatchError, match=r"'model.layers.0.mlp.gate_proj.weight' has uint16 values"):
        narrow = {name: jax.ShapeDtypeStruct((24, 4, 40), "uint8", sharding=NamedSharding(mesh_of("1x8"), P()))}
        shardload.load_arrays(folder, narrow, names=rules.__getitem__, strict=False)


def test_usage(folder):
    rules, name = llama_rules(), "decoder.layers.mlp.wi_0"
    with pytest.raises(UsageError, match="it has a rule, expected the order of dims there"):
        shardload.load_arrays(
            folder, {name: P()}, mesh="1x8", names=rules.__getitem__, transpose={name: (1, 0)}, strict=False
        )
    with pytest.raises(MismatchError, match=r"no target names 4 of its tensors:\n  model.layers.0.mlp.up_proj"):
        targets = dict.fromkeys([key for key in rules if key != "decoder.layers.mlp.wi_1"], P())
        shardload.load_arrays(folder, targets, mesh="1x8", names=rules.__getitem__)
    with pytest.raises(UsageError, match="it gives 3, expected a tensor's name or a StoredAs"):
        shardload.load_arrays(folder, {name: P()}, mesh="1x8", names={name: 3})


def test_dtypes_must_agree(tmp_path):
    save_file({"l.0": np.zeros(2, np.float16), "l.1": np.zeros(2, np.float32)}, tmp_path / "m.safetensors")
    load = {"names": {"a": StoredAs("l.{i}", "n -> i n")}, "mesh": "1x8"}
    with pytest.raises(MismatchError, match=r"'l.0' is stored in float16, and 'l.1' in float32, expected one dtype"):
        shardload.load_arrays(tmp_path / "m.safetensors", {"a": P()}, **load)
    found = shardload.load_arrays(tmp_path / "m.safetensors", {"a": P()}, dtype="bfloat16", **load)
    assert found["a"].dtype == jax.numpy.bfloat16


@pytest.mark.parametrize("out", [24, 20])
def test_interleaved_tensors_whether_or_not_shards_keep_pairs(tmp_path, out):
    # Of 24 pairs each of eight devices gets three; of 20 pairs, two and a half.
    values = {
        f"l.{i}.{k}": np.random.default_rng(i).integers(0, 99, (out, 16), np.uint8) for i in range(2) for k in "ab"
    }
    save_file(values, tmp_path / "m.safetensors")
    rule = StoredAs(["l.{i}.a", "l.{i}.b"], "out in -> i (out pair) in", along="pair")
    expected = np.stack([np.stack([values[f"l.{i}.{k}"] for k in "ab"], 1).reshape(2 * out, 16) for i in range(2)])
    load = {"names": {"w": rule}, "mesh": "1x8"}
    for spec in (P(None, "model"), P(None, None, "model"), P()):
        found = shardload.load_arrays(tmp_path / "m.safetensors", {"w": spec}, **load)["w"]
        assert found.sharding.spec == spec
        assert_equal(found, expected)
        assert (np.asarray(found + 1) == expected + 1).all()
    names = {"w": rule}
    shardload.save_arrays({"w": found}, tmp_path / "again.safetensors", names=names)
    again = shardload.load_arrays(tmp_path / "again.safetensors", P(), mesh="1x1")
    assert all(np.array_equal(again[name], value) for name, value in values.items())
