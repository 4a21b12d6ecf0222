"""A host that builds its rows of a mixture of text and sides, slowly, until it is killed.

    python -m tests.loading.side_worker FOLDER INDEX HOSTS STEP

The folder holds the corpora. Each step is a file of its rows; its state is written first.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np

from pipeline import Batches, Bucket, Corpora, Plan
from pipeline.corpus import open_corpus

BUCKET = Bucket(4, {"inputs": 24, "patches": 24, "images": 12})


def mix(folder: Path, **share: int) -> Batches:
    """The batches of both corpora, or the share of a host."""
    corpora = {name: open_corpus(folder / name) for name in ("text", "pictures")}
    mixture = Corpora(corpora)
    plan = Plan(mixture, [BUCKET], weights={"text": 1, "pictures": 2}, align={"patches": 2})
    return Batches(mixture, plan, **share).repeat(None)


def main(folder: Path, index: int, hosts: int, step: int) -> None:
    batches = mix(folder, process_index=index, process_count=hosts)
    iterator = iter(batches.to_iter_dataset())
    if step:
        iterator.set_state(json.loads((folder / f"{step}.json").read_text()))
    while True:
        batch = next(iterator)
        step += 1
        (folder / f"{step}.{index}.tmp").write_text(json.dumps(iterator.get_state()))
        (folder / f"{step}.{index}.tmp").replace(folder / f"{step}.json")
        with (folder / f"{step}-{index}.tmp").open("wb") as file:
            np.savez(file, **batch)
        (folder / f"{step}-{index}.tmp").replace(folder / f"{step}-{index}of{hosts}.npz")
        time.sleep(0.02)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
