"""Damaged corpora are refused with a sentence, or read the same; nothing crashes the process."""

import sys
import textwrap
from contextlib import nullcontext
from pathlib import Path

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
from tests.processes import call

COUNTS = [5, 30, 0, 12, 40, 1, 33, 20, 9, 50]
EXAMPLES = [np.arange(count) + 100 * number for number, count in enumerate(COUNTS)]
WEIGHTS = [np.linspace(0, 1, count) for count in COUNTS]
SMALL = {"TOKENS_PER_PART": 60}

# A program that flips bits of files, one at a time, and reads what it can in some `WAYS`.
FLIPS = """
    import sys
    from pathlib import Path

    import numpy as np

    place, flips, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    exec(sys.argv[4])

    def outcome(way):
        "What reading gives, or a sentence."
        try:
            return way()
        except REFUSALS as error:
            assert len(str(error).split()) > 3, error
            return str(error)

    expected = outcome(WAYS[0])
    assert not isinstance(expected, str), expected
    rng, refused = np.random.default_rng(seed), 0
    for number in range(flips):
        path = FILES[number % len(FILES)]
        whole = path.read_bytes()
        at, bit = int(rng.integers(len(whole))), int(rng.integers(8))
        print(path.name, at, bit, flush=True)
        content = bytearray(whole)
        content[at] ^= 1 << bit
        for data in (content, whole):
            path.with_name(".new").write_bytes(data)
            path.with_name(".new").replace(path)
            for way in WAYS if data is content else ():
                found = outcome(way)
                refused += isinstance(found, str)
                # An Arrow file has no digest: other tokens are not noticed there.
                assert isinstance(found, str) or found == expected or not place.is_dir(), found
    print("refused", refused)
"""

# For a corpus, or an Arrow file; a read beyond a map kills the process.
OF_CORPUS = """
    from pipeline import Corpus, InPlace
    from tests.corpus.files import map_apart

    map_apart()

    def read(corpus):
        tokens = [{name: ids.tolist() for name, ids in each.items()} for each in corpus]
        corpus.verify()
        return tokens, corpus.fingerprint

    FILES, WAYS = [place], [lambda: read(InPlace.arrow(place))]
    REFUSALS = ValueError, IndexError
    if place.is_dir():
        FILES = sorted(path for path in place.iterdir() if not path.name.startswith("."))
        both = {}, {"cache": place.parent / "cache"}
        WAYS = [lambda way=way: read(Corpus.open(place, **way)) for way in both]
"""

# For the work directory of a run.
OF_RUN = """
    import jax.numpy as jnp
    from etils import epath

    from pipeline import Bucket, Corpus, Plan
    from pipeline.history import NotAsPlanned, RunLog, audit, losses, read_history, write_history
    from pipeline.history.loss_archive import LossLog
    from pipeline.trainer.checkpoint import Checkpoints
    from pipeline.loading.state import StateKey

    corpus = Corpus.from_arrays([np.arange(at % 7) for at in range(30)], place / "corpus")
    plan = Plan(corpus, [Bucket(2, 4), Bucket(1, 8)], seed=3).after(5, seed=4, exclude=[2])
    write_history(epath.Path(place), corpus, plan)
    sums = LossLog(epath.Path(place), 0)
    with RunLog(place, 0, 8) as log:
        for step in range(8):
            log.write({"step": step, "batch": plan.batch(step).digest, "loss": 1.5})
            sums.add(step, plan.batch(step), np.full((2, 2, 8), step, np.float32))
    sums.flush()
    like = {"weights": jnp.zeros((20, 50))}
    with Checkpoints(place / "checkpoints") as checkpoints:
        for step in (4, 8):
            state = {"weights": like["weights"] + step}
            data = StateKey(plan, corpus).state(step)
            checkpoints.save(step, state, data=data, run={"a": 1})

    def read():
        said = []
        audit(epath.Path(place), said.append)
        # A window may be larger or smaller, and the batches, which are checked, the same.
        said = [line for line in said if not line.startswith("plan from step")]
        corpus, plan = read_history(epath.Path(place))
        checkpoints = Checkpoints(place / "checkpoints")
        try:
            state, data = checkpoints.restore(like)
            assert checkpoints.restore_json(8)[1] == {"a": 1}
        finally:
            checkpoints.close()
        said.append(str(losses(place)))
        return said, StateKey(plan, corpus).resume(data), np.asarray(state["weights"]).tolist()

    WAYS, REFUSALS = [read], (ValueError, FileNotFoundError, NotAsPlanned)
    files = sorted(path for path in place.rglob("*") if path.is_file() and path.stat().st_size)
    FILES = [path for path in files if not {"tensorboard", "4"} & {*path.parts}]
"""


def write_arrays(place):
    return Corpus.from_arrays({"tokens": EXAMPLES, "weights": WEIGHTS}, place)


def write_texts(place):
    texts = [f"text {number} " * (number % 4) for number in range(20)]
    return pipeline.prepare(Records(texts), Bytes(), place, progress=False, num_workers=0)


def write_in_place(place, examples=EXAMPLES):
    ids = pa.array([[*each] for each in examples], pa.list_(pa.int32()))
    feather.write_feather(pa.table({"input_ids": ids}), str(place), compression="uncompressed")


@pytest.fixture
def corpus(tmp_path):
    return write_arrays(tmp_path / "corpus")


@pytest.mark.parametrize(
    ("entry", "value", "sentence"),
    [
        ("file", "/etc/passwd", "a part is '/etc/passwd'"),
        ("file", "../corpus/part-000000-00001.arrow", "a part is '../corpus"),
        ("file", "part-000000-00000.arrow", "a part is 'part-000000-00000.arrow'"),
        ("offsets", -8, "offsets of a part are negative"),
        ("learnt", -1, "learnt of a part are negative"),
        ("weighted", False, "some of its parts have weights and others have none"),
        ("examples", None, "it is not a table of parts"),
    ],
)
def test_numbers_of_a_manifest_are_checked_at_opening(corpus, entry, value, sentence):
    def change(manifest):
        manifest["parts"][1][entry] = value

    alter(corpus, change)
    with pytest.raises(ValueError, match=rf"damaged at .*(corpus.json|parts.arrow): .*{sentence}"):
        Corpus.open(corpus.directory)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"parts": []}, "parts.arrow: it has no parts"),
        ({"origin": None}, "corpus.json: its origin is None, not a dict"),
    ],
)
def test_a_manifest_without_parts_or_origin_is_refused(corpus, change, sentence):
    alter(corpus, lambda manifest: manifest.update(change))
    with pytest.raises(ValueError, match=rf"damaged at .*{sentence}"):
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
    part = corpus._manifest.parts[0]
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
    corpus = write_texts(tmp_path)
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
    for path in tmp_path.rglob("part-*.arrow"):
        for due in (pytest.raises(ValueError, match=f"damaged at {path}: "), nullcontext()):
            flip(path, path.stat().st_size // 2)
            with due:
                corpus.verify()


@pytest.mark.parametrize("offsets", [[0, 3, 1 << 30], [0, 4, 3], [-1, 3, 5]])
def test_offsets_of_arrow_files_in_place_are_checked(tmp_path, offsets):
    write_in_place(tmp_path / "a.arrow", [[1, 2, 3], [4, 5]])
    content = (tmp_path / "a.arrow").read_bytes()
    there = np.array([0, 3, 5], np.int32).tobytes()
    assert content.count(there) == 1
    changed = content.replace(there, np.array(offsets, np.int32).tobytes())
    (tmp_path / "a.arrow").write_bytes(changed)
    with pytest.raises(ValueError, match=r"a.arrow cannot be read as Arrow: .*ffset.* damaged"):
        InPlace.arrow(tmp_path / "a.arrow")


@pytest.mark.parametrize(
    ("write", "program", "flips", "least"),
    [
        (write_arrays, OF_CORPUS, 60, 30),
        (write_texts, OF_CORPUS, 60, 30),
        pytest.param(write_arrays, OF_CORPUS, 300, 150, marks=pytest.mark.slow),
        pytest.param(write_texts, OF_CORPUS, 300, 150, marks=pytest.mark.slow),
        pytest.param(write_in_place, OF_CORPUS, 300, 1, marks=pytest.mark.slow),
        pytest.param(Path.mkdir, OF_RUN, 100, 33, marks=pytest.mark.slow),
        pytest.param(write_arrays, OF_CORPUS, 2000, 1000, marks=pytest.mark.exhaustive),
        pytest.param(write_texts, OF_CORPUS, 2000, 1000, marks=pytest.mark.exhaustive),
        pytest.param(write_in_place, OF_CORPUS, 2000, 1, marks=pytest.mark.exhaustive),
        pytest.param(Path.mkdir, OF_RUN, 2000, 667, marks=pytest.mark.exhaustive),
    ],
)
def test_a_flipped_bit_is_found_or_harmless_wherever_it_is(write, program, flips, least, tmp_path):
    place = tmp_path / "place"
    write(place)
    command = [sys.executable, "-c", textwrap.dedent(FLIPS), place, flips, 0]
    process = call(*command, textwrap.dedent(program), limit=600 + 3 * flips)
    last = process.stdout.splitlines()[-1:]
    assert process.returncode == 0, f"after the flip {last}: {process.stderr}"
    assert int(last[0].split()[1]) >= least
