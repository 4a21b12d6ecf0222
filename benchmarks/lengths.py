"""Lengths to measure with: sampled from a file, or lognormal."""

import json
import pathlib

import numpy as np

# WikiText-103 has as many training lines longer than two characters.
EXAMPLES = 1_164_464

# Subwords of a line, as against its words, and two marks.
SUBWORDS_PER_WORD, MARKS = 1.137, 2


def sample(path: str | None, count: int = EXAMPLES, longest: int = 512) -> np.ndarray:
    """`count` lengths of at most `longest`: int64, drawn with replacement, always the same.

    Args:
        path: a `.json` file, a list of lengths; any other file is text, of which each line longer
            than two characters is an example. None: lognormal, of mean about 95.
        count: how many.
        longest: longer ones are cut to this.
    """
    rng = np.random.default_rng(0)
    if path is None:
        drawn = np.clip(rng.lognormal(4.2, 0.9, count), 3, None)
    elif path.endswith(".json"):
        drawn = rng.choice(json.loads(pathlib.Path(path).read_text()), count)
    else:
        lines = pathlib.Path(path).read_text().splitlines()
        words = [len(line.split()) for line in lines if len(line) > 2]
        drawn = np.round(SUBWORDS_PER_WORD * rng.choice(words, count)) + MARKS
    return np.minimum(drawn, longest).astype(np.int64)


def examples_of(lengths: np.ndarray, vocab_size: int = 30_000) -> list[np.ndarray]:
    """Random token ids for causal examples of these lengths: int32 arrays of `length + 1`."""
    ids = np.random.default_rng(1).integers(
        1, vocab_size, int(lengths.sum()) + len(lengths), dtype=np.int32
    )
    return np.split(ids, np.cumsum(lengths + 1)[:-1])
