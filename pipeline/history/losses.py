"""The losses of a run: what each example lost in each step, of the log of losses and the plan."""

from typing import NamedTuple

import numpy as np
from etils import epath

from pipeline.corpus.corpora import Corpora
from pipeline.errors import InvalidValue, Missing
from pipeline.fs.atomic import as_path
from pipeline.history.history import read_history
from pipeline.history.loss_log import NAME, read_sums

# Steps before and after a step over which the mean loss at that step is taken.
AROUND = 8


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
        usual: the mean loss of its corpus over this step, the 8 before and the 8 after, in nats,
            which falls as the run learns: float64 [segments].
    """

    example: np.ndarray
    epoch: np.ndarray
    step: np.ndarray
    loss: np.ndarray
    weight: np.ndarray
    corpus: np.ndarray
    usual: np.ndarray

    def select(self, which: np.ndarray) -> "Losses":
        """Some of the segments: a bool for each, or their places."""
        return Losses(*(column[which] for column in self))

    def documents(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Each example once, over all its segments.

        Returns:
            Numbers, ascending, int64 [examples]; mean losses, by weight, in nats; and by how much
            they are above what is usual, which makes examples of any step and corpus comparable:
            float64 [examples].
        """
        numbers, at = np.unique(self.example, return_inverse=True)
        total, usual, weight = (
            np.bincount(at, each, len(numbers))
            for each in (self.loss, self.weight * self.usual, self.weight)
        )
        weight = np.maximum(weight, 1e-9)
        return numbers, total / weight, (total - usual) / weight


def _usual(
    corpus: np.ndarray, step: np.ndarray, loss: np.ndarray, weight: np.ndarray
) -> np.ndarray:
    """The column `usual`; losses that are not finite do not count."""
    shape = int(corpus.max()) + 1, int(step[-1] - step[0]) + 1
    place = corpus * shape[1] + step - step[0]
    ends = np.arange(shape[1])
    begin, end = np.maximum(ends - AROUND, 0), np.minimum(ends + AROUND + 1, shape[1])
    sums = []
    for each in (loss, weight):
        counted = np.where(np.isfinite(loss), each, 0)
        of_steps = np.bincount(place, counted, shape[0] * shape[1]).reshape(shape)
        before = np.pad(np.cumsum(of_steps, axis=1), ((0, 0), (1, 0)))
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
    workdir = as_path(workdir)
    corpus, plan = read_history(workdir)
    found = []
    for step, sums in read_sums(workdir):
        planned = plan.batch(step)
        count = len(planned.segments)
        if count != sums.shape[1]:
            raise InvalidValue(
                f"{workdir / NAME} has losses of {sums.shape[1]:,} segments at step {step:,}, and "
                f"the plan has {count:,}; it is of another run"
            )
        steps = np.full(count, step)
        found.append((planned.segments[:, 1], planned.epoch_of_segments, steps, *sums))
    if not found:
        raise Missing(
            f"there are no losses in {workdir / NAME}; train.py writes them as it saves, and a "
            "loop of your own if its steps give `segments` (pipeline.steps.segments)"
        )
    columns = [np.concatenate(column) for column in zip(*found, strict=True)]
    first = corpus.first if isinstance(corpus, Corpora) else np.zeros(1, int)
    owner = np.searchsorted(first, columns[0], side="right") - 1
    columns += owner, _usual(owner, *columns[2:])
    return Losses(*columns)
