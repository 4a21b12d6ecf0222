"""What users write: type checkers find the mistakes, which are marked, and nothing else."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
from etils import epath

import pipeline
from pipeline import sources, templates, tokenizers
from pipeline.history import losses


class Poems:
    """A source of one's own."""

    fingerprint = "poems-1"

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> dict[str, str]:
        return {"text": "a rose"}


class Proverbs:
    """The same with a property and another kind of record."""

    @property
    def fingerprint(self) -> str:
        return f"proverbs-{self.version}"

    @cached_property
    def version(self) -> int:
        return 7

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Mapping[str, object]:
        return {"text": "all is well", "number": index}


class Rumours:
    """No source: its content cannot be told apart."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> dict[str, str]:
        return {"text": "they say"}


class Letters:
    """A tokenizer of one's own."""

    kind = "letters"

    def __init__(self, vocab_size: int = 256, end_id: int | None = 2):
        self.vocab_size, self.begin_id, self.end_id = vocab_size, None, end_id
        self.fingerprint = f"letters-{vocab_size}"

    def encode_batch(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        ids = [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]
        return np.concatenate(ids), np.array([len(each) for each in ids])

    def decode(self, ids: Any) -> str:
        return bytes(np.asarray(ids).tolist()).decode()

    def save(self, directory: epath.Path) -> dict[str, Any]:
        return {"kind": self.kind}


def answer(record: dict[str, str]) -> list[tuple[str, float]]:
    return [(record["question"], 0), (record["answer"], 1.0)]


def shout(record: Mapping[str, str]) -> str:
    return record["text"].upper()


def prepare_each(tokenizer: tokenizers.Tokenizer) -> None:
    pipeline.prepare(Poems(), Letters(), "corpus", template=answer)
    pipeline.prepare(Proverbs(), tokenizer, Path("corpus"), task=pipeline.corpus.INPUTS)
    pipeline.prepare(sources.TextFiles("*.txt"), tokenizers.Bytes(end=False), "corpus")
    pipeline.prepare(
        sources.Records(["a", "b"]),
        tokenizer,
        "corpus",
        template=templates.Answer(prompt="{q}", answer="{a}"),
    )
    pipeline.prepare_pairs(Poems(), tokenizer, "pairs", fields=("text", answer))
    pipeline.prepare(Rumours(), tokenizer, "corpus")  # mistake: no fingerprint
    pipeline.prepare(["a", "b"], tokenizer, "corpus")  # mistake: a list is no source
    pipeline.prepare(Poems(), tokenizers.Bytes, "corpus")  # mistake: the class
    pipeline.prepare(Poems(), tokenizer, "corpus", template=shout)  # mistake: gives text
    pipeline.prepare_pairs(Poems(), tokenizer, "pairs", fields="text")  # mistake: one field


def plan_each(corpus: pipeline.Corpus, code: pipeline.Corpus, ids: jax.Array) -> None:
    buckets = pipeline.fit_buckets(corpus, tokens_per_batch=4096, max_buckets=2)
    plan = pipeline.Plan([5, 3, 4], [pipeline.Bucket(rows=2, length=8)], overflow="drop")
    pipeline.Plan([[5, 2], [3, 3]], [pipeline.Bucket(2, (8, 4))], exclude=lambda lengths: [0])
    pipeline.Plan(np.array([5, 3]), buckets, exclude=[1], max_segments=None)
    pipeline.Plan(ids, buckets, seed=3, window=1000)
    both = pipeline.Corpora({"code": code, "prose": corpus})
    mixed = pipeline.Plan(both, buckets, weights={"code": 0.7, "prose": 0.3})
    plan.after(7, buckets=buckets, packing="none").onward(7).batch(9)
    mixed.after(7, weights={"code": 1, "prose": 1})
    pipeline.fit_buckets(corpus, max_buckets=2)  # mistake: lacks tokens_per_batch
    pipeline.fit_buckets(corpus, tokens_per_batch="4k", max_buckets=2)  # mistake: text
    pipeline.Plan("corpus", buckets)  # mistake: the name of a directory
    pipeline.Plan(corpus, buckets, packing="bestfit")  # mistake: best_fit
    pipeline.Plan(corpus, buckets, shuffle="no")  # mistake: text
    pipeline.Plan(both, buckets, weights=[0.7, 0.3])  # mistake: without names
    pipeline.Bucket(rows=64)  # mistake: lacks length
    plan.after(7, tokens_per_batch=4096)  # mistake: not an option of a plan
    plan.after(7, overflow="cut")  # mistake: no such rule
    plan.num_batch()  # mistake: num_batches
    pipeline.fit_bucket(corpus)  # mistake: fit_buckets


def load_each(corpus: pipeline.Corpus, pairs: pipeline.Pairs, mesh: jax.sharding.Mesh) -> None:
    with pipeline.load("corpus", tokens_per_batch=4096, positions="restart") as loader:
        for batch in loader:
            (batch["inputs"] * batch["loss_weights"]).sum()
    pair = next(pipeline.load(pairs, buckets=[pipeline.Bucket(2, (8, 4))], sharding=mesh))
    pair["decoder_inputs"] + pair["targets_positions"]
    batches = pipeline.Batches(corpus, loader.plan, process_count=2)
    batches[0]["inputs"].astype(np.int64)
    pipeline.to_global(batches[0], mesh)["inputs"].block_until_ready()
    pipeline.rename(batches[0], "maxtext")["inputs_position"]
    pipeline.load("corpus", tokens_per_batch=4096, max_lenght=512)  # mistake: max_length
    pipeline.load("corpus", tokens_per_batch=4096, packing="nope")  # mistake: no such packing
    pipeline.load("corpus", tokens_per_batch=4096, max_length="512")  # mistake: text
    pipeline.load("corpus", tokens_per_batch=4096, positions="reset")  # mistake: restart
    pipeline.load(tokens_per_batch=4096)  # mistake: of what?
    pipeline.load([1, 2, 3], tokens_per_batch=4096)  # mistake: no corpus
    batch["input"]  # mistake: inputs
    batches[0]["loss_weight"]  # mistake: loss_weights
    pipeline.rename(batches[0], "max_text")  # mistake: maxtext
    loader.set_state("state.json")  # mistake: a file


def score_each(pairs: pipeline.Pairs, mesh: jax.sharding.Mesh) -> None:
    buckets = [pipeline.Bucket(2, (8, 4))]
    pipeline.score(pairs, dict, directory="a", per="targets", buckets=buckets, sharding=mesh)
    kinds = {"nll": "position", "reward": "segment"}
    pipeline.score("corpus", dict, directory="b", per=kinds, tokens_per_batch=4096, exclude=[3])
    found = losses("runs/mine")
    found.select(found.epoch == 0).documents()[2].max()
    pipeline.score("corpus", dict, directory="c", per="row", max_lenght=512)  # mistake: max_length
    pipeline.score("corpus", dict, directory="d", per="row", tokens_per_batch="4k")  # mistake: text
    pipeline.score("corpus", dict, directory="e", per="row", shuffle=True)  # mistake: in order
    found.lost.sum()  # mistake: loss
