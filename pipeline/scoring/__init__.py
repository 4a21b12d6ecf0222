"""What a step makes of each example of a corpus, once and in the order of the corpus."""

from pipeline.scoring.scores import ScoreOptions, score
from pipeline.scoring.table import open_table

__all__ = ["ScoreOptions", "open_table", "score"]
