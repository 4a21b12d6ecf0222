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

# Texts that programs take for something else: line ends of Unicode, marks, halves of pairs.
ODD = ["", " ", "\x00", "\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\ufeff", "é", "𝔘", "e\u0301"]
ODD += [
    "<|end|>",
    "<|user|>",
    "⟦",
    "nan",
    "-0",
    "1e999",
    "../..",
    "a;b=c",
    "part-000000-00000.arrow",
]
HALF = ["\ud800", "a\udfff"]  # JSON can spell these, and UTF-8 cannot

texts = st.sampled_from(ODD) | st.text(max_size=12) | st.sampled_from(["one two", "a" * 70])
HUGE = [64, 1 << 31, (1 << 31) - 1, 1 << 32, (1 << 63) - 1, 1 << 64, -(1 << 63), 10**30]
whole = st.integers(-2, 20) | st.sampled_from(HUGE)
floats = st.sampled_from(
    [0.0, -0.0, 0.5, 1.0, 1.5, -1.0, 1e-300, 1e300, math.inf, -math.inf, math.nan]
)
scalars = st.one_of(st.none(), st.booleans(), whole, floats, texts)
#: Any value that JSON can hold, and Python's NaN and infinities.
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
#: Also what only Python can hold.
objects = values | st.sampled_from([b"bytes", (1, 2), {1: 2}, np.int64(3), np.zeros(2), len])


def sometimes(usual: Any, odd: Any = objects) -> st.SearchStrategy:
    """Mostly a usual value, now and then an odd one; each of a strategy or of a list."""
    usual, odd = (st.sampled_from(e) if isinstance(e, list) else e for e in (usual, odd))
    return st.integers(0, 11).flatmap(lambda roll: odd if roll == 11 else usual)


def options(odd: Any = objects, **usual: Any) -> st.SearchStrategy[dict[str, Any]]:
    """Some of these options, each mostly with a usual value."""
    some = {name: sometimes(each, odd) for name, each in usual.items()}
    return st.fixed_dictionaries({}, optional=some)


# ---- JSON documents


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
def altered(draw, document: Any) -> Any:
    """A JSON document with one to three values replaced, moved, removed or added."""
    document = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(places(document)))
        if not path:
            continue
        *above, key = path
        holder = document
        for each in above:
            holder = holder[each]
        act = draw(st.sampled_from(["replace", "near", "remove", "add", "move"]))
        if act == "near" and type(holder[key]) is int:
            holder[key] += draw(st.sampled_from([-1, 1, 4, -8, 1 << 32, 1 << 40]))
        elif act == "near" and isinstance(holder[key], str):
            holder[key] += draw(texts)
        elif act == "remove":
            del holder[key]
        elif act == "add" and isinstance(holder, list):
            holder.insert(key, copy.deepcopy(holder[draw(st.integers(0, len(holder) - 1))]))
        elif act == "add":
            holder[draw(texts)] = draw(values)
        elif act == "move":
            other = draw(st.sampled_from(places(holder)))
            value = holder
            for each in other:
                value = value[each]
            holder[key] = copy.deepcopy(value)
        else:
            holder[key] = draw(values)
    return document


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

json_objects = st.one_of(
    st.fixed_dictionaries({"text": sometimes(texts | st.sampled_from(HALF), values)}),
    st.dictionaries(texts, values, max_size=3),
)
json_lines = st.one_of(
    json_objects.map(json.dumps),
    json_objects.map(lambda each: json.dumps(each, ensure_ascii=False)),
    st.sampled_from(
        ["", "  ", "[]", "3", "{", '{"text": "a"', '{"text": "a"}}', '{"text": 1e999}']
    ),
    st.sampled_from(['{"text": "a", "text": "b"}', '{"text": "\\ud83d"}', '{"text":\t"tab\\t"}']),
)
#: Files of JSON lines, most of them good.
json_files = st.lists(
    st.tuples(json_lines, st.sampled_from(["\n", "\n", "\r\n", "\n\n"])), max_size=6
).map(lambda pairs: "".join(line + end for line, end in pairs).encode("utf-8", "surrogatepass"))


# ---- tables


kinds = [pa.string(), pa.large_string(), pa.binary(), pa.dictionary(pa.int32(), pa.string())]
kinds_of_tokens = [pa.list_(each) for each in (pa.int32(), pa.int64(), pa.uint16(), pa.int8())]
odd_kinds = [pa.list_(pa.float32()), pa.list_(pa.string()), pa.large_list(pa.int32())]
tokens = st.lists(st.integers(0, 300), max_size=6)


@st.composite
def tables(draw, of_tokens: bool = False) -> pa.Table:
    """A table with a column `text`, or of tokens `input_ids`; now and then of an odd type."""
    rows = draw(st.integers(0, 6))
    cells = (
        tokens.map(lambda ids: [i % 100 for i in ids]) if of_tokens else sometimes(texts, [None])
    )
    column = draw(st.lists(cells, min_size=rows, max_size=rows))
    if of_tokens:
        kind = draw(sometimes(kinds_of_tokens, odd_kinds))
        if kind == pa.list_(pa.string()):
            column = [list(map(str, ids)) for ids in column]
        array = pa.array(column, kind)
    else:
        array = pa.array(column, pa.string()).cast(draw(st.sampled_from(kinds)))
    name = draw(sometimes(["input_ids" if of_tokens else "text"], texts))
    return pa.table({name: array, "number": pa.array(range(rows), pa.int64())})


@st.composite
def table_files(draw, of_tokens: bool = False) -> tuple[str, bytes, list[dict] | None]:
    """A file of a table: the end of its name, its bytes, and its rows; None if it is damaged."""
    table, sink = draw(tables(of_tokens)), io.BytesIO()
    end = draw(st.sampled_from([".arrow", ".arrow", ".feather", ".parquet", "stream"]))
    size = draw(st.integers(1, 4))
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


# ---- arrays, lengths, buckets, weights


ODD_EXAMPLES = [np.zeros((2, 2), int), np.array(3), np.array([1.0, 2]), np.array([1 << 31])]
ODD_EXAMPLES += [np.array([1 << 63], np.uint64), [1 << 70], [True, False], ["1"], [[1], [2, 3]]]
ODD_EXAMPLES += [[-1, 2], [None]]
examples = sometimes(
    st.one_of(
        tokens,
        tokens.map(tuple),
        st.builds(np.array, tokens, st.sampled_from([np.int64, np.uint16])),
    ),
    values | st.sampled_from(ODD_EXAMPLES),
)

ODD_LENGTHS = [[-1, 3], [1.5], [1 << 32], np.zeros((2, 3), int), np.array(["3"]), [[1, 2], [3]]]
ODD_LENGTHS += [np.array([3, 1 << 40], np.uint64), [True], np.array([2], ">u4")]
counts = st.lists(st.integers(0, 24), max_size=30)
lengths = sometimes(
    counts | st.builds(np.array, counts, st.sampled_from([np.uint32, np.int64, np.uint8])),
    objects | st.sampled_from(ODD_LENGTHS),
)

shapes = st.tuples(st.integers(1, 6), st.integers(1, 24))
PACKINGS = ["best_fit", "fill", "none"]
planning = options(
    seed=st.integers(0, 5),
    shuffle=st.booleans(),
    packing=PACKINGS,
    overflow=["split", "truncate", "drop", "error"],
    window=st.integers(1, 12),
    max_segments=st.integers(1, 4),
    exclude=st.lists(st.integers(0, 5), max_size=2),
)
fitting = options(
    tokens_per_batch=st.integers(1, 200),
    max_buckets=st.integers(1, 4),
    max_length=st.integers(1, 40),
    length_multiple=st.integers(1, 16),
    row_multiple=st.integers(1, 3),
    attention=["dense", "segment"],
    width=st.integers(1, 64),
    packing=PACKINGS,
)

shares = sometimes([0, 1, 2, 0.5, 0.7, "1/3", 1e-3], scalars)
phase = st.fixed_dictionaries({"a": shares, "b": shares})
phases = st.lists(st.tuples(sometimes(st.integers(0, 20)), phase), max_size=3)
weights = sometimes(phase | phases)


# ---- fields of configs, records of chats, command lines

message = st.fixed_dictionaries(
    {"role": sometimes(["user", "assistant"]), "content": sometimes(texts)}
)
messages = st.lists(sometimes(message), max_size=3)
chats = sometimes(options(messages=messages, question=texts, answer=texts))

FLAGS = """
    --tokens-per-batch --max-buckets --max-length --length-multiple --row-multiple --packing
    --overflow --attention --width --seed --step --row --epoch --field --begin --end --tokenizer
    --vocab-size --split --kind --ids --no-marks --begin-token --end-token --strict --json --workers
    --color --workdir
"""
flags = st.sampled_from(FLAGS.split())
DATA = ["corpus", "run", "lengths.json", "odd.json", "a.jsonl"]
arguments = st.one_of(
    st.sampled_from(["0", "1", "2", "16", "128", "1000", "-1", "1e3", "0.5", "nan", "x" * 300]),
    st.sampled_from(["best_fit", "none", "split", "drop", "text", "jsonl", "always", "bytes"]),
    st.sampled_from([*DATA, "lengths.npy", "text.txt"]),
    st.sampled_from(["9" * 5000, str(1 << 62), str(1 << 63), "", ".", "/", "nowhere", "*.txt"]),
    texts.filter(lambda text: "\x00" not in text),
)
words = st.one_of(flags, arguments, st.tuples(flags, arguments).map("=".join))
command_lines = st.builds(
    lambda command, data, more: [command, data, *more],
    st.sampled_from(["report", "buckets", "show", "check", "audit", "prepare", "prepare"]),
    st.sampled_from(DATA),
    st.lists(words, max_size=4),
)
