"""The report: what padding costs on a dataset, and what a plan makes of it.

`measure` counts everything and returns plain JSON; `terminal`, `page`, `markdown` and `charts` show
what it returned.
"""

from pipeline.report.dataset import Dataset, open_dataset
from pipeline.report.markdown import markdown
from pipeline.report.measure import measure
from pipeline.report.options import Options

__all__ = ["Dataset", "Options", "markdown", "measure", "open_dataset"]
