"""Runs one input path: `python -m benchmarks.input_paths NAME FOLDER`.

Reads `documents.npz` in the folder, and writes `NAME.pickle` there.
"""

import importlib
import pickle
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.input_paths import PATHS

TIMES = 2  # epochs that are timed, of which the shortest counts


def run(name: str, documents: list[np.ndarray], rows: int, length: int) -> dict[str, Any]:
    """Runs a path: an epoch on one host, an epoch on two, and from its middle on one again.

    Returns:
        `batches` on one host, the number of their `shapes`, and the shortest `seconds` of making
        them; `hosts`, a list of batches for each of two; `half`, the number of their steps before
        a checkpoint; `resumed`, the batches of one host after it, or None if there are none;
        `versions`, and `remark`, what a reader must know of that.
    """
    _, place, options = PATHS[name]
    module, _, kind = place.partition(":")
    path = getattr(importlib.import_module(f"benchmarks.input_paths.{module}"), kind)(
        documents, length, **options
    )
    seconds: list[float] = []
    for _ in range(TIMES):
        begin = time.perf_counter()
        shapes, batches = set(), []
        for element in path.start(rows, 0, 1):
            batches.append(path.convert(element))
            shapes.add(path.shape(element, batches[-1]))
        seconds.append(time.perf_counter() - begin)
    hosts = [[path.convert(element) for element in path.start(rows, host, 2)] for host in (0, 1)]
    half = min(map(len, hosts)) // 2
    states = []
    for host in (0, 1):
        iterator = path.start(rows, host, 2)
        for _ in range(half):
            next(iterator)
        states.append(path.state(iterator, half))
    resumed, remark = None, path.remark
    try:
        if states[0] is not None:
            resumed = [path.convert(element) for element in path.resume(rows, states)]
    except RuntimeError as error:
        remark = f"fails: {error}"
    return {
        "batches": batches,
        "shapes": len(shapes),
        "seconds": min(seconds),
        "hosts": hosts,
        "half": half,
        "resumed": resumed,
        "versions": {package: metadata.version(package) for package in path.packages},
        "remark": remark,
    }


def main(name: str, folder: str) -> None:
    """Reads the documents, and writes what `run` returns; nothing without the library."""
    data = np.load(Path(folder, "documents.npz"))
    documents = np.split(data["ids"], np.cumsum(data["sizes"])[:-1])
    try:
        result = run(name, documents, int(data["rows"]), int(data["length"]))
    except ModuleNotFoundError as error:
        result = {"missing": error.name}
    Path(folder, f"{name}.pickle").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
