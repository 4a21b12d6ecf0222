"""Tokenizer: the protocol that `prepare` needs; and bytes, which need no training."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
from etils import epath

from pipeline.errors import InvalidValue
from pipeline.text.markup import MEANT, parts_of
from pipeline.text.values import count_bytes

# The ids of marks in tokenizers that this package makes.
PAD, BEGIN, END = 0, 1, 2

# Longer texts are encoded in pieces of about so many characters.
LONG = 1 << 20

# The members that a `SpanTokenizer` has beside those of a `Tokenizer`.
EXTENSIONS = ("marks", "marks_words", "parses_special", "encode_spans", "spell", "find_unparsed")


class UnknownMark(InvalidValue):
    """A tokenizer does not have the begin or the end mark that is asked for.

    Attributes:
        seen: what is wrong.
        option: "begin" or "end".
    """

    def __init__(self, seen: str, option: str):
        super().__init__(f"{seen}; name the token, as in {option}='<s>', or pass {option}=False")
        self.seen, self.option = seen, option


class Tokenizer(Protocol):
    """The members of a tokenizer that `prepare` needs; it is pickled once for each worker.

    It may have members of `SpanTokenizer`, too.
    """

    @property
    def kind(self) -> str:
        """Its name in the manifest of a corpus, for `load`."""
        ...

    @property
    def vocab_size(self) -> int:
        """The number of ids; all ids are below it."""
        ...

    @property
    def fingerprint(self) -> str:
        """A string that is equal for two tokenizers exactly if they give the same ids."""
        ...

    @property
    def begin_id(self) -> int | None:
        """The id before each text, or None."""
        ...

    @property
    def end_id(self) -> int | None:
        """The id after each text, or None."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """The ids of all texts, one after another (int32), and their number in each text (int64).

        Special tokens, such as the end of a turn, may be parsed in `Markup` alone: any other text
        may spell them.
        """
        ...

    def decode(self, ids: Any) -> str:
        """The text of the ids, marks removed."""
        ...

    def save(self, directory: epath.Path) -> dict[str, Any]:
        """Writes the files it needs into `directory`; returns the JSON that `load` takes."""
        ...


class SpanTokenizer(Tokenizer, Protocol):
    """What is asked of a tokenizer that has marks, or adds something to texts.

    `extend` gives a tokenizer that lacks some of these members their defaults.
    """

    @property
    def marks(self) -> Mapping[str, tuple[bool, bool]]:
        """The marks that `Markup` may have, and whether they remove spaces on either side.

        Default: none.
        """
        ...

    @property
    def marks_words(self) -> bool:
        """Whether it marks where words begin or end, so that no span may begin inside of one.

        Default: False.
        """
        ...

    @property
    def parses_special(self) -> bool:
        """Whether special tokens in `Markup` become their ids. Default: False."""
        ...

    def encode_spans(
        self, texts: Sequence[str], inside: Sequence[bool]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Like `encode_batch`, but nothing, such as a space, is put before texts that are `inside`.

        They continue an example. Default: `encode_batch`.
        """
        ...

    def spell(self, ids: Any) -> str:
        """The text of the ids of an example, without its begin and end marks, but with others.

        Default: `decode`.
        """
        ...

    def find_unparsed(self, text: str) -> tuple[str, bool] | None:
        """A mark in a text that stays text, and whether it is a template's own; None: none is.

        Default: None.
        """
        ...


def extend(tokenizer: Tokenizer) -> SpanTokenizer:
    """The tokenizer with all members of `SpanTokenizer`."""
    return cast(SpanTokenizer, _Extended(tokenizer))


class _Extended:
    """A tokenizer with the defaults of members that it lacks."""

    marks: Mapping[str, tuple[bool, bool]] = {}  # nobody changes it
    marks_words = parses_special = False

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        for name in EXTENSIONS:
            if hasattr(tokenizer, name):
                setattr(self, name, getattr(tokenizer, name))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode_spans(self, texts: Sequence[str], inside: Sequence[bool]) -> Any:
        return self._tokenizer.encode_batch(texts)

    def spell(self, ids: Any) -> str:
        return self._tokenizer.decode(ids)

    def find_unparsed(self, text: str) -> tuple[str, bool] | None:
        return None


@dataclass(frozen=True)
class Bytes:
    """UTF-8 bytes as ids 3 to 258, after padding (0), a begin mark (1) and an end mark (2).

    >>> Bytes().encode_batch(["hi", ""])
    (array([  1, 107, 108,   2,   1,   2], dtype=int32), array([4, 2]))
    >>> Bytes().decode([1, 107, 108, 2])
    'hi'

    Attributes:
        begin: whether a mark is before each text.
        end: whether a mark is after each text.
    """

    begin: bool = True
    end: bool = True

    # Without annotations, so that the dataclass does not take them for fields.
    kind = "bytes"
    vocab_size = 259

    def __post_init__(self) -> None:
        for name, value in (("begin", self.begin), ("end", self.end)):
            if isinstance(value, str):
                raise UnknownMark(f"bytes have no token {value!r:.80}", name)
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
        """See `Tokenizer`; such as "bytes-end"."""
        return "-".join(["bytes", *["begin"] * self.begin, *["end"] * self.end])

    def encode_batch(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """See `Tokenizer`."""
        # A zero byte holds the place of each mark, so that only one array of ids is made.
        begin, end = b"\0" * self.begin, b"\0" * self.end
        if len(texts) == 1 and len(texts[0]) > LONG:
            sizes = np.array([count_bytes(texts[0])], np.int64)
            flat = np.empty(sizes[0] + self.begin + self.end, np.int32)
            at = int(self.begin)
            for piece in (texts[0][n : n + LONG] for n in range(0, len(texts[0]), LONG)):
                values = np.frombuffer(piece.encode(), np.uint8)
                np.add(values, 3, out=flat[at : at + len(values)], dtype=np.int32)
                at += len(values)
            counts = sizes + self.begin + self.end
        else:
            encoded = [begin + text.encode() + end for text in texts]
            counts = np.fromiter(map(len, encoded), np.int64, len(encoded))
            flat = np.frombuffer(b"".join(encoded), np.uint8).astype(np.int32)
            flat += 3
        ends = np.cumsum(counts)
        if self.begin:
            flat[ends - counts] = BEGIN
        if self.end:
            flat[ends - 1] = END
        return flat, counts

    def find_unparsed(self, text: str) -> tuple[str, bool] | None:
        """See `FileTokenizer`; marks in bytes are text, which `strict` allows."""
        markup = " ".join(part for part, is_markup in parts_of(text) if is_markup)
        if not (mark := MEANT.search(markup)):
            return None
        return f"the template has {mark[0]!r}, and bytes have no special tokens", False

    def decode(self, ids: Any) -> str:
        """See `Tokenizer`; bytes that are not UTF-8 become U+FFFD."""
        ids = np.asarray(ids)
        return (ids[ids >= 3] - 3).astype(np.uint8).tobytes().decode(errors="replace")

    def save(self, directory: epath.Path) -> dict[str, Any]:
        """See `Tokenizer`; needs no file."""
        return {"kind": self.kind, "begin": self.begin, "end": self.end}
