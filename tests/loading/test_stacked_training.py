"""Stacked Llama and Gemma: loaded, trained a step, saved, loaded again, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quantised_folders
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file
from stacked_models import llama_rules, llama_tensors, specs_of, stacked_by_hand

import shardload
from shardload import StoredAs
from shardload.synth import synth

MESHES = {"1x8": (1, 8), "2x4": (2, 4), "1x3": (1, 3)}
VOCABULARY = 50
WIDE = {"hidden_size": 96, "intermediate_size": 160}
"""Groups of GPTQ and AWQ divide these."""


def mesh_of(name):
    sizes = MESHES[name]
    auto = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh(sizes, ("batch", "model"), auto, devices=jax.devices()[: sizes[0] * sizes[1]])


def floats(tensors):
    rng = np.random.default_rng(0)
    return {name: rng.normal(0, 0.2, value.shape).astype(np.float32) for name, value in tensors.items()}


def layer(x, weights):
    """One block, with causal attention; the layer axis is gone."""

    def norm(x, scale):
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * (1 + scale)

    h = norm(x, weights["pre_norm"])
    q, k, v = (jnp.einsum("bte,ehd->bthd", h, weights[f"attention.{name}"]) for name in ("query", "key", "value"))
    k, v = (jnp.repeat(one, q.shape[2] // one.shape[2], 2) for one in (k, v))
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / q.shape[-1] ** 0.5
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
    mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)
    x = x + jnp.einsum("bthd,hde->bte", mixed, weights["attention.out"])
    h = norm(x, weights["post_norm"])
    return x + (jax.nn.silu(h @ weights["mlp.wi_0"]) * (h @ weights["mlp.wi_1"])) @ weights["mlp.wo"]


def loss_of(params, ids, stacks):
    """Of the next tokens. Layers of several stacks take turns, as Gemma's with local and global attention."""
    x = params["token_embedder"][ids]

    def block(x, weights):
        for stack in stacks:
            x = layer(x, {name.removeprefix(stack): value for name, value in weights.items() if name.startswith(stack)})
        return x, None

    stacked = {name: value for name, value in params.items() if name.startswith(tuple(stacks))}
    x, _ = jax.lax.scan(block, x, {name: jnp.moveaxis(value, 1, 0) for name, value in stacked.items()})
    logits = (x * (1 + params["decoder.norm"])) @ params["token_embedder"][:VOCABULARY].T
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), ids[:, 1:, None], -1)
    return -jnp.mean(picked)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("model", ["llama", "gemma"])
def test_a_step_of_training_is_saved_and_loaded(tmp_path, model, mesh):
    tensors, on = floats(llama_tensors(layers=4)), mesh_of(mesh)
    if model == "llama":
        stacks, rules, by_hand = ["decoder.layers."], llama_rules(), stacked_by_hand(tensors)
    else:
        stacks, kinds = ["local.", "full."], {"local.": range(0, 4, 2), "full.": range(1, 4, 2)}
        rules, by_hand = {}, {}
        for stack, layers in kinds.items():
            rules |= llama_rules(layers=layers, where=stack)
            by_hand |= stacked_by_hand(tensors, layers=layers, where=stack)
    save_file(tensors, tmp_path / "in.safetensors")
    targets = specs_of(by_hand, on)
    params = shardload.load_arrays(tmp_path / "in.safetensors", targets, mesh=on, names=rules)
    assert all(np.array_equal(params[name], value) for name, value in by_hand.items())
    ids = jnp.asarray(np.random.default_rng(1).integers(0, VOCABULARY, (4, 9)))

    def updated(params):
        loss, grads = jax.value_and_grad(loss_of)(params, ids, stacks)
        return loss, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    step = jax.jit(updated, out_shardings=(None, jax.tree.map(lambda p: p.sharding, params)))
    first, trained = step(params)
    second, _ = step(trained)
    assert second < first
    shardload.save_arrays(trained, tmp_path / "out", to="safetensors", names=rules, max_shard_bytes="16KiB")
    again = shardload.load_arrays(tmp_path / "out", trained, names=rules)
    for name, value in trained.items():
        assert np.asarray(again[name]).tobytes() == np.asarray(value).tobytes()
        assert again[name].sharding == value.sharding
    assert step(again)[0] == second
    alone = shardload.load_arrays(tmp_path / "out", P(), mesh="1x1")
    assert alone.keys() == tensors.keys() and all(alone[name].shape == value.shape for name, value in tensors.items())
    assert any(not np.array_equal(alone[name], value) for name, value in tensors.items())


def stacks_of(found):
    """Rules for the layers of any folder of the Llama family, and what they give by NumPy."""
    layers = 1 + max(int(name.split(".")[2]) for name in found if name.startswith("model.layers."))
    rules, expected = {}, {}
    for name in ("self_attn.q_proj", "mlp.gate_proj", "mlp.down_proj", "input_layernorm"):
        each = [np.asarray(found[f"model.layers.{i}.{name}.weight"]) for i in range(layers)]
        dims = "out in -> in layer out" if each[0].ndim == 2 else "width -> layer width"
        rules[name] = StoredAs(f"model.layers.{{layer}}.{name}.weight", dims)
        expected[name] = np.stack([one.T for one in each], 1) if each[0].ndim == 2 else np.stack(each)
    return rules, expected


@pytest.mark.filterwarnings("ignore:.*weights dequantised:UserWarning")
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("kind", ["fp8", "gptq", "awq", "nf4", "gguf"])
def test_quantised_layers_are_stacked(tmp_path, kind, mesh):
    if kind == "gguf":
        from gguf_from_folder import write

        folder = synth("llama3_8b", format="safetensors", scale=0.02, directory=tmp_path / "in")
        source = tmp_path / "m.gguf"
        write(folder, source, kind="Q8_0")
    else:
        source = tmp_path / "in"
        method = next(name for name in quantised_folders.METHODS if name.startswith(kind))
        quantised_folders.write(source, method, **WIDE)
    on = mesh_of(mesh)
    found = shardload.load_arrays(source, P(), mesh="1x1")
    rules, expected = stacks_of(found)
    arrays = shardload.load_arrays(source, specs_of(expected, on), mesh=on, names=rules, strict=False)
    for name, value in expected.items():
        assert arrays[name].dtype == value.dtype
        for shard in arrays[name].addressable_shards:
            assert np.asarray(shard.data).tobytes() == np.ascontiguousarray(value[shard.index]).tobytes()


def test_saved_tensors_are_those_of_the_source(tmp_path):
    tensors = llama_tensors()
    save_file(tensors, tmp_path / "in.safetensors")
    arrays = shardload.load_arrays(
        tmp_path / "in.safetensors", dict.fromkeys(llama_rules(), P()), mesh="1x8", names=llama_rules()
    )
    shardload.save_arrays(arrays, tmp_path / "out.safetensors", names=llama_rules())
    found = load_file(tmp_path / "out.safetensors")
    assert found.keys() == tensors.keys()
    assert all(np.array_equal(found[name], value) for name, value in tensors.items())
