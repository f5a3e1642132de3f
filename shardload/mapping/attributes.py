"""Undo changes that a loading hook makes to a layer's attributes.

Some hooks do more than assign: ``Normalization`` derives its mean, ``Dense`` records that it is calibrated.
While recording, those attributes would be derived from placeholders; after a rollback, from discarded values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class AttributeSnapshot:
    """The attributes of one object, and the content of its plain containers, one level deep."""

    target: Any
    attributes: dict[str, Any]
    contents: tuple[tuple[Any, Any], ...]

    @classmethod
    def of(cls, target: Any) -> AttributeSnapshot:
        """Record the attributes of ``target``."""
        attributes = dict(getattr(target, "__dict__", {}))
        # Not Keras' tracked containers: clearing those also untracks the layers and variables in them.
        containers = [v for v in attributes.values() if type(v) in (list, dict, set)]
        return cls(target, attributes, tuple((c, c.copy()) for c in containers))

    def restore(self) -> None:
        """Restore the attributes, bypassing Keras' tracking, which has them all already."""
        current = getattr(self.target, "__dict__", None)
        if current is None:
            return
        for name in current.keys() - self.attributes.keys():
            del current[name]
        for name, value in self.attributes.items():
            if current.get(name, self) is not value:
                current[name] = value
        # Without comparing first: equality of NumPy arrays is not one truth value.
        for container, content in self.contents:
            container.clear()
            container.extend(content) if isinstance(container, list) else container.update(content)
