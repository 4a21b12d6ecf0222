"""Corpora of short documents."""

import numpy as np

import pipeline


def write_documents(directory, count=200, first=(0, 1)):
    """A corpus of 3 to 90 tokens a document, but for the `first` ones, of these sizes."""
    rng = np.random.default_rng(0)
    sizes = np.clip(rng.lognormal(2.7, 0.8, count), 3, 90).astype(int)
    sizes[: len(first)] = first
    examples = [rng.integers(1, 99, size) for size in sizes]
    return pipeline.Corpus.from_arrays(examples, directory, vocab_size=99)
