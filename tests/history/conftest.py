import numpy as np
import pytest

import pipeline


@pytest.fixture(scope="session")
def documents():
    """`documents(directory, count)`: a corpus of 3 to 90 tokens a document; `first` ones differ."""

    def make(directory, count=200, first=(0, 1)):
        rng = np.random.default_rng(0)
        sizes = np.clip(rng.lognormal(2.7, 0.8, count), 3, 90).astype(int)
        sizes[: len(first)] = first
        examples = [rng.integers(1, 99, size) for size in sizes]
        return pipeline.Corpus.from_arrays(examples, directory, vocab_size=99)

    return make
