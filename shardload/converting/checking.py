"""Check a result before it gets its final name: open it as its readers will, reading headers only.

every result       shardload's reader finds exactly the planned tensors
Keras' files       Keras' reader finds in every group what Keras would have written for the model
a folder           the model built from its configuration finds all its weights, and uses all tensors
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardload.converting.plans import ConversionPlan
from shardload.converting.publishing import ConversionFolder
from shardload.converting.source import Source
from shardload.errors import ShardloadError, SourceError
from shardload.hub import building
from shardload.hub.described import placed
from shardload.keras_bridge import abstraction
from shardload.keras_bridge.hub_imports import backbone_of
from shardload.keras_bridge.model_state import own_layers
from shardload.keras_bridge.recording import keeping_names, seeded
from shardload.keras_bridge.weights_files import check_for_keras, listed_by_keras
from shardload.loaders import open_manifest, spec_of
from shardload.loaders.file_pieces import Wanted
from shardload.loaders.hf_folder import open_as_stored
from shardload.loaders.hub_preset import SHARDED_WEIGHTS, TASK_WEIGHTS, WEIGHTS
from shardload.loaders.keras_archive import SPEC as KERAS_ARCHIVE
from shardload.manifest import Manifest
from shardload.mapping import map_weights
from shardload.stores.local import located
from shardload.stores.location import nowhere


def check_result(plan: ConversionPlan, source: Source | None, staging: ConversionFolder) -> None:
    """Raise `SourceError` unless the target has exactly the planned tensors, and a model built from it would load."""
    index = staging.result / staging.target.name if plan.shards else staging.result
    # A copy has the codes of a quantised source.
    manifest = open_as_stored(located(index)) if plan.is_copy else open_manifest(index, format=plan.format)
    spec = spec_of(manifest)
    written = {t.name: (t.shape, t.dtype) for t in manifest.tensors.values()}
    wanted = {c.wanted.name: (c.wanted.shape, c.wanted.dtype) for c in plan.copies}
    if written != wanted:
        name = next(n for n in {**written, **wanted} if written.get(n) != wanted.get(n))
        raise SourceError(
            f"Cannot read back {index}: tensor {name!r} is {written.get(name)}, expected {wanted.get(name)}"
        )
    # It has the tensors of its source, or arrays, and no model is built.
    if plan.is_copy or source is None:
        return
    if plan.is_keras_file:
        check_for_keras(index, listed_by_keras(source.model), omitted=plan.omitted, is_index=bool(plan.shards))
        return
    with abstraction.abstract():
        model = building.build_model(manifest)
    if spec.described_by == "keras-hub":
        backbone, sharded = backbone_of(model), (index / SHARDED_WEIGHTS).is_file()
        file = index / (SHARDED_WEIGHTS if sharded else WEIGHTS)
        check_for_keras(file, listed_by_keras(backbone), is_index=sharded)
        if (head := index / TASK_WEIGHTS).is_file():
            check_for_keras(head, listed_by_keras(model, skip=own_layers(backbone)))
    mapping = map_weights(model, manifest)
    computed = mapping.computed and not spec.is_hugging_face  # fine if KerasHub's converter computes
    zeros = {copy.wanted.name for copy in plan.copies if copy.value.variable is None}  # KerasHub's class lacks them
    unused = [name for name in mapping.unused if name not in zeros]
    if mapping.missing or mapping.mismatched or computed or unused:
        raise SourceError(
            f"Cannot verify {index}: loading it back would not give the same model: "
            f"{[*mapping.missing, *map(str, mapping.mismatched), *unused][:3]}"
        )


def description_fault(name: str, described: Mapping[str, Any], tensors: list[Wanted]) -> str | None:
    """Return why a model built from its description would not fit the weights file of the result; ``None`` if it does.

    If several parts of a model share a layer, its description has the layer several times, and Keras may build it
    as several layers. If the description has classes or functions of other packages than Keras and KerasHub, nothing
    is built or checked, because building would run their code.
    """
    if not _is_of_keras(described):
        return None
    where = nowhere(name)
    specs = [(t.name, t.shape, t.dtype) for t in tensors]
    manifest = Manifest(where, KERAS_ARCHIVE.name, placed(specs, where), {}, described)
    try:
        with abstraction.abstract(), seeded(0), keeping_names():
            again = building.build_model(manifest, compile=False)
    except ShardloadError as error:
        return f"{error.__cause__ or error}".partition("\n")[0]
    mapping = map_weights(again, manifest)
    lacking = [f"no tensor for {name!r}" for name in mapping.missing]
    lacking += [*map(str, mapping.mismatched), *(f"no variable for {name!r}" for name in mapping.unused)]
    return lacking[0] if lacking else None


def _is_of_keras(described: Any) -> bool:
    """Whether a model's description names only classes and functions of Keras and KerasHub, so building is safe."""
    if isinstance(described, Mapping):
        module = described.get("module", "keras") or "keras"
        known = module == "builtins" or f"{module}.".startswith(("keras.", "keras_hub."))
        is_code = described.get("class_name") in ("function", "__lambda__")
        return known and not is_code and all(map(_is_of_keras, described.values()))
    return not isinstance(described, list) or all(map(_is_of_keras, described))
