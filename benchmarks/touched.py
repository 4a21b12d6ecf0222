"""What a plan touches: functions, classes and files that one corpus and two batches call.

    python -m benchmarks.touched           # the numbers
    python -m benchmarks.touched --list    # and what they count

They say how much one has to read to follow a plan. Comprehensions and lambdas do not count.
"""

import argparse
import pathlib
import sys
from types import FrameType
from typing import Any

import numpy as np

import pipeline
from pipeline.planning import Bucket, Plan

ROOT = pathlib.Path(pipeline.__file__).parent


def touched() -> set[tuple[str, str]]:
    """The file and the qualified name of each function of `pipeline` that is called."""
    lengths = np.random.default_rng(0).integers(1, 200, 5000)
    buckets = [Bucket(8, 128), Bucket(4, 256)]
    Plan(lengths, buckets).batch(0)  # caches are filled, and modules loaded
    found = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        path = pathlib.Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT):
            found.add((str(path.relative_to(ROOT)), frame.f_code.co_qualname))

    sys.setprofile(note)
    try:
        plan = Plan(lengths, buckets)
        plan.batch(0)
        plan.batch(1)
    finally:
        sys.setprofile(None)
    return {(file, name) for file, name in found if not name.endswith(">")}


def main() -> None:
    """Prints the numbers."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.touched", description=__doc__)
    parser.add_argument("--list", action="store_true", help="also name what is counted")
    names = sorted(touched())
    # A class is what a method, or a function inside of one, is called of.
    classes = {(file, name.split(".")[0]) for file, name in names if "." in name}
    classes = {(file, name) for file, name in classes if name.lstrip("_")[0].isupper()}
    files = {file for file, _ in names}
    print(f"{len(names)} functions of {len(classes)} classes in {len(files)} files")
    if parser.parse_args().list:
        print("\n".join(f"{file}: {name}" for file, name in names))


if __name__ == "__main__":
    main()
