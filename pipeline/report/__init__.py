"""The report: the cost of padding on your data, and the figures of a plan.

`measure` computes all `Figures`; `format_text` and `format_page` show them. `format_summary` shows
the summary of a run.
"""

from pipeline.report.dataset import Dataset, Options, from_corpus, from_run, open_dataset
from pipeline.report.figures import Figures, measure, measure_epoch
from pipeline.report.page import format_page
from pipeline.report.run import Run, read_run
from pipeline.report.text import format_summary, format_text

__all__ = [
    "Dataset",
    "Figures",
    "Options",
    "Run",
    "format_page",
    "format_summary",
    "format_text",
    "from_corpus",
    "from_run",
    "measure",
    "measure_epoch",
    "open_dataset",
    "read_run",
]
