"""Bring Hugging Face configurations into the form that KerasHub's converters read.

A converter knows the keys that one version of `transformers` wrote. Other versions omit values that equal a default, or
rename keys. What differs by ``model_type`` is in `shardload.families`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

from shardload.errors import SourceError, UnsupportedError
from shardload.families.parts.config import GENERATORS, Config, architecture_of
from shardload.families.parts.tensors import TensorSpec
from shardload.families.registry import families, model_type_of, model_types
from shardload.loaders import spec_of
from shardload.manifest import Manifest, Tensor
from shardload.stores.json_files import read_object
from shardload.transfer.read_tensor import read_rows
from shardload.units import plural

_ROWS = 16
"""How many rows of a stored output layer are compared with the embedding, to decide whether both are one weight."""


def read_config(manifest: Manifest) -> dict[str, Any]:
    """Return a copy of a checkpoint's configuration, with the fields and values that KerasHub's converters expect."""
    config = copy.deepcopy(dict(manifest.config))
    # KerasHub reads the first entry unconditionally; GGUF and KerasHub's own exports have none.
    config["architectures"] = config.get("architectures") or [""]
    config = completed(_with_current_keys(config))
    # Converters call get("rope_parameters", {}).get(…), which fails on null.
    if config.get("rope_parameters", {}) is None:
        del config["rope_parameters"]
    known = model_type_of(config)
    _complete_parts(config)
    if "ForImageClassification" in architecture_of(config):
        config.setdefault("id2label", {"0": "LABEL_0", "1": "LABEL_1"})  # the default, which transformers omits
    if known.is_image_model:
        for key in ("image_size", "patch_size"):
            # The side of a square, which transformers also writes as two equal numbers.
            size = config.get(key)
            if isinstance(size, list) and len(size) == 2 and size[0] == size[1]:
                config[key] = size[0]
    known.adapt(config)
    return config


def completed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a model, or of a part (``text_config``), with its ``model_type``'s defaults."""
    known = model_type_of(config)
    found = {**known.defaults, **config}
    # None stands for multi-head attention: as many key-value heads as heads.
    if found.get("num_key_value_heads", 0) is None:
        found["num_key_value_heads"] = found.get("num_attention_heads")
    known.complete(found)
    return found


def _complete_parts(config: dict[str, Any]) -> None:
    """Add the defaults of a configuration's parts, and of their own parts, in place."""
    for part, kind in model_type_of(config).parts.items():
        if isinstance(config.get(part), dict):
            config[part] = completed({"model_type": kind, **config[part]})
            _complete_parts(config[part])


def _with_current_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with keys added that other versions rename, before defaults hide their values."""
    aliases = model_type_of(config).renamed.items()
    return {wanted: config[stored] for wanted, stored in aliases if stored in config} | dict(config)


def ties_embeddings(manifest: Manifest) -> bool | None:
    """Whether the model to build uses its embedding as output layer; ``None`` for classes without that option.

    As in transformers 5, ``tie_word_embeddings`` counts only if no output layer with other values is stored. A
    checkpoint of a class without an output layer (``LlamaModel``) counts as tied.
    """
    if not model_type_of(manifest.config).has_tie_argument:
        return None
    head = next((t for n, t in manifest.tensors.items() if re.fullmatch(r"(.+\.)?lm_head\.weight", n)), None)
    if manifest.config.get("tie_word_embeddings") is True:
        return head is None or not _differs_from_embedding(head, manifest)
    architecture = architecture_of(manifest.config)
    return bool(architecture) and not architecture.endswith(GENERATORS) and head is None


def tie_as_stored(described: Any, manifest: Manifest) -> None:
    """Set ``tie_word_embeddings`` in a Keras configuration, in place, if a Keras checkpoint stores no output layer.

    Some of KerasHub's classes (Llama's) do not serialise it: only the stored tensors tell. A value that is set stays.
    """
    # Names of the embedding and of an output layer, in files of Keras and in steps.
    patterns = (r"reversible_embedding/vars/0$|token_embedding/embeddings$", r"embedding/(vars/1|reverse_embeddings)$")
    embedding, head = (any(re.search(pattern, name) for name in manifest.tensors) for pattern in patterns)
    if embedding and not head:
        _tie(described)


def tie_as_described(described: Any, manifest: Manifest) -> None:
    """Set ``tie_word_embeddings`` in a Keras configuration, in place, if a Hugging Face folder ties embeddings.

    The configuration, which Keras wrote into the same folder, may lack that argument. A value that is set stays.
    """
    if ties_embeddings(manifest):
        _tie(described)


def _tie(described: Any) -> None:
    if isinstance(described, list):
        for value in described:
            _tie(value)
    if not isinstance(described, dict):
        return
    for value in described.values():
        _tie(value)
    config = described.get("config")
    if isinstance(config, dict) and any(described.get("class_name") in family.ties_unsaid for family in families()):
        config.setdefault("tie_word_embeddings", True)


def _differs_from_embedding(head: Tensor, manifest: Manifest) -> bool:
    """Whether output layer and embedding differ in a sample of their rows; the load compares all rows later."""
    embedding = next((t for n, t in manifest.tensors.items() if re.fullmatch(r"(.+\.)?embed_tokens\.weight", n)), head)
    # Not comparable row by row: build the model tied, and the complete comparison of the load will refuse the tensor.
    if (head.shape, head.dtype) != (embedding.shape, embedding.dtype):
        return False
    rows = range(0, head.rows, max(1, head.rows // _ROWS))
    return any(read_rows(head, i, i + 1).tobytes() != read_rows(embedding, i, i + 1).tobytes() for i in rows)


def check_representable(manifest: Manifest, backbone_cls: type, arguments: Mapping[str, Any]) -> None:
    """Raise if KerasHub's class, whose constructor takes ``arguments``, cannot compute what is configured."""
    config, name = read_config(manifest), f"KerasHub's {backbone_cls.__name__}"
    why = model_type_of(config).lacking(config, name)
    head_dim, hidden, heads = (config.get(key) for key in ("head_dim", "hidden_size", "num_attention_heads"))
    if "head_dim" not in arguments and all(isinstance(n, int) and n > 0 for n in (head_dim, hidden, heads)):
        assert isinstance(hidden, int) and isinstance(heads, int)
        if head_dim != hidden / heads:
            why = (
                f"config.json sets head_dim={head_dim}, but {name} computes it as hidden_size / num_attention_heads = "
                f"{hidden} / {heads} = {hidden / heads:g}"
            )
    if why is not None:
        raise UnsupportedError(
            f"Cannot build the model of {manifest.source}: {why}. Build your own model, then call "
            "shardload.load_weights(model, source)"
        )


def config_beside(manifest: Manifest) -> dict[str, Any] | None:
    """Return the Keras configuration in ``NAME.json`` or ``config.json`` next to ``NAME.weights.h5``, if any."""
    path = manifest.location
    # The first ending of a format is that of its weights; a format without one keeps the whole name.
    stem = path.name.removesuffix((*spec_of(manifest).endings, "")[0])
    for candidate in (path.parent / f"{stem}.json", path.parent / "config.json"):
        if candidate != path and candidate.is_file():
            config = read_object(candidate)
            if "class_name" in config:
                return config
    return None


# ---- tensors, listed from a configuration --------------------------------------------------------


MAX_LAYERS, MAX_SIZE, MAX_EXPERTS = 1000, 1 << 24, 1 << 15
"""Limits for layers, for any dim, and for the experts of all layers together: more than any model has.

Without a limit, the list of tensors for a damaged configuration would fill the memory."""
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth", "encoder_layers", "decoder_layers")


def transformers_tensors(config: Config) -> list[TensorSpec]:
    """Return all tensors of a Hugging Face checkpoint with this configuration, in the order of the file.

    Messages of errors are clauses ("its configuration sets …"), from which the caller makes a sentence.
    """
    kind, known = config.get("model_type"), model_type_of(config)
    if known.tensors is None:
        listed = (name for name, one in model_types().items() if one.tensors is not None)
        raise UnsupportedError(
            f"the tensors of model_type {kind!r:.60} cannot be listed from a configuration, only those of "
            f"{', '.join(sorted(listed))}"
        )
    config = completed(_with_current_keys(config))
    _check_parts(config)
    _check(config, known.tensor_fields)
    _check_lists(config, known.tensor_lists)
    return list(known.tensors(config))


def _check_parts(config: dict[str, Any]) -> None:
    """Add the defaults of the parts that have tensors, in place, and check their sizes; the same of their own parts."""
    known = model_type_of(config)
    for part, fields in known.part_fields.items():
        if config.get(part) is None and part in known.optional_parts:
            continue
        if not isinstance(config.get(part), Mapping):
            raise SourceError(f"its configuration sets {part}={config.get(part)!r:.60}, expected an object. Correct it")
        config[part] = completed({"model_type": known.parts[part], **config[part]})
        _check_parts(config[part])
        _check(config[part], (*fields, *model_type_of(config[part]).tensor_fields))


def _check_lists(config: Config, names: tuple[str, ...]) -> None:
    lists = [config.get(name) for name in names]
    for name, found in zip(names, lists, strict=True):
        one_length = isinstance(found, list) and 0 < len(found) <= MAX_LAYERS and len(found) == len(lists[0] or ())
        if not one_length or not all(type(n) is int and 0 < n <= MAX_SIZE for n in found or ()):
            raise SourceError(
                f"its configuration sets {name}={found!r:.60}, expected a whole number for each stage, in all of "
                f"{', '.join(names)}. Correct it"
            )
    if sum((config.get("depths") or ()) if names else ()) > MAX_LAYERS:
        raise SourceError(
            f"its configuration sets depths={config['depths']!r:.60}, expected at most {MAX_LAYERS} layers"
        )


def _check(config: Config, sizes: tuple[str, ...]) -> None:
    optional = [key for key in ("head_dim", "n_inner") if config.get(key) is not None]
    for key in (*sizes, *optional):
        # type(), not isinstance(): True is an int, but no size.
        size, most = config.get(key), MAX_LAYERS if key in _LAYERS else MAX_SIZE
        if type(size) is not int or not 0 < size <= most:
            raise SourceError(
                f"its configuration sets {key}={size!r:.60}, expected a whole number from 1 to {most}. Correct it"
            )
    experts = config.get("num_local_experts") or config.get("num_experts") or 0
    if experts * config.get("num_hidden_layers", 0) > MAX_EXPERTS:
        raise SourceError(
            f"its configuration sets {plural(experts, 'expert')} in {plural(config['num_hidden_layers'], 'layer')}, "
            f"expected at most {MAX_EXPERTS} in all layers. Correct it"
        )
    # Each key-value head serves as many query heads as any other.
    if "num_key_value_heads" in sizes and config["num_attention_heads"] % config["num_key_value_heads"]:
        raise SourceError(
            f"its configuration sets num_attention_heads={config['num_attention_heads']}, expected a multiple of "
            f"num_key_value_heads={config['num_key_value_heads']}. Correct them"
        )
    if config.get("add_cross_attention"):
        raise UnsupportedError("its configuration sets add_cross_attention, expected a model without cross-attention")
