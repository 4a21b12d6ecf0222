"""HuggingFace: a `tokenizer.json`, as the `tokenizers` library writes it."""

import json
from typing import Any

import numpy as np
from etils import epath

from pipeline.errors import InvalidValue, require
from pipeline.text.tokenizers.file_tokenizer import FileTokenizer
from pipeline.text.tokenizers.markup import MarkError, is_mark


class HuggingFace(FileTokenizer):
    """A tokenizer of the Hugging Face `tokenizers` library, read from its file.

    Byte-level tokenizers decode to the original text; those that normalise (BERT's lower case) do
    not.

    Args:
        path: a `tokenizer.json`.
        begin: the token before each text, such as "<s>"; True: the token that the tokenizer's own
            post-processor puts there; False: none.
        end: the token after each text, likewise.
        parse_special: whether special tokens in a template's own text (`<|im_start|>` in a chat
            template) become their ids; see `templates.Markup`. The text of records never has
            special tokens.

    Added tokens that are not special, but look like marks (`<tool_call>`), are also parsed in a
    template's own text alone. Other added tokens, such as words and runs of spaces, are parsed in
    all text.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a tokenizer, or has no such token; or, while encoding, its model finds
            a special token in a text.
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
        self._tokenizer = self._parser = self._open(self._content)
        described, added = json.loads(self._content), self._tokenizer.get_added_tokens_decoder()
        special = [token.content for token in added.values() if token.special]
        named = [token.content for token in added.values() if is_mark(token.content)]
        others = [content for content in named if content not in special]
        self._set_marks([*special, *others] if parse_special else others)
        if self._marks is not None:
            self._parser.encode_special_tokens = not parse_special
            for token in described["added_tokens"]:  # so that these marks become text, too
                token["special"] |= token["content"] in others
            self._tokenizer = self._open(json.dumps(described).encode())
        # Some models have special tokens in their own vocabulary, and find them in text.
        unknown = described["model"].get("unk_token"), described["model"].get("unk_id")
        ids = {self._tokenizer.token_to_id(content) for content in [*special, *others]}
        self._control = ids - {unknown[1], self._tokenizer.token_to_id(unknown[0] or "")}
        marked = self._tokenizer.encode("x").ids
        plain = self._tokenizer.encode("x", add_special_tokens=False).ids
        places = range(len(marked))
        at = next((n for n in places if marked[n : n + len(plain)] == plain), 0)
        self.begin_id = self._mark("begin", begin, marked[:at])
        self.end_id = self._mark("end", end, marked[at + len(plain) :])
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        # The tokens rather than True, so that a corpus names them.
        marks = (self.begin_id, self.end_id)
        first, last = (mark is not None and self._tokenizer.id_to_token(mark) for mark in marks)
        self._options = {"begin": first, "end": last, "parse_special": parse_special}

    def _open(self, content: bytes) -> Any:
        """A tokenizer of the library, which encodes special tokens as text."""
        library = require("tokenizers", extra="huggingface", purpose="a Hugging Face tokenizer")
        try:
            tokenizer = library.Tokenizer.from_str(content.decode())
        except Exception as error:  # the library raises nothing more specific
            raise InvalidValue(f"{self._name} is not a tokenizer.json: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        return tokenizer

    def _mark(self, option: str, wanted: bool | str, own: list[int]) -> int | None:
        if wanted is False:
            return None
        if wanted is True:
            if len(own) == 1:
                return own[0]
            raise InvalidValue(
                f"{self._name} does not add exactly one {option} mark; name the token, as in "
                f"{option}='<s>', or pass {option}=False"
            )
        found = self._tokenizer.token_to_id(wanted)
        if found is None:
            raise InvalidValue(f"{self._name} has no token {wanted!r}; give another {option}=")
        return found

    def _encode(self, texts: list[str], *, parse: bool) -> list[list[int]]:
        tokenizer = self._parser if parse else self._tokenizer
        encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        ids = [each.ids for each in encodings]
        for text, each in zip([] if parse else texts, ids, strict=False):
            if found := self._control.intersection(each):
                mark = self._tokenizer.id_to_token(min(found))
                at = max(text.find(mark) - 20, 0)
                raise MarkError(
                    f"the text …{text[at : at + 60]!r}… has {mark!r}, which {self._name} can "
                    "encode only as a special token; change the spelling in the records, or use "
                    "another tokenizer"
                )
        return ids

    def decode(self, ids: Any) -> str:
        """See `Tokenizer`."""
        marks = (self.begin_id, self.end_id)
        text = [id_ for id_ in np.asarray(ids).tolist() if id_ not in marks]
        return self._tokenizer.decode(text, skip_special_tokens=False)
