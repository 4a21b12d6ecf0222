"""Following: a model trained while its text is prepared, beside preparing first.

python -m benchmarks following --text FILE
"""

import dataclasses
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import jax

import pipeline
from benchmarks.model import MODEL, Step
from benchmarks.peers import read_texts
from benchmarks.results import Line, Section
from pipeline import sources, tokenizers

MEGABYTES = 300  # of text: preparing takes longer than until the first window is there
VOCABULARY = 2048
BUCKET = pipeline.Bucket(8, 512)
SECONDS = 20  # of training alone


def measure(text: str | None) -> Section:
    """Prepares and trains alone and together, from lines of a file or from functions."""
    with tempfile.TemporaryDirectory() as directory:
        folder = pathlib.Path(directory)
        documents = _write_text(folder / "text.txt", text)
        _tokenizer(folder)
        step = Step(dataclasses.replace(MODEL, vocab_size=VOCABULARY))

        begin = time.perf_counter()
        _prepare(folder, "alone").wait()
        preparing = time.perf_counter() - begin
        corpus = pipeline.Corpus.open(folder / "alone")
        tokens = int(corpus.lengths.sum())
        with pipeline.load(corpus, buckets=[BUCKET]) as loader:
            step(next(loader))  # compiles
            first = time.perf_counter()
            next(loader)
            planned = time.perf_counter() - first
            alone, took = _train(step, loader, lambda spent: spent >= SECONDS)

        begin = time.perf_counter()
        process = _prepare(folder, "followed")
        options = {"buckets": [BUCKET], "num_epochs": 1}
        with pipeline.load(folder / "followed", follow=True, **options) as loader:
            next(loader)
            waited = time.perf_counter() - begin
            together, meanwhile = _train(step, loader, lambda spent: process.poll() is not None)
        process.wait()
        both = time.perf_counter() - begin
    prepared, trained_alone = tokens / preparing, alone / took
    shares = preparing / both, together / meanwhile / trained_alone
    return Section(
        "following",
        f"{MEGABYTES} MB of text, {documents:,} documents and {tokens:,} tokens of a sentencepiece "
        f"model of {VOCABULARY:,} ids; a decoder of {MODEL.num_layers} layers of width "
        f"{MODEL.width}, batches of {BUCKET}. Steps are compiled before they are timed. The "
        f"machine had a load of {os.getloadavg()[0]:.0f} at the end.",
        [
            Line("prepared first: the first batch", f"{preparing + planned:.1f} s", ""),
            Line("followed: the first batch", f"{waited:.1f} s", "after the start of preparing"),
            Line("preparing alone", f"{prepared:,.0f} tokens/s", ""),
            Line("training alone", f"{trained_alone:,.0f} tokens/s", ""),
            Line("preparing, followed", f"{tokens / both:,.0f} tokens/s", f"{shares[0]:.2f}×"),
            Line(
                "training meanwhile",
                f"{together / meanwhile:,.0f} tokens/s",
                f"{shares[1]:.2f}×; both together {sum(shares):.2f} of one after the other",
            ),
        ],
    )


def _write_text(path: pathlib.Path, text: str | None) -> int:
    """Writes a document a line, over and over, each with a number; returns how many."""
    every = [each.replace("\n", " ") for each in read_texts(text)[0]]
    number = 0
    with path.open("w") as file:
        while file.tell() < MEGABYTES * 10**6:
            file.writelines(f"{number + at} {line}\n" for at, line in enumerate(every))
            number += len(every)
    return number


def _source(folder: pathlib.Path) -> sources.Source:
    return sources.TextFiles(folder / "text.txt")


def _tokenizer(folder: pathlib.Path) -> tokenizers.SentencePiece:
    """One trained on the text, the first time."""
    return tokenizers.train_sentencepiece(_source(folder), VOCABULARY, folder / "tokenizer.model")


def _prepare(folder: pathlib.Path, name: str) -> subprocess.Popen:
    """A process that prepares the text into a directory."""
    command = [sys.executable, "-m", "benchmarks.following", os.fspath(folder), name]
    return subprocess.Popen(command, cwd=pathlib.Path(__file__).parent.parent)


def _train(step: Step, batches: Iterator, ended: Callable[[float], bool]) -> tuple[int, float]:
    """Tokens trained on until `ended`, which is told the seconds so far; and the seconds."""
    tokens, begin = 0, time.perf_counter()
    for batch in batches:
        jax.block_until_ready(step(batch))
        tokens += int((batch["inputs_segment_ids"] > 0).sum())
        if ended(time.perf_counter() - begin):
            break
    return tokens, time.perf_counter() - begin


def main() -> None:
    """Prepares the text in a folder, as the process that is measured."""
    folder = pathlib.Path(sys.argv[1])
    pipeline.prepare(_source(folder), _tokenizer(folder), folder / sys.argv[2], progress=False)


if __name__ == "__main__":
    main()
