"""Bytes: the tokenizer that needs no training."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from etils import epath

from pipeline.errors import InvalidValue
from pipeline.text.tokenizers.tokenizer import BEGIN, END


@dataclass(frozen=True)
class Bytes:
    """UTF-8 bytes as ids 3 to 258, after padding (0), a begin mark (1) and an end mark (2).

    >>> Bytes().encode_batch(["hi", ""])
    (array([  1, 107, 108,   2,   1,   2], dtype=int32), array([4, 2]))
    >>> Bytes().decode([1, 107, 108, 2])
    'hi'
    """

    begin: bool = True
    end: bool = True

    # Without annotations, so that the dataclass does not take them for fields.
    kind = "bytes"
    vocab_size = 259

    def __post_init__(self) -> None:
        for name, value in (("begin", self.begin), ("end", self.end)):
            if not isinstance(value, bool | np.bool):
                raise InvalidValue(f"{name} is {value!r:.80}; it must be True or False")

    @property
    def begin_id(self) -> int | None:
        """See `Tokenizer`."""
        return BEGIN if self.begin else None

    @property
    def end_id(self) -> int | None:
        """See `Tokenizer`."""
        return END if self.end else None

    @property
    def fingerprint(self) -> str:
        """Says all there is to it.

        >>> Bytes(begin=False).fingerprint
        'bytes-end'
        """
        return "-".join(["bytes", *["begin"] * self.begin, *["end"] * self.end])

    def encode_batch(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """See `Tokenizer`."""
        # Any byte in the place of each mark: one array of ids is made, and none is copied.
        begin, end = b"\0" * self.begin, b"\0" * self.end
        encoded = [begin + text.encode() + end for text in texts]
        counts = np.fromiter(map(len, encoded), np.int64, len(encoded))
        content = encoded.pop() if len(encoded) == 1 else b"".join(encoded)
        del encoded
        flat = np.frombuffer(content, np.uint8).astype(np.int32)
        flat += 3
        ends = np.cumsum(counts)
        if self.begin:
            flat[ends - counts] = BEGIN
        if self.end:
            flat[ends - 1] = END
        return flat, counts

    def decode(self, ids: Any) -> str:
        """See `Tokenizer`; bytes that are no UTF-8 become U+FFFD."""
        ids = np.asarray(ids)
        return (ids[ids >= 3] - 3).astype(np.uint8).tobytes().decode(errors="replace")

    def save(self, directory: epath.Path) -> dict[str, Any]:
        """See `Tokenizer`; needs no file."""
        return {"kind": self.kind, "begin": self.begin, "end": self.end}
