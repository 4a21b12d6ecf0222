"""The parts of train.py that know its config: its corpora, its schedule of batches, its run."""

from pipeline.trainer.corpora import prepare_corpora, prepare_on_hosts, prepare_test
from pipeline.trainer.evaluation import evaluation_batches
from pipeline.trainer.model import Model
from pipeline.trainer.parameters import require_checkpoint, restore_parameters
from pipeline.trainer.run import Run
from pipeline.trainer.schedule import Schedule
from pipeline.trainer.scoring import score_corpus

__all__ = [
    "Model",
    "Run",
    "Schedule",
    "evaluation_batches",
    "prepare_corpora",
    "prepare_on_hosts",
    "prepare_test",
    "require_checkpoint",
    "restore_parameters",
    "score_corpus",
]
