"""The losses of a run: what each example lost in each step, of the log of losses and the plan."""

from typing import NamedTuple

import numpy as np
from etils import epath

from pipeline.storage.corpora import Corpora
from pipeline.training.history import read_history
from pipeline.training.loss_log import NAME, read_sums

# Steps before and after a step over which the mean loss at that step is taken.
AROUND = 16


class Losses(NamedTuple):
    """The losses of the segments of a run, in the order in which it trained on them.

    An example that is split has several segments, in one step or in several.

    Attributes:
        example: its number, over all corpora: int64 [segments].
        epoch: the epoch of its corpus: int64 [segments].
        step: int64 [segments].
        loss: Σ weight · nll, in nats: float32 [segments].
        weight: Σ weight: float32 [segments].
        corpus: which of several corpora the example is of, from 0: int64 [segments].
    """

    example: np.ndarray
    epoch: np.ndarray
    step: np.ndarray
    loss: np.ndarray
    weight: np.ndarray
    corpus: np.ndarray

    def select(self, which: np.ndarray) -> "Losses":
        """Some of the segments: a bool for each, or their places."""
        return Losses(*(column[which] for column in self))

    def expected(self) -> np.ndarray:
        """The mean loss at the time of each segment, in nats: float64 [segments].

        It is that of its corpus over the 16 steps before and after, so it falls as the run learns.
        """
        names, corpus = np.unique(self.corpus, return_inverse=True)
        first, last = (int(self.step.min()), int(self.step.max())) if len(self.step) else (0, 0)
        shape = len(names), last - first + 1
        place = np.ravel_multi_index((corpus, self.step - first), shape)
        finite = np.isfinite(self.loss)
        loss, weight = (
            np.bincount(place, np.where(finite, each, 0), shape[0] * shape[1]).reshape(shape)
            for each in (self.loss, self.weight)
        )
        ends = np.arange(shape[1])
        begin, end = np.maximum(ends - AROUND, 0), np.minimum(ends + AROUND + 1, shape[1])
        sums = []
        for each in (loss, weight):
            before = np.pad(np.cumsum(each, axis=1), ((0, 0), (1, 0)))
            sums.append((before[:, end] - before[:, begin]).ravel()[place])
        return sums[0] / np.maximum(sums[1], 1e-9)


def losses(workdir: epath.PathLike) -> Losses:
    """The losses of a run, over all its starts: arrays with an entry for each segment.

    >>> import tempfile, pipeline
    >>> workdir = tempfile.mkdtemp()
    >>> try:
    ...     pipeline.losses(workdir)
    ... except FileNotFoundError as error:
    ...     print("there is no plans.json" in str(error))
    True

    Args:
        workdir: of a run of train.py; or of a loop of your own that writes a history and a
            `MetricsLog`, and whose steps give `segments`.

    Raises:
        FileNotFoundError: there is no run, or it has no losses.
        ValueError: what is there cannot be read, or its batches cannot be planned again.
    """
    workdir = epath.Path(workdir).expanduser()
    corpus, plan = read_history(workdir)
    found = []
    for step, sums in read_sums(workdir):
        planned = plan.batch(step)
        count = len(planned.segments)
        if count != sums.shape[1]:
            raise ValueError(
                f"{workdir / NAME} has losses of {sums.shape[1]:,} segments at step {step:,}, and "
                f"the plan has {count:,}; it is of another run"
            )
        steps = np.full(count, step)
        found.append((planned.segments[:, 1], planned.epoch_of_segments, steps, *sums))
    if not found:
        raise FileNotFoundError(
            f"there are no losses in {workdir / NAME}; train.py writes them as it saves, and a "
            "loop of your own if its steps give `segments` (pipeline.training.segments)"
        )
    example, epoch, step, loss, weight = map(np.concatenate, zip(*found, strict=True))
    first = corpus.first if isinstance(corpus, Corpora) else np.zeros(1, int)
    owner = np.searchsorted(first, example, side="right") - 1
    return Losses(example, epoch, step, loss, weight, owner)
