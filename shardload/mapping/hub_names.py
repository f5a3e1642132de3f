"""Find the tensor that a KerasHub converter means by a name.

A converter knows one spelling; directories have several. They are tried in this order, and the first match wins::

    as requested        roberta.encoder.layer.0.…     the name itself, or behind a prefix that fits (KerasHub's rule)
    another spelling    LayerNorm.gamma               for LayerNorm.weight: another name used by transformers
    without a prefix    encoder.layer.0.…             a base model, stored without its family's prefix
    the tied tensor     model.embed_tokens.weight     for lm_head.weight, where the configuration ties them

The prefix of a base model is determined once, from the tensors; several matching prefixes are an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from shardload.errors import SourceError
from shardload.families.registry import model_types
from shardload.manifest import Manifest

_SPELLINGS = (
    ("LayerNorm.weight", "LayerNorm.gamma"),
    ("LayerNorm.bias", "LayerNorm.beta"),
    ("vision_tower.vision_model.", "vision_tower."),
    ("cls_classifier.", "classifier."),
)
"""Name in converters → name in old TensorFlow checkpoints, in ESM and vision towers of transformers 5,
and in DeiT's classifier without a teacher."""
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class HubNames:
    """Looks up names in one checkpoint; remembers the prefix that matched, as KerasHub's loader does."""

    def __init__(self, manifest: Manifest, prefix: str | None) -> None:
        self.prefix = prefix
        self._source = manifest.source
        self._config = manifest.config
        self._bare: dict[str, str] = {}
        """Prefix in the converter → prefix in this checkpoint."""

    def find(self, wanted: str, names: Mapping[str, Any]) -> str:
        """Return the stored name for ``wanted``, or ``wanted`` itself if there is none.

        Raises:
            SourceError: When the name is ambiguous.
        """
        if (found := self._plain(wanted, names)) is not None:
            return found
        for spelling in _spellings(wanted):
            if (found := self._plain(spelling, names)) is not None:
                return found
        for spelling in (wanted, *_spellings(wanted)):
            if (found := self._without_base(spelling, names)) is not None:
                return found
        if wanted == _HEAD and self._config.get("tie_word_embeddings") is True:
            return self.find(_EMBEDDING, names)
        # KerasHub's loader forgets its prefix after a miss, too.
        self.prefix = ""
        return wanted

    def _plain(self, wanted: str, names: Mapping[str, Any]) -> str | None:
        if wanted in names:
            return wanted
        if self.prefix is not None and self.prefix + wanted in names:
            return self.prefix + wanted
        # Whole parts only, unlike KerasHub: "norm.weight" must not find "layers.1.self_attn.q_norm.weight".
        for name in names:
            if name.endswith(f".{wanted}"):
                self.prefix = name[: -len(wanted)]
                return str(name)
        return None

    def _without_base(self, wanted: str, names: Mapping[str, Any]) -> str | None:
        base, _, rest = wanted.partition(".")
        if base not in _bases() or not rest:
            return None
        if base not in self._bare:
            # The checkpoint does have the prefix, so a name that is not found with it is absent.
            if any(name.startswith(f"{base}.") for name in names):
                return None
            found = list(_prefixes(rest, names))
            if len(found) > 1:
                raise SourceError(
                    f"Cannot determine which tensor of {self._source} KerasHub's converter means by {wanted!r}: "
                    f"{len(found)} names match: {', '.join(repr(prefix + rest) for prefix in found[:4])}. Remove the "
                    "tensors that are not part of the model"
                )
            if not found:
                return None
            self._bare[base] = found[0]
        name = self._bare[base] + rest
        return name if name in names else None


def _spellings(wanted: str) -> Iterator[str]:
    for requested, stored in _SPELLINGS:
        if requested in wanted:
            yield wanted.replace(requested, stored)


def _prefixes(rest: str, names: Iterable[str]) -> Iterator[str]:
    """Yield the prefixes of ``rest`` in names: empty, or whole parts."""
    for name in names:
        if name == rest or name.endswith(f".{rest}"):
            yield name[: len(name) - len(rest)]


def _bases() -> set[str]:
    """Return first parts of names that `transformers` omits when it stores a base model alone."""
    return {"model", "transformer", *(kind.prefix for kind in model_types().values() if kind.prefix)}
