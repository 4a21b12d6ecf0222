import dataclasses
import datetime
import json
import re

import numpy as np
import pytest

import pipeline.report
from pipeline import Batches, Bucket, Corpus, Plan
from pipeline.report import (
    Dataset,
    Options,
    format_page,
    format_summary,
    format_text,
    from_corpus,
    from_run,
    measure,
    measure_epoch,
    read_run,
)
from pipeline.report.figures import measure_side
from pipeline.report.findings import find_ours, findings, tabulate_strategies
from pipeline.report.run import WORDS
from pipeline.report.strategies import compare_plans
from trainer.stats import RunStats


@pytest.fixture(scope="module")
def options():
    """Of a narrow model: attention weighs so much that several buckets are worth it."""
    planning = {"tokens_per_batch": 512, "max_length": 64, "length_multiple": 8, "row_multiple": 4}
    return Options(planning | {"width": 4})


@pytest.fixture(scope="module")
def figures(corpus, options):
    """What the report measures of the corpus with these options."""
    return measure(from_corpus(corpus, "the corpus"), options)


class Counted:
    """Everything that the report says of an epoch, counted over the arrays of its batches."""

    def __init__(self, corpus, plan):
        self.shapes, self.tokens, self.squares = [], [], 0
        pieces = np.zeros(len(corpus), np.int64)
        for step in range(plan.num_batches()):
            batch = Batches(corpus, plan)[step]
            ids = batch["inputs_segment_ids"]
            self.shapes.append(ids.shape)
            self.tokens.append(int(batch["loss_weights"].sum()))
            sizes = np.concatenate([np.bincount(row)[1:] for row in ids])
            self.squares += int((sizes.astype(np.int64) ** 2).sum())
            pieces += np.bincount(plan.batch(step).segments[:, 1], minlength=len(corpus))
        self.cut = int(np.count_nonzero(pieces > 1))
        self.positions = sum(rows * length for rows, length in self.shapes)
        self.scores = sum(rows * length**2 for rows, length in self.shapes)


def test_every_figure_of_the_plan_is_a_count_over_the_real_batches(figures, corpus, options):
    plan = options.plan(corpus)
    seen, real = figures.plan, Counted(corpus, plan)
    assert (seen.fingerprint, seen.printed) == (plan.fingerprint, str(plan))
    assert seen.batches == len(real.shapes)
    assert seen.tokens == sum(real.tokens) == corpus.num_tokens
    assert seen.padding == pytest.approx(1 - sum(real.tokens) / real.positions)
    overlong = np.count_nonzero(np.asarray(corpus.lengths) > 64)
    assert (seen.losses["overlong"], seen.losses["lost"]) == (overlong, 0)
    assert [bucket["bucket"] for bucket in seen.buckets] == [b.as_json for b in plan.buckets]
    for bucket in seen.buckets:
        rows, length = bucket["bucket"]
        here = [step for step, shape in enumerate(real.shapes) if shape == (rows, length)]
        assert bucket["batches"] == len(here)
        if here:
            tokens = sum(real.tokens[step] for step in here)
            assert bucket["fill"] == pytest.approx(tokens / (len(here) * rows * length))


@pytest.mark.parametrize("packing", ["best_fit", "none", "fill"])
def test_every_figure_of_lockstep_is_a_count_over_the_real_batches(
    corpus, options, packing, monkeypatch
):
    monkeypatch.setattr("pipeline.report.strategies.BUCKETS", (1, 3))
    options = options.replace(packing=packing)
    own = options.plan(corpus)
    ours = compare_plans(corpus.lengths, options, own, lambda text: None)
    assert {way.packing for way in ours} == {"best_fit", "none", packing}
    assert [bucket.as_json for bucket in own.buckets] in [
        way.buckets for way in ours if way.packing == packing
    ]
    for seen in ours:
        buckets = tuple(Bucket(*bucket) for bucket in seen.buckets)
        real = Counted(corpus, options.replace(packing=seen.packing).plan(corpus, buckets))
        tokens = sum(real.tokens)
        assert seen.padding == pytest.approx(1 - tokens / real.positions)
        assert seen.batches == len(real.shapes)
        assert seen.shapes == len(set(real.shapes))
        for kind, scores in (("dense", real.scores), ("segment", real.squares)):
            cost = real.positions + scores / (6 * options["width"])
            assert seen.work[kind] == pytest.approx(cost / tokens)
        # Figures count a part of an overlong document that is cut to fill rows once more.
        assert real.cut <= seen.cut <= real.cut * (1.1 if seen.packing == "fill" else 1)
    numbers = [len(way.buckets) for way in ours if way.packing == "best_fit"]
    assert numbers == sorted(set(numbers))


def test_buckets_that_are_given_are_compared_with_fitted_ones(options):
    buckets = (Bucket(3, 50), Bucket(1, 100))
    lengths = np.random.default_rng(0).integers(1, 90, 300)
    seen = measure(Dataset("lengths", lengths), options.replace(buckets=buckets))
    ours = find_ours(seen)
    assert ours.about == "3x50, 1x100"
    assert ours.padding == pytest.approx(Plan(lengths, buckets).padding)
    names = [way.name for way in seen.strategies]
    assert names.count("Lockstep, 2 buckets") == names.count("Lockstep, 1 bucket") == 1


def test_the_statistics_of_a_few_examples(tmp_path):
    examples = [[1, 2, 2], [7], [3] * 5, [1, 2, 9, 9, 9, 9, 9, 9, 9, 9, 9]]
    corpus = Corpus.from_arrays(map(np.array, examples), tmp_path / "c", vocab_size=12)
    seen = measure_side(from_corpus(corpus, "few"), "corpus", 4)  # lengths 2, 0, 4, 10
    assert (seen.examples, seen.tokens, seen.empty, seen.overlong) == (4, 16, 1, 1)
    assert (seen.longest, seen.mean) == (10, 16 / 3)
    assert (seen.percentiles["50"], seen.percentiles["99"]) == (4, 10)
    assert sum(seen.columns["examples"]) == 3
    assert sum(seen.columns["tokens"]) == 16
    assert seen.edges[-1] > 10
    four = seen.edges.index(4)
    assert (seen.columns["examples"][four], seen.columns["tokens"][four]) == (1, 4)


def test_only_the_first_batches_of_a_long_epoch_are_walked(monkeypatch):
    walked, batch = [], Plan.batch
    monkeypatch.setattr(Plan, "batch", lambda plan, step: walked.append(step) or batch(plan, step))
    monkeypatch.setattr(pipeline.report.figures, "MOST_BATCHES", 3)
    assert measure_epoch(Plan(np.full(100, 10), [Bucket(2, 20)])).batches == 25
    assert walked == [0, 1, 2]


def html(figures):
    command = "lockstep report 'the corpus' --html page.html"
    return format_page(figures, command=command, date=datetime.date(2026, 1, 2))


def test_what_overflows_is_told():
    lengths = np.array([10, 20, 30, 0])
    for overflow, said in (
        ("split", "split: 2 examples longer than 16, 0 positions lost"),
        ("truncate", "truncated: 2 examples longer than 16, 18 positions lost"),
        ("drop", "dropped: 2 examples longer than 16, 50 positions lost"),
    ):
        options = {"tokens_per_batch": 64, "max_length": 16, "length_multiple": 16}
        seen = measure(Dataset("all", lengths), Options({**options, "overflow": overflow}))
        for text in (said, "left out: 1 example with nothing to train on"):
            assert text in format_text(seen)
            assert text in html(seen)


def test_in_pairs_targets_also_attend_to_inputs():
    options = Options({"buckets": [Bucket(2, (8, 6))], "width": 1})
    ours = find_ours(measure(Dataset("pairs", np.array([[4, 2]] * 8)), options))
    scores = {"dense": 4 * (8 * 8 + 8 * 6 + 6 * 6), "segment": 8 * (4 * 4 + 4 * 2 + 2 * 2)}
    assert ours.work == pytest.approx({kind: (56 + n / 6) / 48 for kind, n in scores.items()})


def test_pairs_are_compared_with_sorted_batches_and_a_budget_of_tokens(monkeypatch):
    monkeypatch.setattr("pipeline.report.strategies.BUCKETS", (1,))  # fitting more takes long
    inputs = np.random.default_rng(0).lognormal(3, 0.5, 500).astype(int) + 1
    pairs = Dataset("pairs", np.stack([inputs, inputs * 9 // 10 + 1], axis=1))
    seen = measure(pairs, Options({"tokens_per_batch": 4096}))
    padding = [way.padding for way in seen.strategies if way.packing is None]
    assert len(padding) == 4
    assert padding == sorted(padding, reverse=True)
    best, others = findings(seen)[1:3]
    assert '"Lockstep, 1 bucket" needs the least work' in best
    theirs = [way for way in seen.strategies if way.usable and way.packing is None]
    assert f'the best that is not of Lockstep, "{theirs[-1].name}", ' in best
    assert re.search(r'"token budget, read-ahead" .*unequal numbers of batches on hosts', others)


def test_ways_that_no_run_can_use_are_named_after_those_that_it_can(figures):
    """With at most 16 shapes, and as many batches on every host: the others have their price."""
    usable = [way for way in figures.strategies if way.usable]
    assert all(way.equal and way.shapes <= 16 for way in usable)
    assert {way.name for way in figures.strategies if not way.equal} == {
        "token budget, read-ahead",
        "concatenate and split",
    }
    best = min(usable, key=lambda way: way.work["dense"])
    first, others = findings(figures)[1:3]
    assert f'"{best.name}" needs the least work, {best.work["dense"]:.3f} units' in first
    for way in figures.strategies:
        assert (f'"{way.name}" ' in others) == (not way.usable)
    cheap = dataclasses.replace(usable[0], name="cheap", packing=None, work={"dense": 1.0})
    seen = dataclasses.replace(figures, strategies=[*figures.strategies, cheap])
    assert '"cheap" needs the least work, 1.000 units' in findings(seen)[1]
    assert f'; "{find_ours(figures).name}" needs ' in findings(seen)[1]


def write_log(folder, steps, evaluations=(), **more):
    lines = [
        {"step": n, "loss": 8.0 - n, "tokens": 10 * (n + 1), "seconds": 2.0, "waited": 0.5} | more
        for n in range(steps)
    ]
    lines += [{"step": n, "eval_loss": loss} for n, loss in evaluations]
    folder.mkdir(exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(f'{text}{{"step": 3, "lo')  # cut short by a kill


def test_the_log_of_a_run_is_measured(tmp_path, monkeypatch):
    write_log(tmp_path, 4, [(0, 9.0), (4, 5.5), (2, None)])
    run = read_run(tmp_path)
    assert (run.steps, run.loss) == ([0, 1, 2, 3], [8.0, 7.0, 6.0, 5.0])
    assert (run.waiting, run.tokens_per_second) == ([0.25] * 4, [5.0, 10.0, 15.0, 20.0])
    assert run.evaluations == [(0, 9.0), (4, 5.5)]
    assert (len(run.last_lines), run.summary) == (7, {})
    monkeypatch.setattr(pipeline.report.run, "COLUMNS", 2)
    monkeypatch.setattr(pipeline.report.run, "LAST", 3)
    run = read_run(tmp_path)
    assert run.steps == [0, 2]
    assert run.loss == [(8 * 10 + 7 * 20) / 30, (6 * 30 + 5 * 40) / 70]
    assert run.tokens_per_second == [30 / 4, 70 / 4]
    assert len(run.last_lines) == 3
    write_log(tmp_path / "nan", 2, loss=None)
    assert read_run(tmp_path / "nan").loss == [None, None]
    assert read_run(tmp_path / "none") is None
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "metrics.jsonl").write_text('{"step": 0, "loss": 3.0}\n')
    assert read_run(tmp_path / "own").waiting == [None]


def test_the_page_of_a_run_has_its_losses_its_waits_and_its_log(corpus, tmp_path):
    plan = Plan(corpus, [Bucket(4, 64)])
    dataset = from_run(corpus, "the run", plan, {})
    plain = html(measure(dataset, Options(dataset.options)))
    assert "The run</h2>" not in plain
    write_log(tmp_path, 4, [(0, 9.0), (4, 5.5)], note="<b>")
    (tmp_path / "summary.json").write_text(
        json.dumps({"waiting": 0.25, "tokens_per_second": 12.5, "seconds": {"train": 6.0}})
    )
    seen = measure(dataclasses.replace(dataset, run=read_run(tmp_path)), Options(dataset.options))
    text = html(seen)
    assert "losses of the run went from 8.000 to 5.000, those of evaluations from 9.000" in text
    assert "It waited for batches for 25.0% of its steps&#x27; time" in text
    loss, waits, speed, _ = re.findall(r"<svg.*?</svg>", text, re.S)
    # From 9 at the top to 5 at the bottom, over 4 steps in 400 units; dots are the evaluations.
    assert 'd="M0.0 30.0L100.0 60.0L200.0 90.0L300.0 120.0"' in loss
    assert re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', loss) == [("0.0", "0.0"), ("400.0", "105.0")]
    assert 'd="M0.0 0.0L' in waits
    assert "from 0.0% to 25.0%" in text
    assert 'L400.0 0.0"' in speed
    assert text.count("<td>&lt;b&gt;</td>") == 4
    assert "The last 6 lines of its log" in text
    assert "6 train" in text
    write_log(tmp_path, 1, loss=None)
    alone = measure(dataclasses.replace(dataset, run=read_run(tmp_path)), Options(dataset.options))
    assert "The run</h2>" in html(alone)


@pytest.mark.slow
def test_another_number_of_buckets_is_advised_only_if_the_plan_can_have_it():
    lengths = np.clip(np.random.default_rng(0).lognormal(5, 1.2, 5000), 1, 4096).astype(int)
    few = measure(Dataset("long tail", lengths), Options({"max_buckets": 1}))
    best = max(len(way.buckets) for way in few.strategies if way.packing == "best_fit")
    assert best > 1
    assert f"(--max-buckets {best})" in " ".join(findings(few))
    assert "--max-buckets" not in " ".join(findings(dataclasses.replace(few, ran=True)))


def test_a_run_is_told_what_it_trains_with_and_measured_with_its_own_model(corpus):
    bucket = Bucket(4, 64)
    batches = {"tokens_per_batch": 300, "width": 16, "attention": "segment"}
    plan = Plan(corpus, [bucket], seed=3, width=16, attention="segment")
    dataset = from_run(corpus, "the run", plan, batches)
    seen = measure(dataset, Options(dataset.options))
    own = {"tokens_per_batch": 300, "width": 16, "attention": "segment", "seed": 3}
    assert own.items() <= seen.options.items()
    real = Counted(corpus, plan)
    work = (real.positions + real.squares / (6 * 16)) / sum(real.tokens)
    assert find_ours(seen).work["segment"] == pytest.approx(work)
    # A run of another loop has stored no config; buckets that changed have a budget of their own.
    later = plan.after(3, buckets=[Bucket(8, 64)])
    for now, stored, tokens in (
        (plan, {}, 256),
        (later, batches, 512),
        (plan, batches | {"buckets": [[4, 64]]}, 256),
    ):
        assert from_run(corpus, "run", now, stored).options["tokens_per_batch"] == tokens


@pytest.mark.parametrize("change", [{"max_segments": 1}, {"exclude": range(0, 200, 2)}])
def test_a_run_has_the_same_padding_in_its_plan_and_beside_other_ways(corpus, change):
    plan = Plan(corpus, [Bucket(4, 64)], overflow="truncate").after(3, **change)
    dataset = from_run(corpus, "the run", plan, {"tokens_per_batch": 256})
    figures = measure(dataset, Options(dataset.options))
    ours = find_ours(figures)
    assert ours.padding == pytest.approx(figures.plan.padding)
    assert ours.batches == figures.plan.batches


def test_the_page_needs_no_network_and_no_script_and_has_one_style(figures):
    text = html(dataclasses.replace(figures, name="<b>&</b>"))
    assert "<h1>&lt;b&gt;&amp;&lt;/b&gt;</h1>" in text
    assert "report &#x27;the corpus&#x27; --html page.html" in text
    assert "2026-01-02" in text
    assert not re.search(r"""<script|http|(src|href)\s*=\s*["'](?!data:,|#)|url\((?!#)""", text)
    for way in figures.strategies:
        assert way.name.replace("'", "&#x27;") in text
    (chart,) = re.findall(r"<svg.*?</svg>", text, re.S)
    assert not re.search(r"<text[^>]*fill", chart)  # so the page's style decides


def test_every_column_and_every_way_is_explained_below_the_table(figures):
    head, *rows = tabulate_strategies(figures)
    lines = format_text(figures).splitlines()
    below = lines[[line.startswith(head[0]) for line in lines].index(True) + len(rows) + 1 :]
    explained = {line.split("  ")[0] for line in below}
    assert {*head[1:], *(name for name, *_ in rows)} <= explained


@pytest.mark.parametrize("summary", [{}, {"goodput": None}, {"seconds": {}}, {"seconds": None}])
def test_a_summary_without_values_has_no_lines(summary):
    assert format_summary(summary) == ""


def test_every_entry_of_the_summary_of_a_run_has_words():
    summary = RunStats().summary(0, {})
    assert summary.keys() <= WORDS.keys()
    text = format_summary(summary | {"other": 1.5, "seconds": {"train": 2.0}})
    assert "share of all time that went into steps" in text
    assert re.search(r"^other +1\.5$", text, re.MULTILINE)
    assert re.search(r"^seconds +2 train$", text, re.MULTILINE)
    assert "bits per byte" not in text, "there is none"


def test_bars_are_as_long_as_the_work_that_they_show(figures):
    text = html(figures)
    least = min(way.work["dense"] for way in figures.strategies)
    bars = re.findall(r'<div class="bar">(.*?)</div>', text)
    assert len(bars) == len(figures.strategies)
    for bar, way in zip(bars, figures.strategies, strict=True):
        shares = [float(share) for share in re.findall(r"width:([\d.]+)%", bar)]
        assert sum(shares) == pytest.approx(40 * way.work["dense"] / least, abs=0.03)
        assert sum(shares[:2]) / shares[0] == pytest.approx(1 / (1 - way.padding), rel=0.01)


def test_lengths_that_are_all_the_same_make_a_page():
    same = Dataset("same", np.full(512, 64))
    text = html(measure(same, Options({"tokens_per_batch": 512, "length_multiple": 64})))
    assert "One bucket is enough" in text


def test_the_time_with_tiers_is_that_of_a_plan_with_sixteen_over_that_of_this_one():
    lengths = np.clip(np.random.default_rng(0).lognormal(4, 1.2, 800), 1, 512).astype(int)
    plans = {tiers: Plan(lengths, [Bucket(8, 512)], tiers=tiers) for tiers in (1, 4, 16)}
    epochs = {tiers: measure_epoch(plan, width=8) for tiers, plan in plans.items()}
    assert [*epochs[1].over_ideal] == [*epochs[1].with_tiers] == ["8"]
    for tiers in (1, 4):  # each has the same rows, so the least time is the same
        expected = epochs[16].over_ideal["8"] / epochs[tiers].over_ideal["8"]
        assert epochs[tiers].with_tiers["8"] == pytest.approx(expected)
        assert expected < 0.95
    assert epochs[16].with_tiers == {}
