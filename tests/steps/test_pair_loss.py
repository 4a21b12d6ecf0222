"""Pairs: the loss of a batch of groups is that of each pair alone, whatever row it is in."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from models import preference_losses
from pipeline.steps import make_eval_step, make_score_step, make_train_step, position_losses
from pipeline.steps.preferences import REFERENCE, PairLoss

VOCABULARY, LENGTH, MOST = 11, 12, 3  # pairs of a row
BETA = 0.3


def tokens_loss(table, batch):
    """A bigram model: Σ weight · nll, and Σ weight."""
    logits = table[batch["inputs"]]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return (losses * batch["loss_weights"]).sum(), batch["loss_weights"].sum()


LOSS = PairLoss(tokens_loss, functools.partial(preference_losses, beta=BETA, kind="sigmoid"))


@pytest.fixture(scope="module")
def case():
    """Parameters, and a batch of 4 rows with 2, 3, 0 and 1 pairs, of random tokens."""
    rng = np.random.default_rng(0)
    segments, branches = np.zeros((2, 4, LENGTH), np.int32)
    for row, pairs in enumerate((2, 3, 0, 1)):
        for pair in range(pairs):  # a column of the prompt, two of one answer, one of the other
            columns = slice(4 * pair, 4 * pair + 4)
            segments[row, columns] = pair + 1
            branches[row, columns] = 0, 2 * pair + 1, 2 * pair + 1, 2 * pair + 2
    batch = {
        "inputs": rng.integers(0, VOCABULARY, (4, LENGTH)).astype(np.int32),
        "targets": rng.integers(0, VOCABULARY, (4, LENGTH)).astype(np.int32),
        "inputs_segment_ids": segments,
        "inputs_branch_ids": branches,
        "loss_weights": np.where(branches, rng.choice([0.0, 0.5, 1.0], branches.shape), 0),
        REFERENCE: rng.normal(-5, 2, (4, 2 * MOST)).astype(np.float32),
    }
    batch["loss_weights"] = batch["loss_weights"].astype(np.float32)
    table = rng.normal(size=(VOCABULARY, VOCABULARY)).astype(np.float32)
    return jnp.asarray(table), {name: jnp.asarray(each) for name, each in batch.items()}


def plain(table, batch):
    """The losses and reward margins `[row, pair]` of a batch, in plain loops of float64."""
    table, batch = np.asarray(table, np.float64), jax.tree.map(np.asarray, batch)
    found = {}
    for row, ids in enumerate(batch["inputs_segment_ids"]):
        for pair in range(ids.max()):
            rewards = []
            for branch in (2 * pair + 1, 2 * pair + 2):
                logprob = 0.0
                for column in np.flatnonzero(batch["inputs_branch_ids"][row] == branch):
                    logits = table[batch["inputs"][row, column]]
                    own = logits[batch["targets"][row, column]] - np.log(np.exp(logits).sum())
                    logprob += batch["loss_weights"][row, column] * own
                rewards.append(BETA * (logprob - batch[REFERENCE][row, branch - 1]))
            margin = rewards[0] - rewards[1]
            found[row, pair] = np.log(1 + np.exp(-margin)), margin
    return found


def update(case, most, microbatches=1, **options):
    """The parameters after an update by the gradient itself, and the values of the step."""
    table, batch = case
    init, train_step = make_train_step(LOSS, optax.sgd(1.0), most_segments=most, **options)
    state, values = jax.jit(train_step, static_argnums=2)(init(table), batch, microbatches)
    return state["params"], values


@pytest.mark.parametrize(("microbatches", "most"), [(1, MOST), (2, MOST + 2)])
def test_a_batch_has_the_mean_loss_of_its_pairs_and_the_loss_of_each(case, microbatches, most):
    table, batch = case
    params, values = update(case, most, microbatches)
    expected = plain(table, batch)
    losses, margins = np.array(list(expected.values())).T
    assert len(losses) == 6
    assert float(values["loss"]) == pytest.approx(losses.mean(), rel=1e-5)
    assert float(values["reward_margin"]) == pytest.approx(margins.mean(), rel=1e-5)
    assert float(values["reward_accuracy"]) == pytest.approx((margins > 0).mean())
    sums = np.zeros((2, 4, most))
    for place, (loss, _) in expected.items():
        sums[:, *place] = loss, 1
    np.testing.assert_allclose(values["segments"], sums, rtol=1e-4)
    # An update by the mean over pairs: its gradient by differences.
    step = 1e-4 * np.random.default_rng(1).normal(size=table.shape)
    ahead, behind = (
        np.mean([loss for loss, _ in plain(np.float64(table) + each, batch).values()])
        for each in (step, -step)
    )
    gradient = np.asarray(table - params)
    assert (gradient * step).sum() == pytest.approx((ahead - behind) / 2, rel=1e-3)
    assert float(values["gradient_norm"]) == pytest.approx(np.linalg.norm(gradient), rel=1e-5)


def test_an_update_is_that_without_the_losses_of_segments_and_with_any_loss_scale(case):
    usual, values = update(case, MOST)
    for params, others in (update(case, None), update(case, MOST, loss_scale=1024.0)):
        np.testing.assert_allclose(params, usual, rtol=1e-6)
        assert float(others["loss"]) == pytest.approx(float(values["loss"]), rel=1e-6)


def test_an_evaluation_has_the_sums_of_pairs(case):
    table, batch = case
    evaluate = jax.jit(make_eval_step(LOSS), static_argnames="microbatches")
    total, weight, others = evaluate(table, batch, microbatches=2)
    losses, margins = np.array(list(plain(table, batch).values())).T
    assert (float(total), float(weight)) == pytest.approx((losses.sum(), 6), rel=1e-5)
    assert float(others["reward_margin"]) == pytest.approx(margins.sum(), rel=1e-5)


def test_scores_are_those_of_pairs(case):
    table, batch = case
    scores = jax.jit(make_score_step(LOSS))(table, batch)
    expected = plain(table, batch)
    assert scores["weight"].tolist() == [[1, 1, 0], [1, 1, 1], [0, 0, 0], [1, 0, 0]]
    with pytest.raises(ValueError, match="by segment, and no values of positions"):
        jax.eval_shape(functools.partial(position_losses, LOSS), table, batch)
    for place, (loss, _) in expected.items():
        assert float(scores["nll"][place]) == pytest.approx(loss, rel=1e-5)


def test_the_model_is_its_own_reference_with_a_margin_of_zero(case):
    table, batch = case
    own = LOSS.score_reference(table, batch)[REFERENCE]
    assert own.shape == (4, LENGTH)
    losses, weights, others = LOSS(table, {**batch, REFERENCE: own[:, : 2 * MOST]})
    np.testing.assert_allclose(losses, weights * np.log(2), rtol=1e-6)
    assert not np.asarray(others["reward_margin"]).any()
