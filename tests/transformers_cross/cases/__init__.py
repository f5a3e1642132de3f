"""Every folder of the cross, and how `transformers` makes it.

To add one, add a line to a module here, write its fixture with `generate`, and say in ``expected.toml`` what must
become of it.
"""

from __future__ import annotations

from transformers_cross.cases import decoders, encoders, images, several
from transformers_cross.cases.parts import Case

CASES: tuple[Case, ...] = (*decoders.cases(), *encoders.cases(), *images.cases(), *several.cases())
"""All of them, in the order of the table."""

__all__ = ["CASES", "Case"]
