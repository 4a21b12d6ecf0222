"""HuggingFace: a `tokenizer.json`, as the `tokenizers` library writes it."""

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

FILE = "tokenizer.json"  # its name in the directory of a corpus


class HuggingFace:
    """A tokenizer of the Hugging Face `tokenizers` library, read from its file.

    Whether decoding gives back each text as it was depends on the tokenizer: byte-level ones do,
    those that normalise (BERT's lower case) do not.

    Args:
        path: a `tokenizer.json`.
        begin: the token before each text, such as "<s>"; True for the one that the tokenizer's own
            post-processor puts there, False for none.
        end: the token after each text, in the same way.
        parse_special: whether special tokens spelled in a text (`<|im_start|>` in a chat template)
            become their ids. Otherwise they are text like any other, as documents need it.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no tokenizer, or has no such token.
    """

    kind: ClassVar[str] = "huggingface"

    def __init__(
        self,
        path: epath.PathLike,
        *,
        begin: bool | str = True,
        end: bool | str = True,
        parse_special: bool = False,
    ):
        place = epath.Path(path).expanduser()
        if not place.exists():
            raise FileNotFoundError(f"there is no tokenizer {os.fspath(place)}")
        self._setup(place.read_text(), begin, end, parse_special, os.fspath(place))

    def _setup(
        self, content: str, begin: bool | str, end: bool | str, parse_special: bool, name: str
    ) -> None:
        self._content, self.parse_special, self._name = content, parse_special, name
        library = require("tokenizers", extra="huggingface", purpose="a Hugging Face tokenizer")
        try:
            self._tokenizer = library.Tokenizer.from_str(content)
        except Exception as error:  # the library raises nothing more special
            raise ValueError(f"{name} is not a tokenizer.json: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = not parse_special
        own = self._tokenizer.encode("x").ids
        plain = self._tokenizer.encode("x", add_special_tokens=False).ids
        at = next((n for n in range(len(own)) if own[n : n + len(plain)] == plain), 0)
        self.begin_id = self._mark("begin", begin, own[:at])
        self.end_id = self._mark("end", end, own[at + len(plain) :])
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())

    def _mark(self, option: str, wanted: bool | str, own: list[int]) -> int | None:
        if wanted is False:
            return None
        if wanted is True and len(own) == 1:
            return own[0]
        if wanted is True:
            raise ValueError(
                f"{self._name} does not put one {option} mark of its own; name the token, as in "
                f"{option}='<s>', or pass {option}=False"
            )
        found = self._tokenizer.token_to_id(wanted)
        if found is None:
            raise ValueError(f"{self._name} has no token {wanted!r}; give another {option}=")
        return found

    @functools.cached_property
    def fingerprint(self) -> str:
        """From the content of the file, and the marks."""
        content = hashlib.sha256(self._content.encode()).hexdigest()[:12]
        marks = [f"begin{self.begin_id}"] * (self.begin_id is not None)
        marks += [f"end{self.end_id}"] * (self.end_id is not None)
        return "-".join(["huggingface", content, *marks, *["special"] * self.parse_special])

    def encode_batch(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """See `Tokenizer`."""
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        ids = [each.ids for each in encoded]
        counts = np.fromiter(map(len, ids), np.int64, len(ids))
        body = np.fromiter(itertools.chain.from_iterable(ids), np.int32, int(counts.sum()))
        return with_marks(body, counts, self.begin_id, self.end_id)

    def decode(self, ids: Any) -> str:
        """See `Tokenizer`."""
        marks = (self.begin_id, self.end_id)
        kept = [id_ for id_ in np.asarray(ids).tolist() if id_ not in marks]
        return self._tokenizer.decode(kept, skip_special_tokens=False)

    def save(self, directory: epath.Path) -> dict[str, Any]:
        """See `Tokenizer`; writes the tokenizer as `tokenizer.json`."""
        with atomic_write(directory / FILE) as file:
            file.write(self._content.encode())
        return {
            "kind": self.kind,
            "begin": self._spelled(self.begin_id),
            "end": self._spelled(self.end_id),
            "parse_special": self.parse_special,
        }

    def _spelled(self, mark: int | None) -> str | bool:
        return False if mark is None else self._tokenizer.id_to_token(mark)

    def __reduce__(self):
        begin, end = self._spelled(self.begin_id), self._spelled(self.end_id)
        return _from_content, (self._content, begin, end, self.parse_special, self._name)

    def __repr__(self) -> str:
        begin, end = self._spelled(self.begin_id), self._spelled(self.end_id)
        return f"HuggingFace({self._name!r}, begin={begin!r}, end={end!r})"


def _from_content(
    content: str, begin: bool | str, end: bool | str, parse_special: bool, name: str
) -> HuggingFace:
    tokenizer = HuggingFace.__new__(HuggingFace)
    tokenizer._setup(content, begin, end, parse_special, name)
    return tokenizer
