"""SentencePiece: a trained model, read from its file."""

import functools
import itertools
from typing import Any

from etils import epath

from pipeline.errors import InvalidValue, require
from pipeline.text.file_tokenizer import FileTokenizer
from pipeline.text.markup import is_mark

SPACE = "\u2581"  # how a model spells a space

# A model is a protocol buffer: three types of its pieces, and fields that, appended to a model, say
# that no space is put before a text, and that none is removed.
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5
NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"  # normalizer_spec { add_dummy_prefix: false }
KEEP_SPACES = b"\x1a\x02\x20\x00"  # normalizer_spec { remove_extra_whitespaces: false }


def library() -> Any:
    """The module sentencepiece."""
    purpose = "a sentencepiece tokenizer (Bytes() does not)"
    return require("sentencepiece", extra="sentencepiece", purpose=purpose)


class SentencePiece(FileTokenizer):
    """A sentencepiece model, read from its file.

    Args:
        model: the `.model` file.
        begin: whether to put the model's begin mark before each text; or the piece to put there.
        end: the mark after each text, likewise.

    Control symbols, and user-defined ones that look like marks (`<|end|>`), are parsed in a
    template's own text alone (see `templates.Markup`), others, such as runs of spaces, in all text.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a sentencepiece model, or has no such mark.
    """

    kind, file = "sentencepiece", "tokenizer.model"

    def __init__(self, model: epath.PathLike, *, begin: bool | str = True, end: bool | str = True):
        super().__init__(model, begin=begin, end=end)

    @staticmethod
    def train(*arguments: Any, **options: Any) -> "SentencePiece":
        """See `train_sentencepiece`."""
        from pipeline.text.tokenizers.training import train_sentencepiece

        return train_sentencepiece(*arguments, **options)

    def _setup(self, *, begin: bool | str, end: bool | str) -> None:
        _load(self._content, self.path)  # or it is refused
        self._names, model = _read_marks(self._content)
        self._set_marks(dict.fromkeys(self._names.values(), (False, False)))
        self._processor = _load(model, self.path)
        self._kinds = {
            "alone": self._processor,
            "first": _load(model + KEEP_SPACES, self.path),
            "inside": _load(model + KEEP_SPACES + NO_DUMMY_PREFIX, self.path),
        }
        if "".join(self._processor.encode("a", out_type=str)).endswith(SPACE):
            # It puts a space after a text: not where a first span ends.
            self._kinds["first"] = self._kinds["inside"]
        marks = self._processor.bos_id(), self._processor.eos_id()
        before, after = ([mark] if mark >= 0 else [] for mark in marks)
        self.begin_id = self._mark("begin", begin, before)
        self.end_id = self._mark("end", end, after)
        self.vocab_size = self._processor.vocab_size()
        # A model spells a space as U+2581, and so cannot tell it from that character itself.
        # If it falls back to bytes, text is split at that character, which is spelled in bytes.
        pieces = [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE.encode()]
        self._space = pieces if all(map(self._processor.is_byte, pieces)) else []

    def _find(self, token: str) -> int | None:
        number = self._processor.piece_to_id(token)
        return number if self._processor.id_to_piece(number) == token else None

    def _encode(self, texts: list[str], kind: str) -> list[list[int]]:
        # One thread, since many texts are encoded by many processes.
        options = {"out_type": int, "num_threads": 1}
        encode, inside = self._kinds[kind].encode, self._kinds["inside"].encode
        ids = encode(texts, **options)
        for number, text in enumerate(texts if self._space else []):
            if SPACE in text:
                first, *rest = text.split(SPACE)
                (ids[number],) = encode([first], **options)
                for piece in inside(rest, **options):
                    ids[number] += [*self._space, *piece]
        return ids

    def decode(self, ids: Any) -> str:
        """See `Tokenizer`."""
        marks = {self._processor.pad_id(), self._processor.bos_id(), self._processor.eos_id()}
        return self._processor.decode([i for i in self._strip(ids) if i not in marks])

    def spell(self, ids: Any) -> str:
        """See `FileTokenizer`."""
        texts: list[str] = []
        for mark, group in itertools.groupby(self._strip(ids), self._names.get):
            run = list(group)
            # The first text alone may begin with a space that the model has put there.
            decode = self._kinds["inside" if texts else "alone"].decode
            texts += [decode(run)] if mark is None else [mark] * len(run)
        return "".join(texts)


def _read_marks(model: bytes) -> tuple[dict[int, str], bytes]:
    """The marks of a model by id; and the model without the ones that it finds in any text.

    Marks are control symbols, and user-defined ones that look like marks.
    """
    message, marks = _message_of_models().FromString(model), {}
    for number, piece in enumerate(message.pieces):
        if piece.type in (CONTROL, USER_DEFINED) and is_mark(piece.piece.replace(SPACE, " ")):
            marks[number] = piece.piece
            piece.type = UNUSED if piece.type == USER_DEFINED else CONTROL
    return marks, message.SerializeToString()


@functools.cache
def _message_of_models() -> Any:
    """The class of a model, with the text and type of its pieces; other fields stay as they are.

    sentencepiece's own module has it, but refuses any protobuf older than the one that made it.
    """
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="lockstep_models.proto", package="lockstep")
    piece, model = (file.message_type.add(name=name) for name in ("Piece", "Model"))
    kinds = descriptor_pb2.FieldDescriptorProto
    for name, number, kind in (("piece", 1, kinds.TYPE_STRING), ("type", 3, kinds.TYPE_INT32)):
        piece.field.add(name=name, number=number, type=kind, label=kinds.LABEL_OPTIONAL)
    model.field.add(
        name="pieces",
        number=1,
        type=kinds.TYPE_MESSAGE,
        type_name=".lockstep.Piece",
        label=kinds.LABEL_REPEATED,
    )
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("lockstep.Model"))


def _load(content: bytes, name: str) -> Any:
    processor = library().SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(content)
    except RuntimeError as error:
        raise InvalidValue(f"{name} is not a sentencepiece model: {error}") from error
    return processor
