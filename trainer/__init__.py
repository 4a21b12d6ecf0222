"""The parts of train.py that know its config: its corpora, its schedule of batches, its log."""

from trainer import launch
from trainer.balance import fit_schedule
from trainer.checkpoint import Checkpoints
from trainer.config import (
    check_config,
    check_warmup,
    default_workdir,
    load_config,
    resume_config,
)
from trainer.corpora import prepare_corpora, prepare_run
from trainer.evaluation import evaluate, evaluation_batches, require_same_data
from trainer.log import TrainingLog, is_finished, say_stopped
from trainer.model import Model, choose_layout, choose_network
from trainer.parameters import start_from
from trainer.schedule import Schedule
from trainer.scoring import score
from trainer.stats import Clock
from trainer.steps import Steps, compile_steps, share_batches, warn_of_window
from trainer.weights_file import WeightsFile, loader_options
from trainer.workdir import describe_run, store_config, work_directory

__all__ = [
    "Checkpoints",
    "Clock",
    "Model",
    "Schedule",
    "Steps",
    "TrainingLog",
    "WeightsFile",
    "check_config",
    "check_warmup",
    "choose_layout",
    "choose_network",
    "compile_steps",
    "default_workdir",
    "describe_run",
    "evaluate",
    "evaluation_batches",
    "fit_schedule",
    "is_finished",
    "launch",
    "load_config",
    "loader_options",
    "prepare_corpora",
    "prepare_run",
    "require_same_data",
    "resume_config",
    "say_stopped",
    "score",
    "share_batches",
    "start_from",
    "store_config",
    "warn_of_window",
    "work_directory",
]
