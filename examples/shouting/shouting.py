"""Two kinds for Lockstep: a template, and a format of token files. Install it with pip.

lockstep prepare asked.jsonl --template shout field=question --into corpus
lockstep report ids.txt --tokens words base=16
"""

from dataclasses import dataclass

import numpy as np

from pipeline.corpus.token_files import TokenFiles
from pipeline.text.files import find


@dataclass(frozen=True, kw_only=True)
class Shout:
    """A field of a record in capital letters.

    Attributes:
        field: the field to shout.
    """

    field: str

    def __call__(self, record):
        """The spans of a record."""
        return [(record[self.field].upper(), 1.0)]


def read_words(paths, *, base=10):
    """The ids of text files: a document a line, with spaces between ids.

    Args:
        paths: names or globs.
        base: of the numbers.
    """
    files = find(paths)
    lines = [line.split() for file in files for line in file.read_text().splitlines()]
    flat = np.array([int(word, base) for line in lines for word in line], np.int32)
    counts = np.array([len(line) for line in lines])
    return TokenFiles(files, [{"tokens": (flat, np.cumsum(counts) - counts, counts)}], base)
