"""Rebuild the tokenizer in a GGUF file's header exactly, or write it as the files of a Hugging Face folder.

The header names one of five kinds (``tokenizer.ggml.model``)::

    llama    SentencePiece: pieces, scores and types. Its settings are missing, but equal in all models of this kind.
    gpt2     byte-level BPE: vocabulary and merges. ``tokenizer.ggml.pre`` names the way to split text into words first.
    gemma4   pieces as in SentencePiece, and merges as in BPE
    bert     WordPiece, for encoders
    t5       unigrams, for XLM-RoBERTa

In GGUF, ▁ marks the beginning of a word in every vocabulary. BERT's own files mark the inside of a word instead::

    vocab.txt   [CLS]   hello    ##ing
    GGUF        [CLS]   ▁hello   ing
"""

from __future__ import annotations

import json
from typing import Any

from shardload.errors import SourceError, UnsupportedError
from shardload.families.parts.gguf import GgufTokenizer
from shardload.families.registry import model_type_of, pre_tokenizers
from shardload.loaders.gguf.loader import TokenizerMetadata, tokenizer_metadata
from shardload.manifest import Manifest
from shardload.stores.location import Location
from shardload.text.tokenizer import TURN_ENDS, HuggingFace, SentencePiece, Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Values of ``tokenizer.ggml.token_type``, the kinds of tokens; SentencePiece uses the same numbers."""


def rebuild(path: Location) -> Tokenizer:
    """Read the header of a ``.gguf`` file, and return a tokenizer that works like the original one."""
    return of_metadata(tokenizer_metadata(path), str(path))


def of_metadata(metadata: TokenizerMetadata, path: str) -> Tokenizer:
    """Return a tokenizer that works like the one in a GGUF file's metadata; ``path`` is for messages."""
    check_supported(metadata.model, metadata.pre, path)
    match metadata.model:
        case GgufTokenizer.SENTENCEPIECE:
            import sentencepiece

            processor = sentencepiece.SentencePieceProcessor(model_proto=_sentencepiece_proto(metadata))
            # The rebuilt model calls them user-defined, and so would print them.
            control = frozenset(i for i, kind in enumerate(metadata.token_types.tolist()) if kind == CONTROL)
            return SentencePiece(processor, _stop_ids(metadata), _prefix(metadata), control)
        case GgufTokenizer.BYTE_PAIRS:
            return _byte_level(metadata)
        case GgufTokenizer.SPACED_PAIRS:
            return _spaced_pairs(metadata)
    # Encoders generate nothing, so nothing stops them.
    return HuggingFace(_encoder_tokenizer(metadata), ())


def check_supported(model: str, pre: str, path: str) -> None:
    """Raise if a tokenizer with these GGUF types (``tokenizer.ggml.model`` and ``pre``) cannot be rebuilt."""
    # Takes names, not the metadata: a load asks this without reading the vocabulary.
    if model not in tuple(GgufTokenizer):
        raise UnsupportedError(
            f"Cannot rebuild the tokenizer of {path}: its type is {model!r}, expected one of "
            f"{', '.join(GgufTokenizer)}. Load without a prompt, and pass token ids to the model"
        )
    if model == GgufTokenizer.BYTE_PAIRS and pre not in (known := pre_tokenizers()):
        raise UnsupportedError(
            f"Cannot rebuild the tokenizer of {path}: its pre-tokenizer is {pre!r}, expected one of "
            f"{', '.join(known)}. Load without a prompt, and pass token ids to the model"
        )


def _sentencepiece_proto(metadata: TokenizerMetadata) -> bytes:
    """Return the bytes of a SentencePiece model that splits texts as the original one does, made from a GGUF header."""
    from sentencepiece import sentencepiece_model_pb2 as pb2

    # The settings that a header lacks.
    proto = pb2.ModelProto()
    proto.trainer_spec.model_type = pb2.TrainerSpec.BPE
    proto.trainer_spec.vocab_size = len(metadata.tokens)
    proto.trainer_spec.byte_fallback = True
    proto.normalizer_spec.name = "identity"
    proto.normalizer_spec.add_dummy_prefix = metadata.flags.get("add_space_prefix", True)
    proto.normalizer_spec.remove_extra_whitespaces = False
    proto.normalizer_spec.escape_whitespaces = True
    unknown = metadata.special_ids.get("unknown", 0)
    # The pieces. SentencePiece accepts exactly one of type UNKNOWN.
    scores = metadata.scores.tolist() or [0.0] * len(metadata.tokens)
    kinds = metadata.token_types.tolist() or [NORMAL] * len(metadata.tokens)
    taken = set(metadata.tokens)
    for number, (token, score, stored) in enumerate(zip(metadata.tokens, scores, kinds, strict=True)):
        # Control pieces become user-defined ones: "<start_of_turn>" in a prompt means that token, not its letters.
        kind = UNKNOWN if number == unknown else {CONTROL: USER_DEFINED, UNKNOWN: UNUSED}.get(stored, stored)
        # SentencePiece refuses empty pieces.
        piece = token or f"<empty {number}>"
        # Writers of GGUF files replace ▁ in user-defined pieces with spaces; SentencePiece has no spaces. It refuses a
        # piece that occurs twice, so one whose other form is in the vocabulary stays.
        if kind == USER_DEFINED and (escaped := piece.replace(" ", "\u2581")) not in taken:
            piece = escaped
        proto.pieces.add(piece=piece, score=score, type=kind)
    return bytes(proto.SerializeToString())


def _byte_level(metadata: TokenizerMetadata) -> HuggingFace:
    """Return a byte-level BPE tokenizer, made from a GGUF header, which names the way to split text into words."""
    import tokenizers
    from tokenizers import decoders, models
    from tokenizers import pre_tokenizers as splitters

    pre = pre_tokenizers()[metadata.pre]
    model = models.BPE(**_vocabulary(metadata), ignore_merges=pre.takes_whole_words)
    inner: Any = tokenizers.Tokenizer(model)
    split = [] if pre.words is None else [splitters.Split(tokenizers.Regex(pre.words), "isolated")]
    inner.pre_tokenizer = splitters.Sequence(
        [*split, splitters.ByteLevel(add_prefix_space=False, use_regex=pre.words is None)]
    )
    inner.decoder = decoders.ByteLevel()
    _add_tokens(inner, metadata)
    if pre.surrounds_texts:
        _surround(inner, metadata)
        return HuggingFace(inner, _stop_ids(metadata))
    # Llama 3 needs its start token; GPT-2 and Qwen define one that they never use.
    return HuggingFace(inner, _stop_ids(metadata), _prefix(metadata, default=pre.starts_texts))


def _spaced_pairs(metadata: TokenizerMetadata) -> HuggingFace:
    """Return Gemma 4's tokenizer: byte pairs over text with ``▁`` for spaces; unknown characters become bytes."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    unknown = metadata.tokens[metadata.special_ids.get("unknown", 0)]
    inner: Any = tokenizers.Tokenizer(
        models.BPE(**_vocabulary(metadata), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    inner.normalizer = normalizers.Replace(" ", "\u2581")
    inner.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    inner.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    _add_tokens(inner, metadata)
    return HuggingFace(inner, _stop_ids(metadata), _prefix(metadata))


def _vocabulary(metadata: TokenizerMetadata) -> dict[str, Any]:
    """Return a tokenizer's vocabulary and merges as arguments of ``tokenizers.models.BPE``."""
    # The first space ends the left half: in these vocabularies, a token has Ġ or ▁ for a space.
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in metadata.merges)]
    return {"vocab": {token: i for i, token in enumerate(metadata.tokens)}, "merges": merges}


def _prefix(metadata: TokenizerMetadata, *, default: bool = True) -> tuple[int, ...]:
    """Return the ids to put before a prompt: the start token's or none; ``default`` counts if the header is silent."""
    bos = metadata.special_ids.get("bos")
    return (bos,) if bos is not None and metadata.flags.get("add_bos_token", default) else ()


def _add_tokens(inner: Any, metadata: TokenizerMetadata) -> None:
    """Tell ``inner``, a tokenizer, which tokens never to split: control tokens (``<bos>``) and user-defined ones."""
    from tokenizers import AddedToken

    # Not strict: a header may have no types.
    kinds = list(zip(metadata.tokens, metadata.token_types.tolist(), strict=False))
    inner.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, k in kinds if k == CONTROL])
    inner.add_tokens([AddedToken(t, normalized=False) for t, k in kinds if k == USER_DEFINED])


def _stop_ids(metadata: TokenizerMetadata) -> tuple[int, ...]:
    # A header may name the end of a text only; ends of turns are found by their text.
    named = {metadata.special_ids[key] for key in ("eos", "eot", "eom") if key in metadata.special_ids}
    listed = {i for i, token in enumerate(metadata.tokens) if token in TURN_ENDS}
    return tuple(sorted(named | listed))


_START = "\u2581"


# ---- encoders ------------------------------------------------------------------------------------


def _encoder_tokenizer(metadata: TokenizerMetadata) -> Any:
    """Return an encoder's tokenizer, which puts one token before and one after each text (``[CLS]``, ``[SEP]``)."""
    inner = _word_pieces(metadata) if metadata.model == GgufTokenizer.WORD_PIECES else _unigrams(metadata)
    _surround(inner, metadata)
    return inner


def _word_piece_vocabulary(metadata: TokenizerMetadata) -> list[str]:
    """Return a GGUF vocabulary as BERT's ``vocab.txt`` spells it: ``##ing`` if not at the beginning of a word."""
    kinds = metadata.token_types.tolist() or [1] * len(metadata.tokens)
    pieces = []
    for token, kind in zip(metadata.tokens, kinds, strict=True):
        # "[unused7]" is not the inside of a word either, whatever its type.
        is_whole = token.startswith(_START) or kind == CONTROL or (token[:1], token[-1:]) == ("[", "]")
        pieces.append(token.removeprefix(_START) if is_whole else f"##{token}")
    return pieces


def _is_lower_case(metadata: TokenizerMetadata) -> bool:
    """Whether the tokenizer lower-cases text. GGUF does not say, but a cased vocabulary has words with upper case."""
    return not any(token.startswith(_START) and token != token.lower() for token in metadata.tokens)


def _word_pieces(metadata: TokenizerMetadata) -> Any:
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    words = _word_piece_vocabulary(metadata)
    unknown = words[metadata.special_ids["unknown"]] if "unknown" in metadata.special_ids else "[UNK]"
    # The limit of Hugging Face's BERT: a longer word becomes one unknown token.
    pieces = models.WordPiece(
        {word: i for i, word in enumerate(words)}, unk_token=unknown, max_input_chars_per_word=100
    )
    inner = tokenizers.Tokenizer(pieces)
    inner.normalizer = normalizers.BertNormalizer(lowercase=_is_lower_case(metadata))
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece()
    return inner


def _unigrams(metadata: TokenizerMetadata) -> Any:
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    scores = metadata.scores.tolist() or [0.0] * len(metadata.tokens)
    pairs = list(zip(metadata.tokens, scores, strict=True))
    # XLM-RoBERTa's ids start with <s>, <pad>, </s>, <unk>.
    inner = tokenizers.Tokenizer(models.Unigram(pairs, unk_id=metadata.special_ids.get("unknown", 3)))
    if metadata.charsmap:
        inner.normalizer = normalizers.Precompiled(metadata.charsmap)
    # Whitespace is split off first: several spaces count as one, as in Hugging Face's own file.
    words = pre_tokenizers.Metaspace(
        prepend_scheme="always" if metadata.flags.get("add_space_prefix", True) else "never"
    )
    inner.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), words])
    inner.decoder = decoders.Metaspace()
    return inner


def _surround(inner: Any, metadata: TokenizerMetadata) -> None:
    """Make ``inner``, a tokenizer, put one token before and one after each text, and know all control tokens."""
    from tokenizers import AddedToken
    from tokenizers.processors import TemplateProcessing

    ids = metadata.special_ids
    # "seperator" is GGUF's spelling.
    first, last = ids.get("cls", ids.get("bos")), ids.get("seperator", ids.get("eos"))
    if first is None or last is None:
        raise SourceError(
            "Cannot rebuild the tokenizer: it names no tokens for the beginning and the end of a text, expected cls "
            "and 'seperator' (as GGUF spells it), or bos and eos. Load without a prompt"
        )
    kinds = enumerate(metadata.token_types.tolist())
    control = {i for i, kind in kinds if kind == CONTROL} | {first, last}
    inner.add_special_tokens([AddedToken(metadata.tokens[i], special=True, normalized=False) for i in sorted(control)])
    around = [metadata.tokens[first], metadata.tokens[last]]
    inner.post_processor = TemplateProcessing(
        single=f"{around[0]} $A {around[1]}", special_tokens=list(zip(around, (first, last), strict=True))
    )


_SPECIAL = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


# ---- files of a Hugging Face folder, which KerasHub reads too ------------------------------------


def tokenizer_files(manifest: Manifest) -> dict[str, bytes]:
    """Return the tokenizer of a GGUF file as files of a Hugging Face folder: name → content."""
    metadata = tokenizer_metadata(manifest.location)
    return files_of(metadata, manifest.source, str(manifest.config.get("model_type")))


def files_of(metadata: TokenizerMetadata, source: str, model_type: str) -> dict[str, bytes]:
    """Return a tokenizer as files (name → content) of a Hugging Face folder; they give the same tokens as GGUF's.

    llama   SentencePiece      tokenizer.model
    gpt2    byte-level BPE     tokenizer.json
    bert    WordPiece          tokenizer.json, vocab.txt
    t5      unigrams           tokenizer.json
            all                tokenizer_config.json: special tokens, chat template
    """
    ids = metadata.special_ids
    described: dict[str, Any] = {name: metadata.tokens[ids[key]] for key, name in _SPECIAL.items() if key in ids}
    if metadata.chat_template is not None:
        described["chat_template"] = metadata.chat_template
    if "add_bos_token" in metadata.flags:
        described["add_bos_token"] = metadata.flags["add_bos_token"]
    check_supported(metadata.model, metadata.pre, source)
    if metadata.model in (GgufTokenizer.WORD_PIECES, GgufTokenizer.UNIGRAMS):
        # KerasHub reads BERT's vocabulary from vocab.txt only.
        files = {"tokenizer.json": _encoder_tokenizer(metadata).to_str(pretty=True).encode()}
        described["tokenizer_class"] = "XLMRobertaTokenizer"
        if metadata.model == GgufTokenizer.WORD_PIECES:
            files["vocab.txt"] = "".join(f"{word}\n" for word in _word_piece_vocabulary(metadata)).encode()
            described |= {"tokenizer_class": "BertTokenizer", "do_lower_case": _is_lower_case(metadata)}
    elif metadata.model in (GgufTokenizer.BYTE_PAIRS, GgufTokenizer.SPACED_PAIRS):
        described["tokenizer_class"] = "PreTrainedTokenizerFast"
        rebuilt = _byte_level(metadata) if metadata.model == GgufTokenizer.BYTE_PAIRS else _spaced_pairs(metadata)
        files = {"tokenizer.json": rebuilt.inner.to_str(pretty=True).encode()}
    else:
        described["tokenizer_class"] = model_type_of({"model_type": model_type}).tokenizer_class
        files = {"tokenizer.model": _with_special(metadata)}
    return {**files, "tokenizer_config.json": json.dumps(described, indent=2, ensure_ascii=False).encode()}


def _with_special(metadata: TokenizerMetadata) -> bytes:
    """Return the bytes of a ``tokenizer.model``; its special tokens are control pieces, as other programs expect."""
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2 as pb2

    # The rebuilt model calls them user-defined, to find them in a prompt; other readers expect their type and ids.
    proto = pb2.ModelProto.FromString(_sentencepiece_proto(metadata))
    spec = proto.trainer_spec
    for key, name in (("bos", "bos"), ("eos", "eos"), ("padding", "pad"), ("unknown", "unk")):
        # SentencePiece refuses a model without an unknown piece; -1 means that it has none of the others.
        number = metadata.special_ids.get(key, 0 if key == "unknown" else -1)
        setattr(spec, f"{name}_id", number)
        if number >= 0:
            setattr(spec, f"{name}_piece", proto.pieces[number].piece)
            if key != "unknown":
                proto.pieces[number].type = pb2.ModelProto.SentencePiece.CONTROL
    made = bytes(proto.SerializeToString())
    # Raises for pieces that it cannot read: better now than in the program that gets the file.
    sentencepiece.SentencePieceProcessor(model_proto=made)
    return made
