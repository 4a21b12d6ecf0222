"""Writers of corpora: what is sealed stays, and what is finished is what `from_arrays` makes."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import Corpus, Writer, prepare
from pipeline.corpus import CAUSAL, INPUTS
from pipeline.corpus.stored.log import list_records, read_records
from pipeline.text import ragged
from pipeline.text.sources import Records
from pipeline.text.tokenizers import Bytes
from tests.corpus.files import few_bytes, require_equal, wait_for
from tests.corpus.kinds import FEATURES, draw_columns

SMALL = {"TOKENS_PER_PART": 40, "LEAST": 60, "BLOCK": 20}


@settings(max_examples=25)
@given(data=st.data())
def test_what_a_writer_wrote_is_what_from_arrays_makes_of_the_same_examples(data, tmp_path_factory):
    """Whenever it seals, stops and goes on."""
    folder = tmp_path_factory.mktemp("writer")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ragged, "TOKENS_PER_PART", data.draw(st.integers(1, 60), "tokens a part"))
        patch.setattr("pipeline.corpus.stored.log.PARTS_AT_ONCE", 2)
        sizes = data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=40), "sizes")
        names = data.draw(st.sets(st.sampled_from(["weights", *FEATURES])), "columns")
        task = data.draw(st.sampled_from([CAUSAL, INPUTS]), "task")
        if task == INPUTS:
            names -= {"weights", "logprob", "half"}
        features = {name: FEATURES[name] for name in FEATURES if name in names}
        drawn = draw_columns(sizes)
        columns = {name: drawn[name] for name in drawn if name in {"tokens", *names}}
        rows = zip(*columns.values(), strict=True)
        examples = [dict(zip(columns, row, strict=True)) for row in rows]
        options = {"features": features, "vocab_size": 1000, "task": task}
        acts = st.sampled_from(["append"] * 6 + ["seal", "stop", "kill"])
        writer, at, due = Writer(folder / "a", **options), 0, 0
        while at < len(examples):
            act = data.draw(acts, "act")
            if act == "append":
                writer.append(**examples[at])
                at += 1
                continue
            if act in ("seal", "stop"):
                writer.seal(cursor={"next": at})
                due = at
                if due:
                    with pytest.raises(ValueError, match="is not finished"):
                        Corpus.open(folder / "a")
            if act == "kill" and due:  # while it writes a record
                (folder / f"a/shards/.000000-99999.json.{0:032}.tmp").write_bytes(b"{")
            if act in ("stop", "kill"):
                writer.close()
                writer = Writer(folder / "a", **options)
                at = (writer.cursor or {"next": 0})["next"]
                assert at == due == writer.examples
        writer.finish()
        with pytest.raises(RuntimeError, match="is closed; begin another"):
            writer.append([1])
        made = Corpus.from_arrays(columns, folder / "b", **options)
    corpus = Corpus.open(folder / "a")
    corpus.verify()
    require_equal(corpus, made)
    for name in ("lengths_digest", "num_tokens", "num_learnt", "text_bytes", "vocab_size"):
        assert getattr(corpus, name) == getattr(made, name)
    assert not (folder / "a" / "shards").exists()


@pytest.mark.slow
def test_a_writer_holds_few_bytes_for_each_example(tmp_path, monkeypatch):
    monkeypatch.setattr(ragged, "TOKENS_PER_PART", 1 << 24)
    tokens = np.arange(16)
    with Writer(tmp_path) as writer, few_bytes(40_000 * 300):  # as it seals, more than twice 72
        for _ in range(40_000):
            writer.append(tokens)
        writer.seal()


def test_a_preparation_that_was_interrupted_has_sealed_what_it_continues(tmp_path):
    texts = [f"text {number}" for number in range(150)]

    def run(function, items):
        yield from map(function, items[:10])
        wait_for(lambda: list_records(tmp_path))
        raise KeyError("lost")

    engine = SimpleNamespace(run=run)
    with pytest.raises(KeyError, match="lost"):
        prepare(Records(texts), Bytes(), tmp_path, engine=engine, progress=False)
    records = read_records(tmp_path).values()
    sealed = {part["file"]: part["sha256"] for record in records for part in record["parts"]}
    assert sealed
    other = Records(texts[1:]), Bytes(), tmp_path
    for act in (lambda: prepare(*other, progress=False), lambda: Writer(tmp_path)):
        with pytest.raises(ValueError, match="made with another source"):
            act()
    # A sealed part does not become another.
    lost = (tmp_path / "part-000000-00000.arrow").rename(tmp_path / "lost")
    with pytest.raises(ValueError, match=r"part-000000-00000.arrow: it is missing. Restore that"):
        prepare(Records(texts), Bytes(), tmp_path, num_workers=0, progress=False)
    lost.rename(tmp_path / "part-000000-00000.arrow")
    done = prepare(Records(texts), Bytes(), tmp_path, num_workers=0, progress=False)
    assert sealed.items() <= {part.file: part.sha256 for part in done.manifest.parts}.items()
