"""`Hardware`: rates of devices and links, from which a search estimates how long work and collectives take."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

from shardload.errors import LayoutError, UsageError
from shardload.layout_search.program import CollectiveKind
from shardload.sharding.mesh import MeshSpec


@dataclass(frozen=True, slots=True)
class Hardware:
    """Rates of one device and of the links of each mesh axis, from which a search estimates the time of a step.

    The defaults are those of a TPU v5e at about half of its peak rates: 197 TFLOP/s in bfloat16, 819 GB/s of memory
    bandwidth, and 45 GB/s per link and direction (https://cloud.google.com/tpu/docs/v5e).
    """

    flops_per_s: float = 1e14
    memory_bytes_per_s: float = 6e11
    link_bytes_per_s: float = 4.5e10
    """Bandwidth of the links along each axis that has no entry in ``axis_bytes_per_s``."""
    latency_s: float = 1e-6
    """Least seconds for each of the steps in which a collective sends data. A ring of k devices has k - 1 steps."""
    axis_bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    reduce_scatter: bool = True
    """Whether XLA makes a reduce-scatter of an all-reduce of whose result each device needs a part. It does for TPU and
    GPU, and not for CPU."""
    fused_attention: bool = False
    """Whether attention runs in one kernel that stores no scores, neither for the backward pass nor on the way: flash
    attention, which Keras uses on a GPU where cuDNN has it. XLA stores them, as on CPU, and on TPU for the models of
    KerasHub, whose masks are computed in the step."""

    def __post_init__(self) -> None:
        if not isinstance(self.axis_bytes_per_s, Mapping):
            raise LayoutError(
                f"Cannot plan with axis_bytes_per_s={self.axis_bytes_per_s!r:.60}: expected a bandwidth for each axis, "
                "such as {'data': 1e10}"
            )
        # An infinite rate would make all plans cost the same; 0 and NaN give no cost at all.
        rates = (self.flops_per_s, self.memory_bytes_per_s, self.link_bytes_per_s, *self.axis_bytes_per_s.values())
        every: tuple[Any, ...] = (*rates, self.latency_s)
        finite = not any(isinstance(n, bool) or not isinstance(n, Real) or not math.isfinite(n) for n in every)
        if not finite or min(rates) <= 0 or self.latency_s < 0:
            raise LayoutError(f"Cannot plan with {self}: rates must be positive and the latency not negative")
        for name in ("reduce_scatter", "fused_attention"):
            if not isinstance(flag := getattr(self, name), bool):
                raise LayoutError(f"Cannot plan with {name}={flag!r:.60}: expected True or False")
        for name in ("flops_per_s", "memory_bytes_per_s", "link_bytes_per_s", "latency_s"):
            object.__setattr__(self, name, float(getattr(self, name)))  # plans are JSON, which has no numbers of NumPy
        axes = {axis: float(rate) for axis, rate in self.axis_bytes_per_s.items()}
        object.__setattr__(self, "axis_bytes_per_s", axes)

    @classmethod
    def simulated(cls) -> Hardware:
        """Return rates, to one digit, of one of eight simulated devices that share two CPU cores.

        All devices compute on the same cores, where an exchange is a copy and repeated work costs as often as it is
        repeated: plans for training on them split small weights that accelerators would rather copy.
        """
        return cls(flops_per_s=1e10, memory_bytes_per_s=2e9, link_bytes_per_s=1e9, reduce_scatter=False)

    @classmethod
    def of(cls, given: Hardware | None) -> Hardware:
        """Return the ``hardware`` argument of a caller, or the default for ``None``; raise if it is no `Hardware`."""
        if given is not None and not isinstance(given, cls):
            raise UsageError(
                f"Cannot plan with hardware={given!r:.60}: expected a shardload.parallel.Hardware, such as "
                "Hardware(link_bytes_per_s=2e11)"
            )
        return cls() if given is None else given

    def on(self, mesh: MeshSpec, parts: Mapping[str, tuple[str, ...]]) -> Hardware:
        """Return the rates for a mesh whose axes are divided into ``parts``, each with the bandwidth of its axis."""
        rates = {p: rate for axis, rate in self.axis_bytes_per_s.items() for p in parts.get(axis, ()) if p in mesh.axes}
        return replace(self, axis_bytes_per_s=rates)

    def check(self, mesh: MeshSpec) -> None:
        """Raise unless the mesh has every axis for which ``axis_bytes_per_s`` gives a bandwidth."""
        if unknown := sorted(set(self.axis_bytes_per_s) - set(mesh.axes)):
            raise LayoutError(
                f"Cannot plan on {mesh}: axis_bytes_per_s has a bandwidth for {unknown}, expected axes of the mesh"
            )

    def rate_of(self, axis: str) -> float:
        """Return the bandwidth of the links along an axis, in bytes per second."""
        return self.axis_bytes_per_s.get(axis, self.link_bytes_per_s)

    def exchange_s(self, kind: CollectiveKind, nbytes: float, *, axes: Sequence[str], size: int) -> float:
        """Return the seconds of a collective over k = ``size`` devices whose result has ``nbytes`` on each of them.

        An all-reduce moves 2(k-1)/k of the result, an all-gather (k-1)/k, a reduce-scatter k-1 times the result, a
        collective-permute all of it. Over several mesh axes, it is as fast as the slowest of their links.
        """
        if size == 1:
            return 0.0
        rate = min(map(self.rate_of, axes))
        if kind == "collective-permute":
            return nbytes / rate + self.latency_s
        # A ring takes k - 1 steps, in each of which a device passes on 1/k of the result. An all-reduce is a
        # reduce-scatter and an all-gather: two rounds.
        passes = 2 if kind == "all-reduce" else 1
        sent = nbytes if kind == "reduce-scatter" else nbytes / size
        return passes * (size - 1) * (sent / rate + self.latency_s)

    def compute_s(self, flops: float, nbytes: float) -> float:
        """Return the seconds of work on one device: those of arithmetic plus those of reading and writing memory."""
        return flops / self.flops_per_s + nbytes / self.memory_bytes_per_s
