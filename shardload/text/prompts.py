"""Encode prompts, and refuse those that a model has no room for: before its weights are read, where that is known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from shardload.errors import UnsupportedError, UsageError
from shardload.manifest import Manifest
from shardload.resolve.opening import open_source
from shardload.text.sources import tokenizer_of
from shardload.text.tokenizer import Tokenizer
from shardload.typing import PathLike
from shardload.units import is_integer, plural

_DEFAULT_CONTEXT = 8192
"""Context length if the checkpoint states none: that of Gemma 1 and 2. The memory for attention grows with its square,
so an unlimited prompt could exhaust the machine."""
SHORTER = "Shorten the prompt, or generate fewer tokens: max_new_tokens (--max-new-tokens)"
"""How to fix a prompt that is too long."""


def tokenizer_for_prompt(source: PathLike, prompt: str, *, max_new_tokens: int, format: str | None = None) -> Tokenizer:
    """Return a source's tokenizer; raise if it has none, or prompt and new tokens exceed the context that it states."""
    manifest = open_source(source, format, described=True, verify=False).manifest
    found = tokenizer_of(manifest)
    encode_prompts(prompt, found, max_new_tokens=max_new_tokens, manifest=manifest, name=str(source))
    return found


def encode_prompts(
    prompts: str | Sequence[str], tokenizer: Tokenizer, *, max_new_tokens: int, manifest: Manifest | None, name: str
) -> list[list[int]]:
    """Check prompts and the number of new tokens, and return the prompts' token ids; ``name``: the model, in errors."""
    texts = [prompts] if isinstance(prompts, str) else list(prompts) if isinstance(prompts, Iterable) else [prompts]
    if not all(isinstance(text, str) for text in texts):
        raise UsageError(f"Cannot continue {prompts!r:.60}: expected text, or a list of texts")
    for text in texts:
        try:  # half of a surrogate pair is a valid str, but tokenizers written in Rust and C++ take UTF-8
            text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                f"Cannot continue a prompt with {text[error.start]!a} at position {error.start}, which is half of a "
                "character. Decode the text from its original bytes as UTF-8"
            ) from error
    if not (is_integer(max_new_tokens) and max_new_tokens >= 1):
        raise UsageError(f"Cannot use max_new_tokens={max_new_tokens!r:.60}: expected a positive integer")
    encoded = [tokenizer.encode(text) for text in texts]
    # Before anything is compiled: a prompt that is too long would fail only after that, or exhaust the memory.
    _check_context(name, max(map(len, encoded), default=0), max_new_tokens, manifest)
    return encoded


def _check_context(name: str, prompt_tokens: int, max_new_tokens: int, manifest: Manifest | None) -> None:
    # Multimodal models have the sizes of their language model in text_config. GPT-2 has another name for this one.
    said = {} if manifest is None else manifest.config
    config = text if isinstance(text := said.get("text_config"), Mapping) else said
    stated = (config.get(field) for field in ("max_position_embeddings", "n_positions"))
    context = next((size for size in stated if is_integer(size) and size), _DEFAULT_CONTEXT)
    if prompt_tokens + max_new_tokens > context:
        raise UnsupportedError(
            f"Cannot generate {plural(max_new_tokens, 'token')} after a prompt of {plural(prompt_tokens, 'token')}: "
            f"the context of {name} has {context}. {SHORTER}"
        )
