"""Maps: parts of a corpus in memory, each column of them as one array."""

from collections.abc import Mapping

import numpy as np

from pipeline.corpus.gather import span
from pipeline.corpus.parts import PartFile

COLUMNS = {"offsets": np.int64, "tokens": np.int32, "weights": np.float32}


class Maps:
    """Some parts of a corpus, mapped into memory for as long as this object lives.

    Args:
        files: the files of these parts, by their numbers.
        count: the number of parts of the corpus.

    Attributes:
        has: whether each part of the corpus is one of them: bool [parts].
        columns: for each name of `COLUMNS` one array over the memory of all its parts (see `span`),
            and the place in it where each part begins: int64 [parts].
    """

    def __init__(self, files: Mapping[int, PartFile], count: int):
        self._files = files
        numbers = np.array([*files], np.int64)
        self.has = np.zeros(count, bool)
        self.has[numbers] = True
        self.columns = {}
        for name, dtype in COLUMNS.items():
            arrays = [getattr(file, name) for file in files.values()]
            arrays = [np.zeros(0, dtype) if array is None else array for array in arrays]
            values, begins = span([np.zeros(0, dtype), *arrays])
            places = np.zeros(count, np.int64)
            places[numbers] = begins[1:]
            self.columns[name] = values, places
