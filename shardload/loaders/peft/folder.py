"""Read the folder of a PEFT adapter of LoRA: which modules it changes, by which factors, and how much.

    adapter_config.json            {"peft_type": "LORA", "r": 8, "lora_alpha": 16, …}
    adapter_model.safetensors      base_model.model.<module>.lora_A.weight             (rank, in)
                                   base_model.model.<module>.lora_B.weight             (out, rank)
                                   base_model.model.<module>.lora_embedding_A, …_B     (rank, vocabulary), (dim, rank)
                                   base_model.model.<module>.weight, …bias             replaces that of the base model

    a linear layer     weight (out, in)             + scale · B @ A
    an embedding       weight (vocabulary, dim)     + scale · (B @ A).T
    GPT-2's layers     weight (in, out)             + scale · (B @ A).T

Only headers are read. A setting that is not known here is refused by its name: it may change what the factors mean.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardload.errors import SourceError, UnsupportedError
from shardload.loaders import safetensors
from shardload.loaders.contents import member
from shardload.manifest import Tensor
from shardload.stores.json_files import read_object
from shardload.stores.location import Location
from shardload.units import plural

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""What PEFT puts before the names of the base model's modules."""
LINEAR, EMBEDDING = (".lora_A.weight", ".lora_B.weight"), (".lora_embedding_A", ".lora_embedding_B")
"""Endings of the names of both factors, of linear layers and of embeddings."""
_FACTOR = re.compile(r"(.+?)(\.lora_A\.weight|\.lora_B\.weight|\.lora_embedding_A|\.lora_embedding_B)")
_REPLACED = re.compile(r"(.+?)(?:\.base_layer|\.modules_to_save)?\.(weight|bias)")
_PLAIN = re.compile(r"\^?([\w.\-]+)\$?")
"""Matches keys of ``rank_pattern`` and ``alpha_pattern`` that are names, although PEFT reads them as patterns."""

_WITHOUT_EFFECT = {
    "peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "r", "lora_alpha", "lora_dropout", "rank_pattern", "alpha_pattern", "use_rslora", "fan_in_fan_out", "bias",
    "target_modules", "exclude_modules", "modules_to_save", "init_lora_weights", "layers_to_transform",
    "layers_pattern", "megatron_core", "runtime_config", "qalora_group_size", "ensure_weight_tying", "eva_config",
    "lora_ga_config", "corda_config", "loftq_config",
}  # fmt: skip
"""Settings that this module reads, or that concern training only: the stored tensors show what they led to."""
_PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")
"""Values of ``init_lora_weights`` that leave the base model's weights as they are; PiSSA and others change them."""


@dataclass(frozen=True, slots=True)
class LoraFactors:
    """The two factors of one module, as stored, and what their product is multiplied by."""

    module: str
    a: Tensor
    """``(rank, in)``, or ``(rank, vocabulary)`` of an embedding."""
    b: Tensor
    """``(out, rank)``, or ``(dim, rank)`` of an embedding."""
    scale: float
    is_embedding: bool

    @property
    def rank(self) -> int:
        """The inner dim of the product."""
        return self.a.shape[0]


@dataclass(frozen=True, slots=True)
class Adapter:
    """What the headers of a PEFT folder say."""

    location: Location
    base: str | None
    """Name of the base model, as the configuration states it."""
    factors: Mapping[str, LoraFactors]
    """Name of a module → its factors."""
    replaced: Mapping[str, Tensor]
    """Name of a weight or bias of the base model → the tensor that replaces it."""
    is_transposed: bool
    """Whether the configuration says that weights are stored as ``(in, out)``."""
    files: Mapping[Location, int] = field(default_factory=dict)
    """Each file → its size in bytes."""


def open_adapter(folder: Location) -> Adapter:
    """Read the headers of a PEFT folder.

    Raises:
        SourceNotFoundError: When a file is missing.
        SourceError: When configuration and tensors contradict themselves or each other.
        UnsupportedError: When it is no LoRA, or has a setting that is not known.
    """
    named_by = str(folder)
    if not folder.is_folder() or not (folder / CONFIG_FILE).is_file():
        raise _no_adapter(folder)
    path = member(folder, CONFIG_FILE, named_by=named_by)
    settings = _Settings(path, read_object(path))
    settings.check()
    if (pickle := folder / "adapter_model.bin").exists() and not (folder / WEIGHTS_FILE).exists():
        raise UnsupportedError(
            f"Cannot read {pickle}: it is a pickle of PyTorch that can run code when opened, expected {WEIGHTS_FILE}. "
            'Convert it in its folder: safetensors.torch.save_file(torch.load("adapter_model.bin", map_location="cpu", '
            f'weights_only=True), "{WEIGHTS_FILE}")'
        )
    weights = member(folder, WEIGHTS_FILE, named_by=named_by)
    header = safetensors.read_header(weights)
    stored: dict[str, Tensor] = {}
    for tensor in header.tensors:
        if not tensor.name.startswith(PREFIX):
            raise _wrong(folder, f"the tensor {tensor.name!r:.200} does not begin with {PREFIX!r}")
        if tensor.dtype.name not in ("float32", "bfloat16", "float16", "float64"):
            raise _wrong(folder, f"the tensor {tensor.name!r:.200} is stored as {tensor.dtype}, expected floats")
        stored[tensor.name.removeprefix(PREFIX)] = tensor
    factors = _factors(folder, stored, settings)
    replaced = _replaced(folder, stored)
    if not factors and not replaced:
        raise _wrong(folder, f"{WEIGHTS_FILE} has no tensors")
    base = settings.values.get("base_model_name_or_path")
    return Adapter(
        folder,
        base if isinstance(base, str) and base else None,
        factors,
        replaced,
        settings.values.get("fan_in_fan_out") is True,
        {weights: header.file_bytes},
    )


def _no_adapter(folder: Location) -> SourceError:
    """Return the error for a place without ``adapter_config.json``: it says which folder has one."""
    why = f"expected a folder with {CONFIG_FILE} and {WEIGHTS_FILE}"
    if folder.is_file() and (folder.parent / CONFIG_FILE).is_file():
        why = f"it is a file, expected its folder. Pass {folder.parent}"
    elif folder.is_folder() and (
        found := [str(folder / n) for n in folder.names() if (folder / n / CONFIG_FILE).is_file()]
    ):
        why = f"it contains {plural(len(found), 'adapter')}, expected one. Pass one of them: {', '.join(found[:8])}"
    return SourceError(f"Cannot open {folder} as a PEFT adapter: {why}")


def _wrong(folder: Location, what: str) -> SourceError:
    return SourceError(f"Cannot use the PEFT adapter {folder}: {what}. Save it again, or download it again")


@dataclass(frozen=True, slots=True)
class _Settings:
    """The content of ``adapter_config.json``, which is untrusted."""

    path: Location
    values: Mapping[str, Any]

    def check(self) -> None:
        """Raise for another method than LoRA, and for each setting that is not known."""
        if (kind := self.values.get("peft_type")) != "LORA":
            raise UnsupportedError(
                f"Cannot use the PEFT adapter {self.path.parent}: it has peft_type={kind!r:.100}, expected 'LORA'. "
                "Merge it with PEFT (merge_and_unload), and load the result"
            )
        for name, value in self.values.items():
            if name not in _WITHOUT_EFFECT and value not in (None, False, {}, []) and name != "megatron_config":
                raise self._unknown(name, value)
        if self.values.get("megatron_config"):
            raise self._unknown("megatron_config", self.values["megatron_config"])
        start = self.values.get("init_lora_weights")
        if not isinstance(start, str | bool | None) or start not in _PLAIN_STARTS:
            raise self._unknown("init_lora_weights", start)
        if (bias := self.values.get("bias", "none")) not in ("none", "all", "lora_only"):
            raise self._unknown("bias", bias)
        for name in ("use_rslora", "fan_in_fan_out"):
            if not isinstance(value := self.values.get(name, False), bool):
                raise self._bad(name, value, "true or false")
        for name in ("rank_pattern", "alpha_pattern"):
            if not isinstance(value := self.values.get(name) or {}, Mapping):
                raise self._bad(name, value, "an object")

    def rank_of(self, module: str, stored: int) -> int:
        """Return the rank that the settings state for a module; ``stored`` if they state it by a regular expression."""
        patterns = self.values.get("rank_pattern") or {}
        if any(_PLAIN.fullmatch(key) is None for key in patterns):
            return stored
        key = _key_of(module, patterns)
        rank = self.values.get("r", 8) if key is None else patterns[key]
        if type(rank) is not int or rank < 1:
            raise self._bad("r" if key is None else f"rank_pattern[{key!r:.100}]", rank, "a positive whole number")
        return rank

    def scale_of(self, module: str, rank: int) -> float:
        """Return what the product of a module's factors is multiplied by: alpha over the rank, or over its root."""
        patterns = self.values.get("alpha_pattern") or {}
        for pattern in patterns:
            if _PLAIN.fullmatch(pattern) is None:
                # A file's own regular expression could take forever.
                raise self._unknown("alpha_pattern", pattern)
        key = _key_of(module, patterns)
        alpha = self.values.get("lora_alpha", 8) if key is None else patterns[key]
        if type(alpha) not in (int, float) or not abs(alpha) < 1e9:  # NaN compares false
            raise self._bad("lora_alpha" if key is None else f"alpha_pattern[{key!r:.100}]", alpha, "a finite number")
        return float(alpha) / (math.sqrt(rank) if self.values.get("use_rslora") else rank)

    def _unknown(self, name: str, value: Any) -> UnsupportedError:
        return UnsupportedError(
            f"Cannot use the PEFT adapter {self.path.parent}: {CONFIG_FILE} sets {name}={value!r:.100}, which is not "
            "supported. Merge it with PEFT (merge_and_unload), and load the result"
        )

    def _bad(self, name: str, value: Any, expected: str) -> SourceError:
        return _wrong(self.path.parent, f"{CONFIG_FILE} sets {name}={value!r:.100}, expected {expected}")


def _key_of(module: str, patterns: Mapping[str, Any]) -> str | None:
    """Return the first key of ``patterns`` that is a module's name, or the last parts of it; ``None`` without one."""
    for key in patterns:
        name = key.removeprefix("^").removesuffix("$")
        if module == name or (module.endswith(f".{name}") and not key.startswith("^")):
            return str(key)
    return None


def _factors(folder: Location, stored: Mapping[str, Tensor], settings: _Settings) -> dict[str, LoraFactors]:
    """Return the factors of each module; they are removed from no mapping."""
    modules = dict.fromkeys(found[1] for name in stored if (found := _FACTOR.fullmatch(name)))
    return {module: _factors_of(folder, module, stored, settings) for module in modules}


def _factors_of(folder: Location, module: str, stored: Mapping[str, Tensor], settings: _Settings) -> LoraFactors:
    kinds = [names for names in (LINEAR, EMBEDDING) if any(module + name in stored for name in names)]
    if len(kinds) > 1:
        raise _wrong(folder, f"{module!r:.200} has factors of a linear layer and of an embedding")
    [(name_a, name_b)] = kinds
    a, b = stored.get(module + name_a), stored.get(module + name_b)
    if a is None or b is None:
        lacking = name_a if a is None else name_b
        raise _wrong(folder, f"{module!r:.200} has one factor only, without the tensor {PREFIX + module + lacking!r}")
    if len(a.shape) != 2 or len(b.shape) != 2:
        if len(a.shape) > 2 and len(a.shape) == len(b.shape):
            raise UnsupportedError(
                f"Cannot use the PEFT adapter {folder}: {module!r:.200} is a convolution, with factors of shapes "
                f"{a.shape} and {b.shape}. Merge it with PEFT (merge_and_unload), and load the result"
            )
        raise _wrong(folder, f"the factors of {module!r:.200} have shapes {a.shape} and {b.shape}, expected matrices")
    rank = settings.rank_of(module, a.shape[0])
    if not a.shape[0] == b.shape[1] == rank:
        raise _wrong(
            folder,
            f"the factors of {module!r:.200} have shapes {a.shape} and {b.shape}, expected ({rank}, in) and "
            f"(out, {rank}), as {CONFIG_FILE} states the rank {rank}",
        )
    return LoraFactors(module, a, b, settings.scale_of(module, rank), (name_a, name_b) == EMBEDDING)


def _replaced(folder: Location, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that replace weights and biases of the base model, by the names that these have in it."""
    replaced: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        if _FACTOR.fullmatch(name):
            continue
        found = _REPLACED.fullmatch(name)
        if found is None or "lora_" in name:
            raise UnsupportedError(
                f"Cannot use the PEFT adapter {folder}: the tensor {tensor.name!r:.200} is not a factor of LoRA, nor "
                "a weight or bias of the base model. Merge it with PEFT (merge_and_unload), and load the result"
            )
        own = f"{found[1]}.{found[2]}"
        if own in replaced:
            raise _wrong(folder, f"two tensors replace {own!r:.200}")
        replaced[own] = tensor
    return replaced
