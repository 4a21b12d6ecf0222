"""Token files that the programs themselves wrote are read as these programs read them.

`golden/write.py` wrote them, and what is expected.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from etils import epath

from pipeline import InPlace, registry
from pipeline.corpus import INPUTS, token_files
from pipeline.corpus.token_files import signs
from pipeline.corpus.token_formats import recognise
from pipeline.corpus.tokens import arrow
from pipeline.errors import UserError
from tests.corpus.files import documents_of
from tests.text.record_files import save_to_disk

GOLDEN = Path(__file__).parent / "golden"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())

# How each data set is opened, and with its masks.
OPENED = {
    ("arrow", "rows"): ("arrow", {}, {"labels": "labels"}),
    ("arrow", "splits"): ("arrow", {"split": "test"}, None),
    ("megatron", "text"): ("megatron", {}, None),
    ("megatron", "sentences"): ("megatron", {}, None),
    ("olmo", "part-0.npy"): ("flat", {"dtype": "uint16"}, None),
    ("olmo", "masked"): ("flat", {"dtype": "uint16"}, {"weights": "masked/labels_mask*"}),
    ("flat", "train.bin"): ("flat", {"dtype": "uint16", "end": 50256}, None),
    ("flat", "gpt2"): ("flat", {}, None),
    ("flat", "llama3"): ("flat", {}, None),
}
PATHS = {"masked": "masked/token_ids*.npy", "gpt2": "gpt2_*.bin", "llama3": "llama3_*.bin"}


def open_golden(of, monkeypatch, golden=GOLDEN, twice=False, **options):
    """The corpus of a data set, whose files may be given twice."""
    form, some, _ = OPENED[of]
    monkeypatch.chdir(golden / of[0])
    given = PATHS.get(of[1], of[1])
    return InPlace(form, [given, f"./{given}"] if twice else given, **some, **options)


@pytest.mark.parametrize(
    "of", [(folder, name) for folder, names in EXPECTED.items() for name in names], ids="-".join
)
def test_documents_and_masks_are_those_of_the_programs_own_reader(of, monkeypatch):
    documents, masks = EXPECTED[of[0]][of[1]]
    masked = OPENED[of][2]
    plain = {"weights": ()} if masked or of == ("arrow", "splits") else {}
    plain |= {"twice": of[1] in ("text", "part-0.npy")}  # then each file is read once
    corpus = open_golden(of, monkeypatch, task=INPUTS, vocab_size=128001, **plain)
    assert documents_of(corpus) == documents
    corpus.verify()
    if masked:
        weighted = open_golden(of, monkeypatch, task=INPUTS, **masked)
        assert [example["loss_weights"].tolist() for example in weighted] == masks
        assert weighted.num_learnt == sum(map(sum, masks))
        assert weighted.silent.tolist() == [at for at, mask in enumerate(masks) if not any(mask)]
        causal = open_golden(of, monkeypatch, **masked)
        assert [example["loss_weights"].tolist() for example in causal] == [
            mask[1:] for mask in masks
        ]
        with pytest.raises(ValueError, match=r"on which tokens to train; give (weights|labels)="):
            open_golden(of, monkeypatch)


@pytest.mark.parametrize("of", OPENED, ids="-".join)
def test_the_files_of_a_corpus_are_those_that_were_given_and_not_their_local_copies(
    of, tmp_path, monkeypatch
):
    def copy(path):
        copies.append(tmp_path / path.resolve().relative_to(GOLDEN))
        copies[-1].parent.mkdir(parents=True, exist_ok=True)
        return epath.Path(shutil.copy(path, copies[-1]))

    copies = []
    for module in (arrow, token_files):
        monkeypatch.setattr(module, "local_copy", copy)
    form, options, masked = OPENED[of]
    monkeypatch.chdir(GOLDEN / of[0])
    none = {"weights": ()} if masked or of == ("arrow", "splits") else {}
    opened = registry.find("tokens", form).make(PATHS.get(of[1], of[1]), **options, **none)
    assert copies
    assert opened.files
    assert all(GOLDEN in path.resolve().parents for path in opened.files)


def test_formats_are_told_by_the_files(tmp_path):
    for (folder, name), (form, *_) in OPENED.items():
        assert recognise(GOLDEN / folder / PATHS.get(name, name)).name == form
    save_to_disk(tmp_path / "texts", {"a.arrow": [{"text": "no ids"}]})
    np.save(tmp_path / "array.npy", [1, 2])
    for path, form in (
        (GOLDEN / "megatron" / "text.idx", "megatron"),
        (tmp_path / "array.npy", "npy"),
        (tmp_path / "texts", ""),
        (tmp_path / "texts" / "a.arrow", ""),
        (tmp_path / "nowhere.bin", ""),
    ):
        assert (found.name if (found := recognise(path)) else "") == form


def test_a_format_of_another_package_is_asked_before_those_that_know_names_alone(
    tmp_path, monkeypatch
):
    @signs(lambda path: path.read_bytes().startswith(b"MINE"))
    def mine(paths):
        """Files of another program."""

    (tmp_path / "mine.bin").write_bytes(b"MINE and more")
    (tmp_path / "other.bin").write_bytes(b"ids")
    kinds = [*registry.kinds("tokens"), registry.Kind("tokens", "mine", mine)]
    monkeypatch.setattr(registry, "kinds", lambda group: iter(kinds))
    assert recognise(tmp_path / "mine.bin").name == "mine"
    assert recognise(tmp_path / "other.bin").name == "flat"


def test_an_option_that_names_files_is_told_by_its_type():
    named = {
        (kind.name, name)
        for kind in registry.kinds("tokens")
        for name, option in kind.options.items()
        if option.names_files
    }
    assert named == {(form, "weights") for form in ("flat", "megatron", "npy")}


@pytest.mark.parametrize("of", OPENED, ids="-".join)
def test_a_file_that_is_cut_short_is_refused_or_not_needed(of, tmp_path, monkeypatch):
    """Ids alone, without an index or a count, are the only ones that nobody can tell from whole."""
    if of == ("flat", "train.bin"):
        return
    golden = shutil.copytree(GOLDEN, tmp_path / "golden")
    masked = OPENED[of][2] or ({"weights": ()} if of == ("arrow", "splits") else {})
    options = {"task": INPUTS, **masked}
    due = documents_of(open_golden(of, monkeypatch, golden, **options))
    refused = 0
    for path in sorted(path for path in (golden / of[0]).rglob("*") if path.is_file()):
        content = path.read_bytes()
        for size in {0, 1, len(content) // 2, len(content) - 2, len(content) - 1}:
            path.write_bytes(content[: max(size, 0)])
            try:
                corpus = open_golden(of, monkeypatch, golden, **options)
                assert documents_of(corpus) == due, (path, size)
            except (UserError, FileNotFoundError):
                refused += 1
        path.write_bytes(content)
    assert refused
