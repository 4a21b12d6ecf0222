"""Sealed parts in memory, for plans of corpora that grow."""

import hashlib
import threading

import numpy as np


class SealedInMemory:
    """All parts of a finished corpus; `asked` is the number of parts that were asked for.

    Of one that grows, `sealed` parts are there, and others are waited for.
    """

    _changed = threading.Condition()  # of all of them, so that each can be pickled

    def __init__(self, parts, sealed=None):
        self.parts, self.asked = [np.asarray(part, np.uint32) for part in parts], 0
        self._sealed = len(parts) + 1 if sealed is None else sealed

    def seal(self, number):
        """Seals the first parts; one more than there are finishes the corpus."""
        with self._changed:
            self._sealed = number
            self._changed.notify_all()

    def lengths(self, number):
        with self._changed:
            self._changed.wait_for(lambda: number < self._sealed)
        self.asked = max(self.asked, number + 1)
        return self.parts[number] if number < len(self.parts) else None

    def digest(self, number):
        if number > len(self.parts):
            return None
        content = b"/".join(part.tobytes() for part in self.parts[:number])
        return hashlib.sha256(content).hexdigest()[:16] if number else ""

    def whole(self):
        return np.concatenate(self.parts)
