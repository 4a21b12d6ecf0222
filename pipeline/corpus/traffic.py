"""Traffic: what reading a corpus through a cache costs."""

import dataclasses


@dataclasses.dataclass
class Traffic:
    """What reading has cost so far, in this process.

    Attributes:
        fetched: bytes of whole parts.
        ranged: bytes that were read by ranges, since their part was not there.
        hits, misses: pieces of examples that were read from parts on disk, and by ranges.
        stalls: reads that waited for ranges.
        waited: the seconds of these.
    """

    fetched: int = 0
    ranged: int = 0
    hits: int = 0
    misses: int = 0
    stalls: int = 0
    waited: float = 0.0
