"""Keras 2's ``.h5`` files of weights or of whole models. Keras 3 also writes them, to names that end in ``.h5``.

    /                     layer_names = [dense, dropout, dense_1]
    ├─ dense              weight_names = [dense/kernel:0, dense/bias:0]
    │   └─ dense/kernel:0 …
    └─ top_level_model_weights   weight_names = [ … ]

Keras loads weights by order: the n-th layer with weights gets the weights of the n-th group with weights. Names say
nothing, as Keras makes them up. So the manifest's metadata contains the order, which `shardload.mapping` uses.

In a file of a whole model, all this is in the group ``/model_weights``, next to ``/optimizer_weights``. The root has
the model's configuration as `model_config`, and the arguments of `compile` as `training_config`. If one of these two is
damaged, the file is read as a file of weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shardload.errors import ShardloadError, SourceError
from shardload.loaders.contents import FileContent, refuse_part
from shardload.loaders.extents import checked_tensors
from shardload.loaders.keras_h5 import is_hdf5
from shardload.loaders.registry import FormatSpec
from shardload.manifest import Manifest, Tensor
from shardload.stores.json_files import parse_object
from shardload.stores.location import Location

if TYPE_CHECKING:
    from shardload.loaders.hdf5.datasets import Reader

LAYERS = "layers"
"""Key in the manifest's metadata. The value: layer → names of its tensors in Keras' order, for layers with tensors.
Files of Keras 2 are loaded by this order."""
TOP_LEVEL = "top_level_weights"
"""Key in the manifest's metadata. The value: names of the model's tensors outside its layers; older files have none."""
OPTIMIZER = "optimizer_weights/"
"""Prefix of the names of the optimizer's tensors, in files of whole models."""
TRAINING = "training_config"
"""Key in the manifest's metadata. The value: the arguments of `model.compile`; missing if the file has none."""
UNREADABLE = "unreadable_config"
"""Key in the manifest's metadata. The value: why the model's configuration in the file cannot be read."""
_CONFIG = "model_config"
_MODEL = "model_weights"
_TOP_LEVEL_GROUP = "top_level_model_weights"


def open_file(path: Location) -> Manifest:
    """Return the manifest of one ``.h5`` file of Keras 2, with the order of its tensors in the metadata."""
    # Imported late: formats are listed without h5py.
    from shardload.loaders.hdf5 import datasets as hdf5

    region = hdf5.FileRegion.whole(path)
    files = {path: region.nbytes}
    with hdf5.reading(region) as reader:
        tensors = checked_tensors(reader.tensors(), files=files)
        metadata = _order(reader, tensors, path)
        config, described = _described(reader, path)
    # transformers splits the weights of TensorFlow so: tf_model-00001-of-00002.h5.
    if not config:
        refuse_part(path)
    return Manifest(path, "keras-legacy-h5", tensors, files, config, metadata | described, notes=reader.notes())


def _described(reader: Reader, path: Location) -> tuple[dict[str, Any], dict[str, object]]:
    """Return the model's configuration, and how it was compiled as metadata; if damaged, metadata that say why."""
    try:
        texts = ((name, reader.text(name)) for name in (_CONFIG, TRAINING))
        config, training = (
            {} if text is None else parse_object(text.encode(), path=f"{path}: attribute {name!r}")
            for name, text in texts
        )
    except ShardloadError as error:
        # The weights alone are of use: for a model that the user builds.
        return {}, {UNREADABLE: str(error)}
    return config, {TRAINING: training} if training else {}


def _order(reader: Reader, tensors: Mapping[str, Tensor], path: Location) -> dict[str, object]:
    # As in Keras: the root, unless only the group of a whole model's weights is there.
    is_whole = not reader.has_names("", "layer_names") and _MODEL in reader.groups
    root = _MODEL if is_whole else ""
    seen: set[str] = set()
    layers: dict[str, list[str]] = {}
    for layer in reader.names(root, "layer_names"):
        if layer in layers:
            raise SourceError(f"{path} lists the layer {layer!r} twice. Save it again with Keras")
        layers[layer] = _weights(reader, f"{root}/{layer}".lstrip("/"), tensors, seen, path)
    metadata: dict[str, object] = {LAYERS: {layer: found for layer, found in layers.items() if found}}
    if (group := f"{root}/{_TOP_LEVEL_GROUP}".lstrip("/")) in reader.groups:
        metadata[TOP_LEVEL] = _weights(reader, group, tensors, seen, path)
    return metadata


def _weights(reader: Reader, group: str, tensors: Mapping[str, Tensor], seen: set[str], path: Location) -> list[str]:
    if group not in reader.groups:
        raise SourceError(f"{path} lists the layer {group!r}, but has no such group. Download or save it again")
    found = []
    for name in reader.names(group, "weight_names"):
        full = f"{group}/{name}"
        if full not in tensors or full in seen:
            problem = "twice" if full in seen else "but has no such dataset"
            raise SourceError(f"{path} lists the weight {full[:200]!r} {problem}. Download or save it again")
        seen.add(tensors[full].name)
        found.append(tensors[full].name)
    return found


def _is_legacy(content: FileContent) -> bool:
    if not is_hdf5(content):
        return False
    from shardload.loaders.hdf5 import datasets as hdf5

    try:
        with hdf5.reading(hdf5.FileRegion(content.path, 0, content.size)) as reader:
            return reader.is_legacy()
    except ShardloadError:
        # What is damaged is reported by the general format.
        return False


SPEC = FormatSpec(
    name="keras-legacy-h5",
    description="a Keras 2 .h5 file",
    variant_of="keras-h5",
    is_file=_is_legacy,
    open_file=open_file,
    described_by="keras-legacy",
    tensor_names="order",
)
