"""The history of a run: its plans, its log, the losses of its documents, and its audit.

`write_history` stores the plans of a run, and `RunLog` each of its steps. Afterwards `audit`
compares the two, `losses` returns the loss of each document in each step, and `Why` names the
documents behind a loss.
"""

from pipeline.history.auditing import audit
from pipeline.history.coverage import NotAsPlanned
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
