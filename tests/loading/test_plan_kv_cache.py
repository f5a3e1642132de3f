"""A plan counts the KV cache of generation: its bytes are those of the arrays that KerasHub's models make."""

import json

import jax
import numpy as np
import pytest
from small_family import published
from transformers_cross import folders

import shardload
from shardload.errors import UsageError
from shardload.layouts.kv_cache import KvCache
from shardload.pipeline.load import build, open_planned
from shardload.pipeline.request import PlanRequest
from shardload.resolve.architectures import lookup

GENERATING = ("gemma", "gemma2", "gemma3_text", "gpt_oss", "llama", "mistral", "mixtral", "phi3", "qwen2", "qwen3")
ROWS, TOKENS = 3, 11


def model_of(source):
    request = PlanRequest(source=source)
    return build(open_planned(request).manifest, request.construction)


def folder_of(family, path):
    if family == "gpt2":
        config = lookup("gpt2_base")[1] | {"n_layer": 2}
    else:
        config = next(iter(folders.read_family(family).values()))["json"]["config.json"]
    (path / "config.json").write_text(json.dumps(config))
    return path


def filled_cache(model, rows, tokens):
    """The shapes that the model returns for its cache, filled: of the whole computation, on shapes."""

    def run(weights, token_ids):
        with model_with(model, weights):
            others = [None] * (model._build_cache.__code__.co_argcount - 2)
            return model._build_cache(token_ids, *others)[-1]

    weights = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in model.variables]
    cache = jax.eval_shape(run, weights, jax.ShapeDtypeStruct((rows, tokens), "int32"))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))


def model_with(model, values):
    from keras import StatelessScope

    return StatelessScope(state_mapping=list(zip(model.variables, values, strict=True)))


@pytest.mark.parametrize("family", [*GENERATING, "gpt2"])
def test_the_cache_is_that_of_the_model(family, tmp_path):
    model = model_of(folder_of(family, tmp_path))
    cache = KvCache.of(model, rows=ROWS, tokens=TOKENS)
    assert cache.nbytes == filled_cache(model, ROWS, TOKENS) > 0
    assert len(cache.keys) == model.backbone.num_layers
    for one in cache.arrays:
        assert one.shape[one.rows] == ROWS
        assert one.shape[one.heads] == getattr(model.backbone, "num_key_value_heads", None) or model.backbone.num_heads


LLAMA = lookup("llama3_8b")[1] | {"num_hidden_layers": 2, "torch_dtype": "bfloat16"}
WHOLE = 2 * 2 * 8 * 128 * 2  # layers, keys and values, heads, head_dim, bytes: of a row and a token


@pytest.fixture
def llama(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


@pytest.mark.parametrize(
    ("mesh", "rows", "parts"),
    [("1x1", 4, 1), ("1x8", 4, 8), ("2x4", 4, 8), ("2x4", 3, 4), ("1x16", 4, 1), ("data=2,expert=4", 4, 2)],
)
def test_rows_and_heads_are_split_where_their_axes_divide_them(mesh, rows, parts, llama):
    use = shardload.plan(llama, mesh=mesh, kv_cache=(rows, 100)).kv_cache
    assert (use.rows, use.tokens, use.bytes) == (rows, 100, rows * 100 * WHOLE)
    assert use.per_device == use.bytes // parts


def test_the_cache_counts_in_what_fits_and_in_the_smallest_mesh(llama):
    without = shardload.plan(llama, mesh="1x2", device_memory_bytes="2500MiB")
    assert without.fits.fits and without.kv_cache is None
    found = shardload.plan(llama, mesh="1x2", device_memory_bytes="2500MiB", kv_cache="32x8192")
    assert found.kv_cache.per_device == 32 * 8192 * WHOLE // 2 == 1 << 30
    assert found.fits.per_device_max == without.fits.per_device_max + (1 << 30)
    assert not found.fits.fits
    assert (without.fits.smallest_mesh, found.fits.smallest_mesh) == ("1x2", "1x4")
    assert "KV cache" in str(found) and "32 rows of 8,192 tokens: 2.0 GiB, 1.0 GiB on each device" in str(found)
    assert found.to_json()["kv_cache"] == {"rows": 32, "tokens": 8192, "bytes": 2 << 30, "per_device": 1 << 30}


def test_a_cache_that_is_not_known_is_a_note():
    planned = shardload.plan("bert_base", kv_cache="8")
    assert planned.kv_cache is None
    assert planned.notes[-1] == "the KV cache is not counted: BertBackbone does not generate text from a KV cache"


@pytest.mark.parametrize("wrong", ["8x", "x8", "0x8", "8x8x8", "", "8 x 8", (8,), (8, 0), (True, 8), 8.0])
def test_other_sizes_are_refused(wrong):
    with pytest.raises(UsageError, match="expected rows and tokens, such as '8x4096'"):
        shardload.plan("gpt2_base", kv_cache=wrong)


def test_a_compiled_loop_splits_its_cache_as_planned(tmp_path):
    from shardload.synth import synth

    small = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 520, "num_attention_heads": 8}
    with published("tiny", LLAMA | small | {"num_key_value_heads": 4}) as name:
        model = shardload.load(synth(name, directory=tmp_path, dtype="float32"), mesh="2x4")
    ids = {"token_ids": np.ones((4, 96), "int32"), "padding_mask": np.ones((4, 96), bool)}
    mesh = model.variables[0].value.sharding.mesh
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("batch"))

    def run(weights, ids):
        with model_with(model, weights):
            return model.generate_step(ids)

    lowered = jax.jit(run).lower([v.value for v in model.variables], jax.device_put(ids, rows))
    cache = KvCache.of(model, rows=4, tokens=96)
    assert cache.arrays[0].shape == (4, 2, 2, 96, 4, 8)
    assert "f32[2,2,2,96,1,8]" in lowered.compile().as_text()
