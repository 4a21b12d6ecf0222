"""Compiled steps, microbatches, accumulated gradients, and many hosts as one.

init, train_step = make_train_step(loss, optimizer)     a step for any model
train_step = Compiled(train_step, state, loader.specs)  compiled for every bucket
with CompileLog() as log: …                             what is compiled after that
"""

from pipeline.steps import hosts
from pipeline.steps.compile_log import CompileLog
from pipeline.steps.compiled import Compiled, keep_programs, on_batch_mesh, programs_table
from pipeline.steps.hosts import make_mesh
from pipeline.steps.microbatches import summed
from pipeline.steps.segments import (
    by_segment,
    segment_last,
    segment_mean,
    sum_continuations,
    sum_segments,
)
from pipeline.steps.train_step import (
    accumulate,
    flush,
    make_eval_step,
    make_score_step,
    make_train_step,
)

__all__ = [
    "CompileLog",
    "Compiled",
    "accumulate",
    "by_segment",
    "flush",
    "hosts",
    "keep_programs",
    "make_eval_step",
    "make_mesh",
    "make_score_step",
    "make_train_step",
    "on_batch_mesh",
    "programs_table",
    "segment_last",
    "segment_mean",
    "sum_continuations",
    "sum_segments",
    "summed",
]
