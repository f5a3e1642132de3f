"""Write the tokenizer in a GGUF file's header as the files of a Hugging Face folder, which KerasHub reads too.

    llama   SentencePiece      tokenizer.model
    gpt2    byte-level BPE     tokenizer.json
    bert    WordPiece          tokenizer.json, vocab.txt
    t5      unigrams           tokenizer.json
            all                tokenizer_config.json: special tokens, chat template

A rebuilt tokenizer gives the same tokens for any text (`shardload.text.gguf_tokenizer`), but its files differ.
"""

from __future__ import annotations

import json
from typing import Any

from shardload.families.parts.gguf import GgufTokenizer
from shardload.families.registry import model_type_of
from shardload.loaders.gguf.loader import TokenizerMetadata, tokenizer_metadata
from shardload.manifest import Manifest
from shardload.text.encoder_tokenizers import encoder_tokenizer, is_lower_case, vocabulary
from shardload.text.gguf_tokenizer import byte_level, check_supported, sentencepiece_proto, spaced_pairs

_SPECIAL = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


def tokenizer_files(manifest: Manifest) -> dict[str, bytes]:
    """Return the tokenizer of a GGUF file as Hugging Face's files.

    Raises:
        UnsupportedError: When the file has no tokenizer, or one whose type cannot be rebuilt.
        SourceError: When its parts contradict each other.
    """
    found = tokenizer_metadata(manifest.location)
    return files_of(found, manifest.source, str(manifest.config.get("model_type")))


def files_of(found: TokenizerMetadata, source: str, model_type: str) -> dict[str, bytes]:
    """Return a tokenizer as Hugging Face's files.

    Raises:
        UnsupportedError: When its type cannot be rebuilt.
    """
    # tokenizer_config.json, which names the special tokens, the class and the chat template.
    described: dict[str, Any] = {
        name: found.tokens[found.special_ids[key]] for key, name in _SPECIAL.items() if key in found.special_ids
    }
    if found.chat_template is not None:
        described["chat_template"] = found.chat_template
    if "add_bos_token" in found.flags:
        described["add_bos_token"] = found.flags["add_bos_token"]
    check_supported(found.model, found.pre, source)
    if found.model in (GgufTokenizer.WORD_PIECES, GgufTokenizer.UNIGRAMS):
        # KerasHub reads BERT's vocabulary from vocab.txt only.
        files = {"tokenizer.json": encoder_tokenizer(found).to_str(pretty=True).encode()}
        described["tokenizer_class"] = "XLMRobertaTokenizer"
        if found.model == GgufTokenizer.WORD_PIECES:
            files["vocab.txt"] = "".join(f"{word}\n" for word in vocabulary(found)).encode()
            described |= {"tokenizer_class": "BertTokenizer", "do_lower_case": is_lower_case(found)}
    elif found.model in (GgufTokenizer.BYTE_PAIRS, GgufTokenizer.SPACED_PAIRS):
        described["tokenizer_class"] = "PreTrainedTokenizerFast"
        rebuilt = byte_level(found) if found.model == GgufTokenizer.BYTE_PAIRS else spaced_pairs(found)
        files = {"tokenizer.json": rebuilt.inner.to_str(pretty=True).encode()}
    else:
        described["tokenizer_class"] = model_type_of({"model_type": model_type}).tokenizer_class
        files = {"tokenizer.model": _with_special(found)}
    return {**files, "tokenizer_config.json": json.dumps(described, indent=2, ensure_ascii=False).encode()}


def _with_special(found: TokenizerMetadata) -> bytes:
    """Return a SentencePiece model that marks special pieces as such, which other readers rely on."""
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2 as pb2

    # The rebuilt model calls them user-defined, to find them in a prompt; other readers expect their type and ids.
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
    made = bytes(proto.SerializeToString())
    # Raises for pieces that it cannot read: better now than in the program that gets the file.
    sentencepiece.SentencePieceProcessor(model_proto=made)
    return made
