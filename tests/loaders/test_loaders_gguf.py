import itertools
import re
import struct
import sys
from pathlib import Path
from types import SimpleNamespace

import gguf
import gguf_pairs
import keras_hub
import ml_dtypes
import numpy as np
import pytest
from checkpoints import finish_gguf, llama3_factors, read_tensor, write_gguf
from gguf_fixture import gemma3_gguf  # noqa: F401 - a fixture
from jax.sharding import PartitionSpec

import shardload
from shardload.cli import main
from shardload.comparing import diff
from shardload.errors import (
    MismatchError,
    MissingExtraError,
    SourceError,
    TransferError,
    TruncatedSourceError,
    UnsafeSourceError,
    UnsupportedError,
)
from shardload.families.registry import gguf_architectures
from shardload.loaders import open_manifest
from shardload.loaders.gguf.header import INLINE_ITEMS, TYPES, read_array, read_gguf_header
from shardload.loaders.gguf.loader import tokenizer_metadata
from shardload.loaders.gguf.rows import PLAIN, minus_one
from shardload.stores.local import located
from shardload.verifying import verify

Q8, Q4 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_0


def permute(weights, heads):
    """As llama.cpp's converter does it."""
    halves = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def test_our_type_table_is_the_package_s():
    for kind in TYPES.values():
        assert (kind.block_elements, kind.block_bytes) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind.id)]
        assert gguf.GGMLQuantizationType(kind.id).name == kind.name
    known = {kind.name for kind in TYPES.values()}
    # For dot products only, and Q1_0, which the package cannot decode.
    assert {kind.name for kind in gguf.GGMLQuantizationType} - known == {"Q8_1", "Q8_K", "Q1_0"}


def test_the_page_lists_every_type():
    rows = [
        f"| `{kind.name}` | {kind.id} | {kind.block_elements} | {kind.block_bytes} | "
        f"{PLAIN.get(kind.name, 'float32')} |"
        for kind in TYPES.values()
    ]
    assert "\n".join(rows) + "\n" in (Path(__file__).parents[2] / "docs" / "reference" / "gguf.md").read_text()


@pytest.mark.parametrize("kind", [*itertools.chain(*gguf_architectures().values())], ids=lambda kind: kind.name)
def test_our_names_are_the_package_s(kind):
    arch = next(a for a, label in gguf.MODEL_ARCH_NAMES.items() if label == kind.name)
    names = gguf.get_tensor_name_map(arch, 2)
    parts = [part for part in kind.block_names if "." not in part]
    for ours in (*(f"blk.1.{part}" for part in parts), *kind.top_names):
        hf = kind.hf_name(f"{ours}.weight", "x").replace(".{}", "")
        spellings = (hf, hf.removeprefix("transformer."))
        known = next(filter(None, (names.get_name(each, try_suffixes=(".weight",)) for each in spellings)), None)
        assert known is None or known.removesuffix(".weight") == ours, hf
        assert known or ours.endswith(("_q_norm", "_k_norm", "output", ".ffn_gate", ".ffn_up", ".ffn_down")), hf


@pytest.mark.parametrize("kind", [k for k in TYPES.values() if k.name not in PLAIN], ids=lambda k: k.name)
def test_every_range_of_rows_decodes_like_the_whole(tmp_path, kind):
    rng = np.random.default_rng(kind.id)
    qtype = gguf.GGMLQuantizationType(kind.id)
    raw = rng.integers(0, 256, (37, 2 * kind.block_bytes), np.uint8)
    with np.errstate(all="ignore"):
        whole = gguf.dequantize(raw, qtype)
    path = write_gguf(tmp_path / "x.gguf", {"blk.0.ffn_down.weight": (raw, qtype)})
    tensor = open_manifest(path).tensors["model.layers.0.mlp.down_proj.weight"]
    for start, stop in [(0, 37), (5, 6), (16, 33), (36, 37), (7, 7)]:
        rows = tensor.storage.reader.read_rows(start, stop)
        assert rows.dtype == np.float32
        assert rows.tobytes() == whole[start:stop].tobytes()


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0"])
def test_llama_rows_are_put_back_in_order(tmp_path, heads, kind):
    rng = np.random.default_rng(heads)
    qtype = gguf.GGMLQuantizationType[kind]
    hf = gguf.dequantize(gguf.quantize(rng.normal(size=(32, 64)).astype(np.float32), qtype), qtype)
    stored = gguf.quantize(permute(hf, heads), qtype)
    path = write_gguf(tmp_path / "x.gguf", {"blk.0.attn_q.weight": (stored, qtype)}, heads=heads)
    tensor = open_manifest(path).tensors["model.layers.0.self_attn.q_proj.weight"]
    for start, stop in [(0, 32), (3, 4), (7, 25), (31, 32)]:
        np.testing.assert_array_equal(tensor.storage.reader.read_rows(start, stop).astype(np.float32), hf[start:stop])


def test_llama_biases_are_put_back_in_order(tmp_path):
    hf = np.arange(32, dtype=np.float32)
    path = write_gguf(tmp_path / "x.gguf", {"blk.0.attn_k.bias": permute(hf, 2)}, heads=4, kv_heads=2)
    tensor = open_manifest(path).tensors["model.layers.0.self_attn.k_proj.bias"]
    np.testing.assert_array_equal(read_tensor(tensor), hf)
    np.testing.assert_array_equal(tensor.storage.reader.read_rows(5, 21), hf[5:21])


def test_plain_tensors_are_extents(tmp_path):
    value = np.arange(12, dtype=np.float32).reshape(3, 4)
    path = write_gguf(tmp_path / "x.gguf", {"blk.0.ffn_up.weight": value.astype(np.float16), "output.weight": value})
    tensors = open_manifest(path).tensors
    assert read_tensor(tensors["model.layers.0.mlp.up_proj.weight"]).tobytes() == value.astype(np.float16).tobytes()
    np.testing.assert_array_equal(read_tensor(tensors["lm_head.weight"]), value)


def test_gemma_norms_come_back_exactly_from_bfloat16():
    every = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        norms = every.astype(np.float32)
    norms = norms[(np.abs(norms) < 256) & (np.abs(norms) > 2.0**-15)]
    np.testing.assert_array_equal(minus_one(norms + np.float32(1)), norms)


def test_gemma_norms_kept_in_float32_lose_nothing_more():
    norms = np.random.default_rng(0).normal(size=1000).astype(np.float32) / 3
    stored = norms + np.float32(1)
    found = minus_one(stored)
    np.testing.assert_array_equal(found + np.float32(1), stored)
    np.testing.assert_allclose(found, norms, atol=1.2e-7)


def test_quantised_vectors_decode_in_blocks(tmp_path):
    value = gguf.quantize(np.arange(96, dtype=np.float32), Q8)
    path = write_gguf(tmp_path / "x.gguf", {"output_norm.weight": (value, Q8)}, arch="qwen2")
    reader = open_manifest(path).tensors["model.norm.weight"].storage.reader
    assert reader.row_alignment == 32
    np.testing.assert_array_equal(reader.read_rows(30, 70), gguf.dequantize(value, Q8)[30:70])


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}
LLAMA3_FACTORS = llama3_factors(LLAMA3, theta=500000.0, head_dim=16).astype(np.float32)


def test_llama3_rope_scaling_is_recovered(tmp_path):
    assert LLAMA3_FACTORS.min() == 1
    assert LLAMA3_FACTORS.max() == 8
    path = write_gguf(tmp_path / "x.gguf", {"rope_freqs.weight": LLAMA3_FACTORS}, theta=500000.0)
    manifest = open_manifest(path)
    assert manifest.config["rope_scaling"] == LLAMA3
    assert "rope_freqs.weight" not in manifest.metadata
    path = write_gguf(tmp_path / "y.gguf", {"rope_freqs.weight": LLAMA3_FACTORS * 2 - 1}, theta=500000.0)
    with pytest.raises(UnsupportedError, match="does not follow Llama 3's rule"):
        open_manifest(path).require_description()


STRETCHED = {
    "mistral, by its window": ("mistral", {"extra": lambda w: w.add_sliding_window(4096)}),
    "mistral, by its heads": ("mistral", {"extra": lambda w: w.add_key_length(16), "hidden": 64}),
    "mixtral": ("mixtral", {"extra": lambda w: (w.add_expert_count(4), w.add_expert_used_count(2))}),
    "smollm3": ("smollm3", {"arch": "smollm3"}),
}


@pytest.mark.parametrize(("kind", "options"), STRETCHED.values(), ids=STRETCHED)
def test_llama3_rope_scaling_of_other_models_is_in_their_configuration(tmp_path, kind, options):
    """KerasHub's classes have no such positions, so the build refuses it: it must not get lost here."""
    path = write_gguf(tmp_path / "x.gguf", {"rope_freqs.weight": LLAMA3_FACTORS}, theta=500000.0, **options)
    found = open_manifest(path).config
    assert (found["model_type"], found["rope_scaling"]) == (kind, LLAMA3)


def experts(writer):
    writer.add_expert_count(4)
    writer.add_expert_used_count(2)


def of_gpt2(writer):
    writer.add_layer_norm_eps(1e-5)
    writer.add_context_length(9)


def of_gemma4(writer):
    writer.add_key_length(8)
    writer.add_array("gemma4.attention.sliding_window_pattern", [True])


ONES, BIG = np.ones(4, np.float32), np.full(4, 1e30, np.float32)
UNUSED_FACTORS = {
    "qwen2": ({"arch": "qwen2"}, {"rope_freqs": ONES}, "'rope_freqs.weight' has no counterpart"),
    "gpt-oss": ({"arch": "gpt-oss"}, {"rope_freqs": ONES}, "'rope_freqs.weight' has no counterpart"),
    "llama, of Phi-3": ({}, {"rope_factors_short": ONES, "rope_factors_long": ONES}, "has no counterpart"),
    "phi3, of Llama": ({"arch": "phi3"}, {"rope_freqs": ONES}, "'rope_freqs.weight' has no counterpart"),
    "phi3, short only": ({"arch": "phi3"}, {"rope_factors_short": ONES}, "contains only one of them"),
    "phi3, long only": ({"arch": "phi3"}, {"rope_factors_long": ONES}, "contains only one of them"),
    "gemma4, other factors": ({"arch": "gemma4"}, {"rope_freqs": ONES * 8}, "1 for the first pairs"),
    "gemma4, other order": ({"arch": "gemma4"}, {"rope_freqs": np.r_[BIG[:2], ONES[:2]]}, "1 for the first pairs"),
    "gemma4, other size": ({"arch": "gemma4"}, {"rope_freqs": ONES[:2]}, "4 numbers"),
}


@pytest.mark.parametrize(("options", "factors", "message"), UNUSED_FACTORS.values(), ids=UNUSED_FACTORS)
def test_rotary_factors_that_a_model_does_not_use_are_refused(tmp_path, options, factors, message):
    def extra(writer):
        writer.add_context_length(64)
        experts(writer)
        writer.add_sliding_window(4)
        if options.get("arch") == "gemma4":
            of_gemma4(writer)

    tensors = {f"{key}.weight": value for key, value in factors.items()}
    path = write_gguf(tmp_path / "x.gguf", tensors, kv_heads=1, hidden=16, extra=extra, **options)
    with pytest.raises(SourceError if "only" in message else UnsupportedError, match=message):
        open_manifest(path).require_description()


def test_rotary_factors_of_gemma_4(tmp_path):
    factors = {"rope_freqs.weight": np.r_[ONES[:1], BIG[:3]]}
    path = write_gguf(tmp_path / "x.gguf", factors, arch="gemma4", kv_heads=1, hidden=16, extra=of_gemma4)
    assert open_manifest(path).config["rope_parameters"]["full_attention"]["partial_rotary_factor"] == 0.25


def test_mistral_is_told_by_what_only_it_has(tmp_path):
    assert open_manifest(write_gguf(tmp_path / "x.gguf", {})).config["model_type"] == "llama"
    path = write_gguf(tmp_path / "x.gguf", {}, extra=lambda w: w.add_sliding_window(4096))
    assert open_manifest(path).config["model_type"] == "mistral"


def test_header_is_small_and_long_arrays_stay_in_the_file(tmp_path):
    tokens = [f"<{i}>é" for i in range(3 * INLINE_ITEMS)]

    def tokenizer(writer):
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(tokens)
        writer.add_token_scores([0.5] * len(tokens))
        writer.add_token_merges(["a b", "c d"])
        writer.add_eos_token_id(7)
        writer.add_add_bos_token(True)
        writer.add_chat_template("{{ messages }}")

    path = write_gguf(tmp_path / "x.gguf", {}, extra=tokenizer)
    assert len(open_manifest(path).metadata["tokenizer.ggml.tokens"]) == len(tokens)
    found = tokenizer_metadata(located(path))
    assert found.tokens == tuple(tokens)
    assert found.merges == ("a b", "c d")
    assert found.scores.dtype == np.float32
    assert (found.model, found.special_ids, found.flags) == ("gpt2", {"eos": 7}, {"add_bos_token": True})
    assert found.chat_template == "{{ messages }}"
    assert not found.token_types.size


def test_long_texts_stay_in_the_file_and_long_templates_come_whole(tmp_path):
    licence, template = "All rights reserved. " * 4096, "{{ bos_token }}é" * 8192

    def extra(writer):
        writer.add_license(licence)
        writer.add_token_list(["a", "b"])
        writer.add_chat_template(template)

    path = write_gguf(tmp_path / "x.gguf", {"blk.0.attn_norm.weight": np.ones(32, np.float32)}, extra=extra)
    assert read_array(read_gguf_header(located(path)).values["general.license"]).tobytes() == licence.encode()
    assert tokenizer_metadata(located(path)).chat_template == template


def test_no_tokenizer(tmp_path):
    with pytest.raises(UnsupportedError, match="contains no tokenizer"):
        tokenizer_metadata(located(write_gguf(tmp_path / "x.gguf", {})))


@pytest.fixture
def three_files(tmp_path):
    """The second has the same values in its quantised tensor as the first, the third others."""
    rng = np.random.default_rng(0)
    first, other = (gguf.quantize(rng.normal(size=(8, 32)).astype(np.float32), Q8) for _ in range(2))
    names = {"a": (first, (2, 32)), "b": (first, (3, 32)), "c": (other, (2, 32))}
    return [
        write_gguf(tmp_path / f"{name}.gguf", {"output.weight": (raw, Q8), "blk.0.ffn_up.weight": np.ones(shape, "f4")})
        for name, (raw, shape) in names.items()
    ]


NEEDS_NO_PACKAGE = {
    "inspect": lambda a, b, c: shardload.inspect(a).tensors["lm_head.weight"].shape == (8, 32),
    "verify": lambda a, b, c: verify(a)[0].verdict == "readable",
    "diff of equal bytes": lambda a, b, c: [d.what for d in diff(a, b).differences] == ["shape"],
    "load_arrays of others": lambda a, b, c: shardload.load_arrays(a, only("model.embed_tokens.weight"), mesh="1x1"),
    "plan": lambda a, b, c: shardload.plan(a).bytes,
}
DECODES = {
    "load_arrays": lambda a, b, c: shardload.load_arrays(a, only("lm_head.weight"), mesh="1x1"),
    "load": lambda a, b, c: shardload.load(a, mesh="1x1", strict=False),
    "load_weights": lambda a, b, c: shardload.load_weights(llama(), a, mesh="1x1", strict=False),
    "rows": lambda a, b, c: shardload.inspect(a).tensors["lm_head.weight"].storage.reader.read_rows(0, 1),
}


def only(name):
    return lambda tensor, shape: PartitionSpec() if tensor == name else None


def llama():
    sizes = {"num_layers": 1, "num_query_heads": 2, "num_key_value_heads": 2, "hidden_dim": 32, "intermediate_dim": 64}
    return keras_hub.models.Llama3Backbone(vocabulary_size=8, **sizes)


@pytest.fixture
def without_package(three_files, monkeypatch):
    """Those files, which a program without the package ``gguf`` is to read."""
    monkeypatch.setitem(sys.modules, "gguf", None)
    return three_files


@pytest.mark.parametrize("call", NEEDS_NO_PACKAGE.values(), ids=NEEDS_NO_PACKAGE)
def test_what_decodes_nothing_needs_no_package(call, without_package):
    assert call(*without_package)


@pytest.mark.parametrize("call", DECODES.values(), ids=DECODES)
def test_what_decodes_names_the_extra(call, without_package):
    needs = r"Decoding Q8_0 tensors of .*gguf needs .*pip install 'shardload\[gguf\]'"
    with pytest.raises(MissingExtraError, match=needs):
        call(*without_package)


def test_diff_without_the_package_compares_the_rest(tmp_path, request):
    tensors = {"output.weight": np.ones((8, 32), "f4"), "blk.0.ffn_up.weight": np.ones((2, 32), "f4")}
    plain = write_gguf(tmp_path / "n.gguf", tensors)
    first, _, other = request.getfixturevalue("without_package")
    found = diff(first, other)
    (only_one,) = found.differences
    assert (only_one.name, only_one.what) == ("lm_head.weight", "stored bytes")
    assert (only_one.elements, only_one.largest) == (256, None)
    assert found.equal == 2
    assert re.fullmatch(
        r"1 tensor could not be compared by value \('lm_head.weight'\): Decoding Q8_0 tensors of .*a.gguf needs "
        r"the package 'gguf', which is not installed\. Install it with: pip install 'shardload\[gguf\]'",
        found.notes[-1],
    )
    found = diff(first, plain)
    assert [(d.name, d.what) for d in found.differences] == [("lm_head.weight", "not compared")]
    assert (found.equal, len(found.notes)) == (2, 1)


def test_a_conversion_without_the_package_writes_nothing(tmp_path, monkeypatch):
    file, _ = gguf_pairs.write(tmp_path, "llama", "Q8_0")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'shardload\[gguf\]'"):
        shardload.convert(file, tmp_path / "out", to="h5")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "model.gguf"]


def test_verify_reads_stored_bytes_to_their_end(three_files):
    first, _, other = three_files
    (verdict,) = verify(first)
    assert verdict.n_bytes == sum(t.stored_bytes for t in shardload.inspect(first).tensors.values())
    assert [(d.name, d.what) for d in diff(first, other).differences] == [("lm_head.weight", "values")]


def test_a_file_that_shrinks_is_a_transfer_error(tmp_path):
    raw = gguf.quantize(np.zeros((64, 32), np.float32), Q8)
    path = write_gguf(tmp_path / "x.gguf", {"output.weight": (raw, Q8)})
    reader = open_manifest(path).tensors["lm_head.weight"].storage.reader
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 600)
    with pytest.raises(TransferError, match="shrank"):
        reader.read_rows(0, 64)
    path.unlink()
    with pytest.raises(TransferError, match="can no longer be read"):
        reader.read_rows(0, 64)


def test_truncated_data(tmp_path):
    path = write_gguf(tmp_path / "x.gguf", {"output.weight": np.zeros((64, 32), np.float32)})
    path.write_bytes(path.read_bytes()[:-4000])
    with pytest.raises(TruncatedSourceError, match=r"tensor 'output.weight' should end at byte"):
        open_manifest(path)


def test_truncated_header_at_every_length(tmp_path):
    path = write_gguf(tmp_path / "x.gguf", {})
    raw = path.read_bytes()
    for length in range(4, len(raw) - 200, 7):
        path.write_bytes(raw[:length])
        with pytest.raises(SourceError, match=r"truncated"):
            open_manifest(path)


def header(fields, *values, version=3):
    return struct.pack(f"<4sIQQ{fields}", b"GGUF", version, *values)


def valued(fields, *values):
    """A header of one key-value, whose key is "k" and whose value's type and content are given."""
    return header(f"Q1s{fields}", 0, 1, 1, b"k", *values)


MANY = "'k' is an array of 100 arrays, expected at most 39"
NESTED = struct.pack("<IQ", 9, 1) * 99 + bytes(9999)
RAW = {
    "counts": (header("", 1 << 60, 0), UnsafeSourceError, "declares 1152921504606846976 tensors"),
    "pairs": (header("", 0, 1 << 60), UnsafeSourceError, "key-values"),
    "version 1": (header("", 0, 0, version=1), UnsupportedError, "version 1"),
    "big-endian": (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), UnsupportedError, "big-endian"),
    "string": (header("Q", 0, 1, 1 << 63) + b"x" * 64, SourceError, "a key"),
    "not utf-8": (header("Q", 0, 1, 1) + b"\xff" * 64, SourceError, "not UTF-8"),
    "type": (valued("I", 99) + b"x" * 64, SourceError, "does not exist"),
    "arrays of arrays": (valued("IIQ", 9, 9, 1 << 60) + b"x" * 99, TruncatedSourceError, f"'k' of {1 << 60:,} arrays"),
    "many arrays": (valued("IIQ", 9, 9, 100) + struct.pack("<IQ", 0, 0) * 100, UnsupportedError, MANY),
    "deep arrays": (valued("I", 9) + NESTED, UnsupportedError, "'k' has arrays in more than 8 levels"),
    "a type in an array": (
        valued("IIQIQ", 9, 9, 1, 99, 1) + b"x" * 99,
        SourceError,
        "array of type 99, which does not exist",
    ),
    "array": (valued("IIQ", 9, 4, 1 << 62), TruncatedSourceError, "'k'"),
}


@pytest.mark.parametrize(("raw", "kind", "message"), RAW.values(), ids=RAW)
def test_malformed_headers(tmp_path, raw, kind, message):
    (tmp_path / "x.gguf").write_bytes(raw)
    with pytest.raises(kind, match=rf"x\.gguf.*{message}"):
        open_manifest(tmp_path / "x.gguf")


def test_arrays_of_arrays(tmp_path):
    long = list(range(3 * INLINE_ITEMS))

    def extra(writer):
        writer.add_array("numbers", [[1, 2], [3]])
        writer.add_array("texts", [[["a"], ["b", "c"]]])
        writer.add_array("long", [[1], long])

    found = open_manifest(write_gguf(tmp_path / "x.gguf", {}, extra=extra))
    assert found.undescribed is None
    assert found.metadata["numbers"] == [[1, 2], [3]] and found.metadata["texts"] == [[["a"], ["b", "c"]]]
    one, other = found.metadata["long"]
    assert one == [1] and read_array(other).tolist() == long


@pytest.mark.parametrize("key", ["tokens", "scores", "token_type", "merges"])
def test_a_tokenizer_of_arrays_of_arrays_is_refused(key, tmp_path):
    def extra(writer):
        writer.add_token_list(["a", "b"])
        writer.add_key_value(f"tokenizer.ggml.{key}", [[1], [1, 2]], gguf.GGUFValueType.ARRAY)

    nested_tokens = lambda writer: writer.add_array("tokenizer.ggml.tokens", [["a"], ["b"]])  # noqa: E731
    path = write_gguf(tmp_path / "x.gguf", {}, extra=nested_tokens if key == "tokens" else extra)
    with pytest.raises(SourceError, match=rf"'tokenizer.ggml.{key}' should be a list of"):
        tokenizer_metadata(located(path))


def without_keys(path):
    """A Llama of which a tool kept the tensors only."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tensor("token_embd.weight", np.ones((8, 32), np.float32))
    writer.add_tensor("blk.0.attn_q.weight", gguf.quantize(np.ones((32, 32), np.float32), Q8), raw_dtype=Q8)
    finish_gguf(writer)
    return path


ODD = {
    "v.patch_embd.weight": np.arange(8, dtype=np.float32).reshape(2, 4),
    "v.q.weight": (np.ones((4, 34), np.uint8), Q8),
}
UNDESCRIBED = {
    "architecture": (lambda path: write_gguf(path, ODD, arch="clip"), UnsupportedError, "architecture 'clip'"),
    "nested": (
        lambda path: write_gguf(path, ODD, arch="mamba", extra=lambda w: w.add_array("k", [[1, 2], [3]])),
        UnsupportedError,
        "architecture 'mamba'",
    ),
    "keys": (without_keys, SourceError, r"should contain the key 'llama\.attention\.head_count'"),
    "tensor": (lambda path: write_gguf(path, ODD), UnsupportedError, "'v.patch_embd.weight' has no counterpart"),
}


@pytest.mark.parametrize(("make", "kind", "message"), UNDESCRIBED.values(), ids=UNDESCRIBED)
def test_tensors_need_no_model(make, kind, message, tmp_path, capsys):
    path = make(tmp_path / "x.gguf")
    stored = {info.name: info for info in read_gguf_header(located(path)).tensors}
    found = shardload.inspect(path)
    assert list(found.tensors) == list(stored)
    assert {name: t.shape for name, t in found.tensors.items()} == {name: i.shape for name, i in stored.items()}
    (verdict,) = verify(path)
    assert (verdict.verdict, verdict.tensors) == ("readable", len(stored))
    assert diff(path, path).equal == len(stored)
    arrays = shardload.load_arrays(path, lambda name, shape: PartitionSpec(), mesh="1x1")
    for name, array in arrays.items():
        np.testing.assert_array_equal(np.asarray(array), read_tensor(found.tensors[name]))
    assert main(["inspect", str(path)]) == 0
    assert re.search(f"^No model can be built from it: .*{message}", capsys.readouterr().out, re.MULTILINE)
    with pytest.raises(MismatchError, match=f"They have the names of the file: .*{message}"):
        shardload.load_arrays(path, {"model.norm.weight": np.zeros(3, np.float32)})


@pytest.mark.parametrize(("make", "kind", "message"), UNDESCRIBED.values(), ids=UNDESCRIBED)
def test_a_model_needs_a_description(make, kind, message, tmp_path):
    path = make(tmp_path / "x.gguf")
    model = keras_hub.models.GPT2Backbone(8, 1, 2, 8, 8)
    for call in (
        lambda: shardload.load(path, mesh="1x1"),
        lambda: shardload.plan(path),
        lambda: shardload.convert(path, tmp_path / "out", to="h5"),
        lambda: shardload.convert(path, tmp_path / "out", to="safetensors"),
        lambda: shardload.load_weights(model, path, mesh="1x1"),
    ):
        with pytest.raises(kind, match=message):
            call()


MAMBA = "architecture 'mamba', which is not supported. GGUF is supported for gemma, gemma2"
UNSUPPORTED = {
    "architecture": ({"arch": "mamba"}, {}, MAMBA),
    "falcon": ({"arch": "falcon"}, {}, r"not supported \(KerasHub's Falcon has ALiBi and biases"),
    "gptneox": ({"arch": "gptneox"}, {}, r"not supported \(KerasHub's GPTNeoX uses the embedding as output layer"),
    "qwen35": ({"arch": "qwen35"}, {}, r"not supported \(it stores -exp\(A_log\)"),
    "vision": ({"arch": "clip"}, {}, r"not supported \(it is the vision part of another file"),
    "tensor": ({}, {"v.patch_embd.weight": np.zeros((2, 2), np.float32)}, "no counterpart"),
    "per layer": ({"extra": lambda w: w.add_array("llama.rope.freq_base", [1, 2])}, {}, "one number for all layers"),
}


@pytest.mark.parametrize(("options", "tensors", "message"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_unsupported_models(tmp_path, options, tensors, message):
    path = write_gguf(tmp_path / "x.gguf", tensors, **options)
    with pytest.raises(UnsupportedError, match=message):
        open_manifest(path).require_description()


def test_heads_that_do_not_divide(tmp_path):
    path = write_gguf(tmp_path / "x.gguf", {"blk.0.attn_q.weight": np.zeros((10, 4), np.float32)}, heads=4)
    with pytest.raises(SourceError, match="not a whole number for 4 heads"):
        open_manifest(path).require_description()


STACKS = {"a matrix": (4, 64), "too many": (1025, 4, 32), "empty": (0, 4, 32), "tiny": (8, 1, 1)}


@pytest.mark.parametrize("shape", STACKS.values(), ids=STACKS)
def test_stacks_that_are_no_experts(tmp_path, shape):
    path = write_gguf(tmp_path / "x.gguf", {"blk.0.ffn_up_exps.weight": np.zeros(shape, np.float32)})
    with pytest.raises(SourceError, match=r"expected \(experts, out, in\) with at most 1024 experts"):
        open_manifest(path).require_description()


def quantised(kind, *shape):
    """Random numbers as a file stores them, and what they decode to."""
    qtype = gguf.GGMLQuantizationType[kind]
    stored = gguf.quantize(np.random.default_rng(0).normal(size=shape).astype(np.float32), qtype)
    return (stored, qtype), gguf.dequantize(stored, qtype)


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_experts_are_parts_of_their_stack(tmp_path, kind):
    stored, values = quantised(kind, 3, 4, 64)
    path = write_gguf(tmp_path / "x.gguf", {"blk.0.ffn_up_exps.weight": stored}, arch="qwen3moe", extra=experts)
    tensors = open_manifest(path).tensors
    for i, value in enumerate(values):
        assert read_tensor(tensors[f"model.layers.0.mlp.experts.{i}.up_proj.weight"]).tobytes() == value.tobytes()


def test_experts_in_tensors_of_their_own(tmp_path):
    """As files of before April 2024 have them."""
    value = np.arange(2 * 32, dtype=np.float32).reshape(2, 32)
    path = write_gguf(tmp_path / "x.gguf", {"blk.0.ffn_down.3.weight": value}, extra=experts)
    found = open_manifest(path).tensors["model.layers.0.block_sparse_moe.experts.3.w2.weight"]
    np.testing.assert_array_equal(read_tensor(found), value)


def test_the_gate_of_shared_experts_has_one_row(tmp_path):
    described = {"arch": "qwen2moe", "extra": lambda w: (experts(w), w.add_context_length(9))}
    path = write_gguf(tmp_path / "x.gguf", {"blk.0.ffn_gate_inp_shexp.weight": np.zeros(32, "f4")}, **described)
    assert open_manifest(path).tensors["model.layers.0.mlp.shared_expert_gate.weight"].shape == (1, 32)


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_rows_of_a_transposed_matrix(tmp_path, kind):
    stored, values = quantised(kind, 96, 32)
    path = write_gguf(tmp_path / "x.gguf", {"blk.0.attn_qkv.weight": stored}, arch="gpt2", extra=of_gpt2)
    tensor = open_manifest(path).tensors["transformer.h.0.attn.c_attn.weight"]
    assert tensor.shape == (32, 96)
    for start, stop in [(0, 32), (3, 4), (7, 25), (31, 32), (5, 5)]:
        rows = tensor.storage.reader.read_rows(start, stop)
        assert rows.flags.c_contiguous
        np.testing.assert_array_equal(rows.astype(np.float32), values.T[start:stop])


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("heads", [1, 4])
def test_rows_of_fused_queries_keys_and_values(tmp_path, heads, kind):
    (_, qtype), hf = quantised(kind, 96, 32)
    split = hf.reshape(heads, 3, 32 // heads, 32)
    stored = gguf.quantize(np.concatenate([split[:, i].reshape(32, 32) for i in range(3)]), qtype)
    tensors = {"blk.0.attn_qkv.weight": (stored, qtype), "blk.0.attn_qkv.bias": np.zeros(96, np.float32)}
    described = {"arch": "bloom", "heads": heads, "extra": lambda writer: writer.add_layer_norm_eps(1e-5)}
    path = write_gguf(tmp_path / "x.gguf", tensors, **described)
    reader = open_manifest(path).tensors["transformer.h.0.self_attention.query_key_value.weight"].storage.reader
    for start, stop in [(0, 96), (3, 4), (7, 61), (95, 96), (5, 5)]:
        np.testing.assert_array_equal(reader.read_rows(start, stop), hf[start:stop])


HALVES = {
    "no up": {"blk.0.ffn_gate_exps.weight": (2, 3, 32)},
    "another size": {"blk.0.ffn_gate_exps.weight": (2, 3, 32), "blk.0.ffn_up_exps.weight": (2, 4, 32)},
    "a matrix": {"blk.0.ffn_gate_exps.weight": (6, 32), "blk.0.ffn_up_exps.weight": (6, 32)},
    "down": {"blk.0.ffn_down_exps.bias": (2, 3, 32)},
}


@pytest.mark.parametrize("shapes", HALVES.values(), ids=HALVES)
def test_experts_that_do_not_fit_together(tmp_path, shapes):
    tensors = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    described = {"arch": "gpt-oss", "extra": lambda w: (experts(w), w.add_sliding_window(4))}
    path = write_gguf(tmp_path / "x.gguf", tensors, **described)
    with pytest.raises(SourceError, match=r"should have one shape of \d dims, found blk\.0\.ffn_\w+_exps\.\w+ \("):
        open_manifest(path).require_description()


def test_a_vector_cannot_be_transposed(tmp_path):
    tensors = {"blk.0.attn_qkv.weight": np.zeros(96, np.float32)}
    path = write_gguf(tmp_path / "x.gguf", tensors, arch="gpt2", extra=of_gpt2)
    with pytest.raises(SourceError, match=r"has the shape \(96,\), expected a matrix"):
        open_manifest(path).require_description()


def test_real_gemma_decodes_like_the_package(gemma3_gguf):  # noqa: F811
    manifest = open_manifest(gemma3_gguf)
    names = {info.name: info for info in read_gguf_header(located(gemma3_gguf)).tensors}
    raw = np.memmap(gemma3_gguf, np.uint8)
    wanted = {"attn_output": "self_attn.o_proj", "ffn_down": "mlp.down_proj", "attn_v": "self_attn.v_proj"}
    for gguf_name, hf_name in wanted.items():
        info = names[f"blk.3.{gguf_name}.weight"]
        data = raw[info.offset : info.offset + info.nbytes].reshape(info.shape[0], -1)
        whole = gguf.dequantize(data, gguf.GGMLQuantizationType(info.kind.id))
        tensor = manifest.tensors[f"model.layers.3.{hf_name}.weight"]
        assert tensor.shape == whole.shape
        assert read_tensor(tensor).tobytes() == whole.tobytes()
        assert tensor.storage.reader.read_rows(101, 203).tobytes() == whole[101:203].tobytes()


def test_real_gemma_norms_are_bfloat16_and_small(gemma3_gguf):  # noqa: F811
    norms = [read_tensor(t) for name, t in open_manifest(gemma3_gguf).tensors.items() if "norm" in name]
    assert len(norms) == 18 * 6 + 1
    for norm in norms:
        np.testing.assert_array_equal(norm, norm.astype(ml_dtypes.bfloat16).astype(np.float32))


def test_real_gemma_builds_through_keras_hub(gemma3_gguf):  # noqa: F811
    from keras_hub.src.utils.transformers import convert_gemma3

    manifest = open_manifest(gemma3_gguf)
    found = convert_gemma3.convert_backbone_config(manifest.config)
    sizes = {"vocabulary_size": 262144, "num_layers": 18, "hidden_dim": 640, "intermediate_dim": 2048}
    heads = {"num_query_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "query_head_dim_normalize": True}
    windows = {"sliding_window_size": 512, "use_sliding_window_attention": True}
    numbers = {"global_rope_scaling_factor": 1.0, "layer_norm_epsilon": 1e-6}
    assert found.items() >= {**sizes, **heads, **windows, **numbers}.items()
    asked = set()
    loader = SimpleNamespace(get_tensor=manifest.tensors.__getitem__)
    loader.port_weight = lambda keras_variable, hf_weight_key, hook_fn=None: asked.add(hf_weight_key)
    convert_gemma3.convert_weights(FakeBackbone(), loader, manifest.config)
    assert asked == set(manifest.tensors)


class FakeBackbone:
    """Answers any attribute or layer with itself: only the names that the converter asks for matter."""

    vision_encoder = None
    num_layers = 18
    is_embedding_model = False

    def __getattr__(self, name):
        return self

    def get_layer(self, name):
        return self


def test_real_gemma_tokenizer(gemma3_gguf):  # noqa: F811
    found = tokenizer_metadata(located(gemma3_gguf))
    assert found.model == "llama"
    assert len(found.tokens) == len(found.scores) == len(found.token_types) == 262144
    assert found.tokens[:4] == ("<pad>", "<eos>", "<bos>", "<unk>")
    assert found.special_ids == {"bos": 2, "eos": 1, "unknown": 3, "padding": 0}
