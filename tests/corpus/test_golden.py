"""Token files that the programs themselves wrote are read as these programs read them.

`golden/write.py` wrote them, and what is expected.
"""

import json
import shutil
from pathlib import Path

import pytest

from pipeline import InPlace
from pipeline.corpus import INPUTS, cache
from pipeline.errors import UserError

GOLDEN = Path(__file__).parent / "golden"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())

# How each data set is opened, and with its masks.
OPENED = {
    ("arrow", "rows"): ("arrow", {}, {"labels": "labels"}),
    ("arrow", "splits"): ("arrow", {"split": "test"}, None),
    ("megatron", "text"): ("megatron", {}, None),
    ("megatron", "sentences"): ("megatron", {}, None),
    ("datatrove", "two"): ("datatrove", {}, {"weights": "loss"}),
    ("datatrove", "four"): ("datatrove", {}, {"weights": "loss"}),
    ("mds", "windows"): ("mds", {}, None),
    ("mds", "arrays"): ("mds", {}, None),
    ("mds", "typed"): ("mds", {}, None),
    ("mds", "packed"): ("mds", {}, None),
    ("levanter", "cache"): ("levanter", {}, {"weights": "assistant_masks"}),
    ("olmo", "part-0.npy"): ("flat", {"dtype": "uint16"}, None),
    ("olmo", "masked"): ("flat", {"dtype": "uint16"}, {"weights": "labels_mask*"}),
    ("flat", "train.bin"): ("flat", {"dtype": "uint16", "end": 50256}, None),
    ("flat", "gpt2"): ("flat", {}, None),
    ("flat", "llama3"): ("flat", {}, None),
}


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "default_directory", lambda: tmp_path)


def open_golden(of, monkeypatch, golden=GOLDEN, **options):
    """The corpus of a data set."""
    form, some, _ = OPENED[of]
    folder, name = of
    monkeypatch.chdir(golden / folder)
    if of == ("olmo", "masked"):
        monkeypatch.chdir(golden / folder / name)
    path = {"masked": "token_ids*.npy", "gpt2": "gpt2_*.bin", "llama3": "llama3_*.bin"}
    return InPlace(form, path.get(name, name), **some, **options)


def test_each_golden_file_is_opened():
    assert {(folder, name) for folder, names in EXPECTED.items() for name in names} == {*OPENED}


@pytest.mark.parametrize("of", OPENED, ids="-".join)
def test_documents_and_masks_are_those_of_the_programs_own_reader(of, monkeypatch):
    documents, masks = EXPECTED[of[0]][of[1]]
    masked = OPENED[of][2]
    plain = {"weights": ()} if masked or of == ("arrow", "splits") else {}
    corpus = open_golden(of, monkeypatch, task=INPUTS, vocab_size=128001, **plain)
    assert [each["inputs"].tolist() for each in corpus] == documents
    corpus.verify()
    if masked:
        weighted = open_golden(of, monkeypatch, task=INPUTS, **masked)
        assert [each["loss_weights"].tolist() for each in weighted] == masks
        assert weighted.num_learnt == sum(map(sum, masks))
        assert weighted.silent.tolist() == [at for at, mask in enumerate(masks) if not any(mask)]
        causal = open_golden(of, monkeypatch, **masked)
        assert [each["loss_weights"].tolist() for each in causal] == [mask[1:] for mask in masks]
        with pytest.raises(ValueError, match=r"on which tokens to train; give (weights|labels)="):
            open_golden(of, monkeypatch)


def test_windows_of_mds_are_divided_at_the_end_of_documents(monkeypatch):
    corpus = open_golden(("mds", "windows"), monkeypatch, end=50256, task=INPUTS)
    assert [each["inputs"].tolist() for each in corpus] == EXPECTED["flat"]["train.bin"][0]


@pytest.mark.parametrize("of", OPENED, ids="-".join)
def test_a_file_that_is_cut_short_is_refused_or_not_needed(of, tmp_path, monkeypatch):
    """Ids alone, without an index or a count, are the only ones that nobody can tell from whole."""
    if of == ("flat", "train.bin"):
        return
    golden = shutil.copytree(GOLDEN, tmp_path / "golden")
    masked = OPENED[of][2] or ({"weights": ()} if of == ("arrow", "splits") else {})
    options = {"task": INPUTS, **masked}
    due = [each["inputs"].tolist() for each in open_golden(of, monkeypatch, golden, **options)]
    refused = 0
    for path in sorted(path for path in (golden / of[0]).rglob("*") if path.is_file()):
        content = path.read_bytes()
        for size in {0, 1, len(content) // 2, len(content) - 2, len(content) - 1}:
            path.write_bytes(content[: max(size, 0)])
            try:
                corpus = open_golden(of, monkeypatch, golden, **options)
                assert [each["inputs"].tolist() for each in corpus] == due, (path, size)
            except (UserError, FileNotFoundError):
                refused += 1
        path.write_bytes(content)
    assert refused
