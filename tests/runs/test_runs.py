"""Runs of the training program on the tiny configuration: what it learns, changes and refuses."""

import json
import types

import pytest
from etils import epath

import train
from pipeline.loading.checkpoint import Checkpoints
from pipeline.steps import hosts
from pipeline.trainer.run_config import __file__ as KNOWN
from pipeline.trainer.run_config import get_config, save_config
from tests.processes import ROOT, Group, environment
from tests.runs.runs import assert_same_losses, audited, run, segment_losses, steps, summary, tiny


@pytest.mark.slow
def test_a_loss_scale_that_is_too_large_falls_while_training_goes_on(text, tmp_path):
    run(tiny(text, model__dtype="float16", optimizer__loss_scale=1e9), tmp_path)
    log = steps(tmp_path)
    scales = [line["loss_scale"] for line in log]
    skipped = [line["step"] for line in log if line["gradient_norm"] is None]
    assert skipped
    assert summary(tmp_path)["skipped_steps"] == len(skipped)
    assert all(scales[step + 1] == scales[step] / 2 for step in skipped if step + 1 < len(scales))
    assert summary(tmp_path)["eval_loss_last"] < summary(tmp_path)["eval_loss_first"]


@pytest.mark.slow
def test_microbatches_train_like_the_whole_batch(text, tmp_path):
    run(tiny(text, steps=10), tmp_path / "whole")
    assert "in 2 microbatches" in run(tiny(text, steps=10, microbatches=2), tmp_path / "split")
    assert_same_losses(tmp_path / "split", tmp_path / "whole")


@pytest.mark.slow
def test_a_profile_has_the_phases_of_a_step(text, tmp_path):
    run(tiny(text, steps=4), tmp_path, profile="1:2")
    (trace,) = (tmp_path / "profile").rglob("*.xplane.pb")
    for name in (b"plan", b"collate", b"transfer", b"train_step"):
        assert name in trace.read_bytes()


def test_the_learning_rate_rises_and_falls_over_updates(text):
    fields = {"accumulate": 4, "optimizer__decay_steps": 82}
    for warmup in (8, None):  # a tenth of the decay, which are 2 updates
        _, rate = train.make_optimizer(tiny(text, **fields, optimizer__warmup_steps=warmup))
        rates = [float(rate(update)) for update in (0, 1, 2, 21, 99)]
        assert rates == pytest.approx([2e-3, 3e-3, 4e-3, 2e-4, 2e-4])
        assert rate(20) > 2.1e-4  # the last 2 of 82 steps are in it


@pytest.mark.usefixtures("counter")
def test_a_change_needs_a_word_and_is_told_before_it_is_made(text, tmp_path, monkeypatch):
    run(tiny(text, steps=5), tmp_path)
    more = {"steps": 8, "batches__tokens_per_batch": 512}
    with pytest.raises(ValueError, match="tokens_per_batch was 1024 and is now 512") as refused:
        run(tiny(text, **more), tmp_path)
    change = '{"tokens_per_batch": 512}'
    assert f"change them from step 5 on with --change='{change}'" in str(refused.value)
    output = run(tiny(text, **more), tmp_path, change=change)
    told = output.index("changed from step 5 on: tokens_per_batch=512")
    assert told < output.index("resumed: step 5 of 8") < output.index("step 8/8")
    assert [line["bucket"] for line in steps(tmp_path)][4:6] == ["8x128", "4x128"]
    audited(tmp_path)
    # From then on the run goes on under its first config as well, and as it was changed.
    run(tiny(text, steps=9), tmp_path)
    assert steps(tmp_path)[-1]["bucket"] == "4x128"
    # New data joins the epoch that is half done.
    with pytest.raises(ValueError, match=r"config.added has nothing; each of more must be there"):
        run(tiny(text, steps=11), tmp_path, change='{"add": ["more"]}')
    monkeypatch.setenv("TINY_MORE", "1")
    output = run(tiny(text, steps=11), tmp_path, change='{"add": ["more"]}')
    assert "changed from step 9 on: add=more" in output
    assert "from step 9 on, with 32 new examples, " in output
    # It stays, without a word.
    run(tiny(text, steps=13), tmp_path)
    said = audited(tmp_path)
    assert "plan from step 9 on: examples=" in said
    assert "all 13 batches are those that were planned" in said


RAMP = ((4, {"tokens_per_batch": 2048}), (9, {"max_length": 256}))


@pytest.mark.slow
def test_planned_changes_are_compiled_before_step_0_and_survive_a_kill(text, tmp_path):
    """A ramp of the batch size, and then longer context."""
    config, save = {"steps": 16, "schedule": RAMP}, Checkpoints.save

    def lose_the_last(checkpoints, step, *items, **more):
        return step == 8 or save(checkpoints, step, *items, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hosts.StopSignals, "received", lambda self, step: step == 8)
        patch.setattr(Checkpoints, "save", lose_the_last)
        run(tiny(text, **config), tmp_path)
    assert Checkpoints(tmp_path / "checkpoints").latest == 5
    output, log = run(tiny(text, **config), tmp_path), steps(tmp_path)
    assert [line["step"] for line in log] == list(range(16))
    shapes = [tuple(map(int, line["bucket"].split("x"))) for line in log]
    assert {rows * length for rows, length in shapes[:4]} == {1024}
    assert {length for _, length in shapes[:9]} == {128}
    assert max(length for _, length in shapes[9:]) == 256
    assert summary(tmp_path)["compiles_after_start"] == 0, output
    assert log[-1]["loss"] < log[0]["loss"] - 1
    segment_losses(tmp_path)
    said = audited(tmp_path)
    assert "plan from step 9 on: buckets=" in said
    assert "all 16 batches are those that were planned" in said


ZIGZAG = {"mesh__data": 1, "mesh__context": 4, "context_order": "zigzag"}
REFUSED = {  # before the first of these is written
    "corpus": [
        ({"on_nonfinite": "ignore"}, "on_nonfinite is 'ignore'"),
        ({"keep": 0}, "config.keep is 0; it must be a whole number from 1 up"),
        ({"eval_every": 0}, "config.eval_every is 0; it must be a whole number from 1 up"),
        ({"skip_steps": ("a",)}, "a step of config.skip_steps is 'a'; it must be a whole number"),
        ({"skip_steps": (-1,)}, "a step of config.skip_steps is -1"),
        ({"optimizer__clip": 0.0}, "config.optimizer.clip is 0.0; gradients are scaled down"),
        ({"optimizer__learning_rate": -1.0}, "config.optimizer.learning_rate is -1.0"),
        ({"optimizer__final": -2.0}, "config.optimizer.final is -2.0; it must be at least 0"),
        ({"peak_flops": -1.0}, "config.peak_flops is -1.0; it must be at least 0"),
        ({"start_from": "/nope"}, "there is no checkpoint in /nope to take parameters from"),
        ({"tokenizer__model": "a.model"}, "tokenizer.kind is 'bytes', which has no model"),
        ({"mesh__data": -1, "mesh__fsdp": -1}, "and one may be -1"),
        ({"train__tfds": "lm1b"}, "give one of them"),
        ({"mesh__data": 3}, "does not fit 4 devices"),
        ({"context_order": "zig"}, "context_order is 'zig'; it must be one of contiguous, zigzag"),
        ({"schedule": ((3, {"token_per_batch": 1}),)}, "did you mean 'tokens_per_batch'?"),
    ],
    "metrics.jsonl": [
        ({"optimizer__warmup_steps": 30}, "warm-up must be shorter, or 0"),
        ({"model__attention": "foo"}, "attention is 'foo'"),
        ({"batches__packing": "bestfit"}, "packing is 'bestfit'; it must be one of"),
        ({"batches__overflow": "wrap"}, "overflow is 'wrap'; it must be one of"),
        ({"batches__tokens_per_batch": 0}, "tokens_per_batch"),
        ({"schedule": ((3, {"max_length": 0}),)}, "max_length"),
        ({"memory_budget": 1000}, "train_step needs"),
        (ZIGZAG | {"batches__max_length": 100, "batches__length_multiple": 4}, "length_multiple=8"),
    ],
}


@pytest.mark.parametrize(
    ("name", "fields", "sentence"),
    [(name, *each) for name, every in REFUSED.items() for each in every],
)
def test_bad_options_are_refused_before_anything_is_prepared_or_trained(
    text, tmp_path, name, fields, sentence
):
    with pytest.raises((ValueError, MemoryError)) as error:
        run(tiny(text, **fields), tmp_path)
    assert sentence in str(error.value)
    assert not (tmp_path / name).exists()


def test_flags_that_would_be_ignored_are_refused(text, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="profile_steps is '5'; it must be FIRST:LAST"):
        train.train(tiny(text), epath.Path(tmp_path), profile="5")
    assert not list(tmp_path.iterdir())
    flags = {"SCORES": "there", "MODE": "train", "WORKDIR": tmp_path}
    for name, value in flags.items():
        monkeypatch.setattr(train, name, types.SimpleNamespace(value=value))
    monkeypatch.setattr(train.config_flags, "get_config_filename", lambda _: "a.py")
    monkeypatch.setattr(train.flags, "FLAGS", {"config": None})
    with pytest.raises(ValueError, match="--scores needs --mode=score"):
        train.main()
    for name, value in {"MODE": "score", "CHANGE": "{}"}.items():
        monkeypatch.setattr(train, name, types.SimpleNamespace(value=value))
    with pytest.raises(ValueError, match=r"--change and .* need --mode=train"):
        train.main()


@pytest.mark.slow
def test_a_run_goes_on_with_the_length_divided_and_in_any_order(text, tmp_path):
    small = {"batches__row_multiple": 4, "optimizer__decay_steps": 12}
    run(tiny(text, **small, steps=12), tmp_path / "rows")
    context = {**small, "mesh__data": 1, "mesh__context": 4}
    run(tiny(text, **context, steps=8, context_order="zigzag"), tmp_path / "length")
    context["mesh__context"], context["mesh__data"] = 2, 2
    run(tiny(text, **context, steps=12, context_order="striped"), tmp_path / "length")
    assert_same_losses(tmp_path / "length", tmp_path / "rows", rtol=1e-4)


@pytest.fixture
def parse_flags(text, tmp_path_factory):
    """`parse_flags(*words)`: the exit code of train.py, and what it says or its config."""

    def parse(*words):
        command = ["tests/runs/parse_flags.py", *words]
        group = Group([command], tmp_path_factory.mktemp("flags"), environment(TINY_TEXT=str(text)))
        return group.wait()[0], group.outputs()[0]

    return parse


WRONG_FLAGS = {
    "--config.stepz=3": 'Did you mean "steps" instead of "stepz"?',
    "--config.model.widht=3": 'Did you mean "width" instead of "widht"?',
    "--config.foo=3": "the config has no field 'foo'. The file of the config shows its fields",
    "--config.batches.token_per_batch=3": (
        "has no field 'token_per_batch'. Did you mean \"tokens_per_batch\" instead of"
    ),
    "more.jsonl": "'more.jsonl' is not a flag; write --NAME=VALUE",
    "--config=nowhere.py": "No such file or directory: 'nowhere.py'",
    "--confg=tests/runs/tiny_config.py": "Unknown command line flag 'confg'",
    "--config.steps=many": "many",
}


@pytest.mark.parametrize("word", WRONG_FLAGS)
def test_a_wrong_flag_is_a_sentence_and_exit_code_2(parse_flags, word):
    config = [] if word.startswith("--config=") else ["--config=tests/runs/tiny_config.py"]
    code, said = parse_flags(*config, word)
    assert code == 2
    assert said.startswith("train.py: ")
    assert WRONG_FLAGS[word] in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_a_run_through_a_cache_has_the_same_losses_and_tells_what_it_read(text, tmp_path):
    one = {"steps": 6}
    run(tiny(text, **one), tmp_path / "plain")
    config = tiny(text, **one, cache__directory=str(tmp_path / "cache"))
    run(config, tmp_path / "cached")
    assert sorted(path.name for path in (tmp_path / "cache").glob("*/*.arrow"))
    ours, theirs = (steps(tmp_path / name) for name in ("cached", "plain"))
    for our, their in zip(ours, theirs, strict=True):
        assert our.items() >= their.items()
        assert 0 <= our["cache_hits"] <= 1
    assert ours[-1]["fetched_bytes"] + ours[-1]["ranged_bytes"] > 0
    config.steps, config.cache.bytes = 8, 1 << 30  # may change
    run(config, tmp_path / "cached")
    assert len(steps(tmp_path / "cached")) == 8


@pytest.mark.usefixtures("counter")
def test_checkpoints_are_read_after_the_lock_is_held_on_all_hosts(text, tmp_path, monkeypatch):
    order, first = [], hosts.main_process_first

    def main_process_first(what, work):
        order.append(what)
        return first(what, work)

    def open_checkpoints(*arguments, **options):
        order.append("checkpoints")
        return Checkpoints(*arguments, **options)

    monkeypatch.setattr(hosts, "main_process_first", main_process_first)
    monkeypatch.setattr("pipeline.trainer.run.Checkpoints", open_checkpoints)
    run(tiny(text, steps=4), tmp_path)
    assert order[:2] == ["locking the work directory", "checkpoints"]


@pytest.mark.usefixtures("counter")
def test_a_run_knows_its_config_and_flags_change_it(text, tmp_path, parse_flags):
    fields = {"steps": 4, "model__width": 64, "seed": 3, "mesh__data": 4}
    file, schedule = "tests/runs/tiny_config.py", ((0, {"seed": 5}), (2, {"max_length": 64}))
    config = tiny(text, **fields, schedule=schedule)
    run(config, tmp_path / "first", file=file)
    known = get_config(str(tmp_path / "first"))
    fields["seed"] = 5  # that of the run, from step 0 on
    expected = tiny(text, **fields, optimizer__decay_steps=4, schedule=schedule)
    assert json.loads(known.to_json()) == json.loads(expected.to_json())
    with pytest.raises(ValueError, match=r"config\.model\.width was 64 and is now 32"):
        run(tiny(text, **fields | {"model__width": 32}), tmp_path / "first")
    more = {"task__keep_ids": (1, 2), "template__weights": {"user": 0.5}}
    save_config(epath.Path(tmp_path), tiny(text, **more), f"{file}:hosts")
    assert json.loads((tmp_path / "run_config.json").read_text())["file"] == f"{ROOT / file}:hosts"
    assert get_config(str(tmp_path)).to_json() == tiny(text, **more).to_json()
    flags = [f"--workdir={tmp_path / 'first'}", "--config.steps=7", "--config.model.num_heads=4"]
    code, said = parse_flags(*flags)
    assert code == 0, said
    assert "steps: 7" in said
    assert "width: 64" in said
    assert "num_heads: 4" in said
    assert "width: 32" in parse_flags(f"--config={file}", *flags)[1]
    # It keeps the file also when it goes on without being given one.
    known = get_config(str(tmp_path / "first"))
    known.steps = 5
    run(known, tmp_path / "first", file=f"{KNOWN}:{tmp_path / 'first'}")
    assert get_config(str(tmp_path / "first")).steps == 5
    # A directory that has no run is no reason for one of the default config.
    code, said = parse_flags("--workdir=nowhere")
    assert (code, said.endswith("no run in nowhere; begin one with --config=FILE\n")) == (2, True)
    kept = tmp_path / "first" / "run_config.json"
    kept.write_text(kept.read_text().replace("tiny_config.py", "gone.py"))
    assert "No such file or directory: " in parse_flags(flags[0])[1]
    kept.write_text("{}")
    assert parse_flags(flags[0])[1].endswith("is damaged: KeyError('fields'); give --config\n")


def test_a_coordinator_without_a_port_is_refused():
    with pytest.raises(ValueError, match="coordinator is 'nonsense'; it must be HOST:PORT"):
        hosts.connect("nonsense", 1, 0, wait=1)
