"""Any run, of any corpus with any options, killed and changed: loaded, logged, audited, scored."""

import contextlib
import json
import tempfile

import numpy as np
import pytest
from etils import epath
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline import Batches, Bucket, Corpora, Loader, Plan, score
from pipeline.history import RunLog, audit, losses, read_history, write_history
from tests.corpus.kinds import SIZES, make, require_pieces
from tests.loading.definition import join
from tests.properties.accounts import Account
from trainer.evaluation import evaluation_batches

EXAMPLES = 10

# Two processes can share them; of one corpus, the last batches of an epoch may be smaller.
TEXT = (Bucket(4, 16), Bucket(2, 40)), (Bucket(2, 48),)
PAIRED = (Bucket(4, (24, 12)), Bucket(2, (40, 36))), (Bucket(2, (48, 48)),)

KINDS = ["arrays", "weighted", "cached", "masked"]
PAIRS, GROUPS = ["pairs"], ["groups", "groups cached"]
# One corpus; a part of it, beside examples that are held out; two, one after the other or by
# weight; and one that another joins.
FORMS = ["alone", "split", "joined", "weights", "joins"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """`made(kind, number)`: the first or the second corpus of a kind; each is made once."""
    base, known = tmp_path_factory.mktemp("made"), {}

    def made(kind, number):
        sizes = SIZES[:50] if number == 0 else SIZES[50:]
        if (kind, number) not in known:
            known[kind, number] = make(kind, base / f"{kind} {number}", sizes)
        return known[kind, number]

    return made


@st.composite
def runs(draw):
    """What a run is of, its options, and its starts.

    Each start is (steps, steps after the last checkpoint, processes, what changes before it).
    """
    kind, form = draw(st.sampled_from(KINDS + PAIRS + GROUPS)), draw(st.sampled_from(FORMS))
    whole = kind in PAIRS + GROUPS
    overflows = ["drop"] + ["truncate"] * (kind not in GROUPS) + ["split"] * (not whole)
    options = {
        "buckets": st.sampled_from(PAIRED if kind in PAIRS else TEXT),
        "seed": st.integers(0, 9),
        "shuffle": st.booleans(),
        "overflow": st.sampled_from(overflows),
        "window": st.integers(5, 60),
        "max_segments": st.sampled_from([None, 1, 3]),
    }
    if whole or draw(st.booleans()):
        options["packing"] = st.sampled_from(["best_fit", "none"])
        options["align"] = st.sampled_from([1, 2, 4])
    else:
        options["packing"] = st.sampled_from(["best_fit", "none", "fill"])
    begin = {"buckets": (PAIRED if kind in PAIRS else TEXT)[0], "overflow": "drop"}
    more = {"tiers": st.sampled_from([2, 3]), "curriculum": st.just("short_first")}
    begin |= draw(st.fixed_dictionaries({}, optional=options | more))
    change = options | {"exclude": st.lists(st.integers(0, 29), max_size=4)}
    if form == "weights":
        change["weights"] = st.integers(0, 3).map(lambda share: {"first": 1, "new": share})
        begin["by"] = draw(st.sampled_from(["tokens", "examples"]))
    if form == "joins":
        change["joins"] = st.just(True)
    start = st.tuples(
        st.integers(1, 14),
        st.integers(0, 3),
        st.sampled_from([1, 2]),
        st.fixed_dictionaries({}, optional=change),
    )
    positions = draw(st.sampled_from(["continue", "restart"]))
    return kind, form, begin, positions, draw(st.lists(start, min_size=1, max_size=4))


def sum_of_segments(planned, batch, most):
    """Sums by segment, as a step would return them; a token's loss is its id."""
    ids = batch.get("targets_segment_ids", batch["inputs_segment_ids"])
    sums = np.zeros((2, planned.bucket.rows, most), np.float32)
    for row, number in zip(planned.segments[:, 0], planned.numbers, strict=True):
        weights = batch["loss_weights"][row] * (ids[row] == number + 1)
        sums[:, row, number] = (weights * batch["targets"][row]).sum(), weights.sum()
    return sums


def open_iterators(stack, corpus, plan, processes, positions):
    """Iterators of the processes of a run; a single one has a loader."""
    if processes == 1:
        batches = Batches(corpus, plan, positions=positions).repeat()
        return [stack.enter_context(Loader(batches))]
    return [
        iter(
            Batches(corpus, plan, process_index=p, process_count=processes, positions=positions)
            .repeat()
            .to_iter_dataset()
        )
        for p in range(processes)
    ]


@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
@given(runs())
def test_every_run_trains_on_what_was_planned_and_can_be_audited_evaluated_and_scored(made, what):
    kind, form, begin, positions, starts = what
    corpus, joins = made(kind, 0), {"first": made(kind, 0), "new": made(kind, 1)}
    held = corpus
    if form == "split":
        corpus, held = corpus.split(0.3)
    elif form in ("joined", "weights"):
        held = corpus = Corpora(joins)
    weights = {"weights": {"first": 2, "new": 1}} if form == "weights" else {}
    plan = Plan(corpus, **begin, **weights)
    with tempfile.TemporaryDirectory() as folder:
        workdir = epath.Path(folder)
        step, state, ran = 0, None, []
        for steps, lost, processes, changes in starts:
            given = dict(changes)
            if given.pop("joins", False):
                given["lengths"] = corpus = Corpora(joins)
            if given:
                plan = plan.after(step, **given)
            saved = plan.next_block(step + steps)
            write_history(workdir, corpus, plan)
            with contextlib.ExitStack() as stack:
                parts = open_iterators(stack, corpus, plan, processes, positions)
                for part in parts if state else ():
                    part.set_state(json.loads(json.dumps(state)))
                log = stack.enter_context(RunLog(workdir, step))
                most = plan.most_segments()
                for now in range(step, saved + lost):
                    planned, each = plan.batch(now), [next(part) for part in parts]
                    batch = join([{k: np.asarray(v) for k, v in one.items()} for one in each])
                    require_pieces(corpus, planned, batch)
                    sums = sum_of_segments(planned, batch, most[planned.bucket])
                    log.add(now, planned, {"loss": 1.0, "segments": sums})
                    if now == saved - 1:
                        log.save()
                        state, *others = [p.get_state() for p in parts]
                        assert all(other == state for other in others)
                    if now < saved:
                        ran.append((planned, sums))
            step = saved
        with RunLog(workdir, step):  # without what was lost
            pass
        require_history(workdir, corpus, plan, ran)
        require_scores(workdir / "scores", corpus, plan, epoch=len(starts) - 1)
    require_evaluation(held, plan)


def require_history(workdir, corpus, plan, ran):
    """What is on disk is the run: its plan, its batches, and the losses of its segments."""
    said = []
    audit(workdir, said.append)
    assert said[-1].startswith(f"all {len(ran)} batches are those that were planned")
    tokens = [json.loads(line)["tokens"] for line in (workdir / "metrics.jsonl").open()]
    assert tokens == [planned.num_tokens for planned, _ in ran]
    again, replayed = read_history(workdir)
    assert (again.fingerprint, replayed.fingerprint) == (corpus.fingerprint, plan.fingerprint)
    found = losses(workdir)
    columns = [
        (planned.segments[:, 1], planned.epoch_of_segments, *sums[:, row, planned.numbers])
        for planned, sums in ran
        for row in [planned.segments[:, 0]]
    ]
    due = [np.concatenate(column) for column in zip(*columns, strict=True)]
    for mine, values in zip(
        (found.example, found.epoch, found.loss, found.weight), due, strict=True
    ):
        np.testing.assert_array_equal(mine, values)


def kept_lengths(corpus, options):
    """How many positions of each example, on each side, the options leave in one epoch."""
    return Account(corpus.lengths, 0, vars(options)).due(0)


def require_evaluation(held, plan):
    """All held-out positions are in one epoch, each once, as they are in training."""
    batches = evaluation_batches(held, plan.options)
    seen = np.zeros((len(held), len(held.sides)), np.int64)
    for step in range(len(batches)):
        planned = batches.plan.batch(step)
        require_pieces(held, planned, batches[step])
        np.add.at(seen, planned.segments[:, 1], planned.segments[:, 3:])
    if held.trees is None:
        np.testing.assert_array_equal(seen, kept_lengths(held, batches.plan.options))
    whole = held.trees is not None or len(held.sides) == 2
    used, own = batches.plan.options, plan.options
    assert used.overflow == (own.overflow if whole else "split")
    assert used.align == own.align


def require_scores(directory, corpus, plan, epoch):
    """Every example has its own values, in the order of the corpus."""
    if corpus.trees is not None:
        return
    mine = ("buckets", "packing", "overflow", "max_segments", "align")
    options = {name: getattr(plan.options, name) for name in mine}
    options["per"] = "position" if len(corpus.sides) == 1 else "inputs"
    values = score(
        corpus,
        lambda batch: {"token": batch["inputs"]},
        directory=directory,
        epoch=epoch,
        **options,
    )
    sizes = kept_lengths(corpus, plan.options)[:, 0].tolist()
    for number, (tokens, size) in enumerate(zip(values["token"].to_pylist(), sizes, strict=True)):
        due = corpus.sides["inputs"].read([number], [0], [size], epoch=epoch)["inputs"]
        assert (tokens or []) == due.tolist()
