"""The report: what padding costs on one's own data, and what a plan makes of it.

`measure` counts everything and returns it as plain JSON; `terminal`, `page` and `figure` only draw
what it returned.
"""

from pipeline.report.markdown import markdown
from pipeline.report.measure import measure
from pipeline.report.options import Options
from pipeline.report.subject import Subject, open_subject

__all__ = ["Options", "Subject", "markdown", "measure", "open_subject"]
