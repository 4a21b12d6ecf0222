"""A quick run of all properties; `python -m tests.properties fuzz` is the long one."""

import numpy as np
import pyarrow as pa
import pytest

from pipeline.text.sources import ArrowFiles
from tests.properties.properties import PROPERTIES, run


@pytest.mark.parametrize("name", PROPERTIES)
def test_hostile_input_keeps_the_contract_or_is_refused(name):
    one = PROPERTIES[name]
    assert run(one, one.quick, None) > one.quick / 2


def test_a_damaged_arrow_file_does_not_crash_the_process(tmp_path):
    schema, batches = pa.schema([("text", pa.string())]), [["one", "two"], ["three"]]
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), schema) as file:
        for texts in batches:
            file.write_batch(pa.record_batch([pa.array(texts)], schema))
    content = (tmp_path / "a.arrow").read_bytes()
    offsets = np.array([0, 3, 6], np.int32).tobytes()
    assert content.count(offsets) == 1
    wrong = np.array([0, 1 << 30, 6], np.int32).tobytes()
    (tmp_path / "a.arrow").write_bytes(content.replace(offsets, wrong))
    with pytest.raises(ValueError, match=r"its column of string cannot be read: .* out of bounds"):
        [dict(record) for record in ArrowFiles(tmp_path / "a.arrow")]
