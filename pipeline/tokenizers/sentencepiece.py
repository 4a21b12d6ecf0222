"""SentencePiece: a trained model, read from its file."""

import functools
import hashlib
import itertools
import os
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from etils import epath

from pipeline.atomic import atomic_write
from pipeline.extras import require
from pipeline.tokenizers.tokenizer import with_marks

MODEL = "tokenizer.model"  # its name in the directory of a corpus
SPACE = "\u2581"  # how a model spells a space


def require_sentencepiece() -> Any:
    """The module `sentencepiece`; an ImportError says how to install it."""
    purpose = "a sentencepiece tokenizer (Bytes() does not)"
    return require("sentencepiece", extra="sentencepiece", purpose=purpose)


class SentencePiece:
    """A sentencepiece model, read from its file.

    Args:
        model: the `.model` file.
        begin: whether to put the model's begin mark before each text.
        end: whether to put its end mark after each text.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a sentencepiece model, or has no such mark.
    """

    kind: ClassVar[str] = "sentencepiece"

    def __init__(self, model: epath.PathLike, *, begin: bool = True, end: bool = True):
        path = epath.Path(model).expanduser()
        if not path.exists():
            raise FileNotFoundError(f"there is no sentencepiece model {os.fspath(path)}")
        self._setup(path.read_bytes(), begin, end, os.fspath(path))

    def _setup(self, proto: bytes, begin: bool, end: bool, name: str) -> None:
        self._proto, self.begin, self.end, self._name = proto, begin, end, name
        self._processor = require_sentencepiece().SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(proto)
        except RuntimeError as error:
            raise ValueError(f"{name} is not a sentencepiece model: {error}") from error
        for wanted, mark, option in (
            (begin, self._processor.bos_id(), "begin"),
            (end, self._processor.eos_id(), "end"),
        ):
            if wanted and mark < 0:
                raise ValueError(f"the model {name} has no {option} mark; pass {option}=False")
        # A model spells a space as U+2581, and so cannot tell it from that character itself.
        # Where it falls back to bytes and adds no space of its own, text is cut there, and the
        # character is spelled in bytes.
        spelled = [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE.encode()]
        exact = all(map(self._processor.is_byte, spelled)) and not self._spaced("x")
        self._space = spelled if exact else []

    def _spaced(self, text: str) -> bool:
        return self._processor.encode(text, out_type=str)[0].startswith(SPACE)

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""
        return self._processor.vocab_size()

    @property
    def begin_id(self) -> int | None:
        """See `Tokenizer`."""
        return self._processor.bos_id() if self.begin else None

    @property
    def end_id(self) -> int | None:
        """See `Tokenizer`."""
        return self._processor.eos_id() if self.end else None

    @functools.cached_property
    def fingerprint(self) -> str:
        """From the content of the model, and the marks."""
        content = hashlib.sha256(self._proto).hexdigest()[:12]
        marks = ["begin"] * self.begin + ["end"] * self.end
        return "-".join(["sentencepiece", content, *marks])

    def encode_batch(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """See `Tokenizer`."""
        # One thread: whoever has many texts has many processes.
        encoded = self._processor.encode(list(texts), out_type=int, num_threads=1)
        if self._space:
            for number, text in enumerate(texts):
                if SPACE in text:
                    encoded[number] = self._encode_around_spaces(text)
        counts = np.fromiter(map(len, encoded), np.int64, len(encoded))
        body = np.fromiter(itertools.chain.from_iterable(encoded), np.int32, int(counts.sum()))
        return with_marks(body, counts, self.begin_id, self.end_id)

    def _encode_around_spaces(self, text: str) -> list[int]:
        first, *rest = self._processor.encode(text.split(SPACE), out_type=int, num_threads=1)
        return [*first, *(i for ids in rest for i in (*self._space, *ids))]

    def decode(self, ids: Any) -> str:
        """See `Tokenizer`."""
        marks = {self._processor.pad_id(), self._processor.bos_id(), self._processor.eos_id()}
        return self._processor.decode([i for i in np.asarray(ids).tolist() if i not in marks])

    def save(self, directory: epath.Path) -> dict[str, Any]:
        """See `Tokenizer`; writes the model as `tokenizer.model`."""
        with atomic_write(directory / MODEL) as file:
            file.write(self._proto)
        return {"kind": self.kind, "begin": self.begin, "end": self.end}

    def __reduce__(self):
        return _from_proto, (self._proto, self.begin, self.end, self._name)

    def __repr__(self) -> str:
        return f"SentencePiece({self._name!r}, begin={self.begin}, end={self.end})"


def _from_proto(proto: bytes, begin: bool, end: bool, name: str) -> SentencePiece:
    tokenizer = SentencePiece.__new__(SentencePiece)
    tokenizer._setup(proto, begin, end, name)
    return tokenizer
