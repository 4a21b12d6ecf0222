"""Hostile inputs: strategies for values, files and options that nobody should give.

`test_hostile.py` says what must hold for them.
"""

import copy
import gzip
import io
import json
import math
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st
from pyarrow import feather, parquet

from pipeline.text.values import decode_bytes

# Texts that programs take for something else: line ends of Unicode, marks, halves of pairs, paths.
ODD = ["", " ", "\x00", "\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\ufeff", "é", "𝔘", "e\u0301"]
ODD += [
    "<|end|>",
    "<|user|>",
    "⟦",
    "nan",
    "-0",
    "1e999",
    "1/3",
    "../..",
    "*.txt",
    "nowhere",
    "a;b=c",
]
ODD += ["a" * 70, "9" * 5000, "part-000000-00000.arrow"]
HALF = ["\ud800", "a\udfff"]  # JSON can spell these, and UTF-8 cannot
# Texts that some option takes.
WORDS = "best_fit fill none split truncate drop error dense segment tokens examples"
WORDS += " user assistant text jsonl always bytes"

texts = st.sampled_from(ODD) | st.text(max_size=12) | st.sampled_from(WORDS.split())
HUGE = [64, 1 << 31, (1 << 31) - 1, 1 << 32, (1 << 63) - 1, 1 << 64, -(1 << 63), 10**30]
NUMBERS = [0.0, -0.0, 0.5, 1.0, 1.5, -1.0, 1e-300, 1e300, math.inf, -math.inf, math.nan]
whole = st.integers(-2, 20) | st.sampled_from(HUGE)
scalars = st.one_of(st.none(), st.booleans(), whole, st.sampled_from(NUMBERS), texts)
#: Any value that JSON can hold, and Python's NaN and infinities.
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
#: Also what only Python can hold.
ODD_OBJECTS = [b"bytes", (1, 2), {1: 2}, np.int64(3), len, [0, 0]]
objects = values | st.sampled_from(ODD_OBJECTS)
ARRAYS = [np.zeros(2), np.zeros(3, int), np.zeros((2, 3), int), np.array(3), np.array(["3"])]
ARRAYS += [np.array([1 << 63], np.uint64), np.array([3, 1 << 40]), [[1, 2], [3]]]


# ---- documents


def places(document: Any) -> list[tuple]:
    """The paths of all values in a JSON document."""
    found: list[tuple] = [()]
    items: Any = ()
    if isinstance(document, dict):
        items = document.items()
    elif isinstance(document, list):
        items = enumerate(document)
    for key, value in items:
        found += [(key, *rest) for rest in places(value)]
    return found


@st.composite
def altered(draw, document: Any, odd: st.SearchStrategy = values) -> Any:
    """A document with up to three values replaced, emptied, moved, removed or added."""
    document = copy.deepcopy(document)
    for _ in range(draw(st.integers(0, 3))):
        *above, key = draw(st.sampled_from(places(document)[1:] or [(None,)]))
        if key is None:  # nothing is left
            break
        holder = document
        for each in above:
            holder = holder[each]
        act = draw(st.sampled_from(["replace", "near", "near", "remove", "add", "move"]))
        if act == "near" and type(holder[key]) is int:
            holder[key] += draw(st.sampled_from([-1, 1, 4, -8, 1 << 32, 1 << 40]))
        elif act == "near" and isinstance(holder[key], str):
            holder[key] = draw(st.sampled_from(["", holder[key]])) + draw(texts)
        elif act == "near" and isinstance(holder[key], list | dict):
            holder[key] = type(holder[key])()
        elif act == "remove":
            del holder[key]
        elif act == "add" and isinstance(holder, list):
            holder.insert(key, copy.deepcopy(draw(st.sampled_from(holder))))
        elif act == "add":
            holder[draw(texts)] = copy.deepcopy(draw(odd))
        elif act == "move":
            value = holder
            for each in draw(st.sampled_from(places(holder))):
                value = value[each]
            holder[key] = copy.deepcopy(value)
        else:
            holder[key] = copy.deepcopy(draw(odd))
    return document


@st.composite
def calls(draw, **usual: Any) -> dict[str, Any]:
    """Keyword arguments of a call, some of them altered; now and then, one is an odd array."""
    given = usual | draw(altered(usual, objects))
    if draw(st.integers(0, 6)) == 6:
        given[draw(st.sampled_from([*usual]))] = draw(st.sampled_from(ARRAYS))
    return {name: given[name] for name in usual}


# ---- bytes


@st.composite
def damaged(draw, content: bytes) -> bytes:
    """The same bytes with one to three bits flipped, or bytes replaced, cut, doubled or put in."""
    data = bytearray(content)
    for _ in range(draw(st.integers(1, 3))):
        if not data:
            break
        at = draw(st.integers(0, len(data) - 1))
        act = draw(st.sampled_from(["flip", "flip", "set", "cut", "double", "zero", "put"]))
        size = draw(st.sampled_from([1, 4, 8, 64]))
        if act == "flip":
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif act == "set":
            data[at : at + 1] = bytes([draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]))])
        elif act == "cut":
            del data[at : draw(st.sampled_from([at + size, len(data)]))]
        elif act == "double":
            data[at:at] = data[at : at + size]
        elif act == "zero":
            data[at : at + size] = bytes(len(data[at : at + size]))
        else:
            data[at:at] = draw(st.binary(min_size=1, max_size=8))
    return bytes(data)


@st.composite
def stored(draw, content: st.SearchStrategy[bytes]) -> tuple[bytes, str, bytes | None]:
    """The bytes of a text file, the end of its name, and its content; None if it is damaged."""
    plain = draw(content)
    end = draw(st.sampled_from(["", "", ".gz", ".zst"]))
    data = plain
    if end == ".gz":
        data = gzip.compress(plain, mtime=0)
    elif end == ".zst":
        data = pa.Codec("zstd").compress(plain, asbytes=True)
    if end and draw(st.integers(0, 3)) == 3:
        return draw(damaged(data)), end, None
    return data, end, plain


line_ends = st.sampled_from([b"\n", b"\n", b"\r\n", b"\r", b"\n\n", b"", b"\x85", b"\x0c"])
raw_lines = st.one_of(
    texts.map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.sampled_from([b"\xff", b"\xef\xbb\xbf", b"\xc3", b"plain text"]),
)
#: Files of text: odd characters, ends of lines of all kinds, and now and then bytes that are none.
text_files = st.lists(st.tuples(raw_lines, line_ends), max_size=6).map(
    lambda pairs: b"".join(line + end for line, end in pairs)
)

ODD_LINES = ["", "  ", "[]", "3", "{", '{"text": "a"', '{"text": "a"}}', '{"text": 1e999}']
ODD_LINES += ['{"text": "a", "text": "b"}', '{"text": "\\ud83d"}', '{"text":\t"tab\\t"}']
json_lines = st.one_of(
    st.builds(
        json.dumps,
        st.fixed_dictionaries({"text": texts | st.sampled_from(HALF)})
        | altered({"a": {"text": 1}}),
        ensure_ascii=st.booleans(),
    ),
    st.sampled_from(ODD_LINES),
)
#: Files of JSON lines, most of them good.
json_files = st.lists(
    st.tuples(json_lines, st.sampled_from(["\n", "\n", "\r\n", "\n\n"])), max_size=6
).map(lambda pairs: "".join(line + end for line, end in pairs).encode("utf-8", "surrogatepass"))


# ---- tables


# Types of a column of text; and of tokens, the last of which hold none.
KINDS_OF_TEXT = [pa.string(), pa.large_string(), pa.binary()]
KINDS_OF_TEXT += [pa.dictionary(pa.int32(), pa.string())]
KINDS_OF_TOKENS = [pa.list_(each) for each in (pa.int32(), pa.int64(), pa.uint16(), pa.int8())]
KINDS_OF_TOKENS += [pa.list_(pa.float32()), pa.list_(pa.string()), pa.large_list(pa.int32())]


@st.composite
def table_files(draw, of_tokens: bool = False) -> tuple[str, bytes, list[dict] | None]:
    """A file with a column `text`, or of tokens `input_ids`.

    The end of its name, its bytes, and its rows; None if it is damaged.
    """
    kinds = KINDS_OF_TOKENS if of_tokens else KINDS_OF_TEXT
    cells = st.lists(st.integers(0, 99), max_size=6) if of_tokens else st.none() | texts | texts
    column = pa.array(draw(st.lists(cells, max_size=6)), kinds[0])
    name = draw(st.sampled_from(["input_ids" if of_tokens else "text"] * 7 + ["é"]))
    table = pa.table(
        {name: column.cast(draw(st.sampled_from(kinds))), "number": [*range(len(column))]}
    )
    sink, size = io.BytesIO(), draw(st.integers(1, 4))
    ends = [".arrow", ".arrow", ".feather", "stream"] + [".parquet"] * (not of_tokens)
    end = draw(st.sampled_from(ends))
    if end == ".parquet":
        parquet.write_table(table, sink, row_group_size=size)
    elif end == ".feather":
        how = draw(st.sampled_from(["uncompressed", "lz4", "zstd"]))
        feather.write_feather(table, sink, compression=how, chunksize=size)
    else:
        new = pa.ipc.new_stream if end == "stream" else pa.ipc.new_file
        with new(sink, table.schema) as file:
            file.write_table(table, max_chunksize=size)
    content, rows = sink.getvalue(), decode_bytes(table.to_pylist())  # bytes are text
    if draw(st.integers(0, 2)) == 2:
        content, rows = draw(damaged(content)), None
    return ".arrow" if end == "stream" else end, content, rows
