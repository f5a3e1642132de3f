"""Rebuild the tokenizers of encoders from GGUF metadata: BERT's word pieces and XLM-RoBERTa's unigrams.

GGUF marks the beginning of a word with ▁ in every vocabulary, so BERT's mark for the inside of a word is gone::

    vocab.txt   [CLS]   hello    ##ing
    GGUF        [CLS]   ▁hello   ing
"""

from __future__ import annotations

from typing import Any

from shardload.errors import SourceError
from shardload.families.parts.gguf import GgufTokenizer
from shardload.loaders.gguf import TokenizerMetadata

_START = "\u2581"
_CONTROL = 3
"""A ``tokenizer.ggml.token_type``."""


def encoder_tokenizer(found: TokenizerMetadata) -> Any:
    """Return a ``tokenizers.Tokenizer`` for metadata of the model ``bert`` or ``t5``.

    Raises:
        SourceError: When the metadata has no tokens for the beginning and the end of a text.
    """
    inner = _word_pieces(found) if found.model == GgufTokenizer.WORD_PIECES else _unigrams(found)
    surround(inner, found)
    return inner


def vocabulary(found: TokenizerMetadata) -> list[str]:
    """Return BERT's vocabulary as in ``vocab.txt``."""
    kinds = found.token_types.tolist() or [1] * len(found.tokens)
    return [_word_piece(token, kind) for token, kind in zip(found.tokens, kinds, strict=True)]


def is_lower_case(found: TokenizerMetadata) -> bool:
    """Whether the tokenizer lower-cases text. GGUF does not say, but a cased vocabulary has words with upper case."""
    return not any(token.startswith(_START) and token != token.lower() for token in found.tokens)


def _word_piece(token: str, kind: int) -> str:
    if token.startswith(_START):
        return token.removeprefix(_START)
    # "[unused7]" is not the inside of a word either, whatever its type.
    return token if kind == _CONTROL or (token[:1], token[-1:]) == ("[", "]") else f"##{token}"


def _word_pieces(found: TokenizerMetadata) -> Any:
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    words = vocabulary(found)
    unknown = words[found.special_ids["unknown"]] if "unknown" in found.special_ids else "[UNK]"
    # The limit of Hugging Face's BERT: a longer word becomes one unknown token.
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
    # XLM-RoBERTa's ids start with <s>, <pad>, </s>, <unk>.
    inner = tokenizers.Tokenizer(models.Unigram(pairs, unk_id=found.special_ids.get("unknown", 3)))
    if found.charsmap:
        inner.normalizer = normalizers.Precompiled(found.charsmap)
    # Whitespace is split off first: several spaces count as one, as in Hugging Face's own file.
    words = pre_tokenizers.Metaspace(prepend_scheme="always" if found.flags.get("add_space_prefix", True) else "never")
    inner.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), words])
    inner.decoder = decoders.Metaspace()
    return inner


def surround(inner: Any, found: TokenizerMetadata) -> None:
    """Mark control tokens, and add the model's tokens before and after each text; changes ``inner`` in place.

    Raises:
        SourceError: When the metadata has no tokens for the beginning and the end of a text.
    """
    from tokenizers import AddedToken
    from tokenizers.processors import TemplateProcessing

    ids = found.special_ids
    # "seperator" is GGUF's spelling.
    first, last = ids.get("cls", ids.get("bos")), ids.get("seperator", ids.get("eos"))
    if first is None or last is None:
        raise SourceError(
            "Cannot rebuild the tokenizer: it names no tokens for the beginning and the end of a text, expected cls "
            "and 'seperator' (as GGUF spells it), or bos and eos. Load without a prompt"
        )
    kinds = enumerate(found.token_types.tolist())
    control = {i for i, kind in kinds if kind == _CONTROL} | {first, last}
    inner.add_special_tokens([AddedToken(found.tokens[i], special=True, normalized=False) for i in sorted(control)])
    around = [found.tokens[first], found.tokens[last]]
    inner.post_processor = TemplateProcessing(
        single=f"{around[0]} $A {around[1]}", special_tokens=list(zip(around, (first, last), strict=True))
    )
