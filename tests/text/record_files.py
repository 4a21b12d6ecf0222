"""Sources of every kind, with the same records; files as compressors write them."""

import csv
import gzip
import io
import json

import grain
import pyarrow as pa
from array_record.python.array_record_module import ArrayRecordWriter
from pyarrow import feather, parquet

from pipeline.text.sources import ArrowFiles, ParquetFiles, Records, open_files


def compressed(content, suffix):
    """Bytes of a file with such a name."""
    if suffix == ".gz":
        return gzip.compress(content)
    if suffix == ".zst":
        # Two frames, as parallel compressors write them.
        half, codec = len(content) // 2, pa.Codec("zstd")
        frames = (codec.compress(part).to_pybytes() for part in (content[:half], content[half:]))
        return b"".join(frames)
    return content


def write_array_record(path, records):
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(json.dumps(record).encode())
    writer.close()


def write_stream(path, table, rows):
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)


def save_to_disk(directory, files):
    """Records by file, as `datasets` lays them out: streams, and a state that names them."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, records in files.items():
        write_stream(directory / name, pa.Table.from_pylist(records), rows=7)
    state = {"_data_files": [{"filename": name} for name in files], "_split": None}
    (directory / "state.json").write_text(json.dumps(state))


def as_csv(records, **dialect):
    """Records as the standard library writes them, each field as text."""
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, list(records[0]), **dialect)
    writer.writeheader()
    writer.writerows(records)
    return file.getvalue()


def make(kind, directory, given):
    """A source of some records, of which each has a text, in two files with many groups."""
    halves = given[:25], given[25:]
    for number, records in enumerate(halves):
        table, path = pa.Table.from_pylist(records), directory / f"{number}.{kind}"
        match kind:
            case "array_record":
                write_array_record(path, records)
            case "parquet" | "feather":
                write_table(path, table, rows=4)
            case "arrow":
                write_stream(path, table, rows=7)
            case "csv" | "csv.gz":
                path.write_bytes(compressed(as_csv(records).encode(), path.suffix))
            case "jsonl" | "jsonl.gz" | "jsonl.zst":
                # With blank lines, which are no records.
                lines = [json.dumps(record, ensure_ascii=False) + "\n\n" for record in records]
                path.write_bytes(compressed("".join(lines).encode(), path.suffix))
    names = str(directory / f"*.{kind}")
    match kind:
        case "array_record":
            paths = [str(directory / f"{number}.array_record") for number in range(2)]
            stored = grain.sources.ArrayRecordDataSource(paths)
            return Records(grain.MapDataset.source(stored).map(json.loads))
        case "hugging_face":
            names = (f"data-0000{number}-of-00002.arrow" for number in range(2))
            save_to_disk(directory / "saved", dict(zip(names, halves, strict=True)))
            return open_files(directory / "saved")
        case "list":
            return Records(given)
        case "map_dataset":
            return Records(grain.MapDataset.source(given))
    return open_files([names])


def write_table(path, table, rows=2, **options):
    """A file of one of the kinds, by its name; None: the kind cannot hold the table."""
    match path.suffix:
        case ".parquet":
            try:
                parquet.write_table(table, path, row_group_size=rows, **options)
            except pa.ArrowNotImplementedError:
                return None
            return ParquetFiles(path)
        case ".stream":
            write_stream(path, table, rows)
        case kind:
            packing = {".arrow": "uncompressed", ".zstd": "zstd"}.get(kind, "lz4")
            feather.write_feather(table, str(path), compression=packing, chunksize=rows)
    return ArrowFiles(path)
