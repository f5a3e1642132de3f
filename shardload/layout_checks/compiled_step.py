"""Memory and collectives of a compiled step: the report that `shardload.parallel.compile_step` returns."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax

from shardload.keras_bridge.joint_optimizer import FLOAT32_UPDATE
from shardload.layout_checks.hlo_collectives import Collective, as_json
from shardload.layout_checks.step_programs import Kind
from shardload.layout_search.plan_checks import CompiledCheck
from shardload.sharding.mesh import MeshSpec
from shardload.units import format_bytes, plural

_WORDS = {"forward": "forward pass", "gradients": "forward and backward pass", "training": "training step"}


@dataclass(frozen=True, slots=True)
class CompiledStep:
    """Memory and collectives of a compiled program; bytes are those of one device."""

    mesh: MeshSpec
    kind: Kind
    platform: str
    """The platform it was compiled for, such as ``cpu``."""
    argument_bytes: int
    """Weights, optimizer slots and the batch."""
    output_bytes: int
    """Results: outputs, gradients, or the new state."""
    alias_bytes: int
    """Results that reuse the memory of arguments."""
    temporary_bytes: int
    """Activations and everything else that the program allocates while it runs."""
    float32_argument_bytes: int
    """Those of ``argument_bytes`` that are float32 because the model is."""
    float32_output_bytes: int
    """Those of ``output_bytes`` that are float32 because the model is."""
    collectives: tuple[Collective, ...]
    """Every collective instruction."""
    compile_s: float
    float32_update_bytes: int = 0
    """Those of ``temporary_bytes`` that an optimizer needs in float32 even if the model is 16-bit."""
    notes: tuple[str, ...] = ()
    """What to know when reading these numbers."""

    @property
    def total_bytes(self) -> int:
        """Bytes on each device while the step runs."""
        # Donated arguments become outputs in place: the new weights of a training step are counted once.
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temporary_bytes

    @property
    def collective_bytes(self) -> int:
        """Summed result bytes of all collectives in one step."""
        return sum(found.total_bytes for found in self.collectives)

    @property
    def counts(self) -> Mapping[str, int]:
        """Instructions of each kind: ``{"all-reduce": 4}``."""
        return dict(Counter(found.kind for found in self.collectives))

    def fits(self, device_bytes: int) -> bool:
        """Whether the step needs at most ``device_bytes`` on each device."""
        return self.total_bytes <= device_bytes

    def scaled(self, dtype: str = "bfloat16") -> CompiledStep:
        """Return the numbers that a step compiled in float32 would have in a 16-bit dtype.

        Arguments, outputs and collectives are exact if all floats change their dtype, but for the state and the update
        of an optimizer that computes in float32. Temporaries are scaled likewise, although some of them (sums,
        integers) may stay in 32 bits.
        """
        ratio: float = jax.numpy.dtype(dtype).itemsize / 4

        def less(nbytes: int) -> int:
            return round(nbytes * (1 - ratio))

        return replace(
            self,
            argument_bytes=self.argument_bytes - less(self.float32_argument_bytes),
            output_bytes=self.output_bytes - less(self.float32_output_bytes),
            alias_bytes=self.alias_bytes - less(min(self.alias_bytes, self.float32_output_bytes)),
            temporary_bytes=self.temporary_bytes - less(self.temporary_bytes - self.float32_update_bytes),
            float32_argument_bytes=0,
            float32_output_bytes=0,
            collectives=tuple(
                replace(c, nbytes=c.nbytes - less(c.nbytes), dtype=dtype)
                if c.dtype == "f32" and FLOAT32_UPDATE not in c.source
                else c
                for c in self.collectives
            ),
            notes=(*self.notes, f"scaled from float32 to {dtype}"),
        )

    def for_plan(self) -> CompiledCheck:
        """Return what a plan records of this step."""
        totals: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
        for one in self.collectives:
            count, nbytes = totals[one.kind]
            totals[one.kind] = (count + one.count, nbytes + one.total_bytes)
        return CompiledCheck(
            self.kind,
            self.platform,
            self.total_bytes,
            self.argument_bytes,
            self.temporary_bytes,
            dict(sorted(totals.items())),
            self.notes,
        )

    def summary(self) -> str:
        """Return a few lines for people."""
        lines = [
            f"{_WORDS[self.kind]} on {self.mesh}, compiled for {self.platform} in {self.compile_s:.1f} s",
            f"each device: {format_bytes(self.total_bytes)} (arguments {format_bytes(self.argument_bytes)}, outputs "
            f"{format_bytes(self.output_bytes - self.alias_bytes)}, temporaries {format_bytes(self.temporary_bytes)})",
            f"collectives: {plural(len(self.collectives), 'instruction')}, {format_bytes(self.collective_bytes)}",
        ]
        # One line for all that differ only in their source: the same collective of each layer.
        runs = Counter[Collective]()
        for found in self.collectives:
            runs[replace(found, source="", count=1)] += found.count
        largest = sorted(runs, key=lambda found: -found.nbytes * runs[found])
        lines += [f"  {replace(found, count=runs[found])}" for found in largest]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def to_json(self) -> dict[str, Any]:
        """Return an object for programs; bytes per device."""
        skipped = ("mesh", "collectives", "notes")
        return {
            "mesh": dict(zip(self.mesh.axes, self.mesh.sizes, strict=True)),
            **{name: getattr(self, name) for name in self.__slots__ if name not in skipped},
            "total_bytes": self.total_bytes,
            "collective_bytes": self.collective_bytes,
            "collectives": [as_json(found) for found in self.collectives],
            "notes": list(self.notes),
        }
