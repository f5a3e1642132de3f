"""A checkpoint with adapters of PEFT merged into it: each changed weight is merged row by row while it is read.

    base    model.layers.0.self_attn.q_proj.weight    ┐
    PEFT    …q_proj.lora_A.weight, …lora_B.weight     ┴─►  model.layers.0.self_attn.q_proj.weight (Decoded)

Names and shapes are those of Hugging Face, on both sides. Everything behind the manifest (KerasHub's layouts of
kernels, meshes, plans, conversion) knows nothing of adapters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardload.errors import MismatchError, UnsupportedError
from shardload.families.parts.config import GENERATORS, architecture_of
from shardload.families.registry import model_types
from shardload.loaders.peft.folder import Adapter, LoraFactors
from shardload.loaders.peft.rows import Change, MergedRows
from shardload.manifest import Decoded, Manifest, Tensor
from shardload.units import plural

_HEADS = ("lm_head", "embed_out")
_EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "tok_embeddings")


@dataclass(frozen=True, slots=True)
class Weighted:
    """An adapter, and what its product is multiplied by besides its own scale: 1 for the adapter as it was trained."""

    adapter: Adapter
    weight: float = 1.0


def merged(manifest: Manifest, adapters: Sequence[Weighted], *, dtype: np.dtype[Any] | None = None) -> Manifest:
    """Return the manifest of a checkpoint with Hugging Face's names, with adapters merged into its weights.

    ``dtype``: dtype of the merged weights, by default that of each weight in ``manifest``. Sums are rounded to it once.

    Raises:
        MismatchError: When the base lacks a module of an adapter, or has it in another shape: it is another model.
        UnsupportedError: When an adapter changes an embedding that is the output layer too, or adapters cannot be
            combined.
    """
    tensors = dict(manifest.tensors)
    changes: dict[str, list[Change]] = {}
    for one in adapters:
        found = AdaptedNames(manifest, one)
        for name, tensor in found.replaced():
            own = tensors[name]
            if own.storage is not manifest.tensors[name].storage:
                raise _cannot_combine(one, f"two adapters replace {name!r}")
            tensors[name] = replace(tensor, name=name)
        for name, change in found.changes():
            changes.setdefault(name, []).append(change)
    for name, of_name in changes.items():
        own = tensors[name]
        rounded = own.dtype if dtype is None else dtype
        tensors[name] = replace(own, dtype=rounded, storage=Decoded(MergedRows(own, tuple(of_name), rounded)))
    files = {**manifest.files, **{path: n for one in adapters for path, n in one.adapter.files.items()}}
    notes = (*manifest.notes, *(note for one in adapters for note in _notes(manifest, one)))
    return replace(manifest, tensors=tensors, files=files, notes=notes)


def _notes(manifest: Manifest, one: Weighted) -> Iterator[str]:
    adapter = one.adapter
    times = "" if one.weight == 1 else f"{one.weight:g} times "
    yield (
        f"{times}the adapter {adapter.location} merged into {plural(len(adapter.factors), 'weight')} while they were "
        "read: computed in float32 and rounded once"
    )
    yield from base_notes(manifest, one)


def base_notes(manifest: Manifest, one: Weighted) -> Iterator[str]:
    """Yield a note if an adapter was trained on a model of another name, whose shapes are the same."""
    adapter = one.adapter
    known = manifest.config.get("_name_or_path") or manifest.source
    own, wanted = (str(name).rstrip("/").rpartition("/")[2] for name in (known, adapter.base or ""))
    if wanted and own.lower() != wanted.lower():
        yield f"the adapter {adapter.location} was trained on {adapter.base!r:.200}: its shapes fit, but names differ"


def _cannot_use(one: Weighted, what: str) -> UnsupportedError:
    return UnsupportedError(
        f"Cannot use the PEFT adapter {one.adapter.location}: {what}. Merge it with PEFT (merge_and_unload), and load "
        "the result"
    )


def _cannot_combine(one: Weighted, what: str) -> UnsupportedError:
    return UnsupportedError(
        f"Cannot use the PEFT adapter {one.adapter.location}: {what}. Pass one of these adapters, with weight 1"
    )


class AdaptedNames:
    """Which weights of a base model an adapter changes, found by name and checked by shape."""

    def __init__(self, base: Manifest, one: Weighted) -> None:
        """Compare the names of an adapter with those of the base model's tensors."""
        self.base, self.one = base, one
        self._wrappers = {"model", "language_model", "transformer", *(t.prefix for t in model_types().values())}
        self._by_end: dict[str, list[str]] = {}
        for name in base.tensors:
            self._by_end.setdefault(self._without_wrappers(name), []).append(name)

    def changes(self) -> Iterator[tuple[str, Change]]:
        """Yield name of a weight, and what is added to it."""
        found = [(self._name(f"{f.module}.weight"), f) for f in self.one.adapter.factors.values()]
        for name, factors in found:
            is_embedding = factors.is_embedding or factors.module.rpartition(".")[2] in _EMBEDDINGS
            self._check_tied(name, is_embedding=is_embedding)
            self._check_shape(name, factors)
        # A square matrix does not show how it is stored; the setting and the others of the adapter do.
        plain = [(name, f) for name, f in found if not f.is_embedding]
        is_square = {f.module: f.b.shape[0] == f.a.shape[1] for _, f in plain}
        flag = self.one.adapter.is_transposed
        shown = {f.module: self.base.tensors[name].shape != _product(f) for name, f in plain if not is_square[f.module]}
        if any(is_square.values()) and any(seen != flag for seen in shown.values()):
            other = next(module for module, seen in shown.items() if seen != flag)
            raise _cannot_use(
                self.one, f"fan_in_fan_out={flag} does not fit {other!r:.200}, so it is unknown how others are stored"
            )
        for name, factors in found:
            is_transposed = factors.is_embedding or shown.get(factors.module, flag)
            yield name, Change(factors, is_transposed, factors.scale * self.one.weight)

    def replaced(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name of a tensor of the base, and the one of the adapter that replaces it."""
        adapter = self.one.adapter
        if adapter.replaced and self.one.weight != 1:
            first = next(iter(adapter.replaced))
            raise _cannot_combine(self.one, f"it replaces {first!r:.200}, which cannot be weighted")
        for wanted, tensor in adapter.replaced.items():
            module, _, leaf = wanted.rpartition(".")
            name = self._name(wanted)
            # PEFT stores an embedding's own weight too if it has LoRA.
            if leaf == "weight" and module not in adapter.factors:
                self._check_tied(name, is_embedding=module.rpartition(".")[2] in _EMBEDDINGS)
            own = self.base.tensors[name]
            if own.shape != tensor.shape:
                raise self._another(f"its {wanted!r:.200} has shape {tensor.shape}, that of the base {own.shape}")
            yield name, tensor

    def _check_shape(self, name: str, factors: LoraFactors) -> None:
        own, product = self.base.tensors[name].shape, _product(factors)
        if own not in ((product[::-1],) if factors.is_embedding else (product, product[::-1])):
            kind = "an embedding" if factors.is_embedding else "a weight"
            raise self._another(
                f"the factors of {factors.module!r:.200} are for {kind} of shape {product}, that of the base has {own}"
            )

    def _name(self, wanted: str) -> str:
        """Return the name of a tensor in the base; the first parts of names differ between versions of transformers."""
        if wanted in self.base.tensors:
            return wanted
        end = self._without_wrappers(wanted)
        names = self._by_end.get(end, [])
        if len(names) == 1:
            return names[0]
        if not names and end.removesuffix(".weight") in _HEADS and is_tied(self.base):
            raise self._tied()
        problem = "lacks it" if not names else f"has {names[0]!r} and {names[1]!r}"
        raise self._another(f"it changes {wanted!r:.200}, and the base {problem}")

    def _without_wrappers(self, name: str) -> str:
        """Return a tensor's name without its first parts, of which some versions of transformers write others."""
        parts = name.split(".")
        while len(parts) > 2 and parts[0] in self._wrappers:
            del parts[0]
        return ".".join(parts)

    def _check_tied(self, name: str, *, is_embedding: bool) -> None:
        is_head = name.removesuffix(".weight").rpartition(".")[2] in _HEADS
        if (is_embedding or is_head) and is_tied(self.base):
            raise self._tied()

    def _tied(self) -> UnsupportedError:
        return _cannot_use(
            self.one,
            f"it changes the embedding or the output layer of {self.base.source}, which are one tensor, so that PEFT "
            "computes something else before a merge than after it",
        )

    def _another(self, what: str) -> MismatchError:
        adapter = self.one.adapter
        trained = f" It was trained on {adapter.base!r:.200}." if adapter.base else ""
        return MismatchError(
            f"Cannot use the PEFT adapter {adapter.location} with {self.base.source}: {what}.{trained} Load it with "
            "the base model that it was trained on"
        )


def _product(factors: LoraFactors) -> tuple[int, int]:
    """Return the shape ``(out, in)`` of the product of two factors."""
    return factors.b.shape[0], factors.a.shape[1]


def is_tied(base: Manifest) -> bool:
    """Whether the model of a checkpoint uses its embedding as output layer."""
    config: Mapping[str, Any] = base.config
    text = config.get("text_config")
    says = [c.get("tie_word_embeddings") for c in (config, text) if isinstance(c, Mapping)]
    if True in says:
        return True
    has_head = any(name.removesuffix(".weight").rpartition(".")[2] in _HEADS for name in base.tensors)
    return architecture_of(config).endswith(GENERATORS) and not has_head
