"""Convert the tokenizer in a GGUF file's header to the files of a Hugging Face folder.

    llama   SentencePiece      tokenizer.model
    gpt2    byte-level BPE     tokenizer.json
            both               tokenizer_config.json: special tokens, chat template

A rebuilt tokenizer gives the same tokens for any text (`shardload.text.gguf_tokenizer`), but its files differ.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardload.converting.sidecar_files import Companions, copy
from shardload.hub import kerashub
from shardload.loaders.gguf import TokenizerMetadata, tokenizer_metadata
from shardload.manifest import Manifest
from shardload.stores.local import located
from shardload.text.gguf_tokenizer import of_metadata, sentencepiece_proto
from shardload.text.tokenizer import HuggingFace

_CLASSES = {"gemma": "GemmaTokenizer", "gemma2": "GemmaTokenizer", "gemma3_text": "GemmaTokenizer"}
_SPECIAL = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


def companions_of_gguf(manifest: Manifest) -> Companions:
    """Return the tokenizer, rebuilt from the header, as Hugging Face's files; empty without one, or with a note."""
    if not any(key.startswith("tokenizer.ggml.") for key in manifest.metadata):
        return Companions()
    try:
        found = tokenizer_metadata(manifest.location)
        files = files_of(found, manifest.source, str(manifest.config.get("model_type")))
    except Exception as error:  # of any kind, also SentencePiece's and tokenizers': the weights do not need it
        return Companions(notes=(f"the tokenizer in the GGUF file was left out: {error}",))
    return Companions({}, files, ("the tokenizer was rebuilt from the header of the GGUF file",))


def attach_preprocessor(model: Any, manifest: Manifest, companions: Companions) -> None:
    """Give a task the preprocessor that KerasHub makes from these files, if it can."""
    if not companions.transformers or getattr(type(model), "preprocessor_cls", None) is None:
        return
    with tempfile.TemporaryDirectory() as folder:
        copy(companions.transformers, Path(folder))
        model.preprocessor = kerashub.preprocessor(type(model), replace(manifest, location=located(folder)))


def files_of(found: TokenizerMetadata, source: str, model_type: str) -> dict[str, bytes]:
    """Return a tokenizer as Hugging Face's files.

    Raises:
        UnsupportedError: When its type cannot be rebuilt.
    """
    described: dict[str, Any] = {
        name: found.tokens[found.special_ids[key]] for key, name in _SPECIAL.items() if key in found.special_ids
    }
    if found.chat_template is not None:
        described["chat_template"] = found.chat_template
    if "add_bos_token" in found.flags:
        described["add_bos_token"] = found.flags["add_bos_token"]
    inner = of_metadata(found, source)  # raises for unsupported types
    if isinstance(inner, HuggingFace):
        described["tokenizer_class"] = "PreTrainedTokenizerFast"
        files = {"tokenizer.json": inner.inner.to_str(pretty=True).encode()}
    else:
        described["tokenizer_class"] = _CLASSES.get(model_type, "LlamaTokenizer")
        files = {"tokenizer.model": _with_special(found)}
    return {**files, "tokenizer_config.json": json.dumps(described, indent=2, ensure_ascii=False).encode()}


def _with_special(found: TokenizerMetadata) -> bytes:
    """Return a SentencePiece model that marks special pieces as such, which other readers rely on."""
    from sentencepiece import sentencepiece_model_pb2 as pb2

    proto = pb2.ModelProto.FromString(sentencepiece_proto(found))
    spec = proto.trainer_spec
    for key, name in (("bos", "bos"), ("eos", "eos"), ("padding", "pad"), ("unknown", "unk")):
        # SentencePiece refuses a model without an unknown piece; -1 means that it has none of the others.
        number = found.special_ids.get(key, 0 if key == "unknown" else -1)
        setattr(spec, f"{name}_id", number)
        if number >= 0:
            setattr(spec, f"{name}_piece", proto.pieces[number].piece)
            if key != "unknown":
                proto.pieces[number].type = pb2.ModelProto.SentencePiece.CONTROL
    return bytes(proto.SerializeToString())
