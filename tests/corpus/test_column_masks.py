"""Columns of masks become weights; padding and packed rows are cut; none of them is ignored."""

import json

import numpy as np
import pyarrow as pa
import pytest

from pipeline import Feature, InPlace
from pipeline.corpus import INPUTS
from pipeline.corpus.tokens.arrow import NUMBERS, STARTS
from pipeline.text import sources
from tests.corpus.files import documents_of, weights_of
from tests.text.record_files import save_to_disk, write_table

IDS = [[1, 2, 3, 4], [5, 6], [], [7, 8, 9]]


@pytest.fixture
def write(tmp_path):
    """A function that writes columns into two groups of rows, and returns how to open them."""

    def write_columns(columns):
        path = tmp_path / f"{len([*tmp_path.iterdir()])}.arrow"
        write_table(path, pa.table(columns))
        return lambda **options: InPlace.arrow(path, **options)

    return write_columns


def test_labels_and_masks_are_never_ignored_and_become_weights(write):
    labels = [[-100, -100, 3, 4], [-100, 6], [], [7, -100, -100]]
    masks: dict = {"labels": labels}
    for name, kind in (("completion_mask", bool), ("assistant_masks", int), ("loss_mask", float)):
        masks[name] = [[kind(label != -100) for label in row] for row in labels]
    for name, mask in masks.items():
        opened = write({"input_ids": IDS, name: mask})
        option = "labels" if name == "labels" else "weights"
        sentence = rf"{option}='{name}', or weights=\(\) to train on all"
        with pytest.raises(ValueError, match=sentence):
            opened()
        corpus, whole = opened(**{option: name}), opened(weights=())
        assert (weights_of(corpus), corpus.num_learnt) == ([[0, 1, 1], [1], [], [0, 0]], 3)
        assert (whole.weighted, whole.num_learnt) == (False, None)
        assert opened(features={name: Feature("inputs")}).features[name].of == "inputs"


@pytest.mark.parametrize(
    "name", ["response_mask", "loss_masks", "assistant_mask", "targets_loss_mask"]
)
def test_masks_are_known_by_the_names_that_trainers_give_them(name, write):
    opened = write({"input_ids": IDS, name: [[0, 0, 1, 1], [0, 1], [], [1, 0, 0]]})
    with pytest.raises(ValueError, match=rf"weights='{name}', or weights=\(\) to train on all"):
        opened()
    assert weights_of(opened(weights=name)) == [[0, 1, 1], [1], [], [0, 0]]


@pytest.mark.parametrize("name", ["prompt_mask", "input_mask"])
def test_masks_whose_ones_mean_two_things_are_not_guessed(name, write):
    opened = write({"input_ids": IDS, name: [[0, 0, 1, 1], [0, 1], [], [1, 0, 0]]})
    with pytest.raises(ValueError, match=rf"{name}' says .*weights='{name}'; else write its opp"):
        opened()
    assert weights_of(opened(weights=name)) == [[0, 1, 1], [1], [], [0, 0]]
    assert not opened(weights=()).weighted


def test_columns_that_are_not_read_are_said_with_their_types_once(write, caplog):
    others = {
        "loss_weights": [[0.0, 0.5, 1.0, 1.0], [0.0, 1.0], [], [1.0, 0.0, 0.0]],
        "of_targets": [[0, 1, 1], [1], [], [0, 0]],
        "prompt_length": [2, 1, 0, 1],
        "signs": ["0011", "01", "", "100"],
        "struct": [{"mask": [0] * len(row)} for row in IDS],
        "bytes": [b"0011", b"01", b"", b"100"],
    }
    opened = write({"input_ids": IDS, **others})
    opened()
    (line,) = (record.getMessage() for record in caplog.records)
    for name, of in zip(
        sorted(others), ("binary", "list<", "list<", "int64", "string", "struct<"), strict=True
    ):
        assert f"{name!r} ({of}" in line
    caplog.clear()
    with pytest.raises(ValueError, match=r"of_targets has other .*\(put a 0 before those of each"):
        opened(weights="of_targets")
    caplog.clear()
    write({"input_ids": IDS, "labels": IDS, "loss_weights": others["loss_weights"]})(
        weights="loss_weights", features={"labels": Feature("targets")}
    )
    write({"input_ids": IDS, "labels": IDS})(weights=())
    assert not caplog.text


def test_the_product_of_several_masks_counts(write):
    one = [[0, 1, 1, 0], [1, 1], [], [1, 1, 1]]
    halves = [[1, 1, 0.5, 1], [0, 0], [], [2, 2, 2]]
    opened = write({"input_ids": IDS, "loss_mask": one, "mine": halves})
    assert weights_of(opened(weights=("loss_mask", "mine"))) == [[1, 0.5, 0], [0], [], [2, 2]]
    some = [[1, 0, 1, 1], [1, 1], [], [0, 0.5, 0.25]]  # only the second group has fractions
    corpus = write({"input_ids": IDS, "mine": some})(weights="mine")
    assert weights_of(corpus) == [[0, 1, 1], [1], [], [0.5, 0.25]]
    with pytest.raises(ValueError, match="give weights='loss_mask' as well, or"):
        opened(weights="mine")


def test_the_prompt_of_sources_len_has_no_weight(write):
    opened = write({"input_ids": IDS, "sources_len": [2, 0, 0, 3]})
    assert weights_of(opened(weights="sources_len")) == [[0, 1, 1], [1], [], [0, 0]]


def test_the_prompt_of_sources_len_is_inside_its_row(write):
    for sizes in ([2, 0, 0, 4], [-1, 0, 0, 3]):
        with pytest.raises(
            ValueError, match=r"sources_len is (4 in a row of 3|-1 in a row of 4) tok"
        ):
            write({"input_ids": IDS, "sources_len": sizes})(weights="sources_len")


def test_whole_weights_of_one_number_above_1_are_refused(write):
    mask = [[0, 255, 255, 0], [255, 0], [], [255] * 3]
    for kind in (pa.uint8(), pa.int16()):
        opened = write({"input_ids": IDS, "mine": pa.array(mask, pa.list_(kind))})
        with pytest.raises(
            ValueError, match="the weights of mine are 0 and 255 alone; a mask has 1"
        ):
            opened(weights="mine")
    assert weights_of(
        write({"input_ids": IDS, "mine": pa.array(mask, pa.list_(pa.float32()))})(weights="mine")
    ) == [[255, 255, 0], [0], [], [255, 255]]
    several = [[0, 2, 1, 0], [3, 0], [], [1] * 3]
    corpus = write({"input_ids": IDS, "mine": several})(weights="mine")
    assert weights_of(corpus) == [[2, 1, 0], [0], [], [1, 1]]


def test_a_corpus_without_any_loss_says_so(write):
    mask = [[0] * len(row) for row in IDS]
    assert ", 0 of them with loss" in str(write({"input_ids": IDS, "mine": mask})(weights="mine"))
    assert "with loss" not in str(write({"input_ids": IDS})())


def test_padding_is_dropped_and_packed_rows_are_divided(write):
    ids = [[0, 1, 2, 3, 4, 0], [5, 6, 0, 0, 0, 0], [0] * 6, [7, 8, 9, 7, 8, 9]]
    padding = [[id_ > 0 for id_ in row] for row in ids]
    values = [[[id_, -id_] for id_ in row] for row in ids]
    columns = {
        "input_ids": ids,
        "labels": [[-100 if id_ % 2 else id_ for id_ in row] for row in ids],
        "attention_mask": padding,
        "points": pa.array(values, pa.list_(pa.list_(pa.int32(), 2))),
        "reward": [1.0, 2.0, 3.0, 4.0],
    }
    features = {"points": Feature("inputs", shape=(2,)), "reward": Feature("example")}
    corpus = write(columns)(labels="labels", features=features)
    for kind in (bool, int, float):
        mask = [[*map(kind, row)] for row in padding]
        whole = write({"input_ids": ids, "attention_mask": mask})(task=INPUTS)
        assert documents_of(whole) == [[1, 2, 3, 4], [5, 6], [], [7, 8, 9, 7, 8, 9]]
    assert weights_of(corpus) == [[1, 0, 1], [1], [], [1, 0, 0, 1, 0]]
    assert corpus[0]["points"].tolist() == [[1, -1], [2, -2], [3, -3]]
    packed = write({**columns, "seq_lengths": [[1, 3], [2], [], [3, 3]]})
    corpus = packed(labels="labels", features=features)
    assert [example["points"][:, 0].tolist() for example in corpus] == [
        [],
        [2, 3],
        [5],
        [7, 8],
        [7, 8],
    ]
    assert weights_of(corpus) == [[], [0, 1], [1], [1, 0], [1, 0]]
    assert [float(example["reward"]) for example in corpus] == [1, 1, 2, 4, 4]


def test_sequences_of_a_row_are_never_joined_silently(write):
    ids = [[0, 1, 2, 3, 4], [5, 6], [7]]
    for columns in (
        {"position_ids": [[0, 1, 0, 1, 2], [0, 1], [0]]},
        {"attention_mask": [[1, 1, 2, 2, 0], [1, 1], [1]]},
        *({name: [[0, 0, 1, 1, 1], [0, 0], [0]]} for name in NUMBERS),
    ):
        with pytest.raises(ValueError, match="tells apart several sequences in a row; add a col"):
            write({"input_ids": ids, **columns})()
        divided = write({"input_ids": ids, **columns, "seq_lengths": [[2, 2], [2], [1]]})
        if "attention_mask" in columns:
            assert documents_of(divided(task=INPUTS)) == [[0, 1], [2, 3], [5, 6], [7]]
    for name in STARTS:
        columns = {"input_ids": ids, name: [[0, 2, 5], [0, 2], [0, 1]]}
        with pytest.raises(ValueError, match=f"the column '{name}' divides rows into sequences; a"):
            write(columns)()
        assert len(write({**columns, "seq_lengths": [[2, 3], [2], [1]]})()) == 4
    one = {
        "position_ids": [[1, 1, 0, 1, 2], [0, 1], [4]],
        "attention_mask": [[0, 0, 3, 3, 3], [1, 1], [2]],
    }
    assert documents_of(write({"input_ids": ids, **one})(task=INPUTS)) == [[2, 3, 4], [5, 6], [7]]
    features = {"position_ids": Feature("inputs")}
    corpus = write({"input_ids": ids, "position_ids": [[0, 1, 0, 1, 2], [0, 1], [0]]})
    assert corpus(features=features)[0]["position_ids"].tolist() == [0, 1, 0, 1]


def test_two_columns_of_one_name_are_refused(tmp_path):
    path = tmp_path / "a.arrow"
    write_table(path, pa.table([pa.array([[1, 2]]), pa.array([[3, 4]])], names=["input_ids"] * 2))
    with pytest.raises(ValueError, match=r"a.arrow has several columns 'input_ids'; rename them"):
        InPlace.arrow(path)


def test_columns_that_do_not_fit_the_tokens_are_refused(write):
    for columns, options, sentence in (
        ({"labels": [[1, 2, 4], [2]]}, {"labels": "labels"}, "are not the ids in 'input_ids'"),
        ({"labels": [[1], [3]]}, {"labels": "labels"}, "labels has other numbers of entries"),
        ({"loss_mask": [[1, -1, 1], [1]]}, {"weights": "loss_mask"}, "cannot hold -1"),
        ({"mask": [["0", "1", "1"], ["1"]]}, {"weights": "mask"}, "list<.*: string>; give numbers"),
        # A mask that is added to scores.
        ({"attention_mask": [[-np.inf, 0.0, 0.0], [0.0]]}, {}, "cannot hold -inf; a weight must b"),
        ({"attention_mask": [[1, 0, 1], [1]]}, {}, "attention_mask is 0 between tokens of a row"),
        ({"seq_lengths": [[1], [1]]}, {}, "seq_lengths does not divide"),
        ({}, {"label": "labels"}, "has no option 'label'; did you mean 'labels'"),
    ):
        opened = write({"input_ids": [[1, 3, 4], [2]], **columns})
        with pytest.raises((ValueError, TypeError), match=sentence):
            opened(**options)


def test_a_saved_data_set_with_indices_of_rows_that_it_keeps_is_refused(tmp_path):
    folder = tmp_path / "tokens"
    save_to_disk(folder, {"a.arrow": [{"input_ids": [1, 2]}, {"input_ids": [3, 4]}]})
    state = json.loads((folder / "state.json").read_text())
    (file,) = state["_data_files"]
    whole = (  # version 1 writes None if all rows count
        {"_indices_data_files": None},
        {"_data_files": [{**file, "skip": 0, "take": 2}]},
        {"_data_files": [{**file, "skip": 0, "take": -1}], "_inplace_history": []},
        {"_inplace_history": [{"transforms": []}]},
    )
    columns = (
        {"_indices_data_files": [{"filename": "indices.arrow"}]},
        {"_data_files": [{**file, "skip": 1, "take": 1}]},
        {"_data_files": [{**file, "skip": 0, "take": 1}]},
        {"_data_files": [{**file, "skip": 1}]},
        {"_inplace_history": [{"transforms": [["rename_column_", ["a", "input_ids"], {}]]}]},
    )
    for more in (*whole, *columns):
        (folder / "state.json").write_text(json.dumps({**state, **more}))
        for opened in (InPlace.arrow, sources.open_files, sources.ArrowFiles):
            for paths in (folder, folder / "*.arrow"):
                if more in whole:
                    assert len([*opened(paths)]) == 2
                    continue
                with pytest.raises(ValueError, match=r"the indices of those that it keeps"):
                    opened(paths)


def test_a_saved_data_set_has_the_files_that_it_lists(tmp_path):
    folder, name = tmp_path / "tokens", "data-00000-of-0000{}.arrow"
    for count, ids in ((2, [1, 2]), (1, [4, 5, 6])):  # the first file stays
        save_to_disk(folder, {name.format(count): [{"input_ids": ids}]})
    for opened in (InPlace.arrow, sources.open_files):
        with pytest.raises(ValueError, match=r"00002.arrow is not among the files that state.json"):
            opened(folder / "*.arrow")
    assert [record["input_ids"] for record in sources.open_files(folder)] == [[4, 5, 6]]
    assert documents_of(InPlace.arrow(folder / name.format(1), task=INPUTS)) == [[4, 5, 6]]
    with pytest.raises(ValueError, match="is not a data set that was saved to disk whole"):
        InPlace.arrow(tmp_path)
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    for split in (None, "validation"):
        with pytest.raises(ValueError, match="has the splits train, test"):
            InPlace.arrow(tmp_path, split=split)
    with pytest.raises(ValueError, match=r"split is 'test', but .* is no folder"):
        InPlace.arrow(folder / "*.arrow", split="test")
    (folder / "state.json").write_text('{"_data_files": [')
    with pytest.raises(ValueError, match=r"state\.json cannot be read"):
        InPlace.arrow(folder)
