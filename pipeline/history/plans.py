"""The plans of a run, in `plans.json`, from which its batches can be planned again."""

import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from etils import epath

from pipeline.corpus.description import describe, make_corpus
from pipeline.corpus.interface import AnyCorpus
from pipeline.errors import InvalidValue, Missing, name_some
from pipeline.fs.atomic import as_path, atomic_write, make_directory
from pipeline.planning.identity import differences
from pipeline.planning.lengths import load_mask
from pipeline.planning.plan import Plan

NAME = "plans.json"


def write_history(workdir: epath.PathLike, corpus: Any, plan: Plan) -> None:
    """Writes the corpora, plans and changes behind the batches of the run in `workdir`.

    A directory inside the work directory is named relative to it, any other by its whole path. The
    plan has all of the run's steps.

    {"corpus": {"kind": "stored", "directory": "corpus/train"}, "tokens": {…},
     "plans": [{"from": 0, "fingerprint": …, "identity": {…}, "changes": {"seed": 0, …}},
               {"from": 2000, …, "changes": {"buckets": [[16, 128]]}}]}
    """
    try:
        described = describe(corpus, workdir)
    except InvalidValue as error:
        raise InvalidValue(
            f"audit and show could not plan the batches of the run again: {error}; or write no "
            "history"
        ) from error
    content = {
        "corpus": described,
        "tokens": corpus.identity,
        "plans": [
            {**entry, "changes": changes}
            for entry, (_, changes) in zip(plan.entries, plan.changes, strict=True)
        ],
    }
    with atomic_write(make_directory(workdir) / NAME) as file:
        file.write(json.dumps(content, indent=1).encode())


def read_history(workdir: epath.PathLike) -> tuple[AnyCorpus, Plan]:
    """The corpus or corpora of the run in `workdir`, and its plan; neither may have changed."""
    workdir = as_path(workdir)
    path = workdir / NAME
    if not path.exists():
        raise Missing(
            f"there is no {NAME} in {os.fspath(workdir)}; give the work directory of a run "
            "(train.py writes that file before its first step; your own loop calls "
            "pipeline.history.write_history)"
        )
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        changes = [(int(entry["from"]), dict(entry["changes"])) for entry in content["plans"]]
        identities = [(dict(e["identity"]), e["fingerprint"]) for e in content["plans"]]
        tokens, described = content["tokens"], dict(content["corpus"])
        corpus = make_corpus(described, workdir)
    except InvalidValue:  # the error of a corpus
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damage(path, error) from error
    if others := differences(tokens, corpus.identity):
        raise InvalidValue(
            f"the corpus {described} is not that of the run: {'; '.join(others)}. Put the corpus "
            "of the run back there"
        )
    try:
        plan = Plan.replay(corpus, changes)
    except Exception as error:  # options of any kind and value
        raise _damage(path, error) from error
    for (then, then_print), now in zip(identities, plan.entries, strict=True):
        if others := differences(then, now["identity"]):
            raise InvalidValue(
                f"the plan from step {now['from']:,} on differs from that of the run: "
                f"{'; '.join(others)}. Use the version of Lockstep that made the run"
            )
        if then_print != now["fingerprint"]:
            raise _damage(path, ValueError(f"the plan from step {now['from']:,} on was altered"))
    return corpus, plan


def describe_changes(changes: Mapping[str, Any]) -> str:
    """Options in a line, with the first entries of long lists.

    >>> from pipeline.planning.lengths import store_mask
    >>> describe_changes({"seed": 4, "exclude": store_mask(np.arange(9) > 6)})
    'seed=4, exclude=7, 8'
    """
    every = dict(changes)
    if isinstance(every.get("exclude"), Mapping):
        every["exclude"] = np.flatnonzero(load_mask(every["exclude"])).tolist()
    each = {k: name_some(v) if isinstance(v, list | tuple) else v for k, v in every.items()}
    return ", ".join(f"{name}={value}" for name, value in each.items())


def find_corpora(plan: Plan, examples: np.ndarray) -> np.ndarray:
    """The number of the corpus of each example, whose numbers run over all corpora: int64 [n]."""
    return np.searchsorted(plan.stages[-1].members.firsts, examples, side="right") - 1


def _damage(path: epath.Path, error: Exception) -> ValueError:
    return InvalidValue(
        f"{os.fspath(path)} cannot be read: {error!r}; continue the run, which writes it again"
    )
