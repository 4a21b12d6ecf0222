import datetime
import json

import numpy as np
import pytest

from pipeline import Batches, Bucket, Corpus, Plan
from pipeline.report import (
    Options,
    draw_png,
    format_page,
    format_text,
    from_corpus,
    from_lengths,
    markdown,
    measure,
    measure_epoch,
    open_dataset,
)
from pipeline.report.figures import measure_lengths
from pipeline.report.findings import findings
from pipeline.report.tables import percent

# A narrow model, for which attention weighs so much that several buckets are worth it.
OPTIONS = {
    "tokens_per_batch": 512,
    "max_length": 64,
    "length_multiple": 8,
    "row_multiple": 4,
    "width": 4,
}


@pytest.fixture(scope="module")
def figures(corpus):
    return measure(from_corpus(corpus, "the corpus"), Options(OPTIONS))


@pytest.fixture(scope="module")
def plan(corpus):
    return Options(OPTIONS).plan(corpus)


class Counted:
    """Everything that the report says of an epoch, counted over the arrays of its batches."""

    def __init__(self, corpus, plan, hosts):
        self.shapes, self.per_row, self.order = [], {}, []
        self.tokens, self.segments, self.squares, self.documents = [], [], [], []
        self.work = np.zeros((plan.num_batches(), 2, hosts))
        pieces = np.zeros(len(corpus), np.int64)
        shares = [Batches(corpus, plan, process_index=p, process_count=hosts) for p in range(hosts)]
        for step in range(plan.num_batches()):
            batch = Batches(corpus, plan)[step]
            ids = batch["inputs_segment_ids"]
            self.shapes.append(ids.shape)
            self.order.append([b.shape for b in plan.buckets].index(ids.shape))
            self.tokens.append(int(batch["loss_weights"].sum()))
            held = ids.max(axis=1)
            self.segments.append(int(held.sum()))
            for number in held.tolist():
                self.per_row[number] = self.per_row.get(number, 0) + 1
            self.squares.append(squares(ids))
            example = plan.batch(step).segments[:, 1]
            pieces += np.bincount(example, minlength=len(corpus))
            self.documents.append(len(np.unique(example)))
            for host, share in enumerate(shares):
                part = share[step]["inputs_segment_ids"]
                self.work[step, :, host] = np.count_nonzero(part), squares(part)
        self.cut = int(np.count_nonzero(pieces > 1))
        self.positions = sum(rows * length for rows, length in self.shapes)
        self.scores = sum(rows * length**2 for rows, length in self.shapes)


def squares(ids):
    sizes = [np.bincount(row)[1:] for row in ids]
    return int(sum((each.astype(np.int64) ** 2).sum() for each in sizes))


def test_every_figure_of_the_plan_is_a_count_over_the_real_batches(figures, corpus, plan):
    seen = figures["plan"]
    hosts = seen["balance"]["hosts"]
    assert hosts in (4, 8)
    real = Counted(corpus, plan, hosts)
    assert seen["fingerprint"] == plan.fingerprint
    assert (seen["batches"], seen["walked"]) == (len(real.shapes), len(real.shapes))
    assert seen["tokens"] == sum(real.tokens) == corpus.num_tokens
    assert seen["padding"] == pytest.approx(1 - sum(real.tokens) / real.positions)
    assert seen["order"] == real.order
    assert dict(seen["segments_per_row"]) == real.per_row
    assert seen["overlong"] == np.count_nonzero(np.asarray(corpus.lengths) > 64) > 0
    assert seen["lost"] == 0
    for index, bucket in enumerate(seen["buckets"]):
        here = [step for step, at in enumerate(real.order) if at == index]
        rows, length = bucket["rows"], bucket["length"]
        tokens = sum(real.tokens[step] for step in here)
        assert {real.shapes[step] for step in here} <= {(rows, length)}
        assert bucket["batches"] == len(here)
        assert bucket["tokens"] == tokens
        assert bucket["segments"] == sum(real.segments[step] for step in here)
        if here:
            assert bucket["fill"] == pytest.approx(tokens / (len(here) * rows * length))
            assert bucket["tokens_per_step"] == pytest.approx(tokens / len(here))
            documents = [real.documents[step] for step in here]
            assert bucket["documents_per_step"] == pytest.approx(np.mean(documents))
    ratio = real.work.max(axis=2) / real.work.mean(axis=2)
    for index, name in enumerate(("tokens", "attention")):
        assert seen["balance"][name]["mean"] == pytest.approx(ratio[:, index].mean())
        assert seen["balance"][name]["worst"] == pytest.approx(ratio[:, index].max())


def test_the_mean_lengths_of_random_batches_vary_as_by_chance():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 200, 40_000)
    plan = Plan(lengths, [Bucket(20, 256)], packing="none")
    seen = measure_epoch(plan)["mean_length"]
    assert seen["ratio"] == pytest.approx(1, abs=0.05)
    assert seen["correlation"] == pytest.approx(0, abs=0.07)


def test_the_mean_lengths_of_sorted_batches_vary_more_and_neighbours_are_alike():
    lengths = np.sort(np.random.default_rng(0).integers(1, 200, 4_000))
    plan = Plan(lengths, [Bucket(20, 256)], packing="none", shuffle=False)
    seen = measure_epoch(plan)["mean_length"]
    means = lengths.reshape(-1, 20).mean(axis=1)
    assert seen["ratio"] == pytest.approx(means.std() / (lengths.std() / np.sqrt(20)), rel=0.01)
    assert seen["correlation"] > 0.99


def test_the_mean_length_of_equal_examples_does_not_vary():
    seen = measure_epoch(Plan(np.full(100, 10), [Bucket(2, 20)]))["mean_length"]
    assert seen == {"ratio": None, "correlation": None}


def test_every_figure_of_lockstep_is_a_count_over_the_real_batches(figures, corpus):
    ours = [each for each in figures["strategies"] if each["name"].startswith("Lockstep")]
    assert len(ours) > 4
    width = figures["options"]["width"]
    for seen in ours:
        buckets = tuple(Bucket(*bucket) for bucket in seen["buckets"])
        plan = Options(OPTIONS).replace(packing=seen["packing"]).plan(corpus, buckets)
        real = Counted(corpus, plan, 4)
        tokens = sum(real.tokens)
        assert seen["padding"] == pytest.approx(1 - tokens / real.positions)
        assert seen["batches"] == len(real.shapes)
        assert seen["shapes"] == len(set(real.shapes))
        assert seen["positions_per_token"] == pytest.approx(real.positions / tokens)
        flops = 4 * width * real.scores / tokens
        assert seen["attention_flops_per_token"] == pytest.approx(flops)
        inside = 4 * width * sum(real.squares) / tokens
        assert seen["segment_attention_flops_per_token"] == pytest.approx(inside)
        cost = real.positions + real.scores / (6 * width)
        assert seen["cost"] == pytest.approx(cost / tokens)
        assert seen["cut"] == real.cut
        assert seen["reread"] == 0


def test_the_plan_in_the_comparison_is_the_plan_of_the_report(figures):
    seen = [[b["rows"], b["length"]] for b in figures["plan"]["buckets"]]
    same = [
        each
        for each in figures["strategies"]
        if each.get("buckets") == seen and each["packing"] == "best_fit"
    ]
    assert len(same) == 1
    assert same[0]["padding"] == pytest.approx(figures["plan"]["padding"])
    assert same[0]["batches"] == figures["plan"]["batches"]


def test_each_host_has_as_many_batches_as_the_report_says(figures, corpus):
    for each in figures["strategies"]:
        if "packing" not in each:
            continue
        assert each["equal"]
        assert len(each["batches_per_host"]) == 8
    options = Options(OPTIONS).replace(row_multiple=8, max_buckets=1)
    plan = options.plan(corpus)
    batches = [len(Batches(corpus, plan, process_index=p, process_count=8)) for p in range(8)]
    one = next(each for each in figures["strategies"] if each["name"] == "Lockstep, 1 bucket")
    assert one["batches_per_host"] == batches


def test_the_statistics_of_a_few_examples(tmp_path):
    examples = [[1, 2, 2], [7], [3] * 5, [1, 2, 9, 9, 9, 9, 9, 9, 9, 9, 9]]
    corpus = Corpus.from_arrays(map(np.array, examples), tmp_path / "c", vocab_size=12)
    seen = measure_lengths(from_corpus(corpus, "few"), 0, 8)  # lengths 2, 0, 4, 10
    assert (seen["examples"], seen["tokens"], seen["empty"], seen["overlong"]) == (4, 16, 1, 1)
    assert (seen["shortest"], seen["longest"], seen["mean"]) == (2, 10, 16 / 3)
    assert seen["percentiles"]["50"] == 4
    assert seen["percentiles"]["99"] == 10
    histogram = seen["histogram"]
    assert sum(histogram["examples"]) == 3
    assert sum(histogram["tokens"]) == 16
    assert histogram["edges"][-1] > 10
    four = histogram["edges"].index(4)
    assert (histogram["examples"][four], histogram["tokens"][four]) == (1, 4)
    # Targets: 2 2 | 3 3 3 3 | 2 and nine 9.
    words = seen["vocabulary"][0]
    assert (words["tokens"], words["of"], words["size"]) == (16, 16, 12)
    assert (words["used"], words["rare"], words["half"]) == (3, 3, 1)
    share = np.array([9, 4, 3]) / 16
    assert words["entropy"] == pytest.approx(-(share * np.log2(share)).sum())


def test_sources_have_their_shares(tmp_path):
    np.save(tmp_path / "a.npy", np.full(30, 10))
    (tmp_path / "b.json").write_text('{"20": 10, "50": 10}')
    dataset = open_dataset([str(tmp_path / "a.npy"), str(tmp_path / "b.json")])
    seen = measure(dataset, Options({"tokens_per_batch": 256, "length_multiple": 64}))
    shares = [(each["examples"], each["share_of_tokens"]) for each in seen["corpus"]["sources"]]
    assert shares == [(30, 0.3), (20, 0.7)]
    assert seen["corpus"]["vocabulary"] == []
    assert "70.0%" in format_text(seen)
    assert "b.json" in format_page(seen, command="", date=datetime.date(2026, 1, 2))


def test_only_the_first_batches_of_a_long_epoch_are_walked():
    seen = measure_epoch(Plan(np.full(100, 10), [Bucket(2, 20)]), 3)
    assert (seen["batches"], seen["walked"], len(seen["order"])) == (25, 3, 3)
    assert seen["buckets"][0]["documents_per_step"] == 4


def test_what_overflows_is_told():
    lengths = np.array([10, 20, 30, 0])
    for overflow, lost, said in (
        ("split", 0, "2 examples longer than the longest bucket are split"),
        ("truncate", 18, "truncated, and 18 positions are lost"),
        ("drop", 50, "dropped, and 50 positions are lost"),
    ):
        options = {"tokens_per_batch": 64, "max_length": 16, "length_multiple": 16}
        dataset = from_lengths("lengths", lengths)
        seen = measure(dataset, Options({**options, "overflow": overflow}))
        assert seen["plan"]["lost"] == lost
        assert any(said in each for each in findings(seen))
        assert any("1 examples have nothing to train on" in each for each in findings(seen))


def test_the_report_is_plain_json(figures):
    assert json.loads(json.dumps(figures)) == figures
    names = [each["name"] for each in figures["strategies"]]
    assert len(set(names)) == len(names)
    for each in figures["strategies"]:
        assert {"name", "padding", "batches", "shapes", "positions_per_token"} <= set(each)
        assert 0 <= each["padding"] < 1


def test_lines_fit_the_format_text(figures):
    for width in (80, 100, 130, 200):
        lines = format_text(figures, width=width).splitlines()
        assert max(map(len, lines)) <= width
        assert "Lockstep, 1 bucket" in format_text(figures, width=width)
    assert "\033[" not in format_text(figures)
    assert "\033[32m" in format_text(figures, colour=True)


def test_shares_are_written_with_the_digits_that_matter():
    assert [percent(x) for x in (0.12345, 0.012345, 0.0012345, 0)] == [
        "12.3%",
        "1.23%",
        "0.123%",
        "0%",
    ]


def test_the_markdown_for_tensorboard_has_a_line_for_each_bucket(plan, figures):
    text = markdown(plan)
    for bucket, batches in plan.batches_per_bucket.items():
        assert f"| {bucket.rows:,} × {bucket.length:,} | {batches:,} |" in text
    assert f"**{plan.num_batches():,} batches**" in text
    assert f"`{plan.fingerprint}`" in text


def test_the_picture_is_a_png(figures):
    data = draw_png(figures)
    assert data.startswith(b"\x89PNG")
    assert int.from_bytes(data[16:20], "big") == 1800


def test_the_strongest_other_strategy_is_named_with_its_drawbacks(figures):
    others = [each for each in figures["strategies"] if "packing" not in each]
    least = min(others, key=lambda each: each["cost"])
    (said,) = [text for text in findings(figures) if "the strongest other strategy" in text]
    assert f"on this data, {least['name']}: " in said
    assert f"against {least['cost']:.3f} units" in said
    worse = {"cut": 7, "shapes": 99, "equal": False}
    changed = [{**each, **worse} if each is least else each for each in figures["strategies"]]
    (said,) = [t for t in findings({**figures, "strategies": changed}) if "the strongest" in t]
    assert "compiles 99 shapes instead of" in said
    assert "gives 8 hosts different numbers of batches" in said


def test_strategies_of_many_lengths_come_in_the_order_of_their_padding():
    lengths = np.clip(np.random.default_rng(0).lognormal(4.2, 0.9, 50_000), 3, 512)
    lengths = np.where(lengths > 64, lengths // 16 * 16, lengths)  # optimal packing is fast
    options = Options({"tokens_per_batch": 16_384})
    seen = measure(from_lengths("lengths", lengths.astype(np.uint32)), options)
    padding = {each["name"]: each["padding"] for each in seen["strategies"]}
    assert (
        padding["padded to the longest of all"]
        > padding["padded to the longest in the batch"]
        > padding["sorted windows"]
        > padding["token budget, read-ahead"]
        > padding["Lockstep, 1 bucket"]
    )
    assert padding["Lockstep, 1 bucket"] < 0.001
