"""Files are read by their content, whatever their names are, or the error says what they hold."""

import bz2
import gzip
import io
import lzma
import sys
import tarfile
import zipfile

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import feather, parquet

from pipeline.text import content as contents
from pipeline.text import lines
from pipeline.text import source as sizes
from pipeline.text.sources import ArrowFiles, JsonLines, ParquetFiles, TextFiles

LINES = [f"line {number} é" for number in range(40)]
TEXT = "".join(f"{line}\n" for line in LINES).encode()
MARK = b"\xef\xbb\xbf"
HALF = TEXT.index(b"line 20")


def zipped(**members):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


def tar(content):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        member = tarfile.TarInfo("a.txt")
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    return file.getvalue()


def saved(write, *arguments):
    file = io.BytesIO()
    write(file, *arguments)
    return file.getvalue()


def zstd(content):
    return pa.Codec("zstd").compress(content).to_pybytes()


def lz4(content):
    file = pa.BufferOutputStream()
    with pa.CompressedOutputStream(file, "lz4") as stream:
        stream.write(content)
    return file.getvalue().to_pybytes()


SKIPPED_FRAME = b"\x50\x2a\x4d\x18\x04\0\0\0abcd"
READ = {
    "gzip, two members and zeros": gzip.compress(TEXT[:HALF])
    + gzip.compress(TEXT[HALF:])
    + bytes(9),
    "gzip three times": gzip.compress(gzip.compress(gzip.compress(TEXT))),
    "zstd, frames": zstd(TEXT[:HALF]) + SKIPPED_FRAME + zstd(TEXT[HALF:]),
    "zstd, a frame to skip first": SKIPPED_FRAME + zstd(TEXT),
    "zstd in gzip": gzip.compress(zstd(TEXT)),
    "bzip2, two streams": bz2.compress(TEXT[:HALF]) + bz2.compress(TEXT[HALF:]),
    "marks where files were joined": MARK * 2 + TEXT[:HALF] + MARK + TEXT[HALF:],
}


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("shard", [1 << 24, 50])
def test_content_is_read_whatever_it_is_called(name, shard, tmp_path, monkeypatch):
    monkeypatch.setattr(sizes, "LEAST", shard)
    for suffix in ("txt", "txt.gz", "bin"):
        (tmp_path / f"a.{suffix}").write_bytes(READ[name])
        assert [each["text"] for each in TextFiles(tmp_path / f"a.{suffix}")] == LINES
        whole = TextFiles(tmp_path / f"a.{suffix}", sample_by="file")
        assert [each["text"].replace("\ufeff", "") for each in whole] == [TEXT.decode()]


@pytest.mark.parametrize("window", [27, 28, 31])
def test_zstd_may_have_any_window(window, tmp_path, monkeypatch):
    zstandard = pytest.importorskip("zstandard")
    how = zstandard.ZstdCompressionParameters.from_level(3, window_log=window, enable_ldm=True)
    packer = zstandard.ZstdCompressor(compression_params=how).compressobj()
    (tmp_path / "a.txt.zst").write_bytes(zstd(b"first\n") + packer.compress(TEXT) + packer.flush())
    source = TextFiles(tmp_path / "a.txt.zst")
    assert [each["text"] for each in source] == ["first", *LINES]
    monkeypatch.setitem(sys.modules, "zstandard", None)
    if window > 27:
        sentence = r"a\.txt\.zst: it was written with zstd --long .* pip install .*\[zstd\]"
        with pytest.raises(ImportError, match=sentence):
            list(source)


def test_nul_bytes_of_a_crash_are_refused(tmp_path):
    for content in (b"one\n", b"one\n" * 500):
        (tmp_path / "a.txt").write_bytes(content + bytes(50))
        with pytest.raises(ValueError, match=r"\.txt, line \d+ .*: it has NUL bytes, as a crash"):
            list(TextFiles(tmp_path / "a.txt"))


TABLE = pa.table({"text": ["a"]})
REFUSED = {
    "a Git LFS pointer; run git lfs pull": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    ),
    "Parquet; name it .parquet": saved(lambda file: parquet.write_table(TABLE, file)),
    "a git-annex pointer; run git annex get": b"/annex/objects/SHA256E-s3--ab.txt\n",
    "an Arrow file; name it .arrow": saved(lambda file: feather.write_feather(TABLE, file)),
    "an Arrow stream; name it .arrow": saved(
        lambda file: pa.ipc.new_stream(file, TABLE.schema).write_table(TABLE)
    ),
    "a NumPy array; give token ids to": saved(np.save, np.arange(3)),
    "a tar archive; unpack it first": tar(TEXT),
    "a tar archive; unpack it": gzip.compress(tar(TEXT)),
    "compressed as xz; unpack it first, since only gzip, bzip2 and zstd": lzma.compress(TEXT),
    "compressed as lzma; unpack it": lzma.compress(TEXT, lzma.FORMAT_ALONE),
    "compressed as lz4; unpack it": lz4(TEXT),
    "compressed as lz4; unpack": gzip.compress(lz4(TEXT)),
    "a zip archive; unpack it": zipped(a="1", b="2"),
    "a zip archive; unpack": zipped(),
    "UTF-16; convert it to UTF-8, for example with iconv -f UTF-16": TEXT.decode().encode("utf-16"),
    "UTF-16; convert it to UTF-8": b"\xfe\xff" + TEXT.decode().encode("utf-16-be"),
    "UTF-32; convert it to UTF-8, for example with iconv -f UTF-32": TEXT.decode().encode("utf-32"),
    "NUL bytes.* If it is UTF-16, convert it to UTF-8": TEXT.decode().encode("utf-16-le"),
    "NUL bytes.* If it is UTF-16, convert it to": TEXT.decode().encode("utf-16-be"),
    "NUL bytes, as binary files have, and UTF-16 without": "привет мир\n".encode("utf-16-le"),
    "NUL bytes, as binary files have": bytes(n for id in range(3, 99) for n in (id, 0)),
    "NUL bytes, as binary files": b"a\0" * 3 + b"\0\1",
    "an SQLite database; export": b"SQLite format 3\0" + bytes(90),
    "compressed as .Z; unpack it first": b"\x1f\x9d\x90abc",
    "a PDF; extract its text": b"%PDF-1.4\n%",
    "gzip; unpack it first": gzip.compress(gzip.compress(gzip.compress(gzip.compress(b"x\n")))),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_holds_no_text_is_named(what, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(REFUSED[what])
    for source in (JsonLines(path), TextFiles(path), TextFiles(path, sample_by="file")):
        with pytest.raises(ValueError, match=rf"a\.jsonl.*{what}"):
            list(source)
    if what.startswith(("a Git", "a git", "a NumPy", "an SQLite", "a PDF", "gzip", "UTF")):
        for kind in (ParquetFiles, ArrowFiles):
            with pytest.raises(ValueError, match=rf"a\.jsonl cannot be read as .*{what}"):
                list(kind(path))


BEGINNINGS = ["BZhou et al.", "BZh9 is a level", "PAR1 receptors", "ARROW1", "%PDF-1.4 is a format"]
BEGINNINGS += ["LITPKDS files", "a" * 256 + " ustar ", "SQLite format 3 is old"]


@pytest.mark.parametrize("line", BEGINNINGS)
def test_text_may_begin_with_letters_of_another_format(line, tmp_path):
    (tmp_path / "a.txt").write_text(f"{line}\nand more\n")
    records = [*TextFiles(tmp_path / "a.txt"), *TextFiles(tmp_path / "a.txt", sample_by="file")]
    assert [each["text"] for each in records] == [line, "and more", f"{line}\nand more\n"]


@pytest.mark.parametrize("pack", [gzip.compress, zstd, bz2.compress])
@pytest.mark.parametrize("change", ["cut", "flipped", "begun"])
def test_a_file_that_is_cut_or_changed_is_never_read_as_a_shorter_one(pack, change, tmp_path):
    packed = pack(np.random.default_rng(0).integers(97, 120, 9000, np.uint8).tobytes() + b"\n")
    middle = len(packed) // 2
    flipped = packed[:middle] + bytes([packed[middle] ^ 255]) + packed[middle + 1 :]
    (tmp_path / "a.txt").write_bytes(
        {"cut": packed[:-9], "begun": packed[:5], "flipped": flipped}[change]
    )
    if pack is zstd and change == "flipped":
        return  # without a checksum, as Arrow writes it
    for sample_by in ("line", "file"):
        with pytest.raises(ValueError, match=r"a\.txt cannot be unpacked as .* damaged or cut sho"):
            list(TextFiles(tmp_path / "a.txt", sample_by=sample_by))


@pytest.mark.parametrize("pack", [gzip.compress, zstd, bz2.compress])
def test_a_bomb_ends_at_a_limit_that_is_said(pack, tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    monkeypatch.setattr(contents, "LIMIT", 100_000)
    monkeypatch.setattr(contents, "RATIO", 10)
    path.write_bytes(pack(b"\n" * 200_000))
    for source in (TextFiles(path), TextFiles(path, sample_by="file")):
        with pytest.raises(ValueError, match=r"a\.txt holds more than 10 times its [\d,]+ bytes"):
            list(source)
    monkeypatch.setattr(contents, "LIMIT", 1 << 30)
    assert list(TextFiles(path)) == []
    monkeypatch.setattr(lines, "LONGEST", 60_000)
    monkeypatch.setattr(sizes, "BLOCK", 1000)
    path.write_bytes(pack(b"a\n" + b"x" * 200_000))
    with pytest.raises(ValueError, match=r"line 1 .*: it has a line of more than 60,000 bytes"):
        list(TextFiles(path))
    with pytest.raises(ValueError, match=r"a text of more than 60,000 bytes; divide it"):
        list(TextFiles(path, sample_by="file"))
