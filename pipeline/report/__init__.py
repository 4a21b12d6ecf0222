"""The report: what padding costs on your data, and what a plan makes of it.

`measure` computes every figure and returns plain JSON; `format_text`, `format_page` and `draw_png`
show it. `markdown` is a plan for TensorBoard.
"""

from pipeline.report.charts import draw_png
from pipeline.report.dataset import Dataset, Options, from_corpus, from_lengths, open_dataset
from pipeline.report.figures import measure, measure_epoch
from pipeline.report.page import format_page
from pipeline.report.text import format_text, markdown

__all__ = [
    "Dataset",
    "Options",
    "draw_png",
    "format_page",
    "format_text",
    "from_corpus",
    "from_lengths",
    "markdown",
    "measure",
    "measure_epoch",
    "open_dataset",
]
