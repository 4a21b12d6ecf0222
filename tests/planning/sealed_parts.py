"""Sealed parts in memory, for plans of corpora that grow."""

import hashlib

import numpy as np


class SealedInMemory:
    """All parts of a finished corpus; `asked` is the number of parts that were asked for."""

    def __init__(self, parts):
        self.parts, self.asked = [np.asarray(part, np.uint32) for part in parts], 0

    def lengths(self, number):
        self.asked = max(self.asked, number + 1)
        return self.parts[number] if number < len(self.parts) else None

    def digest(self, number):
        if number > len(self.parts):
            return None
        content = b"/".join(part.tobytes() for part in self.parts[:number])
        return hashlib.sha256(content).hexdigest()[:16] if number else ""

    def whole(self):
        return np.concatenate(self.parts)
