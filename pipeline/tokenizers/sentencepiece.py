"""SentencePiece: a trained model, read from its file."""

from typing import Any

import numpy as np
from etils import epath

from pipeline.extras import require
from pipeline.tokenizers.file_tokenizer import FileTokenizer

SPACE = "\u2581"  # how a model spells a space


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

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a sentencepiece model, or has no such mark.
    """

    kind, file = "sentencepiece", "tokenizer.model"

    def __init__(self, model: epath.PathLike, *, begin: bool = True, end: bool = True):
        super().__init__(model, begin=begin, end=end)

    def _setup(self, *, begin: bool, end: bool) -> None:
        self._processor = require_sentencepiece().SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(self._content)
        except RuntimeError as error:
            raise ValueError(f"{self._name} is not a sentencepiece model: {error}") from error
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
            raise ValueError(f"the model {self._name} has no {option} mark; pass {option}=False")
        return mark if wanted else None

    @property
    def fingerprint(self) -> str:
        """From the content of the model, and the marks."""
        marks = [name for name in ("begin", "end") if self._options[name]]
        return "-".join(["sentencepiece", self._digest(), *marks])

    def _encode(self, texts: list[str]) -> list[list[int]]:
        # One thread: whoever has many texts has many processes.
        ids = self._processor.encode(texts, out_type=int, num_threads=1)
        if self._space:
            for number, text in enumerate(texts):
                if SPACE in text:
                    parts = self._processor.encode(text.split(SPACE), out_type=int, num_threads=1)
                    ids[number] = parts[0]
                    for part in parts[1:]:
                        ids[number] += [*self._space, *part]
        return ids

    def decode(self, ids: Any) -> str:
        """See `Tokenizer`."""
        marks = {self._processor.pad_id(), self._processor.bos_id(), self._processor.eos_id()}
        return self._processor.decode([i for i in np.asarray(ids).tolist() if i not in marks])
