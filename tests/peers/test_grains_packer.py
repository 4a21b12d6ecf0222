"""The migration page's pipeline has what Grain's packer makes of the same documents."""

import numpy as np
import pytest

from tests.pages import SNIPPETS

# The migration page's pipeline with a score of each token and a label of each document.


def of_documents(batches, scores):
    """What batches have for each document: inputs, targets, score and label of each target.

    Scores are all different, so each tells its document and its token.
    """
    flat = np.concatenate(scores)
    order = np.argsort(flat)
    found = np.full((len(flat), 4), np.nan)
    for batch in batches:
        row, column = np.nonzero(batch["inputs_segment_ids"])
        segments = batch["inputs_segment_ids"][row, column]
        score = batch["score"][row, column]
        fields = [batch[name][row, column] for name in ("inputs", "targets")]
        values = np.stack([*fields, score, batch["label"][row, segments - 1]], 1)
        at = order[np.searchsorted(flat[order], score)]
        assert np.isnan(found[at]).all(), "a score came twice"
        found[at] = values
    return np.split(found, np.cumsum([len(score) for score in scores])[:-1])


@pytest.mark.parametrize("sizes", ["(5, 9, 30, 3)", "range(3, 90)"])
def test_the_pipelines_of_the_migration_page_have_equal_values(sizes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = []
    for snippet in SNIPPETS:
        if '"score"' in snippet.content and snippet.page.name == "migration.md":
            assert "in (5, 9, 30, 3)]" in snippet.content
            names = {}
            exec(snippet.content.replace("(5, 9, 30, 3)", sizes), names)
            rows = names["batches"] if "batches" in names else names["rows"].batch(2)
            found.append(of_documents(rows, names["scores"]))
    theirs, ours = found
    given = (names[each] for each in ("documents", "scores", "labels"))
    documents = zip(theirs, ours, *given, strict=True)
    for expected, values, tokens, score, label in documents:
        np.testing.assert_array_equal(values, expected)
        assert np.isnan(values[0]).all()  # nothing predicts the first token
        known = [tokens[:-1], tokens[1:], score[1:], np.full(len(tokens) - 1, label)]
        np.testing.assert_array_equal(values[1:], np.stack(known, 1))
