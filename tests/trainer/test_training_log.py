"""What train.py records of a run beside its lines, and what it compares."""

import sys
from unittest import mock

import pytest
from etils import epath

import pipeline
from configs import quickstart
from pipeline.history import write_history
from pipeline.text.sources import Records
from pipeline.text.tokenizers import Bytes
from trainer import stats, tensorboard
from trainer.config import require_same
from trainer.evaluation import evaluate
from trainer.parameters import require_tokenizer, restore_parameters
from trainer.stats import Clock, RunStats
from trainer.tensorboard import TensorBoard


def test_a_config_under_which_a_run_cannot_go_on_names_every_field():
    def of(config):
        return {"config": config, "schedule": {}, "record": {}}

    then = {"a": 1, "b": {"c": 2}, "e": "", "steps": 3}
    now = {"b": {"c": 4, "d": 5}, "e": "gsm", "steps": 9}
    with pytest.raises(ValueError) as error:
        require_same(of(then), now)
    for part in (
        "config.a was 1 and is now not there",
        "config.b.c was 2 and is now 4",
        "config.b.d was not there and is now 5",
        "config.e was '' and is now 'gsm'",
    ):
        assert part in str(error.value)
    require_same(of(then), {"a": None, "b": {"c": 2}, "e": "", "steps": 9})
    decay = {"optimizer": {"decay_steps": 2}}
    require_same(of(decay), {"optimizer": {"decay_steps": 3}})
    may = "steps mesh microbatches memory_budget peak_flops eval_every checkpoint_every keep"
    may = [*may.split(), "skip_steps", "on_nonfinite"]  # docs/changing_a_run.md
    require_same(of(dict.fromkeys(may, 1)), dict.fromkeys(may, 2))
    assert require_same(of({"a": [1]}), {"a": None}) == {"a": (1,)}  # such as task.keep_ids
    with pytest.raises(ValueError, match="no schedule and no record: another version"):
        require_same({"config": then, "stages": []}, then)


def test_the_summary_says_how_fast_a_run_was():
    record = RunStats(tokens=900, positions=1000)
    record.seconds = {"train": 2.5, "wait": 0.5, "compile": 6.0, "lost": 1.0}
    record.flops, record.capacity = 6e9, 12e9
    values = record.summary(12, {})
    assert values["tokens_per_second"] == 300
    assert values["padding"] == pytest.approx(0.1)
    assert values["flop_utilisation"] == 0.5
    assert values["goodput"] == 0.25
    assert values["waiting"] == pytest.approx(1 / 6)
    assert RunStats().summary(0, {})["flop_utilisation"] is None
    assert list(map(stats.peak_of, ("A100-SXM4-80GB", "H100 PCIe"))) == [312e12, 756e12]


def test_blocks_within_blocks_are_counted_once(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(stats.time, "perf_counter", lambda: now[0])
    clock = Clock({"train": 5.0})
    with clock("train"):
        now[0] = 2.0
        with clock("wait"):
            now[0] = 5.0
            assert clock.seconds() == {"train": 7.0, "other": 0.0, "wait": 3.0}
        now[0] = 6.0
    now[0] = 10.0
    assert clock.seconds() == {"train": 8.0, "other": 4.0, "wait": 3.0}


def test_tensorboard_keeps_the_evaluation_at_the_step_that_is_gone_on_from(tmp_path, monkeypatch):
    writer = mock.Mock()
    monkeypatch.setattr("tensorboardX.SummaryWriter", writer)
    for step in (0, 4):
        with TensorBoard(epath.Path(tmp_path), step) as board:
            board(step, {"loss": 1.0})
    assert [call.kwargs["purge_step"] for call in writer.call_args_list] == [1, 5]
    assert writer().add_scalar.call_args_list == [
        mock.call("loss", 1.0, 0),
        mock.call("loss", 1.0, 4),
    ]


def test_without_appending_each_save_writes_the_new_events(tmp_path, monkeypatch):
    monkeypatch.setattr(tensorboard, "is_local", lambda path: False)
    there = tmp_path / "there"
    there.mkdir()  # in object storage, it is there with its first object
    with TensorBoard(epath.Path(there), 0) as board:
        sizes = [0]
        for step in range(3):
            board(step, {"loss": 1.0})
            assert len([*there.iterdir()]) == step
            board.save()
            files = sorted(there.iterdir())
            assert int(files[-1].suffix[1:]) == sizes[-1]  # where its events begin
            sizes.append(sum(path.stat().st_size for path in files))
        board.save()
    assert sorted(there.iterdir()) == files


def test_a_run_needs_no_tensorboard(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    caplog.set_level("INFO", "trainer")
    with TensorBoard(epath.Path(tmp_path / "board"), 0) as board:
        board(0, {"margin": 1.5})
        board.save()
    assert not (tmp_path / "board").exists()
    assert caplog.messages == ["tensorboardX is not installed, so there are no TensorBoard events"]


def test_a_held_out_corpus_without_a_loss_is_refused(tmp_path):
    corpus = pipeline.Corpus.from_arrays({"tokens": [[1, 2, 3]], "weights": [[0, 0, 0]]}, tmp_path)
    batches = pipeline.Batches(corpus, pipeline.Plan(corpus.covering(), [pipeline.Bucket(1, 8)]))
    config = quickstart.get_config()
    with pytest.raises(ValueError, match="no held-out example has a position that carries"):
        evaluate(config, batches, lambda _, batch: (0.0, batch["loss_weights"].sum()), None)


def test_parameters_for_the_ids_of_another_tokenizer_are_refused(tmp_path):
    source = Records(["some text", "and more"])
    then, now = (
        pipeline.prepare(source, tokenizer, tmp_path / tokenizer.fingerprint, progress=False)
        for tokenizer in (Bytes(), Bytes(begin=False))
    )
    write_history(tmp_path, then, pipeline.Plan(then, [pipeline.Bucket(2, 16)]))
    require_tokenizer(epath.Path(tmp_path), then)
    require_tokenizer(epath.Path(tmp_path / "none"), now)  # of a loop that stores no plan
    with pytest.raises(ValueError, match="the same ids stand for other text"):
        restore_parameters(epath.Path(tmp_path), now, like=None)
