"""An encoder–decoder on pairs through the training program, and the work of a step."""

import json

import numpy as np
import pytest
from etils import epath
from ml_collections import ConfigDict

from configs import pairs as pairs_config
from models.config import TransformerConfig
from models.flops import pair_flops, training_flops
from pipeline import Pairs
from pipeline.history import read_history
from pipeline.trainer.corpora import prepare_corpora
from tests.runs.runs import run, segment_losses, steps, summary, tiny


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """70 pairs of sentences as JSON lines."""
    rng = np.random.default_rng(0)
    words = {"das": "the", "Paar": "pair", "hat": "has", "zwei": "two", "Seiten": "sides"}
    path = tmp_path_factory.mktemp("text") / "pairs.jsonl"
    with path.open("w") as file:
        for size in rng.integers(1, 18, 70):
            chosen = rng.choice(list(words), size=int(size))
            record = {"de": " ".join(chosen), "en": " ".join(words[word] for word in chosen)}
            file.write(json.dumps(record) + "\n")
    return path


@pytest.mark.slow
def test_the_training_program_learns_pairs_and_goes_on_where_it_stopped(text, tmp_path):
    output = run(tiny(text, "tiny_pairs_config"), tmp_path)
    values, log = summary(tmp_path), steps(tmp_path)
    assert values["eval_loss_last"] < values["eval_loss_first"]
    assert len(values["compiles"]) == 2
    assert set(values["compiles"].values()) == {1}
    assert values["compiles_after_start"] == 0
    assert "the ratio of inputs to targets allows at most" in output
    assert {line["epoch"] for line in log} == {0, 1}
    assert {line["bucket"] for line in log} == set(values["compiles"])
    output = run(tiny(text, "tiny_pairs_config", steps=16), tmp_path)
    assert "resumed: step 12 of 16" in output
    assert steps(tmp_path)[:12] == log
    assert [line["step"] for line in steps(tmp_path)] == list(range(16))
    # The batches that came are those of the plan.
    _, plan = read_history(epath.Path(tmp_path))
    assert isinstance(Pairs.open(tmp_path / "corpus/train"), Pairs)
    assert [line["batch"] for line in steps(tmp_path)] == [
        plan.batch(step).digest for step in range(16)
    ]
    segment_losses(tmp_path)


def test_the_config_of_docstrings_needs_no_network(tmp_path):
    config = pairs_config.get_config()
    assert isinstance(config, ConfigDict)
    config.train.end = config.eval.end = 0.1
    config.tokenizer.vocab_size = 600
    pairs, held_out = prepare_corpora(config, tmp_path)
    assert isinstance(pairs, Pairs)
    assert len(pairs) > len(held_out) > 10
    assert "(" in pairs.tokenizer.decode(pairs[0]["targets"])


def test_the_work_of_pairs_is_counted_on_both_sides():
    config = TransformerConfig(
        vocab_size=10, num_layers=2, width=8, num_heads=2, num_kv_heads=2, mlp_width=16
    )
    vocabulary = 6 * 5 * 8 * 10
    decoder = training_flops(config, 5, 25) - vocabulary
    cross = 6 * 2 * 5 * 8 * (8 + 8)  # queries and outputs
    assert pair_flops(config, (0, 5), (0, 25, 0)) == decoder + vocabulary + cross
    # An encoder's scores are not halved, and its output is read by the decoder's keys and values.
    assert pair_flops(config, (5, 0), (25, 0, 0)) == decoder + cross + 6 * 25 * 8 * 2
