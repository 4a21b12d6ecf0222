"""Damaged corpora are refused with a sentence, or read the same; nothing crashes the process."""

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import feather

import pipeline
from pipeline import Corpus, InPlace
from pipeline.text.sources import Records
from pipeline.text.tokenizers import Bytes
from tests.corpus.files import flip
from tests.corpus.kinds import SIZES, make
from tests.corpus.manifests import alter

COUNTS = [5, 30, 0, 12, 40, 1, 33, 20, 9, 50]
EXAMPLES = [np.arange(count) + 100 * number for number, count in enumerate(COUNTS)]
WEIGHTS = [np.linspace(0, 1, count) for count in COUNTS]
SMALL = {"TOKENS_PER_PART": 60}


@pytest.fixture
def corpus(tmp_path):
    return Corpus.from_arrays({"tokens": EXAMPLES, "weights": WEIGHTS}, tmp_path / "corpus")


@pytest.mark.parametrize(
    ("entry", "value", "sentence"),
    [
        ("file", "../corpus/part-000000-00001.arrow", "a part is '../corpus"),
        ("file", "part-000000-00000.arrow", "a part is 'part-000000-00000.arrow'"),
        ("offsets", -8, "offsets of a part are negative"),
        ("weighted", False, "some of its parts have weights and others have none"),
        ("examples", None, "it is not a table of parts"),
    ],
)
def test_numbers_of_a_manifest_are_checked_at_opening(corpus, entry, value, sentence):
    def change(manifest):
        (manifest if entry in manifest else manifest["parts"][1])[entry] = value

    alter(corpus, change)
    with pytest.raises(ValueError, match=rf"damaged at .*(corpus.json|parts.arrow): .*{sentence}"):
        Corpus.open(corpus.directory)


@pytest.mark.parametrize("entry", ["tokens", "offsets", "learnt"])
def test_a_part_is_what_its_own_header_says(corpus, entry):
    def change(manifest):
        manifest["parts"][1][entry] += 8

    alter(corpus, change)
    opened = Corpus.open(corpus.directory)
    for read in (lambda: opened[6], opened.verify):
        with pytest.raises(
            ValueError, match=rf"part-000000-00001.arrow: its {entry} is .*corpus.json says"
        ):
            read()


@pytest.mark.parametrize("number", [1 << 40, -1, 3, 1 << 62])
def test_offsets_of_examples_are_within_their_part(corpus, number):
    part = corpus.manifest.parts[0]
    path = corpus.directory / part.file
    content, at = bytearray(path.read_bytes()), part.offsets
    content[at + 8 : at + 16] = int(number).to_bytes(8, "little", signed=True)
    path.write_bytes(content)
    opened = Corpus.open(corpus.directory)
    said = r"part-000000-00000.arrow.*(do not ascend|example \d has .* tokens by its offsets)"
    for example in (0, 1):
        with pytest.raises(ValueError, match=said):
            opened[example]
    assert opened[6]["inputs"].tolist() == EXAMPLES[6][:-1].tolist()
    with pytest.raises(ValueError, match=r"damaged at .*part-000000-00000.arrow"):
        opened.verify()


@pytest.mark.parametrize(
    ("of_part", "entries"),
    [
        (True, {"learnt": 7}),
        (True, {"text_bytes": 7}),
        (True, {"sha256": "0"}),
        (True, {"lengths_digest": "0"}),
        (False, {"vocab_size": 12}),
        (False, {"tokenizer": {"kind": "bytes", "begin": False, "end": True}}),
        (False, {"origin": {"source": "s", "tokenizer": "t", "field": "f"}}),
        (False, {"lengths_digest": "0"}),
    ],
)
def test_verify_compares_the_manifest_with_the_parts(tmp_path, of_part, entries):
    texts = Records([f"text {number} " * (number % 4) for number in range(20)])
    corpus = pipeline.prepare(texts, Bytes(), tmp_path, progress=False, num_workers=0)
    (tmp_path / "part-000000-00009.arrow").write_bytes(b"")
    with pytest.raises(ValueError, match=r"part-000000-00009.arrow: it is not one of the parts"):
        corpus.verify()
    (tmp_path / "part-000000-00009.arrow").unlink()
    corpus.verify()
    alter(corpus, lambda it: (it["parts"][0] if of_part else it).update(entries))
    with pytest.raises(ValueError, match="damaged at"):
        Corpus.open(tmp_path).verify()


@pytest.mark.parametrize("kind", ["pairs", "groups"])
def test_verify_reads_all_parts_of_pairs_and_of_groups(kind, tmp_path):
    corpus = make(kind, tmp_path / kind, SIZES[:9])
    for path in [*tmp_path.rglob("part-*.arrow")]:
        flip(path)
        with pytest.raises(ValueError, match=f"damaged at {path}: "):
            corpus.verify()
        flip(path)
    corpus.verify()


@pytest.mark.parametrize("offsets", [[0, 3, 1 << 30], [0, 4, 3], [-1, 3, 5]])
def test_offsets_of_arrow_files_in_place_are_checked(tmp_path, offsets):
    table = pa.table({"input_ids": pa.array([[1, 2, 3], [4, 5]], pa.list_(pa.int32()))})
    feather.write_feather(table, str(tmp_path / "a.arrow"), compression="uncompressed")
    content = (tmp_path / "a.arrow").read_bytes()
    there = np.array([0, 3, 5], np.int32).tobytes()
    assert content.count(there) == 1
    changed = content.replace(there, np.array(offsets, np.int32).tobytes())
    (tmp_path / "a.arrow").write_bytes(changed)
    with pytest.raises(ValueError, match=r"a.arrow cannot be read as Arrow: .*ffset.* damaged"):
        InPlace.arrow(tmp_path / "a.arrow")
