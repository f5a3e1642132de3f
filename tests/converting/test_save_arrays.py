"""Trees of sharded arrays, saved and loaded again: bit for bit, on any mesh, by rules as well."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1 as ocp
from process_runs import Run, told
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from stacked_models import llama_rules, llama_tensors, specs_of, stacked_by_hand

import shardload
from shardload import StoredAs
from shardload.errors import MismatchError, UninitialisedError, UnsupportedError, UsageError, WriteError

MESHES = {"1x8": (1, 8), "2x4": (2, 4), "1x3": (1, 3)}
TARGETS = {"file": ("m.safetensors", {}), "safetensors": ("m", {"max_shard_bytes": "8KiB"}), "orbax": ("m", {})}


def mesh_of(name):
    sizes = MESHES[name]
    return jax.make_mesh(sizes, ("batch", "model"), devices=jax.devices()[: sizes[0] * sizes[1]])


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def tree_on(mesh):
    rng = np.random.default_rng(0)

    def placed(shape, dtype, *spec):
        bits = rng.integers(0, 256, (*shape, np.dtype(dtype).itemsize), np.uint8).view(dtype).reshape(shape)
        return jax.device_put(bits, NamedSharding(mesh, P(*spec)))

    model, batch = mesh.shape["model"], mesh.shape["batch"]
    return {
        "embed": placed((5 * model, 7), jnp.bfloat16, "model"),
        "layers": [
            {
                "kernel": placed((3, 2 * model * batch), "float32", None, ("batch", "model")),
                "bias": placed((11,), "float32"),
            }
            for _ in range(3)
        ],
        "both": placed((2 * batch, 3, 2 * model), "float16", "batch", None, "model"),
        "step": placed((), "int32"),
        "mask": placed((9,), "uint8"),
    }


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("mesh", MESHES)
def test_what_is_saved_loads_bit_for_bit(tmp_path, kind, mesh):
    tree = tree_on(mesh_of(mesh))
    name, options = TARGETS[kind]
    report = shardload.save_arrays(tree, tmp_path / name, to=None if kind == "file" else kind, **options)
    assert report.tensors == len(jax.tree.leaves(tree)) and list(tmp_path.iterdir()) == [tmp_path / name]
    found = shardload.load_arrays(tmp_path / name, tree)
    same(found, tree)
    # Onto another mesh as well.
    other = mesh_of("2x4" if mesh == "1x8" else "1x8")
    same(shardload.load_arrays(tmp_path / name, jax.tree.map(lambda _: NamedSharding(other, P()), tree)), tree)


def test_other_programs_read_it(tmp_path):
    tree = tree_on(mesh_of("2x4"))
    shardload.save_arrays(tree, tmp_path / "m.safetensors")
    with safe_open(tmp_path / "m.safetensors", "flax") as file:
        assert set(file.keys()) == {"embed", "both", "step", "mask"} | {
            f"layers.{i}.{k}" for i in range(3) for k in ("kernel", "bias")
        }
        assert (
            np.asarray(file.get_tensor("layers.1.kernel")).tobytes()
            == np.asarray(tree["layers"][1]["kernel"]).tobytes()
        )
    shardload.save_arrays(tree, tmp_path / "orbax", to="orbax")
    found = ocp.load(tmp_path / "orbax")
    assert found["layers"]["1"]["kernel"].tobytes() == np.asarray(tree["layers"][1]["kernel"]).tobytes()
    assert found["embed"].dtype == jnp.bfloat16


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("mesh", MESHES)
def test_a_stacked_llama_goes_back_to_its_tensors(tmp_path, kind, mesh):
    tensors, rules, on = llama_tensors(), llama_rules(), mesh_of(mesh)
    save_file(tensors, tmp_path / "in.safetensors")
    targets = specs_of(stacked_by_hand(tensors), on)
    arrays = shardload.load_arrays(tmp_path / "in.safetensors", targets, mesh=on, names=rules)
    name, options = TARGETS[kind]
    shardload.save_arrays(arrays, tmp_path / name, to=None if kind == "file" else kind, names=rules, **options)
    found = shardload.load_arrays(tmp_path / name, P(), mesh="1x8")
    assert found.keys() == tensors.keys()
    for key, value in tensors.items():
        assert np.asarray(found[key]).tobytes() == value.tobytes() and found[key].shape == value.shape
    same(shardload.load_arrays(tmp_path / name, arrays, names=rules), arrays)


def test_fused_tensors_are_put_together(tmp_path):
    on = NamedSharding(mesh_of("1x8"), P(None, None, None, "model"))
    value = np.arange(3 * 20 * 8, dtype=np.uint16).reshape(3, 20, 8)
    save_file({f"layers.{i}.qkv": value[i] for i in range(3)}, tmp_path / "in.safetensors")
    parts = {"q": slice(0, 3), "k": slice(3, 4), "v": slice(4, 5)}
    rules = {
        key: StoredAs(
            "layers.{layer}.qkv", "(heads head) in -> layer heads head in", sizes={"head": 4}, take={"heads": part}
        )
        for key, part in parts.items()
    }
    arrays = shardload.load_arrays(tmp_path / "in.safetensors", dict.fromkeys(parts, on), names=rules)
    shardload.save_arrays(arrays, tmp_path / "m.safetensors", names=rules)
    assert load_file(tmp_path / "m.safetensors").keys() == {f"layers.{i}.qkv" for i in range(3)}
    for i in range(3):
        assert np.array_equal(load_file(tmp_path / "m.safetensors")[f"layers.{i}.qkv"], value[i])
    gap = {key: arrays[key] for key in ("q", "v")}
    with pytest.raises(MismatchError, match=r"2 arrays \('q'\) would fill 128 of its 160 elements"):
        shardload.save_arrays(gap, tmp_path / "n.safetensors", names=rules.__getitem__)
    both = {"q": arrays["q"], "k": arrays["k"]}
    again = {
        "q": rules["q"],
        "k": StoredAs(rules["q"].tensors, rules["q"].dims, sizes={"head": 4}, take={"heads": slice(2, 3)}),
    }
    with pytest.raises(MismatchError, match="'k' and 'q' would both be in it"):
        shardload.save_arrays(both, tmp_path / "n.safetensors", names=again)
    assert not (tmp_path / "n.safetensors").exists()


def test_padding_must_be_zero(tmp_path):
    rule = StoredAs("e", "vocab width -> vocab width", sizes={"vocab": 13}, pad={"vocab": 8})
    value = np.zeros((16, 8), np.float32)
    value[:13] = np.arange(13 * 8).reshape(13, 8) + 1
    on = NamedSharding(mesh_of("1x8"), P("model"))
    shardload.save_arrays({"e": jax.device_put(value, on)}, tmp_path / "a.safetensors", names={"e": rule})
    assert np.array_equal(load_file(tmp_path / "a.safetensors")["e"], value[:13])
    for bad in (1.0, -0.0):
        value[15, 3] = bad
        for array in (value, jax.device_put(value, on)):
            with pytest.raises(MismatchError, match=r"is padded from \(13, 8\) on, and the padding at .* is not zero"):
                shardload.save_arrays({"e": array}, tmp_path / "b.safetensors", names={"e": rule})
    with pytest.raises(UsageError, match=r"the length of 'vocab' does not follow.*padded"):
        shardload.save_arrays(
            {"e": value}, tmp_path / "b.safetensors", names={"e": StoredAs("e", rule.dims, pad={"vocab": 8})}
        )
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]


def test_lengths_that_do_not_follow(tmp_path):
    names = ["gate", "up"]
    value = {"both": jnp.arange(12.0).reshape(4, 3)}
    with pytest.raises(UsageError, match=r"the length of 'out' does not follow.*state one length for each"):
        rules = {"both": StoredAs(names, "out in -> out in", along="out")}
        shardload.save_arrays(value, tmp_path / "m.safetensors", names=rules)
    rules = {"both": StoredAs(names, "out in -> out in", along="out", sizes={"out": (1, 3)})}
    shardload.save_arrays(value, tmp_path / "m.safetensors", names=rules)
    assert {k: v.shape for k, v in load_file(tmp_path / "m.safetensors").items()} == {"gate": (1, 3), "up": (3, 3)}


def test_keys_numbers_and_arrays_of_numpy(tmp_path):
    tree = {"key": jax.random.key(3), "step": 7, "rate": 0.5, "host": np.arange(5, dtype=np.int64), "call": jnp.tanh}
    shardload.save_arrays(tree, tmp_path / "m.safetensors")
    targets = {"key": jax.random.key(0), "step": 0, "rate": 0.0, "host": np.zeros(5, np.int64)}
    found = shardload.load_arrays(tmp_path / "m.safetensors", targets)
    assert (found["step"], found["rate"]) == (7, 0.5) and np.array_equal(found["host"], np.arange(5))
    assert jax.random.key_data(found["key"]).tolist() == jax.random.key_data(tree["key"]).tolist()


def test_what_exists_is_kept(tmp_path):
    path = tmp_path / "m.safetensors"
    shardload.save_arrays({"a": jnp.ones(3)}, path)
    with pytest.raises(WriteError, match="already exists"):
        shardload.save_arrays({"a": jnp.zeros(3)}, path)
    shardload.save_arrays({"a": jnp.zeros(3)}, path, overwrite=True)
    assert not load_file(path)["a"].any() and [p.name for p in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("tree", "options", "text"),
    [
        ({"a": "x"}, {}, "Cannot save 'a': found str, expected an array"),
        ({"a": jax.ShapeDtypeStruct((3,), "float32")}, {}, "found ShapeDtypeStruct"),
        ({"a": np.ones(3)}, {"names": {"b": "c"}}, "no array is called 'b'"),
        ({"kernel": np.ones(3), "b": np.ones(3)}, {"names": {"kernal": "w", "b": "c"}}, "but one 'kernel', which has"),
        ({"a": np.ones(3)}, {"names": 3}, "expected a mapping or a function"),
        ({"a": np.ones(3)}, {"to": "h5"}, "expected safetensors or orbax"),
        ({"a": np.ones(3)}, {"to": "orbax"}, "its name is that of a safetensors file"),
        ({"a": np.ones(3)}, {"max_shard_bytes": "1MiB"}, "it is one file"),
    ],
)
def test_usage(tmp_path, tree, options, text):
    with pytest.raises(UsageError, match=text):
        shardload.save_arrays(tree, tmp_path / "m.safetensors", **options)
    assert not list(tmp_path.iterdir())


def test_a_part_of_a_model_is_saved_by_the_table_of_all_of_it(tmp_path):
    table = {"up": StoredAs("h.{i}.up", "a -> i a"), "down": StoredAs("h.{i}.down", "a -> i a"), "head": "lm_head"}
    shardload.save_arrays({"up": np.ones((2, 3))}, tmp_path / "m.safetensors", names=table)
    assert set(load_file(tmp_path / "m.safetensors")) == {"h.0.up", "h.1.up"}


def test_what_cannot_be_saved(tmp_path):
    with pytest.raises(UsageError, match="Cannot tell the format of m"):
        shardload.save_arrays({"a": np.ones(3)}, tmp_path / "m")
    with pytest.raises(UnsupportedError, match="no arrays without elements"):
        shardload.save_arrays({"a": np.ones((0, 3))}, tmp_path / "m", to="orbax")
    with pytest.raises(UnsupportedError, match="another tensor has this name or is above it"):
        shardload.save_arrays({"a": np.ones(3), "b": np.ones(3)}, tmp_path / "m", to="orbax", names={"b": "a/c"})
    with pytest.raises(MismatchError, match="'a' and 'b' would both be in it"):
        shardload.save_arrays({"a": np.ones(3), "b": np.ones(3)}, tmp_path / "m.safetensors", names={"b": "a"})
    gone = jnp.ones(3)
    gone.delete()
    with pytest.raises(UninitialisedError, match="its array was deleted"):
        shardload.save_arrays({"a": gone}, tmp_path / "m.safetensors")
    with pytest.raises(UnsupportedError, match="Cannot write tensor 'a' to safetensors, which has no int4"):
        shardload.save_arrays({"a": jnp.ones(3, jnp.int4)}, tmp_path / "m.safetensors")
    assert not list(tmp_path.iterdir())


def test_the_host_has_no_copy(tmp_path, monkeypatch):
    from shardload.converting import strided_copy

    blocks = []
    written = strided_copy.PieceWriter.write
    monkeypatch.setattr(
        strided_copy.PieceWriter, "write", lambda s, at, v: (blocks.append(v.nbytes), written(s, at, v))
    )
    value = jax.device_put(
        np.arange(1 << 20, dtype=np.float32).reshape(1024, 1024), NamedSharding(mesh_of("2x4"), P("batch", "model"))
    )
    rule = StoredAs("l.{layer}.w", "out in -> in layer out")
    shardload.save_arrays(
        {"w": value.reshape(256, 4, 1024)}, tmp_path / "m.safetensors", names={"w": rule}, host_memory_bytes="256KiB"
    )
    assert sum(blocks) == value.nbytes and max(blocks) <= 64 << 10


def saved_by_two(do, source, folder, kind):
    with Run(2, 4, "2x4", do, source, folder, kind, module="save_arrays_child") as run:
        outputs = [one.communicate(timeout=150)[0] for one in run.started]
    assert all(told(output) for output in outputs), outputs
    return [one.returncode for one in run.started], [told(output)[-1] for output in outputs]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["safetensors", "orbax"])
def test_two_processes_save_and_load_together(tmp_path, kind):
    tensors = llama_tensors()
    save_file(tensors, tmp_path / "in.safetensors")
    codes, last = saved_by_two("all", tmp_path / "in.safetensors", tmp_path, kind)
    assert codes == [0, 0] and all(one["equal"] for one in last), last
    found = shardload.load_arrays(tmp_path / "out", P(), mesh="1x8")
    assert found.keys() == tensors.keys()
    for key, value in tensors.items():
        assert np.asarray(found[key]).tobytes() == value.tobytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("do", "text"),
    [
        ("kill", "ProcessLostError"),
        ("raise", "the cable was cut"),
        ("disagree", "DisagreementError: .*the arrays"),
        ("padding", "MismatchError: .*is not zero"),
    ],
)
def test_two_processes_fail_together_and_leave_nothing(tmp_path, do, text):
    save_file(llama_tensors(), tmp_path / "in.safetensors")
    codes, last = saved_by_two(do, tmp_path / "in.safetensors", tmp_path, "safetensors")
    assert 0 not in codes
    assert re.search(text, last[0]["error"]), last
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", TARGETS)
def test_a_killed_save_leaves_nothing_under_the_name(tmp_path, kind):
    save_file(llama_tensors(), tmp_path / "in.safetensors")
    name, _ = TARGETS[kind]
    path, seen = tmp_path / name, set()
    for after in (1, 10, 25, 10_000):
        with Run(
            1, 8, "2x4", f"kill-{after}", tmp_path / "in.safetensors", path, kind, module="save_arrays_child"
        ) as run:
            output = run.started[0].communicate(timeout=150)[0]
        if run.started[0].returncode:
            assert not path.exists() and told(output)[-1]["killed"] == after, output
        seen.add(bool(run.started[0].returncode))
    assert seen == {True, False}  # the next run is not hindered by what the killed ones left
    assert len(shardload.inspect(path).tensors) == len(llama_tensors())
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["in.safetensors", name])


@pytest.mark.parametrize(
    ("dtype", "to", "way_out"),
    [
        ("uint4", "safetensors", "Cast it to another dtype"), ("uint4", "orbax", "Cast it to another dtype"),
        ("int4", "safetensors", "Pass to='orbax', or cast it"), ("float4_e2m1fn", "orbax", "Cast it to another dtype"),
        ("float8_e8m0fnu", "orbax", "Pass to='safetensors', or cast it"),
    ],
)  # fmt: skip
def test_dtypes_that_a_format_does_not_have(tmp_path, dtype, to, way_out):
    array = np.zeros(8, getattr(ml_dtypes, dtype))
    with pytest.raises(UnsupportedError, match=rf"Cannot write tensor 'x' to \w+, which has no {dtype}\. {way_out}"):
        shardload.save_arrays({"x": array}, tmp_path / "out", to=to)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("to", ["safetensors", "orbax"])
@pytest.mark.parametrize("name", ["..", "a/../b", "a\0b", "{layer}"])
def test_names_that_mean_something_else(tmp_path, name, to):
    with pytest.raises(UsageError, match=r"braces, a null character, or a part of dots alone\. Rename it with names="):
        shardload.save_arrays({name: np.zeros(3)}, tmp_path / "out", to=to)
    assert not list(tmp_path.iterdir())


def test_other_names_that_cannot_be_written(tmp_path):
    with pytest.raises(UsageError, match=r"Cannot save an array without a name\. Save a tree"):
        shardload.save_arrays(np.zeros(3), tmp_path / "x.safetensors")
    with pytest.raises(UnsupportedError, match="'__metadata__' to safetensors, which reserves the name"):
        shardload.save_arrays({"__metadata__": np.zeros(3)}, tmp_path / "x.safetensors")
    with pytest.raises(MismatchError, match=r"two arrays called 'a\.b' would be in it"):
        shardload.save_arrays({"a.b": np.zeros(3), "a": {"b": np.zeros(3)}}, tmp_path / "x.safetensors")
