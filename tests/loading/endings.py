"""One process that forks another for each case of test_endings.py, so that imports are paid once.

It reads a case as JSON from a line of its input, and writes what became of it.
"""

import asyncio
import atexit
import itertools
import json
import os
import select
import signal
import sys
import tempfile
import threading
import time

import grain
import numpy as np

import pipeline
from pipeline import Batches, Bucket, Examples, Feature, Plan
from pipeline.corpus.stored.reader import Reader

LIMIT = 20.0  # seconds until a child counts as stuck
LATER = 2  # calls before the one that stalls or raises

ERRORS = {
    error.__name__: error
    for error in (
        *(ValueError, OSError, TimeoutError, SystemExit, KeyboardInterrupt, StopIteration),
        *(GeneratorExit, asyncio.CancelledError),
    )
}


def main():
    """Forks a child for each line, and reports its seconds from its end to Python's."""
    for line in sys.stdin:
        ours, theirs = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(ours)
            # A job in the background of a shell ignores it.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            return json.loads(line), theirs
        os.close(theirs)
        print(json.dumps(watch(child, ours, json.loads(line)["end"])), flush=True)
        os.close(ours)
    return None


def watch(child, pipe, end):
    began, begin, end_of_loop, said = time.monotonic(), None, None, ""
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if select.select([pipe], [], [], 0.01)[0]:
            said += (new := os.read(pipe, 10_000).decode())
            if "stalls" in new and end == "ctrl-c":
                time.sleep(0.05)  # until the main thread waits for it
                begin = time.monotonic()
                os.kill(child, signal.SIGINT)
            elif "ends" in new and begin is None:
                begin = time.monotonic()
            if "at exit" in new:
                end_of_loop = time.monotonic()
        if time.monotonic() - (begin or began) > LIMIT:
            os.kill(child, signal.SIGKILL)
    seconds = (end_of_loop or time.monotonic()) - (begin or began)
    return {
        "seconds": seconds,
        "code": os.waitstatus_to_exitcode(ended[1]),
        "said": said.split("\n"),
    }


def run(what, where, end, pipe):
    """Loads until `what` happens at `where`, and then ends in the way of `end`."""

    def say(*words):
        os.write(pipe, (" ".join(map(str, words)) + "\n").encode())

    armed, happened, calls = threading.Event(), threading.Event(), itertools.count()

    def act():
        if not armed.is_set() or next(calls) < LATER:
            return
        happened.set()
        if what in ERRORS:
            raise ERRORS[what]("mine")
        say("stalls")
        if what == "sleep":
            time.sleep(3600)
        elif what == "wait":
            threading.Event().wait()
        elif what == "read":
            os.read(os.pipe()[0], 1)
        while True:  # busy
            pass

    def acting(function):
        def wrapper(*arguments, **options):
            act()
            return function(*arguments, **options)

        return wrapper

    def same(batch):
        act()
        return batch

    rng = np.random.default_rng(0)
    tokens = [rng.integers(1, 100, size) for size in rng.integers(5, 60, 300)]
    columns = {"tokens": tokens, "reward": [*rng.random(300)]}
    examples = Examples(columns, features={"reward": Feature("example")})
    options = {"buckets": [Bucket(4, 64)], "max_segments": 8}
    if where in ("source", "score", "pack"):
        Reader.read = acting(Reader.read)
    elif where == "feature":
        Reader.read_examples = acting(Reader.read_examples)
    if where == "score":

        def loop():
            with tempfile.TemporaryDirectory() as directory:
                armed.set()
                step, more = (lambda batch: {"token": batch["inputs"]}), {"directory": directory}
                pipeline.score(examples, step, per="position", features=(), **more, **options)

        iterator = None
    elif where == "pack":
        packed = pipeline.pack(examples, options["buckets"], max_segments=8)
        iterator = iter(packed)
    elif where == "stream":
        lines = grain.MapDataset.source(tokens).repeat()
        later = lines.map_with_index(lambda n, each: same(each) if n > 50 else each)
        iterator = pipeline.load(later, buckets=options["buckets"], window=40)
    elif where == "Grain's map":
        batches = Batches(examples, Plan(examples, options["buckets"], max_segments=8))
        iterator = iter(batches.repeat().map(same).to_iter_dataset())
    else:
        iterator = pipeline.load(
            examples, transform=same if where == "transform" else None, **options
        )
    armed.set()
    if iterator is not None:

        def loop():
            for _ in iterator:
                pass

    if end == "ctrl-c" and what not in ERRORS:
        return loop()
    if what in ERRORS:
        try:
            loop()
        except BaseException as error:
            causes = [error, error.__cause__, error.__context__]
            say("error", *(type(each).__name__ for each in causes), str(error).replace("\n", " "))
    else:
        own = where in ("score", "pack") or end == "another thread"
        if own:
            threading.Thread(target=loop, daemon=True).start()
        elif hasattr(iterator, "start_prefetch"):
            next(iterator)
            iterator.start_prefetch()
        if not happened.wait(LIMIT):
            say("nothing happened")
    say("ends")
    if end == "close" and hasattr(iterator, "close") and where != "pack":
        iterator.close()
    elif end == "with" and hasattr(iterator, "__enter__"):
        with iterator:
            pass
    elif end == "break" and where not in ("score", "pack") and what in ERRORS:
        del iterator
    elif end == "exception":
        raise ValueError("the end")
    return None


if __name__ == "__main__" and (case := main()):
    # The first to be registered is the last to be called. What Python then does takes a second if
    # the machine is busy, also without a loader.
    atexit.register(os.write, case[1], b"at exit\n")
    run(**case[0], pipe=case[1])
