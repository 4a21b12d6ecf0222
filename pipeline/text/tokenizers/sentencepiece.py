"""SentencePiece: a trained model, read from its file; and a function that trains one."""

import functools
import io
import itertools
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from etils import epath

from pipeline.errors import InvalidValue, require
from pipeline.fs.atomic import as_path, atomic_write, directory_lock
from pipeline.text.fingerprints import fingerprint
from pipeline.text.sources.source import Sharded, Source, sharded, text_of, with_place
from pipeline.text.tokenizers.file_tokenizer import FileTokenizer
from pipeline.text.tokenizers.markup import is_mark
from pipeline.text.tokenizers.tokenizer import BEGIN, END, PAD

logger = logging.getLogger(__name__)

# The field of a record that holds its text, or several, or a function from a record to its texts.
TextOf: TypeAlias = str | Sequence[str] | Callable[[Mapping[str, Any]], Sequence[str]]

SPACE = "\u2581"  # how a model spells a space

# A model is a protocol buffer: three types of its pieces, and fields that, appended to a model, say
# that no space is put before a text, and that none is removed.
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5
NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"  # normalizer_spec { add_dummy_prefix: false }
KEEP_SPACES = b"\x1a\x02\x20\x00"  # normalizer_spec { remove_extra_whitespaces: false }

# The most bytes of text to train on, and the most shards that they come from.
SAMPLE_BYTES, SAMPLED = 1 << 25, 64


def _require() -> Any:
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
        own = self._processor.bos_id(), self._processor.eos_id()
        before, after = ([mark] if mark >= 0 else [] for mark in own)
        self.begin_id = self._mark("begin", begin, before)
        self.end_id = self._mark("end", end, after)
        self.vocab_size = self._processor.vocab_size()
        # A model spells a space as U+2581, and so cannot tell it from that character itself.
        # If it falls back to bytes, text is split at that character, which is spelled in bytes.
        pieces = [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE.encode()]
        self._space = pieces if all(map(self._processor.is_byte, pieces)) else []

    def _find(self, token: str) -> int | None:
        found = self._processor.piece_to_id(token)
        return found if self._processor.id_to_piece(found) == token else None

    def _encode(self, texts: list[str], kind: str) -> list[list[int]]:
        # One thread, since many texts are encoded by many processes.
        processor, inside = (
            functools.partial(self._kinds[each].encode, out_type=int, num_threads=1)
            for each in (kind, "inside")
        )
        ids = processor(texts)
        for number, text in enumerate(texts if self._space else []):
            if SPACE in text:
                first, *rest = text.split(SPACE)
                ids[number] = processor([first])[0]
                ids[number] += [id_ for part in inside(rest) for id_ in (*self._space, *part)]
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


def train_sentencepiece(
    source: Source | Sharded | Sequence[tuple[Source | Sharded, TextOf]],
    vocab_size: int,
    model: epath.PathLike,
    *,
    seed: int = 0,
    field: TextOf = "text",
    begin: bool | str = True,
    end: bool | str = True,
) -> SentencePiece:
    """A byte-pair model trained on `source`, which decodes to exactly the original text.

    No character is normalised, no space added or removed, and text that is not in the vocabulary
    falls back to bytes. Ids: 0 padding, 1 begin, 2 end, 3 unknown (never used), then 256 bytes,
    then pieces. The same source, size and seed give the same model on every machine with the same
    sentencepiece.

    Args:
        source: the text to train on; or pairs of a source and its `field`. If there are more than
            32 MiB, a sample: the beginnings of up to 64 shards that are spread over all of it.
        vocab_size: the number of ids, all kinds together.
        model: the file to write. If it exists, and was trained on the same source with the same
            options, it is loaded; it is never overwritten.
        seed: draws the shards.
        field: the field of the records that holds the text; or several, to train on all of them;
            or a function from a record to its texts.
        begin: see `SentencePiece`.
        end: see `SentencePiece`.

    Raises:
        ValueError: `vocab_size` is too large or too small for this text, or `model` was trained
            otherwise.
    """
    path = as_path(model)
    pairs: Any = source if isinstance(source, list | tuple) else [(source, field)]
    texts = [(sharded(each), [of] if isinstance(of, str) else of) for each, of in pairs]
    fields = [
        fingerprint(of) if callable(of) else of if isinstance(of, str) else list(of)
        for _, of in pairs
    ]
    about = {
        "source": "+".join(each.fingerprint for each, _ in texts),
        "field": fields[0] if len(fields) == 1 else fields,
        "vocab_size": vocab_size,
        "seed": seed,
        "sample_bytes": SAMPLE_BYTES,
    }
    note = path.parent / f"{path.name}.json"

    if not path.exists():
        with directory_lock(path.parent, "training a tokenizer"):
            if not path.exists():
                proto = _train(_sample(texts, seed), vocab_size)
                for place, content in ((note, json.dumps(about, indent=1).encode()), (path, proto)):
                    with atomic_write(place) as file:
                        file.write(content)
    there = json.loads(note.read_text()) if note.exists() else {}
    if changed := [name for name, value in about.items() if there.get(name) != value]:
        raise InvalidValue(
            f"{os.fspath(path)} exists, and was not trained with this text and these options ("
            + ", ".join(f"{name} was {there.get(name)}, now {about[name]}" for name in changed)
            + "). Give it as the tokenizer, train into another directory (for a run, another "
            "--workdir), or delete it if no corpus needs it"
        )
    return SentencePiece(path, begin=begin, end=end)


def _read_marks(model: bytes) -> tuple[dict[int, str], bytes]:
    """The marks of a model by id; and the model without the ones that it finds in any text.

    Marks are control symbols, and user-defined ones that look like marks.
    """
    found, marks = _message_of_models().FromString(model), {}
    for number, piece in enumerate(found.pieces):
        if piece.type in (CONTROL, USER_DEFINED) and is_mark(piece.piece.replace(SPACE, " ")):
            marks[number] = piece.piece
            piece.type = UNUSED if piece.type == USER_DEFINED else CONTROL
    return marks, found.SerializeToString()


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
    processor = _require().SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(content)
    except RuntimeError as error:
        raise InvalidValue(f"{name} is not a sentencepiece model: {error}") from error
    return processor


def _train(texts: Iterator[str], vocab_size: int) -> bytes:
    proto = io.BytesIO()
    try:
        _require().SentencePieceTrainer.train(
            sentence_iterator=texts,
            model_writer=proto,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            max_sentence_length=1 << 30,
            pad_id=PAD,
            bos_id=BEGIN,
            eos_id=END,
            unk_id=END + 1,
            num_threads=8,  # recorded in the model, so it must not depend on the machine
            minloglevel=2,
        )
    except RuntimeError as error:
        seen = str(error).rpartition("] ")[2].rstrip(".")  # without its place in the C++ source
        raise InvalidValue(
            f"sentencepiece cannot make {vocab_size:,} pieces of this text: {seen}; choose another "
            "vocab_size, or give more text"
        ) from error
    return proto.getvalue()


def _sample(texts: Sequence[tuple[Sharded, Any]], seed: int) -> Iterator[str]:
    """Texts of up to `SAMPLE_BYTES` in total, in order, from the beginnings of spread shards."""
    every = [(source, field, shard) for source, field in texts for shard in source.shards()]
    count = min(len(every), SAMPLED)
    failed = ""
    # One shard of each of `count` equal stretches.
    within = np.random.Philox(key=seed).random_raw(count) / 2**64
    for number in ((np.arange(count) + within) * (len(every) / max(count, 1))).astype(int):
        source, field, shard = every[number]
        left = SAMPLE_BYTES // count
        blocks = source.read(shard)
        for block, at in ((each, at) for each in blocks for at in range(len(each.records))):
            if left <= 0:
                break
            try:
                found = _texts_of(block.records[at], field)
            except OSError:
                raise
            except Exception as error:  # `prepare` raises it, or skips the record
                failed = failed or f"{with_place(error, block.where(at))}"
                continue
            yield from found
            left -= sum(len(text.encode()) for text in found)
    if failed:
        logger.warning("the tokenizer is trained without the records that fail; first %s", failed)


def _texts_of(record: Any, field: Any) -> Any:
    if isinstance(record, Exception):
        raise record
    return field(record) if callable(field) else [text_of(record, each) for each in field]
