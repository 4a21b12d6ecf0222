"""Input paths, Lockstep's and others': the same documents in, batches of one form out.

Each path runs in an interpreter that has its library (see `__main__`), so this file and the table
below import NumPy alone.

Tokens are not text: token k of a document has an id of its own, except that each document begins
with BEGIN. So whoever counts ids knows where each token of each document went.
"""

from typing import Any

import numpy as np

PADDING, BEGIN = 0, 1

Batch = dict[str, np.ndarray]  # FIELDS, each [rows, length]
FIELDS = ("inputs", "targets", "inputs_segment_ids", "inputs_positions", "loss_weights")

# The library of each path, and its module here, class and options.
PATHS: dict[str, tuple[str, str, dict[str, str]]] = {
    "Lockstep": ("lockstep", "lockstep:Lockstep", {}),
    "Lockstep, truncated": ("lockstep", "lockstep:Truncated", {}),
    "Grain, first fit": ("grain", "grain_packers:Grain", {"packer": "FirstFitPackIterDataset"}),
    "Grain, best fit": ("grain", "grain_packers:Grain", {"packer": "BestFitPackIterDataset"}),
    "Grain, concat then split": (
        "grain",
        "grain_packers:Grain",
        {"packer": "ConcatThenSplitIterDataset"},
    ),
    "MaxText, Grain": ("maxtext", "maxtext_pipelines:MaxText", {}),
    "MaxText, Hugging Face": ("maxtext", "maxtext_pipelines:HuggingFace", {}),
    "TRL, bfd": ("trl", "torch_loaders:TRL", {"strategy": "bfd"}),
    "TRL, bfd_split": ("trl", "torch_loaders:TRL", {"strategy": "bfd_split"}),
    "TRL, wrapped": ("trl", "torch_loaders:TRL", {"strategy": "wrapped"}),
    "transformers, group_by_length": ("trl", "torch_loaders:LengthGrouped", {}),
    "infinibatch": ("infinibatch", "read_ahead:Infinibatch", {}),
}


class InputPath:
    """The batches of one host, from its library's own parts, and how it resumes.

    Args:
        documents: int32 arrays of token ids.
        length: of the longest row.

    Attributes:
        packages: the libraries whose versions are reported.
        remark: what a reader must know of its resume.
    """

    packages: tuple[str, ...] = ()
    remark = ""

    def __init__(self, documents: list[np.ndarray], length: int):
        self.documents, self.length = documents, length

    def start(self, rows: int, host: int, hosts: int) -> Any:
        """An iterator of one epoch; `hosts` hosts together load batches of `rows` rows."""
        raise NotImplementedError

    def convert(self, element: Any) -> Batch:
        """A batch, from what the iterator gives."""
        return element

    def shape(self, element: Any, batch: Batch) -> tuple[int, ...]:
        """The shape that a step is compiled for, if it takes what the iterator gives."""
        return batch["inputs"].shape

    def state(self, iterator: Any, steps: int) -> Any:
        """What a checkpoint holds for this host after `steps` batches. None: there is no state."""
        return iterator.get_state()

    def resume(self, rows: int, states: list[Any]) -> Any:
        """The iterator of one host, from the states of all the hosts there were."""
        iterator = self.start(rows, 0, 1)
        iterator.set_state(states[0])
        return iterator


def split(document: np.ndarray, length: int) -> list[np.ndarray]:
    """Pieces of at most `length` targets; each begins with the last token of the one before."""
    return [document[at : at + length + 1] for at in range(0, len(document) - 1, length)]
