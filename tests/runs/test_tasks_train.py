"""The training program on each task: it learns, and goes on where it stopped."""

import json
import runpy

import absl.flags
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tensorflow_datasets
from etils import epath
from ml_collections import ConfigDict, config_flags

import train
import trainer
from configs import chat, masked, python_data, quickstart, vision
from configs import tfds as tfds_config
from models.config import TransformerConfig
from models.flops import step_flops
from pipeline import Batches, Bucket, Corpora, Corpus, Decoded, Examples, Pairs, Plan
from pipeline.cli.commands import main
from pipeline.corpus import FillInTheMiddle, Masked
from pipeline.history import read_history
from pipeline.text.config import open_template
from pipeline.text.templates import Preference
from pipeline.text.tokenizers import Bytes
from tests.corpus.token_writers import write_megatron
from tests.runs.runs import audited, run, segment_losses, steps, summary, tiny
from trainer.corpora import prepare_corpora


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """120 records, each a short chat, a text, a pair of sentences, and two answers in a chat."""
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    words, lines = ["pack", "the", "rows"], []
    for number in range(120):
        said = " ".join(words[: 1 + number % 3])
        turns = [("user", f"say {number % 7}"), ("assistant", said)]
        messages = [{"role": role, "content": content} for role, content in turns]
        pair = {"de": "Paar " * (1 + number % 17), "en": "pairs " * (1 + number % 9)}
        worse = [*messages[:1], {"role": "assistant", "content": said.upper()}]
        pair |= {"chosen": messages, "rejected": worse}
        lines.append(json.dumps({"messages": messages, "text": f"{said} " * 3} | pair) + "\n")
    path.write_text("".join(lines))
    return path


KINDS = {
    "chat": Corpus,
    "masked": Masked,
    "middle": FillInTheMiddle,
    "pairs": Pairs,
}


@pytest.mark.slow
@pytest.mark.parametrize("task", KINDS)
def test_a_run_of_each_task_learns_and_goes_on_where_it_stopped(chats, task, tmp_path):
    run(tiny(chats, task), tmp_path)
    values, log = summary(tmp_path), steps(tmp_path)
    assert values["eval_loss_last"] < values["eval_loss_first"]
    assert values["compiles_after_start"] == 0
    assert len({line["bucket"] for line in log}) == (2 if task == "pairs" else 1)
    assert "resumed: step 12 of 24" in run(tiny(chats, task, steps=24), tmp_path)
    assert steps(tmp_path)[:12] == log
    corpus, plan = read_history(epath.Path(tmp_path))
    assert isinstance(corpus, KINDS[task])
    digests = [plan.batch(step).digest for step in range(24)]
    assert [line["batch"] for line in steps(tmp_path)] == digests
    assert plan.batch(23).epoch > 0
    segment_losses(tmp_path)
    assert main(["why", str(tmp_path), "--worst", "2"]) == 0


@pytest.mark.usefixtures("counter")
def test_chats_are_learnt_and_a_run_may_begin_with_the_parameters_of_another(chats, tmp_path):
    run(tiny(chats, "chat"), tmp_path / "one")
    one = summary(tmp_path / "one")
    assert (one["eval_loss_first"], one["eval_loss_last"]) == (0, 12)
    found = segment_losses(tmp_path / "one")  # of the assistant's words alone
    corpus, _ = read_history(epath.Path(tmp_path / "one"))
    assert (found.weight < corpus.lengths[found.example]).all()
    output = run(tiny(chats, "chat", start_from=str(tmp_path / "one")), tmp_path / "two")
    assert f"parameters are those of step 12 of {tmp_path / 'one'}" in output
    assert summary(tmp_path / "two")["eval_loss_first"] == one["eval_loss_last"]
    (tmp_path / "one").rename(tmp_path / "moved")  # the other run goes on without it
    two = tiny(chats, "chat", start_from=str(tmp_path / "one"), steps=16)
    assert "resumed: step 12 of 16" in run(two, tmp_path / "two")


@pytest.mark.parametrize("other", [optax.adam, optax.lion])
@pytest.mark.usefixtures("counter")
def test_a_run_begins_with_the_parameters_of_one_with_another_optimizer(
    chats, tmp_path, monkeypatch, other
):
    with monkeypatch.context() as patch:
        patch.setattr(
            train, "make_optimizer", lambda config: (other(-1.0), optax.constant_schedule(1.0))
        )
        run(tiny(chats), tmp_path / "one")
    run(tiny(chats, steps=4, start_from=str(tmp_path / "one")), tmp_path / "two")
    one, two = summary(tmp_path / "one"), summary(tmp_path / "two")
    assert two["eval_loss_first"] == one["eval_loss_last"] != one["eval_loss_first"]
    with pytest.raises(ValueError, match="optimizer"):  # a resumed run needs that of before
        run(tiny(chats, steps=40), tmp_path / "one")


@pytest.mark.usefixtures("counter")
def test_a_run_on_token_files_of_others_has_their_texts(chats, tmp_path):
    texts = [json.loads(line)["text"] for line in chats.read_text().splitlines()]
    flat, counts = Bytes().encode_batch(texts)
    write_megatron(tmp_path / "a", [[e] for e in np.split(flat, np.cumsum(counts)[:-1])], "uint16")
    fields = {"format": "flat", "files": f"{tmp_path}/a.bin"}
    fields |= {"options__dtype": "uint16", "options__end": 2}
    fields = {f"train__{name}": value for name, value in fields.items()}
    config = tiny(chats, hold_out=0.2, **fields, steps=16)
    run(config, tmp_path / "run")
    assert "each once" in audited(tmp_path / "run")
    corpus, _ = read_history(tmp_path / "run")
    assert 0 < len(corpus) < len(texts)
    assert corpus.tokenizer.decode(corpus[0]["targets"]) in texts
    trainer.score(config, epath.Path(tmp_path / "run"), train.make_model)
    segment_losses(tmp_path / "run")


def test_a_config_of_preferences_prepares_groups_of_two_answers(chats, tmp_path):
    config = tiny(chats, "chat")
    sides = {side: {"kind": "chat", "messages": side} for side in ("chosen", "rejected")}
    config.template = ConfigDict({"kind": "preference", **sides})
    corpus, held_out = prepare_corpora(config, tmp_path)
    assert len(corpus) > len(held_out) > 0
    assert (corpus.trees[:, 1] == 2).all()


@pytest.mark.slow
def test_the_configurations_of_tasks_prepare_what_they_say(tmp_path, monkeypatch):
    for name, config in (("chat", chat.get_config()), ("masked", masked.get_config())):
        config.train.split, config.hold_out = "validation", 0.2
        config.tokenizer.vocab_size = 600
        corpus, held_out = prepare_corpora(config, tmp_path / name)
        assert len(corpus) > len(held_out) > 0
        fields = corpus[0] if name == "chat" else corpus.read([0], [0], corpus.lengths[:1])
        assert list(fields) == ["inputs", "targets", "loss_weights"]
        assert 0 < fields["loss_weights"].sum() < len(fields["loss_weights"])


@pytest.mark.usefixtures("counter")
def test_the_config_of_tfds_makes_its_data_set_once_and_trains_on_it(text, tmp_path, monkeypatch):
    files = python_data.library_files()[::40]
    monkeypatch.setattr(python_data, "library_files", lambda: files)
    monkeypatch.setattr(tensorflow_datasets.core.constants, "DATA_DIR", str(tmp_path / "tfds"))
    config = tiny(text, steps=4, eval_every=4, checkpoint_every=4)
    made = tfds_config.get_config()
    config.train, config.eval = made.train, made.eval
    run(config, tmp_path / "run")
    audited(tmp_path / "run")
    corpus, _ = read_history(epath.Path(tmp_path / "run"))
    records = python_data.Functions("train")
    assert 0.9 < len(corpus) / len(records) < 1
    assert corpus.decode(0) in {record["text"] for record in records}
    # Once more: the data set is there.
    monkeypatch.setattr(python_data, "library_files", None)
    again = runpy.run_path(tfds_config.__file__)["get_config"]()
    assert again.train == made.train


def test_the_work_of_pairs_is_counted_on_both_sides():
    sizes = {"num_layers": 2, "width": 8, "num_heads": 2, "num_kv_heads": 1, "mlp_width": 16}
    config = TransformerConfig(vocab_size=10, **sizes)
    vocabulary = 6 * 5 * 8 * 10
    decoder = step_flops(config, np.array([[5]])) - vocabulary
    queries = 6 * 2 * 5 * 8 * (8 + 8)  # and outputs
    assert step_flops(config, np.array([[0, 5]])) == decoder + vocabulary + queries
    # An encoder's scores are not halved, and its output is read by the decoder's keys and values.
    keys = 6 * 2 * 5 * 8 * (4 + 4)  # and values; both have half as many heads
    assert step_flops(config, np.array([[5, 0]])) == decoder + keys + 6 * 25 * 8 * 2


def test_the_work_of_groups_counts_what_columns_see():
    groups = [([1, 2, 3], [[4, 5], [6, 7, 8]]), ([1], [[3], [4]])]
    corpus = Corpora({"groups": Examples.from_groups(groups), "text": Examples([[1] * 6])})
    sizes = {"num_layers": 2, "width": 8, "num_heads": 2, "num_kv_heads": 2, "mlp_width": 16}
    config = quickstart.get_config()
    config.model.update(sizes)
    corpus.vocab_size = 10
    flops = train.make_model(config, corpus).flops
    planned = Plan(corpus, [Bucket(1, 32)], shuffle=False).batch(0)
    until = Batches(corpus, Plan(corpus, [Bucket(1, 32)], shuffle=False))[0]["visible_until"]
    seen = (np.maximum(until - np.arange(32), 0) * (until > 0)).sum()
    columns = np.count_nonzero(until)
    assert columns == planned.num_tokens
    shape = TransformerConfig(vocab_size=10, **sizes)
    alone = step_flops(shape, np.ones((columns, 1), int))  # each sees itself
    assert flops(planned) == alone + 6 * (2 * seen - 2 * columns) * 8 * 2
    assert flops(planned) < step_flops(shape, planned.segments[:, 3:])


def few_pictures(number_of_steps=12):
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
    run(few_pictures(), tmp_path / "cut")
    run(few_pictures(18), tmp_path / "cut")
    run(few_pictures(18), tmp_path / "whole")
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
    config = few_pictures()
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


def sees_what_follows(config, workdir):
    """Whether the loss at the first position of a row depends on the input at the last one."""
    corpus, _ = prepare_corpora(config, workdir)
    init_params, loss, _ = train.make_model(config, corpus)
    row = jnp.arange(8)[None]
    batch = {"inputs": row + 10, "targets": row + 11, "loss_weights": (row == 0).astype(float)}
    batch |= {"inputs_segment_ids": row * 0 + 1, "inputs_positions": row}
    params, total = jax.jit(init_params)(jax.random.key(0)), jax.jit(lambda *a: loss(*a).total)
    other = batch | {"inputs": batch["inputs"].at[0, -1].set(50)}
    return float(total(params, batch)) != float(total(params, other))


@pytest.mark.parametrize(("kind", "task"), [("", "causal"), ("", "masked"), ("mixture", "masked")])
def test_every_masked_corpus_gets_an_encoder_alone_and_in_a_mixture(chats, tmp_path, kind, task):
    architecture = "encoder" if task == "masked" else "decoder"
    config = tiny(chats, kind, task__kind=task, architecture=architecture)
    assert sees_what_follows(config, epath.Path(tmp_path)) == (task == "masked")
    config.architecture = "decoder" if task == "masked" else "encoder"
    with pytest.raises(ValueError, match=f"task.kind is '{task}' and config.architecture is "):
        sees_what_follows(config, epath.Path(tmp_path))
    config.architecture = "encoder_decoder"
    with pytest.raises(ValueError, match="takes the sides inputs, targets, and the corpus has inp"):
        sees_what_follows(config, epath.Path(tmp_path))


def changed(changes):
    """The quickstart's config with other values, named as flags name them."""
    config = quickstart.get_config()
    config.tokenizer.kind = "bytes"
    with config.ignore_type():
        config.update_from_flattened_dict(changes)
    return config


PAIR = ("text", "name")
PAIRS = {"train.field": PAIR, "eval.field": PAIR}
WRONG = [
    ({"template.kind": "poem"}, "template.kind is 'poem'; it must be one of '', answer, chat"),
    ({"template.kind": "answer", "template.prompt": "{q}"}, "'answer' needs 'answer', the"),
    ({"task.kind": "poem"}, "task.kind is 'poem'; it must be one of causal, masked"),
    ({"task.kind": "masked", "task.mode": "psm"}, "task.kind 'masked' has no option 'mode'"),
    ({"tokenizer.kind": "words"}, "tokenizer.kind is 'words'; it must be one of bytes, sent"),
    ({"tokenizer.kind": "huggingface"}, "tokenizer.model is empty; give the path of a token"),
    ({"train.source": ""}, "config.train has source='' and files=''; give one of them"),
    ({"train.files": "a.txt"}, "has source='configs.*' and files='a.txt'; give one of them"),
    ({"eval.source": "", "eval.files": "none.txt"}, "there is no file none.txt"),
    ({"eval.source": "configs.no_such:A"}, "config.eval.source is 'configs.no_such:A', which c"),
    ({"eval.source": "configs.python_data:no"}, "'configs.python_data:no', which cannot be impor"),
    (PAIRS | {"task.kind": "masked"}, r"config.train.field is \('text', 'name'\); it must be one"),
    (PAIRS | {"tokenizer.begin": False}, "does not mark where texts begin, and a decoder"),
    ({"train.field": PAIR}, "are pairs, which have two fields, and others have one; give each"),
    ({"hold_out": 2.0}, "config.hold_out is 2.0; it must be a number above 0"),
]


@pytest.mark.parametrize(("changes", "sentence"), WRONG)
def test_wrong_fields_are_refused_before_anything_is_prepared(tmp_path, changes, sentence):
    with pytest.raises((ValueError, TypeError, FileNotFoundError), match=sentence):
        prepare_corpora(changed(changes), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["sentencepiece", "bytes"])
def test_records_without_their_text_name_the_flag_of_their_field(tmp_path, kind):
    """As in README's command for text of one's own."""
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps({"content": f"a line {n}"}) + "\n" for n in range(80)))
    changes = {"train.source": "", "train.files": str(path), "hold_out": 0.05}
    config = changed(changes | {"tokenizer.kind": kind})
    sentence = r"mine.jsonl, .*no field 'text' \(its fields: content\).* with --config.train.field="
    with pytest.raises(ValueError, match=sentence):
        prepare_corpora(config, tmp_path / "corpus")
    config.train.field = "content"
    config.tokenizer.vocab_size = 280
    assert prepare_corpora(config, tmp_path / "corpus")[0].num_tokens


def test_every_field_of_a_template_is_a_flag():
    values = absl.flags.FlagValues()
    argv = ["train.py", "--config=configs/quickstart.py", "--config.template.kind=preference"]
    argv += ["--config.template.chosen='{a}'", "--config.template.rejected=('{b}',)"]
    handle = config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=argv)
    values(argv)
    due = Preference(chosen="{a}", rejected=("{b}",))
    assert open_template(handle.value.template.to_dict()) == due


def test_a_backslash_and_an_n_are_no_line_break():
    fields = {"kind": "answer", "prompt": r"Q: {q}\nA: ", "answer": "{a}"}
    with pytest.raises(ValueError, match=r"template.prompt is .* in a shell, write \$'…\\n…'"):
        open_template(fields)
    assert open_template(fields | {"prompt": "{q}\nA: "}).prompt == "{q}\nA: "


def test_records_with_one_key_are_held_out_together(tmp_path):
    lines = [{"text": f"turn {n}", "talk": n // 4} for n in range(80)]
    path = tmp_path / "talks.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    changes = {"train.source": "", "train.files": str(path), "hold_out_by": "talk"}
    train, held_out = prepare_corpora(changed(changes | {"hold_out": 0.3}), tmp_path / "a")
    talks = [{number // 4 for number in view.numbers.tolist()} for view in (train, held_out)]
    assert not talks[0] & talks[1]
    assert len(held_out) == 4 * len(talks[1])
    with pytest.raises(ValueError, match=r"hold_out_by is 'talk', and config.hold_out is None"):
        prepare_corpora(changed(changes), tmp_path / "b")


def numbered(split):
    """Records that a config names as a source."""
    return [{"text": f"{split} {number}", "q": f"{number}?", "a": "Yes."} for number in range(9)]


def test_each_source_of_a_mixture_may_have_a_template_of_its_own(tmp_path):
    config = changed({})
    config.eval.update(source="tests.runs.test_tasks_train:numbered", split="validation")
    library = ConfigDict({**config.eval, "split": "train"})
    answers = ConfigDict(
        {**library, "template": {"kind": "answer", "prompt": "{q}", "answer": "{a}"}}
    )
    config.sources = ConfigDict({"plain": library, "answers": answers})
    config.mixture = ConfigDict({"weights": ((0, {"plain": 1, "answers": 1}),)})
    del config.train
    joined, held_out = prepare_corpora(config, tmp_path)
    plain, answers = joined.corpora["plain"], joined.corpora["answers"]
    assert plain.tokenizer.decode(plain[0]["inputs"]) == "train 0"
    assert answers.tokenizer.decode(answers[0]["inputs"]) == "0?Yes."
    assert "loss_weights" not in plain[0]
    assert answers[0]["loss_weights"].tolist() == [0.0] * 2 + [1.0] * 5
    assert held_out.tokenizer.decode(held_out[0]["inputs"]) == "validation 0"
