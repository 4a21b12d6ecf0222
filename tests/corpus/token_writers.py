"""Writers of the token files of other programs, each after the layout that its readers expect."""

import gzip
import itertools
import json
import struct
from pathlib import Path

import numpy as np
import pyarrow as pa
import tensorstore

CODES = {"uint8": 1, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}


def write_megatron(prefix, documents, dtype="int32"):
    """Documents, each a list of sequences, as `IndexedDatasetBuilder` of Megatron writes them."""
    sequences = [np.asarray(each, dtype) for document in documents for each in document]
    lengths = np.array([len(each) for each in sequences], np.int32)
    first = np.cumsum([0, *map(len, documents)])
    begins = np.cumsum([0, *lengths[:-1]]) * np.dtype(dtype).itemsize
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, CODES[dtype], len(lengths), len(first))
    arrays = lengths, begins[: len(lengths)].astype(np.int64), first.astype(np.int64)
    Path(f"{prefix}.idx").write_bytes(head + b"".join(each.tobytes() for each in arrays))
    Path(f"{prefix}.bin").write_bytes(b"".join(each.tobytes() for each in sequences))


def write_flat(path, documents, dtype="uint16"):
    """Documents as Dolma writes them: ids alone, and a table of where each document is."""
    Path(path).write_bytes(b"".join(np.asarray(each, dtype).tobytes() for each in documents))
    ends = np.cumsum([0, *map(len, documents)]).tolist()
    rows = [f'{a},{b},"id, {a}",source,{n}\n' for n, (a, b) in enumerate(itertools.pairwise(ends))]
    with gzip.open(Path(path).with_suffix(".csv.gz"), "wt") as file:
        file.writelines(rows)


def write_llm_c(path, tokens, kind=20240520, version=1, dtype="uint16"):
    """Tokens in a shard of llm.c: 256 int32, then the ids."""
    head = np.zeros(256, np.int32)
    head[:3] = kind, version, len(tokens)
    Path(path).write_bytes(head.tobytes() + np.asarray(tokens, dtype).tobytes())


def write_mds(folder, samples, encodings, compression=None, rows=3):
    """Samples, dicts of arrays, as `MDSWriter` of MosaicML's Streaming writes them."""
    Path(folder).mkdir()
    names, shards = sorted(encodings), []
    sizes = [8 if encodings[name] == "int" else None for name in names]
    for first in range(0, len(samples), rows):
        about = {"column_names": names, "column_sizes": sizes, "format": "mds", "version": 2}
        about["column_encodings"] = [encodings[name] for name in names]
        header, encoded = json.dumps(about).encode(), []
        for sample in samples[first : first + rows]:
            values = [encode_mds(encodings[name], sample[name]) for name in names]
            widths = [len(v) for v, fixed in zip(values, sizes, strict=True) if fixed is None]
            encoded.append(np.array(widths, np.uint32).tobytes() + b"".join(values))
        edges = np.cumsum([0, *map(len, encoded)]) + 4 + 4 * (len(encoded) + 1) + len(header)
        counts = np.array([len(encoded), *edges], np.uint32).tobytes()
        raw = counts + header + b"".join(encoded)
        name, stored = f"shard.{len(shards):05d}.mds", raw
        about |= {"samples": len(encoded), "compression": compression, "zip_data": None}
        about["raw_data"] = {"basename": name, "bytes": len(raw)}
        if compression:
            name, stored = f"{name}.{compression}", pa.compress(raw, compression, asbytes=True)
            about["zip_data"] = {"basename": name, "bytes": len(stored)}
        (Path(folder) / name).write_bytes(stored)
        shards.append(about)
    (Path(folder) / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))


def encode_mds(encoding, value):
    """A value as its encoding stores it; arrays of one axis of less than 65,536 numbers."""
    form, _, dtype = encoding.partition(":")
    if form != "ndarray":
        return value if isinstance(value, bytes) else np.asarray(value, np.int64).tobytes()
    codes = {"uint8": 8, "uint16": 16, "int32": 33, "int64": 65}
    head = [] if dtype else [codes[value.dtype.name]]
    wide = len(value) > 255
    size = len(value).to_bytes(2, "little") if wide else bytes([len(value)])
    return bytes([*head, 1 << 2 | wide]) + size + value.tobytes()


def write_levanter(folder, columns):
    """Columns of rows as `SerialCacheWriter` of Levanter writes them."""
    Path(folder).mkdir()
    rows = 0
    for name, values in columns.items():
        rows, flat = len(values), np.concatenate(values)
        ends = np.cumsum([len(each) for each in values])
        parts = {"offsets": np.array([rows, *ends], np.int64), "data": flat}
        for part, numbers in parts.items():
            inner = [{"name": "blosc", "configuration": {"clevel": 5}}]
            sharded = {"chunk_shape": [8], "codecs": inner}
            grid = {"name": "regular", "configuration": {"chunk_shape": [32]}}
            codecs = [{"name": "sharding_indexed", "configuration": sharded}]
            store = {"driver": "file", "path": f"{folder}/{name}/{part}"}
            metadata = {"chunk_grid": grid, "codecs": codecs}
            spec = {"driver": "zarr3", "kvstore": store, "metadata": metadata}
            options = {"dtype": numbers.dtype.name, "shape": [1 << 54], "create": True}
            opened = tensorstore.open(spec, **options).result()
            opened[: len(numbers)].write(numbers).result()
    ledger = {"total_num_rows": rows, "is_finished": True, "metadata": {}}
    (Path(folder) / "shard_ledger.json").write_text(json.dumps(ledger))


def write_datatrove(path, documents, masks=None, dtype="uint16"):
    """Documents as `TokenizedFile` of datatrove writes them."""
    Path(path).write_bytes(b"".join(np.asarray(each, dtype).tobytes() for each in documents))
    ends = np.cumsum([len(each) for each in documents], dtype=np.uint64)
    Path(f"{path}.index").write_bytes(ends.tobytes())
    size, total = np.dtype(dtype).itemsize, sum(map(len, documents))
    Path(f"{path}.metadata").write_text(f"some|tokenizer|{size}\n{total}\n{total} T")
    if masks is not None:
        content = b"".join(np.asarray(each, bool).tobytes() for each in masks)
        Path(f"{path}.loss").write_bytes(content)
