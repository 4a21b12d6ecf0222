"""SentencePiece: a trained model, read from its file."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from etils import epath

from pipeline.errors import InvalidValue, require
from pipeline.text.tokenizers.file_tokenizer import FileTokenizer
from pipeline.text.tokenizers.markup import is_mark

SPACE = "\u2581"  # how a model spells a space

# In the protocol buffer of a model: its pieces, and the text and the type of a piece. The library
# finds pieces of the first type here in any text, and those of the second in none.
PIECE, TEXT, TYPE = 1, 1, 3
USER_DEFINED, CONTROL = 4, 3
NO_SPACE = b"\x1a\x02\x18\x00"  # appended, it says: normalizer_spec { add_dummy_prefix: false }


def require_sentencepiece() -> Any:
    """The module `sentencepiece`; an ImportError says how to install it."""
    purpose = "a sentencepiece tokenizer (Bytes() does not)"
    return require("sentencepiece", extra="sentencepiece", purpose=purpose)


class SentencePiece(FileTokenizer):
    """A sentencepiece model, read from its file.

    Args:
        model: the `.model` file.
        begin: whether to put the model's begin mark before each text.
        end: whether to put its end mark after each text.

    User-defined symbols that are spelled as marks (`<|end|>`) are parsed in a template's own text
    alone, see `templates.Markup`; others, such as runs of spaces, in all text; control symbols in
    none.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a sentencepiece model, or has no such mark.
    """

    kind, file = "sentencepiece", "tokenizer.model"

    def __init__(self, model: epath.PathLike, *, begin: bool = True, end: bool = True):
        super().__init__(model, begin=begin, end=end)

    def _setup(self, *, begin: bool, end: bool) -> None:
        self._processor = self._encoder = self._parser = _load(self._content, self._name)
        symbols = _find_symbols(self._content)
        marks = {text: at for text, at in symbols.items() if is_mark(text.replace(SPACE, " "))}
        self._set_marks(list(marks))
        if marks:
            plain = bytearray(self._content)
            for at in marks.values():
                plain[at] = CONTROL
            self._encoder = _load(bytes(plain), self._name)
            self._parser = _load(self._content + NO_SPACE, self._name)
        self.begin_id = self._mark("begin", begin, self._processor.bos_id())
        self.end_id = self._mark("end", end, self._processor.eos_id())
        self.vocab_size = self._processor.vocab_size()
        # A model spells a space as U+2581, and so cannot tell it from that character itself.
        # Where it falls back to bytes and adds no space of its own, text is cut there, and the
        # character is spelled in bytes.
        pieces = [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE.encode()]
        adds_space = self._processor.encode("x", out_type=str)[0].startswith(SPACE)
        exact = all(map(self._processor.is_byte, pieces)) and not adds_space
        self._space = pieces if exact else []

    def _mark(self, option: str, wanted: bool, mark: int) -> int | None:
        if wanted and mark < 0:
            raise InvalidValue(f"the model {self._name} has no {option} mark; pass {option}=False")
        return mark if wanted else None

    @property
    def fingerprint(self) -> str:
        """From the content of the model, the marks around texts, and whether some are parsed."""
        marks = [name for name in ("begin", "end") if self._options[name]]
        markup = ["markup"] * (self._marks is not None)
        return "-".join(["sentencepiece", self._digest(), *marks, *markup])

    def _encode(self, texts: list[str]) -> list[list[int]]:
        return self._encode_by(self._encoder, texts)

    def _parse(self, texts: list[str]) -> list[list[int]]:
        return self._encode_by(self._parser, texts)

    def _encode_by(self, processor: Any, texts: list[str]) -> list[list[int]]:
        # One thread: whoever has many texts has many processes.
        ids = processor.encode(texts, out_type=int, num_threads=1)
        if self._space:
            for number, text in enumerate(texts):
                if SPACE in text:
                    parts = processor.encode(text.split(SPACE), out_type=int, num_threads=1)
                    ids[number] = parts[0]
                    for part in parts[1:]:
                        ids[number] += [*self._space, *part]
        return ids

    def decode(self, ids: Any) -> str:
        """See `Tokenizer`."""
        marks = {self._processor.pad_id(), self._processor.bos_id(), self._processor.eos_id()}
        return self._processor.decode([i for i in np.asarray(ids).tolist() if i not in marks])


def _load(content: bytes, name: str) -> Any:
    processor = require_sentencepiece().SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(content)
    except RuntimeError as error:
        raise InvalidValue(f"{name} is not a sentencepiece model: {error}") from error
    return processor


def _find_symbols(content: bytes) -> dict[str, int]:
    """The user-defined symbols of a model, each with the place of the byte that says its type.

    Read here, because the library does not tell the type of a piece without protobuf.
    """
    symbols = {}
    for number, begin, end in _fields(content, 0, len(content)):
        if number == PIECE:
            places = {field: (at, to) for field, at, to in _fields(content, begin, end)}
            if TYPE in places and content[places[TYPE][0]] == USER_DEFINED:
                symbols[content[slice(*places[TEXT])].decode()] = places[TYPE][0]
    return symbols


def _fields(content: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """The number of each field of a protocol buffer, and where its value begins and ends."""
    while at < end:
        key, at = _varint(content, at)
        if key & 7 == 2:
            size, at = _varint(content, at)
        else:
            size = {1: 8, 5: 4}.get(key & 7) or _varint(content, at)[1] - at
        yield key >> 3, at, at + size
        at += size


def _varint(content: bytes, at: int) -> tuple[int, int]:
    """The number that begins there, and where the next thing begins."""
    value = shift = 0
    while True:
        byte = content[at]
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return value, at
