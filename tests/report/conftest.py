import pytest

from pipeline.report import Options, from_corpus, measure


@pytest.fixture(scope="session")
def options():
    """Of a narrow model: attention weighs so much that several buckets are worth it."""
    planning = {"tokens_per_batch": 512, "max_length": 64, "length_multiple": 8, "row_multiple": 4}
    return Options(planning | {"width": 4})


@pytest.fixture(scope="session")
def figures(corpus, options):
    """What the report measures of the corpus with these options."""
    return measure(from_corpus(corpus, "the corpus"), options)
