"""Types of public arguments: meshes, layouts and dtypes, as protocols, so that this imports neither JAX nor Keras."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    import numpy as np


# Protocols, as annotations with the real classes would import JAX and Keras with every module that has them.


class Mesh(Protocol):
    """A `jax.sharding.Mesh` or a `keras.distribution.DeviceMesh`, passed as ``mesh=``."""

    @property
    def axis_names(self) -> Sequence[Any]:
        """Names of the axes."""

    @property
    def devices(self) -> Any:
        """Array of devices, with one dim per axis."""


class LayoutMap(Protocol):
    """A `keras.distribution.LayoutMap`, passed as ``layout=``: layouts by patterns of variables' paths."""

    @property
    def device_mesh(self) -> Any:
        """The mesh of its layouts."""


class Distribution(Protocol):
    """A `keras.distribution.ModelParallel`, `DataParallel`, or another of Keras, passed as ``mesh=`` or ``layout=``."""

    @property
    def device_mesh(self) -> Any:
        """The mesh that the distribution spreads variables and batches over."""

    @property
    def batch_dim_name(self) -> Any:
        """The mesh axis that splits the batch."""

    def get_variable_layout(self, variable: Any) -> Any:
        """Return the layout of a variable."""


class DTypePolicy(Protocol):
    """A `keras.dtype_policies.DTypePolicy`, passed as ``dtype=``: one dtype for weights, one for computations."""

    @property
    def variable_dtype(self) -> str:
        """The dtype of weights."""


class Plan(Protocol):
    """A `shardload.parallel.LayoutPlan`, passed as ``layout=``: a layout for every variable of one model."""

    @property
    def mesh(self) -> Any:
        """The mesh that the layouts were planned for."""

    def partition_specs(self) -> dict[str, Any]:
        """Return a ``jax.sharding.PartitionSpec`` for every variable."""


# The words are no Literals, as any other string may be a path or a size.
PathLike: TypeAlias = str | os.PathLike[str]
"""A path, a name or an address."""
MeshLike: TypeAlias = str | int | Sequence[int] | Mapping[str, int] | Mesh | Distribution
"""A mesh: ``"1x8"``, ``"data=2,model=4"``, sizes, sizes by name, a mesh of JAX or Keras, or a Keras distribution."""
LayoutLike: TypeAlias = str | os.PathLike[str] | Mapping[str, Sequence[str | None]] | LayoutMap | Distribution | Plan
"""How to shard a model: a way to choose (``"auto"``, ``"search"``, ``"keras_hub"``, ``"replicated"``), the path of a
file with rules or a plan, rules as a mapping, a plan, or a layout map or a distribution of Keras."""
DTypeLike: TypeAlias = "str | type[Any] | np.dtype[Any] | DTypePolicy"
"""A name such as ``"bf16"``, a dtype of NumPy or JAX, or a dtype policy of Keras."""
AdapterLike: TypeAlias = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Mapping[Any, float]
"""The folder of a PEFT adapter, several of them, or a mapping from folders to weights."""
