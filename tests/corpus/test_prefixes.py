"""Prefixes that are found: each token of a group has the weight and the value of its samples."""

import collections

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipeline
from pipeline import Examples, Feature, find_prefixes
from tests.loading.definition import nodes_of

SAMPLES = st.lists(
    st.lists(st.tuples(st.integers(1, 2), st.sampled_from([0, 0.5, 1])), min_size=2, max_size=7),
    min_size=1,
    max_size=9,
)


def count(contents):
    """The weight, and the weight times each value, of each token after the same tokens before it.

    A content is the tokens of a sample, their weights, and their values.
    """
    sums = collections.defaultdict(lambda: np.zeros(2))
    for tokens, weights, values in contents:
        for at in range(1, len(tokens)):
            sums[tuple(tokens[: at + 1])] += weights[at], weights[at] * values[at]
    return {context: total.tolist() for context, total in sums.items()}


def unfold(columns):
    """The same of groups, whose nodes follow the tokens on the path to them."""
    sums = collections.defaultdict(lambda: np.zeros(2))
    for groups in zip(columns["tokens"], columns["weights"], columns["value"], strict=True):
        paths = {}
        for (name, tokens, _), (_, weights, _), (_, values, _) in zip(
            *map(nodes_of, groups), strict=True
        ):
            assert len(tokens) > 0
            path = paths.get(name[:-1], []) if name else []
            for token, weight, value in zip(tokens, weights, values, strict=True):
                path = [*path, int(token)]
                if len(path) > 1:
                    sums[tuple(path)] += weight, weight * value
            paths[name] = path
    return {context: total.tolist() for context, total in sums.items()}


@given(SAMPLES, st.integers(1, 4), st.sampled_from([None, 8, 12]), st.booleans())
@settings(max_examples=150)
def test_weights_and_values_of_each_token_are_those_of_its_samples(
    samples, min_shared, max_length, alike
):
    tokens = [[token for token, _ in sample] for sample in samples]
    weights = [[weight for _, weight in sample] for sample in samples]
    values = [[7 if alike else 10 * n + at for at in range(len(s))] for n, s in enumerate(samples)]
    sample_columns = {"tokens": tokens, "weights": weights, "value": values}
    columns = find_prefixes(sample_columns, min_shared=min_shared, max_length=max_length)
    assert unfold(columns) == count(zip(tokens, weights, values, strict=True))
    examples = Examples.from_groups(columns, features={"value": Feature("targets")})
    assert examples.num_tokens <= sum(len(sample) - 1 for sample in tokens)
    assert max_length is None or examples.lengths.max() <= max_length
    if alike and min_shared == 1 and max_length is None:  # a token after the same ones comes once
        roots = len({sample[0] for sample in tokens})
        assert examples.num_tokens == len(count(zip(tokens, weights, values, strict=True)))
        assert len(examples) == roots


def test_a_conversation_becomes_a_path_and_groups_keep_the_order_of_their_samples():
    turns = [[9, 9, 4, 5], [9, 9, 4, 5, 6, 7], [9, 9, 4, 5, 6, 7, 8, 2], [1, 1, 3], [1, 1, 2]]
    learnt = [[0, 0, 1, 1], [0, 0, 0, 0, 1, 1], [0] * 6 + [1, 1], [0, 0, 1], [0, 0, 1]]
    scores = [np.full(len(turn), 1 + number) for number, turn in enumerate(turns)]
    columns = find_prefixes({"tokens": turns, "weights": learnt, "score": scores}, min_shared=2)
    names = {"tokens": [9, 9, 4, 5, 6, 7, 8, 2], "weights": [0, 0, 1, 1, 1, 1, 1, 1]}
    names["score"] = [1, 1, 1, 1, 2, 2, 3, 3]  # of the sample that learns the token
    for name, expected in names.items():
        first, second = columns[name]
        assert [int(x) for _, content, _ in nodes_of(first) for x in content] == expected
        assert len([*nodes_of(second)]) == 3
    assert [continuation.tolist() for continuation in columns["tokens"][1][1]] == [[2], [3]]


@pytest.mark.parametrize(
    ("samples", "options", "sentence"),
    [
        ([[1, 2], [3]], {}, "sample 1 has 1 token; nothing can be learnt"),
        ([[1, 2]], {"min_shared": 0}, "min_shared is 0; it must be a whole number from 1 up"),
        ({"tokens": [[1, 2]], "weights": [[1]]}, {}, "the weights of example 0"),
        ({"tokens": [[1, 2]], "value": [[1, 2, 3]]}, {}, "value of example 0"),
    ],
)
def test_what_cannot_be_is_refused(samples, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        pipeline.find_prefixes(samples, **options)
