"""Corpora: tokenised examples on disk, in a bucket or in place, and views of them."""

from pipeline.corpus.tasks import CAUSAL, INPUTS, TARGETS, Task

__all__ = ["CAUSAL", "INPUTS", "TARGETS", "Task"]
