"""HuggingFace: a `tokenizer.json`, as the `tokenizers` library writes it."""

from typing import Any

import numpy as np
from etils import epath

from pipeline.extras import require
from pipeline.tokenizers.file_tokenizer import FileTokenizer


class HuggingFace(FileTokenizer):
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

    kind, file = "huggingface", "tokenizer.json"

    def __init__(
        self,
        path: epath.PathLike,
        *,
        begin: bool | str = True,
        end: bool | str = True,
        parse_special: bool = False,
    ):
        super().__init__(path, begin=begin, end=end, parse_special=parse_special)

    def _setup(self, *, begin: bool | str, end: bool | str, parse_special: bool) -> None:
        library = require("tokenizers", extra="huggingface", purpose="a Hugging Face tokenizer")
        try:
            self._tokenizer = library.Tokenizer.from_str(self._content.decode())
        except Exception as error:  # the library raises nothing more special
            raise ValueError(f"{self._name} is not a tokenizer.json: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = not parse_special
        marked = self._tokenizer.encode("x").ids
        plain = self._tokenizer.encode("x", add_special_tokens=False).ids
        places = range(len(marked))
        at = next((n for n in places if marked[n : n + len(plain)] == plain), 0)
        self.begin_id = self._mark("begin", begin, marked[:at])
        self.end_id = self._mark("end", end, marked[at + len(plain) :])
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        # The tokens rather than True, so that a corpus says which they are.
        marks = {"begin": self.begin_id, "end": self.end_id}
        spelled = {
            k: id_ is not None and self._tokenizer.id_to_token(id_) for k, id_ in marks.items()
        }
        self._options = {**spelled, "parse_special": parse_special}

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

    @property
    def fingerprint(self) -> str:
        """From the content of the file, and the marks."""
        marks = [f"begin{self.begin_id}"] * (self.begin_id is not None)
        marks += [f"end{self.end_id}"] * (self.end_id is not None)
        special = ["special"] * self._options["parse_special"]
        return "-".join(["huggingface", self._digest(), *marks, *special])

    def _encode(self, texts: list[str]) -> list[list[int]]:
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [each.ids for each in encodings]

    def decode(self, ids: Any) -> str:
        """See `Tokenizer`."""
        marks = (self.begin_id, self.end_id)
        text = [id_ for id_ in np.asarray(ids).tolist() if id_ not in marks]
        return self._tokenizer.decode(text, skip_special_tokens=False)
