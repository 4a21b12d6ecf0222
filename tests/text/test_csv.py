"""CSV: rows as the standard library wrote them, each complete, or an error with file and line."""

import csv
import gzip
import json
import os
import pickle

import hypothesis
import pytest
from hypothesis import strategies as st

import pipeline
from pipeline.text import source as sizes
from pipeline.text.sources import Csv, open_files
from pipeline.text.templates import Answer
from pipeline.text.tokenizers import Bytes
from tests.text.record_files import as_csv

CELLS = st.text(st.sampled_from(list("ab ,;\t\"\n\r'\\é\u2028\ufeff0")), max_size=8)
DIALECTS = [
    {},
    {"delimiter": ";"},
    {"delimiter": "\t", "quotechar": "'"},
    {"escapechar": "\\", "doublequote": False},
]


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(
    rows=st.lists(st.fixed_dictionaries({"é": CELLS, "text": CELLS}), min_size=1, max_size=20),
    dialect=st.sampled_from(DIALECTS),
    packed=st.booleans(),
    mark=st.booleans(),
)
def test_rows_are_those_that_were_written_from_any_block_on(
    rows, dialect, packed, mark, tmp_path_factory
):
    path = tmp_path_factory.mktemp("rows") / "a.csv"
    quoting = csv.QUOTE_ALL  # a lone quote or return in a cell is not always quoted otherwise
    content = ("\ufeff" * mark + as_csv(rows, quoting=quoting, **dialect)).encode()
    path.write_bytes(gzip.compress(content) if packed else content)
    source = pickle.loads(pickle.dumps(Csv(path, **dialect)))
    assert list(source) == rows
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sizes, "BLOCK", 20)
        (shard,) = source.shards()
        blocks = list(source.read(shard))
        assert [record for block in blocks for record in block.records] == rows
        for number, block in enumerate(blocks[:-1]):
            following = json.loads(json.dumps(block.next))
            assert list(source.read(shard, following)) == blocks[number + 1 :]


def test_a_row_with_other_cells_than_names_is_refused_by_its_line(tmp_path):
    lines = ["text,label"] + [f'"row\n{number}",1' for number in range(3000)]
    for cells, count in (("Dear all, the rest,1", 3), ("short", 1)):
        (tmp_path / "a.csv").write_text("\n".join([*lines[:2001], cells, *lines[2001:]]) + "\n")
        source = Csv(tmp_path / "a.csv")
        sentence = rf"a\.csv, line 4,002 \(byte .*it has {count} cells, and the first row names 2"
        with pytest.raises(ValueError, match=sentence):
            list(source)
        with pytest.raises(ValueError, match=sentence):
            pipeline.prepare(source, Bytes(), tmp_path / f"refused {count}")
        into = tmp_path / f"skipped {count}"
        corpus = pipeline.prepare(source, Bytes(), into, on_error="skip")
        assert (len(corpus), corpus.lengths[2000], corpus.lengths[2999] > 0) == (3001, 0, True)


@pytest.mark.parametrize(
    ("content", "line", "sentence"),
    [
        (b'text\none\n"a"b\nthree\n', 3, "from here on it is no CSV: ',' expected after '\"'"),
        (b'text\none\n"never closed\nthree\n', 3, "is no CSV: unexpected end of data"),
        (b"text\none\n\xe9t\xe9\nthree\n", 3, "byte 9 of the file is 0xe9"),
        (b"text\none\na\0b\nthree\n" + 100 * b"more\n", 3, "NUL bytes"),
        (b"t\xe9xt\none\n", 1, "byte 1 of the file is 0xe9"),
        (b"text,,\none,two,three\n", 1, "its first row names '' twice"),
        (b"text,text\none,two\n", 1, "its first row names 'text' twice"),
        (b"text\rone\rtwo\r", 1, "a carriage return outside of quotes, without a line feed after"),
        (
            b"text,n\none,1\na\rb,2\n",
            3,
            "change them, for example with tr '\\r' '\\n'; else put the",
        ),
        (
            b'text,n\n"a", "b"\n',
            2,
            "a space before a quote, ' \"b\"', so that its quotes are text; gi",
        ),
        (b'text,n\n  "a" ,1\n', 2, "give skipinitialspace=True to leave the space out, or quotec"),
        (b'"text", "n"\n"a",1\n', 1, "a space before a quote, ' \"n\"'"),
        (b"text,n\none,1\ntext,n\ntwo,2\n", 3, "it repeats the names of the first row; files that"),
        (
            b"text,n\none,1\n\xef\xbb\xbftext,n\n",
            3,
            "it begins with a byte order mark; files that we",
        ),
        (b'text,n\n"\n",1\n\n\xef\xbb\xbf"a",2\n', 5, "it begins with a byte order mark; files"),
        (b"sep=;\ntext;n\none;1\n", 1, "its first line, 'sep=;', tells spreadsheets the delimiter"),
        (b"sep=,\ntext,n\none,1\n", 1, "its first line, 'sep=,', tells spreadsheets the delimiter"),
        (
            b"text;n\none;1\n",
            1,
            "its first row is one name, 'text;n'; give delimiter=';' if that is",
        ),
        (
            b"text\tn\none\t1\n",
            1,
            r"is one name, 'text\tn'; give delimiter='\t' if that is between",
        ),
        (b"text,n\none,1\ntwo\0,2\n", 0, "UTF-16 without a mark, the first in line 3; remove them"),
    ],
)
def test_what_is_no_csv_is_refused_by_its_line(content, line, sentence, tmp_path):
    (tmp_path / "a.csv").write_bytes(content + b"more,2\n" * (line == 1))
    with pytest.raises(ValueError, match=rf"a\.csv, line {line} " if line else "a.csv ") as caught:
        list(Csv(tmp_path / "a.csv"))
    assert sentence in str(caught.value)


def test_a_mark_inside_of_quotes_and_a_row_that_is_the_only_name_are_text(tmp_path):
    (tmp_path / "a.csv").write_text('text\n"\ufeffa"\n"b\n\ufeffc"\ntext\n')
    texts = [record["text"] for record in Csv(tmp_path / "a.csv")]
    assert texts == ["\ufeffa", "b\n\ufeffc", "text"]


def test_a_space_before_a_quote_inside_of_quotes_is_text(tmp_path):
    rows = [{"q": ' "a" b', "a": ' "yes"'}, {"q": 'x, "y"', "a": ' "'}, {"q": ' ""', "a": ', "z"'}]
    (tmp_path / "a.csv").write_text(as_csv(rows))
    assert list(Csv(tmp_path / "a.csv")) == rows
    (tmp_path / "b.csv").write_text('q,a\n"hi", "yes, sir"\n')
    spaced = Csv(tmp_path / "b.csv", skipinitialspace=True)
    assert list(spaced) == [{"q": "hi", "a": "yes, sir"}]
    (tmp_path / "b.csv").write_text('q,a\n"hi", "yes"\n')
    as_text = Csv(tmp_path / "b.csv", quotechar="")
    assert list(as_text) == [{"q": '"hi"', "a": ' "yes"'}]


@pytest.mark.parametrize(
    ("names", "delimiter", "text", "is_said"),
    [
        ("q|a", "\t", '"A|one\nB"|two', True),
        ("q|a", "\t", 'A|"one\n' + "B|x\n" * 40 + 'C|two"', True),
        ("q|a|n", ",", '"in|1|2\nfoot"|3|4', True),
        ("q|a", ",", '"Dear Bob|\nthank you"|spam', False),
        ("q|a", ",", '"Well| well\nhello"|spam', False),
        ("q|a", "\t", 'q|"def f():\n|return 1"', False),
        ("q|a", ",", '"two\nlines"|1', False),
        ("q", ",", '"two\nlines"', False),
    ],
)
def test_rows_that_a_quote_may_join_are_counted(names, delimiter, text, is_said, tmp_path, caplog):
    row = names.replace("q", "x")
    (tmp_path / "a.csv").write_text("\n".join([names, row, text, row]).replace("|", delimiter))
    source = Csv(tmp_path / "a.csv", delimiter=delimiter)
    pipeline.prepare(source, Bytes(), tmp_path / "c", field="q", progress=False)
    said = "1 of 3 records have lines that are each a row if quotes are text; if so, give quotechar"
    assert (said in caplog.text) == is_said


def test_long_cells_blank_lines_and_files_without_rows_are_read(tmp_path):
    long = "word " * 100_000  # beyond the limit of the standard library
    for name, content in (("0", ""), ("1", "text\n"), ("2", f"text,n\n\n{long},01.50\n\n")):
        (tmp_path / f"{name}.csv").write_text(content)
    assert list(Csv(tmp_path / "*.csv")) == [{"text": long, "n": "01.50"}]
    (tmp_path / "a.txt").write_text("text\tn\n5\" pipe\t'1'\n")
    source = open_files(tmp_path / "a.txt", kind="csv", delimiter="\t", quotechar="")
    assert list(source) == [{"text": '5" pipe', "n": "'1'"}]
    assert source.fingerprint != Csv(tmp_path / "a.txt").fingerprint
    with pytest.raises((TypeError, ValueError), match=r"the dialect of CSV is .*delimiter"):
        Csv(tmp_path / "a.txt", delimiter="::")
    for signs in ({"delimiter": "\n"}, {"quotechar": ","}, {"escapechar": '"'}):
        with pytest.raises(ValueError, match="a delimiter, a quote, an escape and a line end must"):
            Csv(tmp_path / "a.txt", **signs)


def test_several_workers_prepare_what_one_does(tmp_path, monkeypatch):
    monkeypatch.setattr(sizes, "LEAST", 100)
    for number in range(6):
        rows = [{"q": f"{number}\n{row}", "a": "x" * row} for row in range(20)]
        (tmp_path / f"{number}.csv").write_text(as_csv(rows), newline="")
    source, template = Csv(tmp_path / "*.csv"), Answer(prompt="{q}", answer="{a}")
    assert len(source.shards()) > 3
    made = [
        pipeline.prepare(source, Bytes(), tmp_path / str(n), template=template, num_workers=n)
        for n in (1, 2)
    ]
    assert made[0].fingerprint == made[1].fingerprint
    assert [made[1][n]["targets"].tolist() for n in range(120)] == [
        made[0][n]["targets"].tolist() for n in range(120)
    ]


def test_the_shell_reads_csv_with_the_options_of_a_dialect(run, tmp_path):
    (tmp_path / "a.csv").write_text("text;n\nfirst;1\n")
    arguments = [os.fspath(tmp_path / "a.csv"), "--into", os.fspath(tmp_path / "made")]
    run("prepare", *arguments, "--kind", "csv", "delimiter=;")
    assert len(pipeline.Corpus.open(tmp_path / "made")) == 1
    (tmp_path / "a.csv").write_text("text\tn\nfirst\t1\nsecond\t2\n")
    arguments[-1] = os.fspath(tmp_path / "tabs")
    assert r"give delimiter='\t' if that is between" in run.refused("prepare", *arguments)
    run("prepare", *arguments, "--kind", "csv", r"delimiter=\t")
    assert len(pipeline.Corpus.open(tmp_path / "tabs")) == 2


def test_rows_of_a_dict_reader_with_too_many_cells_and_names_with_marks_are_said():
    bad = [{"text": "hello"}] * 3000
    bad[1501] = {"text": "hello", None: [" the rest"]}  # between the samples of a fingerprint
    with pytest.raises(ValueError, match=r"cells without a name, \[' the rest'\].*sources\.Csv"):
        pipeline.text.sources.Records(bad)[1501]
    with pytest.raises(ValueError, match=r"its fields: '\\ufefftext', label"):
        pipeline.text.source.text_of({"\ufefftext": "a", "label": "b"}, "text")
