"""Dialogues: questions about functions of the standard library, and answers to them."""

from typing import Any

from etils import epath

from pipeline.sources.docstrings import Docstrings

# Functions that one conversation is about.
TURNS = 3


class Dialogues:
    """Records `{"messages": [{"role", "content"}, …]}`: chats of several turns, without a download.

    In each turn the user quotes a docstring of the standard library and the assistant names the
    function with its signature; a conversation is about up to three functions of one module or
    two. Splits and where the data set lies are those of `PythonStdlib`.

    Args:
        split: as TFDS spells it: `train`, `validation`, `train[:50%]`.
        data_dir: where to keep the data set; by default where TFDS keeps its own.
    """

    def __init__(self, split: str = "train", data_dir: epath.PathLike | None = None):
        self._functions = Docstrings(split, data_dir)

    @property
    def fingerprint(self) -> str:
        """See `Source`."""
        return f"dialogues-{self._functions.fingerprint}"

    def __len__(self) -> int:
        return -(-len(self._functions) // TURNS)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of {len(self):,}")
        last = min((index + 1) * TURNS, len(self._functions))
        about = [self._functions[number] for number in range(index * TURNS, last)]
        messages = [{"role": "system", "content": "You know the Python standard library."}]
        for number, function in enumerate(about):
            asked = "Which function does this?" if number == 0 else "And this?"
            messages += [
                {"role": "user", "content": f"{asked}\n{function['docstring']}"},
                {"role": "assistant", "content": function["signature"]},
            ]
        return {"messages": messages}

    def __str__(self) -> str:
        return f"dialogues about {self._functions}"
