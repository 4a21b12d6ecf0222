"""Values of continuations: sums made by the step, scored, and unpacked."""

import jax.numpy as jnp
import numpy as np
import pytest

from pipeline import Bucket, Corpora, Corpus, Examples, Feature, pack, score, unpack
from pipeline.steps import sum_continuations


def groups_of(count, sizes=(2,), seed=0):
    """Prompts with as many continuations each as one of `sizes`."""
    rng = np.random.default_rng(seed)
    return [
        (rng.integers(1, 9, rng.integers(1, 6)).tolist(),
         [rng.integers(1, 9, rng.integers(1, 7)).tolist() for _ in range(rng.choice(sizes))])
        for _ in range(count)
    ]  # fmt: skip


def table_of(seed=1):
    """Log-probabilities of each token after each: a model that knows but the last token."""
    logits = np.random.default_rng(seed).normal(size=(9, 9))
    return (logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))).astype(np.float32)


def sums_of(groups, table):
    """The log-probability of each continuation, from the definition."""
    return [
        [sum(table[a, b] for a, b in zip([prefix[-1], *ids], ids, strict=False)) for ids in each]
        for prefix, each in groups
    ]


def logprobs(table, batch):
    return table[batch["inputs"], batch["targets"]]


@pytest.mark.parametrize("reduce", [None, "sum", "mean"])
def test_scores_by_continuation_are_stored_with_the_groups(tmp_path, reduce):
    groups, table = groups_of(30, (1, 2, 3)), table_of()
    corpus = Corpus.from_groups(groups, tmp_path / "corpus")
    both = Corpora({"text": Examples([[1, 2, 3]]), "groups": corpus})

    def step(table, batch):
        sums = sum_continuations(logprobs(table, batch), batch, 40)
        return {"logprob": sums, "twice": jnp.stack([sums, 2 * sums], -1)}

    options = {"buckets": [Bucket(2, 48)], "per": "continuation", "state": jnp.array(table)}
    found = score(both, step, directory=tmp_path / "scores", reduce=reduce, **options)
    expected = sums_of(groups, table)
    if reduce is None:
        assert found["logprob"].to_pylist()[0] == []
        scores = found["logprob"].to_pylist()[1:]
        for one, other in zip(scores, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5)
        more = corpus.with_features({"ref": scores}, features={"ref": Feature("continuation")})
        assert [example["ref"].tolist() for example in more] == scores
    else:
        reduced = [getattr(np, reduce)(each) for each in expected]
        np.testing.assert_allclose(found["logprob"].to_numpy()[1:], reduced, rtol=1e-5)
        twice = np.array(found["twice"].to_pylist())[1:]
        np.testing.assert_allclose(twice[:, 1], 2 * np.array(reduced), rtol=1e-5)


def test_an_update_gives_the_values_of_continuations_back_in_order():
    groups, table = groups_of(20, (4,)), jnp.array(table_of())
    columns = {"tokens": groups, "advantage": np.random.default_rng(3).normal(size=(20, 4))}
    examples = Examples.from_groups(columns, features={"advantage": Feature("continuation")})
    results, shapes = [], set()
    for planned, batch in pack(examples, [Bucket(2, 64), Bucket(1, 64)], max_segments=6):
        shapes.add(batch["advantage"].shape)
        sums = sum_continuations(logprobs(table, batch), batch, 24)
        results.append((planned, {"sum": sums, "advantage": batch["advantage"]}))
    assert shapes <= {(2, 24), (1, 24)}
    found = unpack(results, examples, per="continuation")
    for one, other in zip(found["sum"], sums_of(groups, table), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
    np.testing.assert_allclose(np.array(found["advantage"]), columns["advantage"], rtol=1e-6)
    with pytest.raises(ValueError, match="needs 12 continuations in each row"):
        unpack([(p, each["sum"][:, :3]) for p, each in results], examples, per="continuation")
    with pytest.raises(ValueError, match="the corpus has no groups; give per='segment'"):
        unpack(results, Examples([[1, 2]]), per="continuation")
