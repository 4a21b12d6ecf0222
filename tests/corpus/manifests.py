"""Manifests that were changed on purpose."""

import json

from pipeline.corpus.parts import json_digest


def alter(corpus, change):
    """Changes the manifest of a corpus, and its digest with it."""
    path = corpus.directory / "corpus.json"
    manifest = json.loads(path.read_text())
    del manifest["digest"]
    change(manifest)
    manifest["digest"] = json_digest(manifest)
    path.write_text(json.dumps(manifest))
