"""Training: a sentencepiece model of the text of a source."""

import io
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from etils import epath

from pipeline.errors import InvalidValue, counted
from pipeline.fs.atomic import as_path, atomic_write, directory_lock
from pipeline.text.fingerprints import fingerprint
from pipeline.text.source import Sharded, Source, sharded, text_of, with_place
from pipeline.text.tokenizer import BEGIN, END, PAD
from pipeline.text.tokenizers.sentencepiece import SentencePiece, library

logger = logging.getLogger(__name__)

# The field of a record that holds its text, or several, or a function from a record to its texts.
TextOf: TypeAlias = str | Sequence[str] | Callable[[Mapping[str, Any]], Sequence[str]]

# The most bytes of text to train on, and the most shards that they come from.
SAMPLE_BYTES, SAMPLED = 1 << 25, 64


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
    texts = [(sharded(source), [of] if isinstance(of, str) else of) for source, of in pairs]
    fields = [
        fingerprint(of) if callable(of) else of if isinstance(of, str) else list(of)
        for _, of in pairs
    ]
    origin = {
        "source": "+".join(shards.fingerprint for shards, _ in texts),
        "field": fields[0] if len(fields) == 1 else fields,
        "vocab_size": vocab_size,
        "seed": seed,
        "sample_bytes": SAMPLE_BYTES,
    }
    beside = path.parent / f"{path.name}.json"  # the origin of the model

    if not path.exists():
        with directory_lock(path.parent, "training a tokenizer"):
            if not path.exists():
                content = _train(Sample(texts, seed), vocab_size)
                with atomic_write(beside) as file:
                    file.write(json.dumps(origin, indent=1).encode())
                with atomic_write(path) as file:
                    file.write(content)
    stored = json.loads(beside.read_text()) if beside.exists() else {}
    if changed := [name for name, value in origin.items() if stored.get(name) != value]:
        raise InvalidValue(
            f"{os.fspath(path)} exists, and was not trained with this text and these options ("
            + ", ".join(f"{name} was {stored.get(name)}, now {origin[name]}" for name in changed)
            + "). Give it as the tokenizer, train into another directory (for a run, another "
            "--workdir), or delete it if no corpus needs it"
        )
    return SentencePiece(path, begin=begin, end=end)


class Sample:
    """Texts of up to `SAMPLE_BYTES` in total, in order, from the beginnings of spread shards.

    Attributes:
        bytes: of the texts that were taken so far.
        failures: the number of records that failed so far, which `prepare` reports or skips.
        failed: the error of the first of them, with its place; "" if there is none.
    """

    def __init__(self, texts: Sequence[tuple[Sharded, Any]], seed: int):
        self._texts, self._seed = texts, seed
        self.bytes, self.failures, self.failed = 0, 0, ""

    def __iter__(self) -> Iterator[str]:
        shards = [
            (source, field, shard) for source, field in self._texts for shard in source.shards()
        ]
        count = min(len(shards), SAMPLED)
        # One shard of each of `count` equal stretches.
        within = np.random.Philox(key=self._seed).random_raw(count) / 2**64
        for index in ((np.arange(count) + within) * (len(shards) / max(count, 1))).astype(int):
            source, field, shard = shards[index]
            end = self.bytes + SAMPLE_BYTES // count
            records = (
                (block, n) for block in source.read(shard) for n in range(len(block.records))
            )
            for block, number in records:
                if self.bytes >= end:
                    break
                try:
                    texts = _texts_of(block.records[number], field)
                except OSError:
                    raise
                except Exception as error:
                    self.failures += 1
                    self.failed = self.failed or f"{with_place(error, block.where(number))}"
                    continue
                yield from texts
                self.bytes += sum(len(text.encode()) for text in texts)


def _train(sample: Sample, vocab_size: int) -> bytes:
    proto = io.BytesIO()
    try:
        library().SentencePieceTrainer.train(
            sentence_iterator=iter(sample),
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
        failed = f"{counted(sample.failures, 'record')} failed, first {sample.failed}"
        if not sample.bytes:
            why = failed if sample.failed else "all records that were read are empty"
            raise InvalidValue(f"there is no text to train a tokenizer on: {why}") from error
        seen = str(error).rpartition("] ")[2].rstrip(".")  # without its place in the C++ source
        raise InvalidValue(
            f"sentencepiece cannot make {vocab_size:,} pieces of {sample.bytes:,} bytes of text: "
            f"{seen}; choose another vocab_size, or give more text"
            f"{f' ({failed})' if sample.failed else ''}"
        ) from error
    if sample.failed:
        logger.warning(
            "the tokenizer is trained without the records that fail; first %s", sample.failed
        )
    return proto.getvalue()


def _texts_of(record: Any, field: Any) -> Any:
    if isinstance(record, Exception):
        raise record
    return field(record) if callable(field) else [text_of(record, name) for name in field]
