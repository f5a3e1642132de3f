"""Hugging Face configurations as KerasHub's converters read them.

A converter knows the keys that one version of `transformers` wrote. Other versions omit values that equal a default, or
rename keys; `read_config` fills them in, without changing a value. `check_representable` refuses features for which
KerasHub's class has no argument, and names the field. What differs by ``model_type`` is in `shardload.families`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

from shardload.errors import UnsupportedError
from shardload.families.parts.config import GENERATORS, architecture_of
from shardload.families.registry import families, model_type_of
from shardload.manifest import Manifest, Tensor
from shardload.transfer.read_tensor import read_rows

_ROWS = 16
"""Rows of the output layer and the embedding that are compared before the model is built."""


def read_config(manifest: Manifest) -> dict[str, Any]:
    """Return a copy of the configuration in the form that KerasHub's converters read."""
    config = copy.deepcopy(dict(manifest.config))
    # KerasHub reads the first entry unconditionally; GGUF and KerasHub's own exports have none.
    config["architectures"] = config.get("architectures") or [""]
    config = completed(renamed(config))
    # Converters call get("rope_parameters", {}).get(…), which fails on null.
    if config.get("rope_parameters", {}) is None:
        del config["rope_parameters"]
    known = model_type_of(config)
    for part, kind in known.parts.items():
        if isinstance(config.get(part), dict):
            config[part] = completed({"model_type": kind, **config[part]})
    if "ForImageClassification" in architecture_of(config):
        config.setdefault("id2label", {"0": "LABEL_0", "1": "LABEL_1"})  # the default, which transformers omits
    if known.is_image_model:
        config |= {key: _side(config[key]) for key in ("image_size", "patch_size") if key in config}
    known.adapt(config)
    return config


def completed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a model or a part with the defaults of its ``model_type`` filled in."""
    known = model_type_of(config)
    found = {**known.defaults, **config}
    # None stands for multi-head attention: as many key-value heads as heads.
    if found.get("num_key_value_heads", 0) is None:
        found["num_key_value_heads"] = found.get("num_attention_heads")
    known.complete(found)
    return found


def renamed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with the names that converters read for keys that other versions renamed.

    Before the defaults are filled in: they would fill in a key that it only has under its other name.
    """
    aliases = model_type_of(config).renamed.items()
    return {wanted: config[stored] for wanted, stored in aliases if stored in config} | dict(config)


def ties_embeddings(manifest: Manifest) -> bool | None:
    """Whether to build the output layer from the embedding; KerasHub reads ``tie_word_embeddings`` at most.

    True if the configuration ties them and no different output layer is stored, as in transformers 5, or if the
    checkpoint's class has no output layer at all. ``None`` for classes without the option.

    Raises:
        TransferError: When a file no longer matches its headers.
    """
    if not model_type_of(manifest.config).has_tie_argument:
        return None
    head = next((t for n, t in manifest.tensors.items() if re.fullmatch(r"(.+\.)?lm_head\.weight", n)), None)
    if manifest.config.get("tie_word_embeddings") is True:
        return head is None or not _differs_from_embedding(head, manifest)
    architecture = architecture_of(manifest.config)
    return bool(architecture) and not architecture.endswith(GENERATORS) and head is None


def tie_as_stored(described: Any, manifest: Manifest) -> None:
    """Tie the embeddings of a model in a Keras configuration, in place, if no output layer is stored.

    Some of KerasHub's classes (Llama's) do not serialise ``tie_word_embeddings``, so files of Keras do not state it.
    """
    embedding, head = (any(re.search(pattern, name) for name in manifest.tensors) for pattern in _STORED)
    if embedding and not head:
        _tie(described)


def tie_as_described(described: Any, manifest: Manifest) -> None:
    """Tie the embeddings in a Keras configuration, in place, if the Hugging Face folder that contains it is tied."""
    if ties_embeddings(manifest):
        _tie(described)


_STORED = (r"reversible_embedding/vars/0$|token_embedding/embeddings$", r"embedding/(vars/1|reverse_embeddings)$")
"""Names of the embedding and of an output layer, in files of Keras and in steps."""


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
    """Compare a few rows: a separately trained head differs everywhere; loading compares a copy completely."""
    embedding = next((t for n, t in manifest.tensors.items() if re.fullmatch(r"(.+\.)?embed_tokens\.weight", n)), head)
    # Not comparable row by row: build the model tied, and the complete comparison of the load will refuse the tensor.
    if (head.shape, head.dtype) != (embedding.shape, embedding.dtype):
        return False
    rows = range(0, head.rows, max(1, head.rows // _ROWS))
    return any(read_rows(head, i, i + 1).tobytes() != read_rows(embedding, i, i + 1).tobytes() for i in rows)


def check_representable(manifest: Manifest, backbone_cls: type, arguments: Mapping[str, Any]) -> None:
    """Check that KerasHub's class can represent the model that the configuration describes.

    Args:
        manifest: The checkpoint.
        backbone_cls: KerasHub's class.
        arguments: Parameters of its constructor.

    Raises:
        UnsupportedError: When the class has no argument for a field, which the message names.
    """
    if (why := _lacking(manifest, f"KerasHub's {backbone_cls.__name__}", arguments)) is not None:
        raise UnsupportedError(
            f"Cannot build the model of {manifest.source}: {why}. Build your own model, then call "
            "shardload.load_weights(model, source)"
        )


def _lacking(manifest: Manifest, name: str, arguments: Mapping[str, Any]) -> str | None:
    """Return the first feature that KerasHub's class or converter cannot represent, or ``None``."""
    config = read_config(manifest)
    if "head_dim" not in arguments and (width := _head_dims(config)) is not None:
        return (
            f"config.json sets head_dim={width[0]}, but {name} computes it as hidden_size / num_attention_heads = "
            f"{width[1]}"
        )
    return model_type_of(config).lacking(config, name)


def _side(size: Any) -> Any:
    """Return the side of a square, which transformers also writes as two equal numbers."""
    return size[0] if isinstance(size, list) and len(size) == 2 and size[0] == size[1] else size


def _head_dims(config: Mapping[str, Any]) -> tuple[Any, str] | None:
    head_dim, hidden, heads = (config.get(key) for key in ("head_dim", "hidden_size", "num_attention_heads"))
    if not all(isinstance(n, int) and n > 0 for n in (head_dim, hidden, heads)):
        return None
    assert isinstance(hidden, int) and isinstance(heads, int)
    return None if head_dim == hidden / heads else (head_dim, f"{hidden} / {heads} = {hidden / heads:g}")
