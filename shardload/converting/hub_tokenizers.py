"""Convert the tokenizer of a KerasHub preset to the files of a Hugging Face folder.

vocabulary.spm                    tokenizer.model: the same file
vocabulary.json, merges.txt       tokenizer.json, with the word-splitting expression of the family (Llama 3, Qwen), or
                                  the same files under other names (GPT-2)
vocabulary.txt                    vocab.txt: the same file (BERT)
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from shardload.converting.source import Source
from shardload.errors import UnsupportedError, is_of_system
from shardload.families.parts.gguf import GgufTokenizer
from shardload.families.record import KerasTokenizer
from shardload.families.registry import exports, families, model_type_of
from shardload.hub import kerashub
from shardload.loaders.gguf.loader import TokenizerMetadata
from shardload.loaders.hub_preset import SPEC as PRESET
from shardload.stores import json_files
from shardload.stores.local import located
from shardload.text.gguf_tokenizer import CONTROL, NORMAL, files_of

_log = logging.getLogger(__name__)
_TOKENIZER = "assets/tokenizer"
_PIECES = f"{_TOKENIZER}/vocabulary.spm"
_OF_TRANSFORMERS = ("tokenizer.model", "tokenizer.json", "vocab.json", "vocab.txt")


def tokenizer_files(source: Source, model_type: str) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """Return files by name, and notes; both empty if the source has Hugging Face's tokenizer files, or none."""
    # The source's own files are copied as they are; only what would be missing is made.
    kept, own = source.companions.keras, source.companions.transformers
    if not own.keys().isdisjoint(_OF_TRANSFORMERS):
        return {}, ()
    if _PIECES in kept:
        return _pieces(kept[_PIECES], model_type), ()
    if "tokenizer.json" not in kept:
        return {}, ()
    if (unchanged := model_type_of({"model_type": model_type}).keras_tokenizer) is not None:
        return _unchanged(kept, unchanged)
    # A GGUF header describes the same kind of tokenizer, and `text` can already write one as tokenizer.json.
    try:
        layer = kerashub.preset_tokenizer(
            replace(source.manifest, location=located(kept["tokenizer.json"].parent), format=PRESET.name)
        )
        found = _metadata(layer, _pre_tokenizer(type(source.backbone).__name__))
        return files_of(found, source.manifest.source, model_type), ()
    except Exception as error:  # its files may cause any error; its kind may be unknown
        if is_of_system(error):
            raise
        _log.info("No tokenizer of %s for Hugging Face: %s", source.manifest.source, error)
        *some, last = (family.title for family in families() if family.exports)
        known = f"{', '.join(some)} and {last}"
        return {}, (f"the tokenizer was not written for Hugging Face: only those of {known} can be converted",)


def _pieces(path: Path, model_type: str) -> dict[str, bytes]:
    """Return KerasHub's SentencePiece vocabulary under Hugging Face's name for it, ``tokenizer.model``."""
    kind = model_type_of({"model_type": model_type}).tokenizer_class
    return {
        "tokenizer.model": path.read_bytes(),
        "tokenizer_config.json": json.dumps({"tokenizer_class": kind}).encode(),
    }


def _unchanged(kept: Mapping[str, Path], tokenizer: KerasTokenizer) -> tuple[dict[str, bytes], tuple[str, ...]]:
    names = {f"{_TOKENIZER}/{own}": name for own, name in tokenizer.files.items()}
    if not names.keys() <= kept.keys():
        return {}, ("the tokenizer was not written for Hugging Face: the source lacks some of its files",)
    found = {name: kept[path].read_bytes() for path, name in names.items()}
    if (kind := tokenizer.lower_case_class) is not None:
        settings = json_files.read_object(kept["tokenizer.json"]).get("config", {})
        tokenizer_config = {"tokenizer_class": kind, "do_lower_case": bool(settings.get("lowercase", False))}
        found["tokenizer_config.json"] = json.dumps(tokenizer_config).encode()
    return found, ()


def _pre_tokenizer(backbone: str) -> str:
    export = exports().get(backbone)
    if export is None or export.pre_tokenizer is None:
        raise UnsupportedError(f"no pre-tokenizer is known for {backbone}")
    return export.pre_tokenizer


def _metadata(layer: Any, pattern: str) -> TokenizerMetadata:
    """Describe a byte-pair tokenizer of KerasHub in the form of a GGUF header."""
    tokens = {int(number): word for word, number in layer.vocabulary.items()}
    special = set(layer.unsplittable_tokens or ())
    # A vocabulary may have gaps, but in a header a token's position is its number.
    listed = tuple(tokens.get(i, f"<unused {i}>") for i in range(max(tokens) + 1))
    ids = {"bos": getattr(layer, "start_token_id", None), "eos": getattr(layer, "end_token_id", None)}
    return TokenizerMetadata(
        model=GgufTokenizer.BYTE_PAIRS,
        pre=pattern,
        tokens=listed,
        scores=np.array([], np.float32),
        token_types=np.array([CONTROL if word in special else NORMAL for word in listed], np.int32),
        merges=tuple(layer.merges),
        special_ids={name: int(number) for name, number in ids.items() if number is not None},
        flags={},
        chat_template=None,
    )
