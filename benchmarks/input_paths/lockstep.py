"""Lockstep."""

import tempfile

import pipeline
from benchmarks.input_paths import InputPath


class Lockstep(InputPath):
    """A plan of up to four buckets."""

    packages = ("lockstep-pipeline",)

    def __init__(self, documents, length):
        super().__init__(documents, length)
        self._folder = tempfile.TemporaryDirectory()
        self._corpus = pipeline.Corpus.from_arrays(documents, self._folder.name)

    def start(self, rows, host, hosts):
        from benchmarks.model import MODEL

        buckets = pipeline.fit_buckets(
            self._corpus,
            tokens_per_batch=rows * self.length,
            max_buckets=4,
            max_length=self.length,
            length_multiple=None,
            row_multiple=2,
            width=MODEL.width,
        )
        plan = pipeline.Plan(self._corpus, buckets)
        batches = pipeline.Batches(self._corpus, plan, process_index=host, process_count=hosts)
        return iter(batches.to_iter_dataset())


class Truncated(Lockstep):
    """The same for documents that are truncated to a row, as other paths truncate them."""

    def __init__(self, documents, length):
        super().__init__([document[: length + 1] for document in documents], length)
