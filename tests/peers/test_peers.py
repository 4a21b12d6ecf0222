"""Beside other input paths: the account of every token."""

import numpy as np
import pytest

from benchmarks import peers
from benchmarks.account import Account, account, numbered
from benchmarks.input_paths.__main__ import run

NOTHING = Account(crossing=0, mixed=0, lost=0, cut=0, repeated=0, missing=0.0)


def batch_of(inputs, targets, segments):
    fields = {"inputs": inputs, "targets": targets, "inputs_segment_ids": segments}
    arrays = {name: np.array([row]) for name, row in fields.items()}
    return arrays | {"loss_weights": arrays["targets"] > 0}


def test_an_account_tells_what_became_of_each_document():
    sizes = np.array([4, 3])
    assert [each.tolist() for each in numbered(sizes)] == [[1, 2, 3, 4], [1, 5, 6]]
    first = batch_of([1, 2, 3], [2, 3, 4], [1, 1, 1])
    second = batch_of([1, 5, 0], [5, 6, 0], [1, 1, 0])
    assert account([first, second], sizes) == NOTHING
    assert account([first], sizes) == Account(0, 0, lost=1, cut=0, repeated=0, missing=0.4)
    assert account([first, second, second], sizes).repeated == 1
    cut = batch_of([1, 2, 0], [2, 3, 0], [1, 1, 0])
    assert account([cut, second], sizes) == Account(0, 0, 0, cut=1, repeated=0, missing=0.2)
    # A row that is shifted as a whole: 4 predicts the next document's mark, which may see it.
    wrapped = batch_of([1, 2, 3, 4, 1, 5], [2, 3, 4, 1, 5, 6], [1, 1, 1, 1, 1, 1])
    assert account([wrapped], sizes) == Account(1, 1, 0, 0, 0, 0.0)
    packed = batch_of([1, 2, 3, 4, 1, 5], [2, 3, 4, 1, 5, 6], [1, 1, 1, 1, 2, 2])
    assert account([packed], sizes) == Account(1, 0, 0, 0, 0, 0.0)
    # The end of one document is no prediction of the middle of another.
    assert account([batch_of([4], [5], [1])], sizes).crossing == 1


@pytest.fixture(scope="module")
def sizes():
    return np.random.default_rng(0).integers(3, 60, 40)


def test_no_token_is_lost_or_repeated_on_one_host_on_two_and_on_one_again(sizes):
    result = run("Lockstep", numbered(sizes), rows=8, length=32)
    one, other = result["hosts"]
    half = result["half"]
    assert 0 < half < len(one) == len(other)
    assert [batch["inputs"].shape for batch in one] == [batch["inputs"].shape for batch in other]
    for batches in (result["batches"], one + other, one[:half] + other[:half] + result["resumed"]):
        assert account(batches, sizes) == NOTHING


def test_an_epoch_has_the_seconds_of_its_shapes():
    def batch(rows, length):
        return {"inputs": np.ones((rows, length)), "loss_weights": np.ones((rows, length))}

    short, long, between = batch(4, 8), batch(2, 16), batch(3, 12)
    every = [short] * 6 + [long] * 2
    timed = peers._choose(every, 4)
    assert [each["inputs"].shape for each in timed] == [(4, 8)] * 3 + [(2, 16)]
    # A second for a short one, three for a long one.
    assert peers._rate(every, timed, [1, 1, 1, 3]) == pytest.approx(8 * 32 / (6 * 1 + 2 * 3))
    assert peers._choose([short] * 9 + [long], 2) == [short, short, long]
    due = 36 / (36 * (1 / 32 + 3 / 32) / 2)
    assert peers._rate([between], [short, long], [1, 3]) == pytest.approx(due)


@pytest.mark.slow
def test_the_table_has_a_line_for_each_path(tmp_path, monkeypatch):
    names = "Lockstep", "Lockstep, truncated", "Grain, best fit", "MaxText, Grain"
    paths = {name: peers.PATHS[name] for name in names}
    for name, value in {"BATCHES": 1, "ROUNDS": 2, "POSITIONS": 256, "PATHS": paths}.items():
        monkeypatch.setattr(peers, name, value)
    (tmp_path / "text").write_text("\n".join("a short line " * (1 + n % 20) for n in range(60)))
    section = peers.measure(str(tmp_path / "text"), [], length=128)
    assert [line[0] for line in section.lines] == [*names]
    assert all(len(line) == len(peers.COLUMNS) for line in section.lines)
    lockstep = dict(zip(peers.COLUMNS, section.lines[0], strict=True))
    assert lockstep["trained tokens/s"] == "1.00× Lockstep's"
    assert lockstep["2 hosts, then 1: lost, cut, repeated"] == "0, 0, 0"
    with pytest.raises(SystemExit, match="no library of an input path: tlr"):
        peers.measure(None, ["tlr=python"])
