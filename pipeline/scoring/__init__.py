"""Scoring: a step's results for each example, in the order of the examples.

`score` writes a table of a whole corpus; `pack` and `unpack` are for an update in memory.
"""

from pipeline.scoring.scores import ScoreOptions, score
from pipeline.scoring.table import open_table
from pipeline.scoring.updates import pack, unpack

__all__ = ["ScoreOptions", "open_table", "pack", "score", "unpack"]
