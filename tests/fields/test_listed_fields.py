"""Every field that batches have besides features is listed, so no feature takes its name."""

import numpy as np
import pytest

import pipeline
from pipeline import Batches, Bucket, Examples, Feature, Plan
from tests.meshes import mesh_of

TEXT, PATCHES = [[1, 2, 3, 4]] * 8, [np.zeros((3, 2), np.float32)] * 8
OF_PATCHES = {"patches": Feature("patches", shape=2)}


def make_text():
    return Examples({"tokens": TEXT, "weights": [[0, 1, 1, 1]] * 8}), 8


def make_groups():
    return Examples.from_groups([([1, 5, 2], [[7, 3], [8, 9, 3]])] * 8), 8


def make_sides():
    sides = Examples({"tokens": TEXT, "patches": PATCHES}, features=OF_PATCHES)
    return sides, {"inputs": 8, "patches": 8}


def make_targets():
    return Examples({"tokens": TEXT}, task=pipeline.corpus.TARGETS), 8


@pytest.mark.parametrize("make", [make_text, make_groups, make_sides, make_targets])
def test_no_feature_has_the_name_of_a_field_that_batches_have(make):
    corpus, length = make()
    plan = Plan(corpus, [Bucket(2, length)])
    order = "contiguous" if corpus.trees is not None else "zigzag"
    names = ["example_id", *(f"{side}_segment_offsets" for side in corpus.side_names)]
    mesh = mesh_of(data=2, context=2)
    batches = Batches(corpus, plan, sharding=mesh, context_order=order, features=names)
    made = {*batches[0]}
    assert {*names, "inputs_segment_ids", "inputs_positions"} <= made
    assert ("inputs_columns" in made) == (order == "zigzag")
    for name in made:
        columns = {"tokens": TEXT, "patches": PATCHES, name: [1] * 8}
        features = OF_PATCHES | {name: Feature("example", dtype="int32")}
        with pytest.raises(ValueError, match="is named"):
            Examples(columns, features=features)
