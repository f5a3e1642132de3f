"""Rebuild the tokenizer in a GGUF file's header exactly.

Five kinds are supported. ``llama`` is SentencePiece: the header has pieces, scores and types, but not the settings,
which decide everything beyond plain words. All models stored this way use the same settings: byte-pair merging by
score, bytes for text that no piece covers, no Unicode normalisation, no collapsing of spaces, and a space before
the text only if the header says so.

``gpt2`` is byte-level BPE: the header has vocabulary and merges, and names the regular expression that first splits
text into words (``tokenizer.ggml.pre``); families define these expressions.

``gemma4`` is both: pieces as in SentencePiece, and merges.

``bert`` (WordPiece) and ``t5`` (XLM-RoBERTa's unigrams) are in `encoder_tokenizers`.
"""

from __future__ import annotations

from typing import Any

from shardload.errors import UnsupportedError
from shardload.families.parts.gguf import GgufTokenizer
from shardload.families.registry import pre_tokenizers
from shardload.loaders.gguf.loader import TokenizerMetadata, tokenizer_metadata
from shardload.stores.location import Location
from shardload.text.encoder_tokenizers import encoder_tokenizer, surround
from shardload.text.tokenizer import TURN_ENDS, HuggingFace, SentencePiece, Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""``tokenizer.ggml.token_type``; SentencePiece's own numbers."""


def rebuild(path: Location) -> Tokenizer:
    """Rebuild the tokenizer of a ``.gguf`` file.

    Raises:
        UnsupportedError: When the file has no tokenizer, or one whose type is not supported.
        SourceError: When its parts contradict each other.
    """
    return of_metadata(tokenizer_metadata(path), str(path))


def of_metadata(found: TokenizerMetadata, path: str) -> Tokenizer:
    """Rebuild a tokenizer from GGUF metadata; ``path`` is its origin, for messages.

    Raises:
        UnsupportedError: When its type is not supported.
        SourceError: When its parts contradict each other.
    """
    check_supported(found.model, found.pre, path)
    match found.model:
        case GgufTokenizer.SENTENCEPIECE:
            return _sentencepiece(found)
        case GgufTokenizer.BYTE_PAIRS:
            return byte_level(found)
        case GgufTokenizer.SPACED_PAIRS:
            return spaced_pairs(found)
    # Encoders generate nothing, so nothing stops them.
    return HuggingFace(encoder_tokenizer(found), ())


def check_supported(model: str, pre: str, path: str) -> None:
    """Raise if a tokenizer of this type cannot be rebuilt.

    Args:
        model: As in `TokenizerMetadata`.
        pre: As in `TokenizerMetadata`.
        path: Its origin, for messages.

    Raises:
        UnsupportedError: When the type is not supported.
    """
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


def sentencepiece_proto(found: TokenizerMetadata) -> bytes:
    """Return a serialised SentencePiece model that tokenises like the original one."""
    from sentencepiece import sentencepiece_model_pb2 as pb2

    # The settings that a header lacks.
    proto = pb2.ModelProto()
    proto.trainer_spec.model_type = pb2.TrainerSpec.BPE
    proto.trainer_spec.vocab_size = len(found.tokens)
    proto.trainer_spec.byte_fallback = True
    proto.normalizer_spec.name = "identity"
    proto.normalizer_spec.add_dummy_prefix = found.flags.get("add_space_prefix", True)
    proto.normalizer_spec.remove_extra_whitespaces = False
    proto.normalizer_spec.escape_whitespaces = True
    unknown = found.special_ids.get("unknown", 0)
    # The pieces. SentencePiece accepts exactly one of type UNKNOWN.
    scores = found.scores.tolist() or [0.0] * len(found.tokens)
    kinds = found.token_types.tolist() or [NORMAL] * len(found.tokens)
    taken = set(found.tokens)
    for number, (token, score, stored) in enumerate(zip(found.tokens, scores, kinds, strict=True)):
        # Control pieces become user-defined ones: "<start_of_turn>" in a prompt means that token, not its letters.
        kind = UNKNOWN if number == unknown else {CONTROL: USER_DEFINED, UNKNOWN: UNUSED}.get(stored, stored)
        # SentencePiece refuses empty pieces.
        piece = token or f"<empty {number}>"
        if kind == USER_DEFINED:
            piece = _respaced(piece, taken)
        proto.pieces.add(piece=piece, score=score, type=kind)
    return bytes(proto.SerializeToString())


def _respaced(piece: str, taken: set[str]) -> str:
    """Return a user-defined piece in SentencePiece's form: writers of GGUF files replace its ``▁`` with spaces."""
    # Unless both forms are in the vocabulary: SentencePiece refuses a piece that occurs twice.
    escaped = piece.replace(" ", "\u2581")
    return piece if escaped in taken else escaped


def _sentencepiece(found: TokenizerMetadata) -> SentencePiece:
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_proto(found))
    # The rebuilt model calls them user-defined, and so would print them.
    control = frozenset(i for i, kind in enumerate(found.token_types.tolist()) if kind == CONTROL)
    return SentencePiece(processor, _stop_ids(found), _prefix(found), control)


def byte_level(found: TokenizerMetadata) -> HuggingFace:
    """Rebuild a byte-level BPE tokenizer of a supported type."""
    import tokenizers
    from tokenizers import decoders, models
    from tokenizers import pre_tokenizers as splitters

    pre = pre_tokenizers()[found.pre]
    model = models.BPE(**_vocabulary(found), ignore_merges=pre.takes_whole_words)
    inner: Any = tokenizers.Tokenizer(model)
    split = [] if pre.words is None else [splitters.Split(tokenizers.Regex(pre.words), "isolated")]
    inner.pre_tokenizer = splitters.Sequence(
        [*split, splitters.ByteLevel(add_prefix_space=False, use_regex=pre.words is None)]
    )
    inner.decoder = decoders.ByteLevel()
    _add_tokens(inner, found)
    if pre.surrounds_texts:
        surround(inner, found)
        return HuggingFace(inner, _stop_ids(found))
    # Llama 3 needs its start token; GPT-2 and Qwen define one that they never use.
    return HuggingFace(inner, _stop_ids(found), _prefix(found, default=pre.starts_texts))


def spaced_pairs(found: TokenizerMetadata) -> HuggingFace:
    """Rebuild Gemma 4's tokenizer: byte pairs over text whose spaces are ``▁``, and bytes for what no piece covers."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    unknown = found.tokens[found.special_ids.get("unknown", 0)]
    inner: Any = tokenizers.Tokenizer(
        models.BPE(**_vocabulary(found), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    inner.normalizer = normalizers.Replace(" ", "\u2581")
    inner.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    inner.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    _add_tokens(inner, found)
    return HuggingFace(inner, _stop_ids(found), _prefix(found))


def _vocabulary(found: TokenizerMetadata) -> dict[str, Any]:
    """Return the ids and the merges of byte pairs, as arguments of ``models.BPE``."""
    # The first space ends the left half: in these vocabularies, a token has Ġ or ▁ for a space.
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in found.merges)]
    return {"vocab": {token: i for i, token in enumerate(found.tokens)}, "merges": merges}


def _prefix(found: TokenizerMetadata, *, default: bool = True) -> tuple[int, ...]:
    """Return the start token, if there is one and the header, or else ``default``, says that texts begin with it."""
    bos = found.special_ids.get("bos")
    return (bos,) if bos is not None and found.flags.get("add_bos_token", default) else ()


def _add_tokens(inner: Any, found: TokenizerMetadata) -> None:
    """Mark tokens that are matched as a whole: control tokens, which decode to nothing, and user-defined ones."""
    from tokenizers import AddedToken

    # Not strict: a header may have no types.
    kinds = list(zip(found.tokens, found.token_types.tolist(), strict=False))
    inner.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, k in kinds if k == CONTROL])
    inner.add_tokens([AddedToken(t, normalized=False) for t, k in kinds if k == USER_DEFINED])


def _stop_ids(found: TokenizerMetadata) -> tuple[int, ...]:
    # A header may name the end of a text only; ends of turns are found by their text.
    named = {found.special_ids[key] for key in ("eos", "eot", "eom") if key in found.special_ids}
    listed = {i for i, token in enumerate(found.tokens) if token in TURN_ENDS}
    return tuple(sorted(named | listed))
