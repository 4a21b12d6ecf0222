"""Lockstep."""

import functools
import sys
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
        plan = pipeline.Plan(self._corpus, self.buckets(rows))
        batches = pipeline.Batches(self._corpus, plan, process_index=host, process_count=hosts)
        return iter(batches.to_iter_dataset())

    def buckets(self, rows):
        """The shapes, by the formula."""
        from benchmarks.model import MODEL

        return pipeline.fit_buckets(self._corpus, **self._options(rows), width=MODEL.width)

    def _options(self, rows):
        return {
            "tokens_per_batch": rows * self.length,
            "max_length": self.length,
            "max_buckets": 4,
            "length_multiple": None,
            "row_multiple": 2,
        }


class Tuned(Lockstep):
    """A plan of up to eight buckets, chosen by measured seconds of the step that is compared."""

    def buckets(self, rows):
        return self._tuned(rows).buckets

    @functools.lru_cache  # noqa: B019  # one path in a process
    def _tuned(self, rows):
        from benchmarks.model import Step, model_for

        step = Step(model_for(self.length))
        # Compilations are not compared, so they are paid by many epochs.
        options = self._options(rows) | {"max_buckets": 8}
        found = pipeline.tune(lambda: step, self._corpus, epochs=100, **options)
        print(found, file=sys.stderr)
        return found


class Truncated(Tuned):
    """The same for documents that are truncated to a row, as other paths truncate them."""

    def __init__(self, documents, length):
        super().__init__([document[: length + 1] for document in documents], length)
