"""The training program on each task: it learns, and goes on where it stopped."""

import json

import pytest
from etils import epath
from ml_collections import ConfigDict

from configs import chat, masked, quickstart
from pipeline.configuration import open_template, prepare_corpora
from pipeline.sources import Dialogues
from pipeline.training.history import read_history
from pipeline.views import Masked
from tests.runs import run, steps, summary, tiny


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """120 records, each a short chat and a text."""
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    with path.open("w") as file:
        for number in range(120):
            words = ["pack", "the", "rows"][: 1 + number % 3]
            turns = [("user", f"say {number % 7}"), ("assistant", " ".join(words))]
            messages = [{"role": role, "content": content} for role, content in turns]
            file.write(json.dumps({"messages": messages, "text": " ".join(words * 3)}) + "\n")
    return path


def of(chats, task, **fields):
    return tiny(chats, "tiny_tasks_config", task, **fields)


def test_a_masked_encoder_learns_and_goes_on_where_it_stopped(chats, tmp_path):
    run(of(chats, "masked"), tmp_path)
    assert summary(tmp_path)["eval_loss_last"] < summary(tmp_path)["eval_loss_first"]
    first = steps(tmp_path)
    assert len(first) == 12
    assert "resumed: step 12 of 14" in run(of(chats, "masked", steps=14), tmp_path)
    assert steps(tmp_path)[:12] == first
    assert len(steps(tmp_path)) == 14
    corpus, plan = read_history(epath.Path(tmp_path))
    assert isinstance(corpus, Masked)
    assert plan.batch(13).num_tokens


def test_chats_are_learnt_and_a_run_may_begin_with_the_parameters_of_another(chats, tmp_path):
    run(of(chats, "chat"), tmp_path / "one")
    one = summary(tmp_path / "one")
    assert one["eval_loss_last"] < one["eval_loss_first"]
    output = run(of(chats, "chat", start_from=str(tmp_path / "one")), tmp_path / "two")
    assert f"parameters are those of step 12 of {tmp_path / 'one'}" in output
    assert summary(tmp_path / "two")["eval_loss_first"] == one["eval_loss_last"]


def test_an_encoder_decoder_learns_to_fill_gaps(chats, tmp_path):
    run(of(chats, "corrupted"), tmp_path)
    assert summary(tmp_path)["eval_loss_last"] < summary(tmp_path)["eval_loss_first"]
    assert summary(tmp_path)["compiles_after_start"] == 0


def test_the_configurations_of_tasks_prepare_what_they_say(tmp_path, monkeypatch):
    for name, config in (("chat", chat.get_config()), ("masked", masked.get_config())):
        config.train.split, config.eval.split = "train[:2%]", "validation[:2%]"
        config.tokenizer.vocab_size = 600
        corpus, held_out = prepare_corpora(config, tmp_path / name)
        assert len(corpus) > len(held_out) > 0
        fields = corpus[0] if name == "chat" else corpus.read([0], [0], corpus.lengths[:1])
        assert list(fields) == ["inputs", "targets", "loss_weights"]
        assert 0 < fields["loss_weights"].sum() < len(fields["loss_weights"])
    dialogue = Dialogues("train[:2%]", tmp_path / "chat" / "tfds")[0]["messages"]
    assert [turn["role"] for turn in dialogue[:3]] == ["system", "user", "assistant"]
    with pytest.raises(IndexError, match="record -1 of"):
        Dialogues("train[:2%]", tmp_path / "chat" / "tfds")[-1]


def test_kinds_that_there_are_not_are_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"template\.kind is 'poem'; it must be one of chat, answer"
    ):
        open_template(ConfigDict({"kind": "poem"}))
    config = quickstart.get_config()
    config.task.kind = "poem"
    with pytest.raises(ValueError, match=r"task\.kind is 'poem'; it must be one of causal, masked"):
        prepare_corpora(config, tmp_path)
