"""The training program on questions about pictures: it learns, and goes on where it stopped."""

import jax
import pytest
from etils import epath

import train
from configs import vision
from pipeline import Decoded
from pipeline.history import read_history
from pipeline.trainer.corpora import prepare_corpora
from tests.runs.runs import audited, run, steps, summary


def few(number_of_steps=12):
    """The config with few pictures and a small model."""
    config = vision.get_config()
    config.train.split, config.eval.split = "0:60", "60:80"
    config.steps, config.eval_every, config.checkpoint_every = number_of_steps, 6, 4
    config.batches.tokens_per_batch = 2048
    config.model.update(num_layers=1, width=32, num_heads=2, num_kv_heads=1, mlp_width=64)
    config.optimizer.update(decay_steps=18, warmup_steps=3)
    config.model.attention = "dense"  # compiles sooner
    return config


@pytest.mark.slow
def test_a_run_with_pictures_learns_and_goes_on_where_it_stopped(tmp_path):
    run(few(), tmp_path / "cut")
    run(few(18), tmp_path / "cut")
    run(few(18), tmp_path / "whole")
    log = steps(tmp_path / "whole")
    assert [line["loss"] for line in steps(tmp_path / "cut")][:18] == [x["loss"] for x in log]
    values = summary(tmp_path / "whole")
    assert values["eval_loss_last"] < values["eval_loss_first"]
    assert values["compiles_after_start"] == 0
    corpus, plan = read_history(epath.Path(tmp_path / "whole"))
    assert isinstance(corpus, Decoded)
    assert [line["batch"] for line in log] == [plan.batch(step).digest for step in range(18)]
    audited(tmp_path / "whole")


def test_a_question_has_its_answer_alone_as_loss(tmp_path):
    config = few()
    config.train.split, config.eval.split = "0:4", "4:6"
    corpus, held_out = prepare_corpora(config, epath.Path(tmp_path))
    assert (len(corpus), len(held_out), corpus.num_learnt) == (4, 2, 4)
    for number, example in enumerate(corpus):
        _, question, answer = vision.draw(number)
        (at,) = example["loss_weights"].nonzero()[0]
        text = example["inputs"][example["patch"] < 0][1:]  # without the begin mark
        assert bytes(text.tolist()).decode() == f"{question} "
        assert chr(example["targets"][at]) == answer
        assert (example["inputs"][example["patch"] >= 0] == vision.PATCH).all()
    model = train.make_model(config, corpus)
    assert jax.eval_shape(model.init_params, jax.random.key(0))["encoder"]["patches"].shape[0] == (
        corpus.features["patches"].size
    )
