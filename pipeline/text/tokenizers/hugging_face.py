"""HuggingFace: a `tokenizer.json`, as the `tokenizers` library writes it."""

import itertools
import json
from typing import Any

import numpy as np
from etils import epath

from pipeline.errors import InvalidValue, require
from pipeline.text.file_tokenizer import FileTokenizer
from pipeline.text.markup import is_mark
from pipeline.text.tokenizer import LONG

# Characters around a cut of a long text that have to have the same tokens with it and without.
AROUND = 512

# The id of a word that no tokenizer has.
WORD = (1 << 32) - 1


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
            template) become their ids, which is the default; see `templates.Markup`. The text of
            records never has special tokens.

    A tokenizer that puts a space before each text does so where an example begins, and not before
    a later span of a template or after a mark.

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
        parse_special: bool = True,
    ):
        super().__init__(path, begin=begin, end=end, parse_special=parse_special)

    def _setup(self, *, begin: bool | str, end: bool | str, parse_special: bool) -> None:
        self._tokenizer = self._open(self._content)
        added = self._tokenizer.get_added_tokens_decoder()
        special = [token.content for token in added.values() if token.special]
        named = [token.content for token in added.values() if is_mark(token.content)]
        others = [content for content in named if content not in special]
        parsed = {*special, *others} if parse_special else {*others}
        sides = {token.content: (token.lstrip, token.rstrip) for token in added.values()}
        self._set_marks({mark: sides[mark] for mark in sorted(parsed)})
        described = json.loads(self._tokenizer.to_str())
        model = described["model"]
        if model.get("dropout"):
            raise InvalidValue(
                f"{self.path} has dropout={model['dropout']:g}, so a text has other "
                "tokens each time; set it to null in that file"
            )
        if others:  # so that these marks become text, too
            for token in described["added_tokens"]:
                token["special"] |= token["content"] in others
            self._tokenizer = self._open(json.dumps(described).encode())
        bare = _without_prefix(described)
        is_bare = bare == described
        self._inside = self._tokenizer if is_bare else self._open(json.dumps(bare).encode())
        # Some models have special tokens in their own vocabulary, and find them in text.
        ids: set[Any] = {self._find(content) for content in [*special, *others]}
        self._control = ids - {model.get("unk_id"), self._find(model.get("unk_token") or "")}
        of_words = model["type"] in ("WordPiece", "WordLevel")
        self.marks_words = of_words or bool(model.get("end_of_word_suffix"))
        before, after = self._read_marks()
        self.begin_id = self._mark("begin", begin, before)
        self.end_id = self._mark("end", end, after)
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        # The tokens rather than True, so that a corpus names them.
        marks = (self.begin_id, self.end_id)
        first, last = (mark is not None and self._tokenizer.id_to_token(mark) for mark in marks)
        self._options = {"begin": first, "end": last, "parse_special": parse_special}
        self.parses_special = parse_special

    def _find(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def _read_marks(self) -> tuple[list[int], list[int]]:
        """The ids that the post-processor puts before and after a text, here a single word."""
        library = _library()
        probe = library.Tokenizer(library.models.WordLevel({"word": WORD}, unk_token="word"))
        if self._tokenizer.post_processor is not None:
            probe.post_processor = self._tokenizer.post_processor
        ids = probe.encode("word").ids
        at = ids.index(WORD)
        return ids[:at], ids[at + 1 :]

    def _open(self, content: bytes) -> Any:
        """A tokenizer of the library, which encodes special tokens as text."""
        try:
            tokenizer = _library().Tokenizer.from_str(content.decode())
        except Exception as error:  # the library raises nothing more specific
            raise InvalidValue(f"{self.path} is not a tokenizer.json: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        return tokenizer

    def _encode(self, texts: list[str], kind: str) -> list[Any]:
        if not any(len(text) > LONG for text in texts):
            return self._encode_short(texts, kind)
        return [self._encode_long(text, kind) for text in texts]

    def _encode_long(self, text: str, kind: str) -> np.ndarray:
        """The ids of a text, piece by piece, as the library takes 100 bytes for each byte."""
        pieces, at = list[np.ndarray](), 0
        while at < len(text):
            end = self._find_cut(text, at + LONG)
            (ids,) = self._encode_short([text[at:end]], "inside" if at else kind)
            pieces.append(np.array(ids, np.int32))
            at = end
        return np.concatenate(pieces)

    def _find_cut(self, text: str, begin: int) -> int:
        """A place from `begin` on where the tokenizer cuts a text, before white space; or its end.

        A cut is one if what is around it has the same tokens when it is cut there.
        """
        if (steps := self._inside.pre_tokenizer) is None:
            return len(text)
        for at in range(begin, len(text) - AROUND, AROUND):
            window = text[at - AROUND : at + AROUND]
            starts = {start for _, (start, _) in steps.pre_tokenize_str(window)}
            spaces = (n for n in range(AROUND, len(window)) if window[n].isspace())
            for cut in itertools.islice((n for n in spaces if not window[n - 1].isspace()), 8):
                texts = [window, window[:cut], window[cut:]]
                whole, before, after = self._encode_short(texts, "inside")
                if cut in starts and before + after == whole:
                    return at - AROUND + cut
        return len(text)

    def _encode_short(self, texts: list[str], kind: str) -> list[list[int]]:
        try:
            tokenizer = self._inside if kind == "inside" else self._tokenizer
            encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as error:  # the library raises nothing more specific
            raise InvalidValue(
                f"{self.path} cannot encode {texts[0]!r:.60}: {error}; correct the record, or "
                "train a tokenizer on this text"
            ) from error
        ids_of_texts = [encoding.ids for encoding in encodings]
        for text, ids in zip(texts, ids_of_texts, strict=True):
            if control := self._control.intersection(ids):
                mark = self._tokenizer.id_to_token(min(control))
                at = max(text.find(mark) - 20, 0)
                raise InvalidValue(
                    f"the text …{text[at : at + 60]!r}… has {mark!r}, which {self.path} can "
                    "encode only as a special token; change the spelling in the records, or use "
                    "another tokenizer"
                )
        return ids_of_texts

    def decode(self, ids: Any) -> str:
        """See `Tokenizer`."""
        return self._tokenizer.decode(self._strip(ids), skip_special_tokens=False)


def _library() -> Any:
    return require("tokenizers", extra="huggingface", purpose="a Hugging Face tokenizer")


def _without_prefix(described: Any) -> Any:
    """A description of a tokenizer, or of a step in it, that puts nothing before a text."""
    if isinstance(described, list):
        return [_without_prefix(step) for step in described if step.get("type") != "Prepend"]
    bare = dict(described)
    for name in ("normalizer", "pre_tokenizer", "normalizers", "pretokenizers"):
        if step := bare.get(name):
            prepends = isinstance(step, dict) and step["type"] == "Prepend"
            bare[name] = None if prepends else _without_prefix(step)
    if bare.get("type") == "Metaspace":
        bare["prepend_scheme"] = "never"
    if bare.get("type") == "ByteLevel":
        bare["add_prefix_space"] = False
    return bare
