"""Training: a sentencepiece model made from a source."""

import io
import json
from collections.abc import Iterator, Sequence

import numpy as np
from etils import epath

from pipeline.errors import InvalidValue
from pipeline.fs.atomic import as_path, atomic_write, directory_lock
from pipeline.text.sources.source import Source, read_texts
from pipeline.text.tokenizers.sentencepiece import SentencePiece, require_sentencepiece
from pipeline.text.tokenizers.tokenizer import BEGIN, END, PAD

# Trained on no more text than this, read in batches of records.
SAMPLE_BYTES, BATCH = 1 << 25, 1024


def train_sentencepiece(
    source: Source,
    vocab_size: int,
    model: epath.PathLike,
    *,
    seed: int = 0,
    field: str | Sequence[str] = "text",
    begin: bool = True,
    end: bool = True,
) -> SentencePiece:
    """A byte-pair model trained on `source`, exact: decoding gives back every text as it was.

    No character is normalised, no space added or removed, and what is not in the vocabulary falls
    back to bytes. Ids: 0 padding, 1 begin, 2 end, 3 unknown (never used), then 256 bytes, then
    pieces. The same source, size and seed give the same model on every machine with the same
    sentencepiece.

    Args:
        source: whose text to train on; of one with more than 32 MiB, a sample spread over all of
            it, drawn by `seed`.
        vocab_size: ids in all.
        model: the file to write. If it was trained there already from the same source with the
            same options, it is loaded instead.
        seed: draws the sample.
        field: the field of the records that holds the text; or several, all of whose texts count.
        begin: see `SentencePiece`.
        end: see `SentencePiece`.

    Raises:
        ValueError: `vocab_size` is too large or too small for this text.
    """
    path = as_path(model)
    fields = [field] if isinstance(field, str) else list(field)
    about = {
        "source": source.fingerprint,
        "field": field if isinstance(field, str) else list(field),
        "vocab_size": vocab_size,
        "seed": seed,
        "sample_bytes": SAMPLE_BYTES,
    }
    note = path.parent / f"{path.name}.json"

    def done() -> bool:
        return path.exists() and note.exists() and json.loads(note.read_text()) == about

    if not done():
        with directory_lock(path.parent, "training a tokenizer"):
            if not done():
                # The note goes first and comes last, so it never describes another model.
                note.unlink(missing_ok=True)
                proto = _train(_sample(source, fields, seed), vocab_size)
                with atomic_write(path) as file:
                    file.write(proto)
                with atomic_write(note) as file:
                    file.write(json.dumps(about, indent=1).encode())
    return SentencePiece(path, begin=begin, end=end)


def _train(texts: Iterator[str], vocab_size: int) -> bytes:
    proto = io.BytesIO()
    try:
        require_sentencepiece().SentencePieceTrainer.train(
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
            f"sentencepiece cannot make {vocab_size:,} pieces of this text: {seen}. Choose "
            "another vocab_size, or more text"
        ) from error
    return proto.getvalue()


def _sample(source: Source, fields: Sequence[str], seed: int) -> Iterator[str]:
    """Texts of about `SAMPLE_BYTES` in all, in order, spread evenly over the source."""
    total = len(source)
    probe = np.unique(np.linspace(0, total - 1, num=min(total, 256)).astype(np.int64))
    texts = (text for field in fields for text in read_texts(source, probe.tolist(), field))
    size = sum(len(text.encode()) for text in texts)
    wanted = min(total, max(1, SAMPLE_BYTES * len(probe) // max(size, 1)))
    # One record of each of `wanted` equal stretches, so that compressed files are read in order.
    within = np.random.Philox(key=seed).random_raw(wanted) / 2**64
    numbers = ((np.arange(wanted) + within) * (total / wanted)).astype(np.int64)
    for begin in range(0, wanted, BATCH):
        for field in fields:
            yield from read_texts(source, numbers[begin : begin + BATCH].tolist(), field)
