"""Costs of computing and communicating. A plan states the constants it was made with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from shardload.errors import LayoutError, UsageError
from shardload.layout_search.program import CollectiveKind
from shardload.sharding.mesh import MeshSpec


@dataclass(frozen=True, slots=True)
class Hardware:
    """Rates of one device and of the links of each mesh axis.

    The defaults are those of a TPU v5e at about half of its peak rates: 197 TFLOP/s in bfloat16, 819 GB/s of memory
    bandwidth, and 45 GB/s per link and direction (https://cloud.google.com/tpu/docs/v5e).

    Raises:
        LayoutError: When a rate is not a positive number.
    """

    flops_per_s: float = 1e14
    memory_bytes_per_s: float = 6e11
    link_bytes_per_s: float = 4.5e10
    """Bandwidth of an axis without an entry in ``axis_bytes_per_s``."""
    latency_s: float = 1e-6
    """Time that a collective takes at least, per step of a ring."""
    axis_bytes_per_s: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.axis_bytes_per_s, Mapping):
            raise LayoutError(
                f"Cannot plan with axis_bytes_per_s={self.axis_bytes_per_s!r:.60}: expected a bandwidth for each axis, "
                "such as {'data': 1e10}"
            )
        # An infinite rate would make all plans cost the same; 0 and NaN give no cost at all.
        rates = (self.flops_per_s, self.memory_bytes_per_s, self.link_bytes_per_s, *self.axis_bytes_per_s.values())
        if not all(map(_is_finite, (*rates, self.latency_s))) or min(rates) <= 0 or self.latency_s < 0:
            raise LayoutError(f"Cannot plan with {self}: rates must be positive and the latency not negative")
        for name in ("flops_per_s", "memory_bytes_per_s", "link_bytes_per_s", "latency_s"):
            object.__setattr__(self, name, float(getattr(self, name)))  # plans are JSON, which has no numbers of NumPy
        axes = {axis: float(rate) for axis, rate in self.axis_bytes_per_s.items()}
        object.__setattr__(self, "axis_bytes_per_s", axes)

    @classmethod
    def of(cls, given: Hardware | None) -> Hardware:
        """Return the hardware that a caller gives; the default for ``None``.

        Raises:
            UsageError: When it is something else.
        """
        if given is not None and not isinstance(given, cls):
            raise UsageError(
                f"Cannot plan with hardware={given!r:.60}: expected a shardload.parallel.Hardware, such as "
                "Hardware(link_bytes_per_s=2e11)"
            )
        return cls() if given is None else given

    def check(self, mesh: MeshSpec) -> None:
        """Check that every axis with a bandwidth of its own is one of the mesh.

        Raises:
            LayoutError: When one is not.
        """
        if unknown := sorted(set(self.axis_bytes_per_s) - set(mesh.axes)):
            raise LayoutError(f"Cannot plan on {mesh}: the hardware has a bandwidth for {unknown}, expected axes of it")

    def rate_of(self, axis: str) -> float:
        """Return the bandwidth of an axis."""
        return self.axis_bytes_per_s.get(axis, self.link_bytes_per_s)

    def exchange_s(self, kind: CollectiveKind, nbytes: float, *, axis: str, size: int) -> float:
        """Return the seconds of a collective over one axis.

        Args:
            kind: An all-reduce moves 2(k-1)/k of the result, an all-gather (k-1)/k, a collective-permute all of it.
            nbytes: Bytes of the result on each device.
            axis: The mesh axis.
            size: Number of devices along it, k.
        """
        if size == 1:
            return 0.0
        rate = self.rate_of(axis)
        if kind == "collective-permute":
            return nbytes / rate + self.latency_s
        # A ring takes k - 1 steps, in each of which a device passes on 1/k of the result. An all-reduce is a
        # reduce-scatter and an all-gather: two rounds.
        passes = 2 if kind == "all-reduce" else 1
        return passes * (size - 1) * (nbytes / size / rate + self.latency_s)

    def compute_s(self, flops: float, nbytes: float) -> float:
        """Return the seconds of work on one device: arithmetic and memory traffic one after the other."""
        return flops / self.flops_per_s + nbytes / self.memory_bytes_per_s


def _is_finite(rate: Any) -> bool:
    return not isinstance(rate, bool) and isinstance(rate, Real) and math.isfinite(rate)
