"""What was a run trained on? Its plans, its log, the losses of its documents, and its audit.

`write_history` writes down the plans of a run, and `RunLog` each of its steps. Afterwards `audit`
compares the two, `losses` says what each document lost in each step, and `Why` names the documents
that a loss is from.
"""

from pipeline.history.auditing import NotAsPlanned, audit
from pipeline.history.loss_archive import Losses, Why, losses
from pipeline.history.plans import read_history, write_history
from pipeline.history.run_log import RunLog

__all__ = [
    "Losses",
    "NotAsPlanned",
    "RunLog",
    "Why",
    "audit",
    "losses",
    "read_history",
    "write_history",
]
