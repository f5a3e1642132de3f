"""Rebuild the tokenizers of encoders from GGUF metadata: BERT's word pieces and XLM-RoBERTa's unigrams.

Converters to GGUF mark the beginnings of words in all vocabularies alike, so BERT's lack their own marks::

    vocab.txt   [CLS]   hello    ##ing
    GGUF        [CLS]   ▁hello   ing
"""

from __future__ import annotations

from typing import Any

from shardload.errors import SourceError
from shardload.loaders.gguf import TokenizerMetadata

_START = "\u2581"
_CONTROL = 3


def encoder_tokenizer(found: TokenizerMetadata) -> Any:
    """Return a ``tokenizers.Tokenizer`` for metadata of the model ``bert`` or ``t5``.

    Raises:
        SourceError: When the metadata has no tokens for the beginning and the end of a text.
    """
    inner = _word_pieces(found) if found.model == "bert" else _unigrams(found)
    surround(inner, found)
    return inner


def vocabulary(found: TokenizerMetadata) -> list[str]:
    """Return BERT's vocabulary as in ``vocab.txt``."""
    kinds = found.token_types.tolist() or [1] * len(found.tokens)
    return [_word_piece(token, kind) for token, kind in zip(found.tokens, kinds, strict=True)]


def is_lower_case(found: TokenizerMetadata) -> bool:
    """Whether the tokenizer lowers its text, which GGUF does not say: a cased vocabulary has upper-case letters."""
    return not any(token.startswith(_START) and token != token.lower() for token in found.tokens)


def _word_piece(token: str, kind: int) -> str:
    if token.startswith(_START):
        return token.removeprefix(_START)
    return token if kind == _CONTROL or (token[:1], token[-1:]) == ("[", "]") else f"##{token}"


def _word_pieces(found: TokenizerMetadata) -> Any:
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    words = vocabulary(found)
    unknown = words[found.special_ids["unknown"]] if "unknown" in found.special_ids else "[UNK]"
    pieces = models.WordPiece(
        {word: i for i, word in enumerate(words)}, unk_token=unknown, max_input_chars_per_word=100
    )
    inner = tokenizers.Tokenizer(pieces)
    inner.normalizer = normalizers.BertNormalizer(lowercase=is_lower_case(found))
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece()
    return inner


def _unigrams(found: TokenizerMetadata) -> Any:
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    scores = found.scores.tolist() or [0.0] * len(found.tokens)
    pairs = list(zip(found.tokens, scores, strict=True))
    inner = tokenizers.Tokenizer(models.Unigram(pairs, unk_id=found.special_ids.get("unknown", 3)))
    if found.charsmap:
        inner.normalizer = normalizers.Precompiled(found.charsmap)
    words = pre_tokenizers.Metaspace(prepend_scheme="always" if found.flags.get("add_space_prefix", True) else "never")
    inner.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), words])
    inner.decoder = decoders.Metaspace()
    return inner


def surround(inner: Any, found: TokenizerMetadata) -> None:
    """Mark control tokens, and put those that the model expects around a text, in place; raises `SourceError`."""
    from tokenizers import AddedToken
    from tokenizers.processors import TemplateProcessing

    ids = found.special_ids
    first, last = ids.get("cls", ids.get("bos")), ids.get("seperator", ids.get("eos"))  # GGUF's spelling
    if first is None or last is None:
        raise SourceError("The tokenizer should name the tokens at the beginning and the end of a text, but does not")
    kinds = enumerate(found.token_types.tolist())
    control = {i for i, kind in kinds if kind == _CONTROL} | {first, last}
    inner.add_special_tokens([AddedToken(found.tokens[i], special=True, normalized=False) for i in sorted(control)])
    around = [found.tokens[first], found.tokens[last]]
    inner.post_processor = TemplateProcessing(
        single=f"{around[0]} $A {around[1]}", special_tokens=list(zip(around, (first, last), strict=True))
    )
