"""Slots: placeholder tokens in a text, which point to a side of arrays."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from pipeline.errors import InvalidValue
from pipeline.text.features import Feature


class Slots(str):
    """Placeholder tokens that point to a side, in place of the text of a span.

    >>> picture = [("What is this? ", 0.0), (Slots(9, at=[0, 1, 2]), 0.0), ("A cat.", 1.0)]

    Attributes:
        id: the token id of each placeholder.
        at: the position that each of them points to, if the tokens have one pointer; or a dict of
            such positions and of the values of other features of tokens, `[n, *shape]`, by name.
    """

    id: int
    at: Any

    def __new__(cls, id: int, at: Any) -> "Slots":  # noqa: D102
        slots = super().__new__(cls)  # no text
        slots.id, slots.at = id, at
        return slots

    @property
    def size(self) -> int:
        """The number of placeholders."""
        return len(next(iter(self.at.values())) if isinstance(self.at, Mapping) else self.at)

    def values(self, features: Mapping[str, Feature]) -> dict[str, np.ndarray]:
        """The values of features of tokens, `[n, *shape]`, by name."""
        pointers = [name for name, feature in features.items() if feature.to is not None]
        if not isinstance(self.at, Mapping) and len(pointers) != 1:
            raise InvalidValue(
                f"it returned Slots, and the pointers of tokens are {', '.join(pointers) or 'none'}"
                "; give Slots(id, {pointer: positions}), and a feature with to= for each pointer"
            )
        at = self.at if isinstance(self.at, Mapping) else {pointers[0]: self.at}
        if unknown := [name for name in at if name not in features]:
            raise InvalidValue(f"it returned Slots with {unknown[0]!r}, no feature of the tokens")
        return {
            name: features[name].convert([values], f"{name} of the slots", [self.size])
            for name, values in at.items()
        }
