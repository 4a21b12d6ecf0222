"""Token files in place stand everywhere a corpus does: by a directory, in pairs, in mixtures."""

import pickle
import re

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import feather

import pipeline
from pipeline import Corpus, Feature, InPlace, Pairs
from pipeline.corpus import INPUTS, TARGETS
from pipeline.corpus.links import link
from pipeline.corpus.opening import open_corpus
from pipeline.text.tokenizers import Bytes
from tests.corpus.files import require_equal
from tests.corpus.token_writers import write_flat, write_megatron
from tests.fs import object_servers

REWARD = {"reward": Feature("example")}
SIZES = [5, 1, 9, 14, 3, 0, 22, 8]
EXAMPLES = [np.arange(3, 3 + size) for size in SIZES]


@pytest.fixture
def opened(tmp_path):
    """The corpora of each format, of the same examples."""
    write_megatron(tmp_path / "mega", [[ids] for ids in EXAMPLES])
    masks = [ids % 2 == 1 for ids in EXAMPLES]
    write_flat(tmp_path / "olmo_token_ids.npy", EXAMPLES)
    np.concatenate(masks).tofile(tmp_path / "olmo_labels_mask.npy")
    np.save(tmp_path / "flat.npy", np.concatenate(EXAMPLES))
    np.save(tmp_path / "offsets.npy", np.cumsum([0, *SIZES]))
    columns = {"input_ids": EXAMPLES, "loss_mask": masks, "reward": np.arange(8.0)}
    feather.write_feather(pa.table(columns), str(tmp_path / "a.arrow"), compression="uncompressed")
    options = {"vocab_size": 99}
    masked = {"weights": "olmo_labels_mask*", "dtype": "uint16", "tokenizer": Bytes()}
    return {
        "megatron": InPlace.megatron("mega", **options),
        "npy": InPlace.npy("flat.npy", "offsets.npy", **options),
        "flat": InPlace.flat("olmo_token_ids*", **masked),
        "arrow": InPlace.arrow("*.arrow", weights="loss_mask", features=REWARD, **options),
    }


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_directory_stands_for_token_files(opened, tmp_path, monkeypatch):
    for name, corpus in opened.items():
        linked = link(corpus, tmp_path / "links" / name)
        again = link(corpus, tmp_path / "links" / name)
        for copy in (linked, again, pickle.loads(pickle.dumps(linked))):
            assert copy.identity == corpus.identity
            require_equal(copy, corpus)
    monkeypatch.chdir("/")
    for name, corpus in opened.items():
        linked_corpus = open_corpus(tmp_path / "links" / name)
        assert linked_corpus.identity == corpus.identity
        assert isinstance(linked_corpus, InPlace)
    assert open_corpus(tmp_path / "links" / "flat").tokenizer == Bytes()
    assert opened["flat"].identity["tokenizer"] == Bytes().fingerprint


def test_a_link_to_files_that_changed_is_refused(opened, tmp_path):
    link(opened["megatron"], "linked")
    for corpus in (opened["npy"], InPlace.megatron("mega", vocab_size=98)):
        with pytest.raises(ValueError, match="linked holds another corpus"):
            link(corpus, "linked")
    Corpus.from_arrays(EXAMPLES, "prepared")
    with pytest.raises(ValueError, match="prepared holds another corpus"):
        link(opened["npy"], "prepared")
    write_megatron(tmp_path / "mega", [[ids + 1] for ids in EXAMPLES])
    with pytest.raises(ValueError, match="the files that linked stands for have changed"):
        open_corpus("linked")


def test_pairs_may_be_in_place(tmp_path):
    for name, task, step in (("inputs", INPUTS, 1), ("targets", TARGETS, -1)):
        write_megatron(tmp_path / name, [[ids] for ids in EXAMPLES[::step]])
        link(InPlace.megatron(name, task=task, vocab_size=99), tmp_path / "linked" / name)
    pairs = open_corpus("linked")
    due = Pairs.from_arrays(EXAMPLES, EXAMPLES[::-1], "prepared", vocab_size=99)
    for copy in (pairs, pickle.loads(pickle.dumps(pairs))):
        require_equal(copy, due)


def test_commands_read_token_files(opened, tmp_path, run):
    flags = "--tokens", "megatron", "vocab_size=99"
    for command, said in (("report", r"^examples +8$"), ("check", "8 examples")):
        assert re.search(said, run.done(command, "mega", *flags), re.MULTILINE)
    masked = "--tokens", "flat", "dtype=uint16", "weights=olmo_labels_mask*"
    out = run.done("prepare", "olmo_token_ids*", *masked, "--into", "linked")
    assert "now look at it: lockstep report linked" in out
    assert open_corpus("linked").weighted
    for command in ("show", "buckets"):
        run.done(command, "linked")
    write_megatron(tmp_path / "bad", [[[1, -5, 99]]])
    assert "holds the id -5" in run("check", "bad", *flags)[2]
    for arguments, sentence in (
        ("report mega", "InPlace.megatron('mega') opens them, and commands take --tokens"),
        ("prepare mega.bin --into x", "mega.bin holds tokens, which need no preparing"),
        ("report mega --tokens numpy", "it must be one of arrow, npy, megatron, flat"),
        ("report mega --tokens flat ends=3", "format 'flat' has no option 'ends'; did you"),
        ("report flat.npy", "or --lengths if it has the lengths"),
    ):
        assert sentence in run.refused(*arguments.split())


def test_token_files_in_a_bucket_are_read(opened, tmp_path, monkeypatch):
    (tmp_path / "cloud").mkdir()
    with object_servers.s3(tmp_path / "cloud") as port:
        for name, value in object_servers.s3_environment(port).items():
            monkeypatch.setenv(name, value)
        root = f"s3://{object_servers.BUCKET}"
        for path in tmp_path.iterdir():
            if path.is_file():
                pipeline.fs.as_path(f"{root}/{path.name}").write_bytes(path.read_bytes())
        for name, paths, options in (
            ("megatron", "mega", {}),
            ("flat", "olmo_token_ids*", {"dtype": "uint16", "weights": f"{root}/olmo_labels*"}),
            ("arrow", "a.arrow", {"weights": "loss_mask", "features": REWARD}),
        ):
            corpus = InPlace(name, f"{root}/{paths}", **options, vocab_size=99)
            linked = open_corpus(link(corpus, f"{root}/links/{name}").directory)
            assert linked.identity == corpus.identity
            require_equal(corpus, opened[name])
        with monkeypatch.context() as patch:
            patch.setattr(pipeline.fs.objects, "read_pieces", None)  # all files have been copied
            before = InPlace.megatron(f"{root}/mega", vocab_size=99)
        write_megatron(tmp_path / "mega", [[ids + 1] for ids in EXAMPLES])
        for ending in ("bin", "idx"):
            content = (tmp_path / f"mega.{ending}").read_bytes()
            pipeline.fs.as_path(f"{root}/mega.{ending}").write_bytes(content)
        after = InPlace.megatron(f"{root}/mega", vocab_size=99)
        assert [example["inputs"].tolist() for example in before] == [
            (example["inputs"] - 1).tolist() for example in after
        ]
        with pytest.raises(FileNotFoundError, match=r"mega2\.idx"):
            InPlace.megatron(f"{root}/mega2")
