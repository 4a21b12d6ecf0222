"""Manifests that were changed on purpose."""

import hashlib
import json

import pyarrow as pa

from pipeline.corpus.stored.parts import WRITE, PartTable, json_digest


def alter(corpus, change):
    """Changes the manifest of a corpus, or its parts, which are dicts; and their digests."""
    path, table = corpus.directory / "corpus.json", corpus.directory / "parts.arrow"
    manifest, parts = json.loads(path.read_text()), pa.ipc.open_file(table.read_bytes()).read_all()
    del manifest["digest"]
    manifest["parts"] = parts.to_pylist()
    change(manifest)
    memory = pa.BufferOutputStream()
    changed = pa.Table.from_pylist(manifest["parts"], PartTable.SCHEMA)
    with pa.ipc.new_file(memory, changed.schema, options=WRITE) as writer:
        writer.write_table(changed)
    table.write_bytes(memory.getvalue())
    manifest["parts"] = hashlib.sha256(memory.getvalue()).hexdigest()
    manifest["digest"] = json_digest(manifest)
    path.write_text(json.dumps(manifest))
