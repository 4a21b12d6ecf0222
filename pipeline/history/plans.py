"""The plans of a run, `plans.json`: all that is needed to plan its batches again."""

import json
import os
from typing import Any

from etils import epath

from pipeline.corpus.corpora import Corpora
from pipeline.corpus.interface import AnyCorpus
from pipeline.corpus.pairs import open_corpus
from pipeline.corpus.views import View, view_of
from pipeline.errors import InvalidType, InvalidValue, Missing
from pipeline.fs.atomic import as_path, atomic_write, is_local, make_directory
from pipeline.planning.plan import Plan

NAME = "plans.json"


def write_history(workdir: epath.PathLike, corpus: Any, plan: Plan) -> None:
    """Writes which corpus, plans and changes make up the batches of the run in `workdir`.

    A corpus inside the work directory is named relative to it, any other by its whole path. `view`
    describes a view. Of several corpora, directories and views are given by name.

    {"corpus": "corpus/train", "view": null, "tokens": "tokens=…",
     "plans": [{"from": 0, "fingerprint": …, "changes": {"buckets": [[8, 128]], "seed": 0, …}},
               {"from": 2000, "fingerprint": …, "changes": {"buckets": [[16, 128]]}}]}

    Args:
        workdir: of the run; made if it is missing.
        corpus: what the run reads: of `Corpora` all, of a view the view.
        plan: all of the run's steps.

    Raises:
        ValueError: a corpus has no directory to open it by, such as one of `InPlace`.
    """
    inside = os.path.join(_absolute(workdir), "")
    several = isinstance(corpus, Corpora)
    corpora: dict[str, Any] = dict(corpus.corpora) if several else {"": corpus}
    places, views = {}, {}
    for name, one in corpora.items():
        if not hasattr(one, "directory"):
            raise InvalidValue(
                f"the corpus is {one!r:.80}, which has no directory, so its batches cannot be "
                "planned again for audit and show; prepare a corpus, or write no history"
            )
        places[name] = _absolute(one.directory).removeprefix(inside)
        if isinstance(one, View):
            views[name] = one.description
    content = {
        "corpus": places if several else places[""],
        "view": (views if several else views.get("")) or None,
        "tokens": corpus.fingerprint,
        "plans": [
            {**entry, "changes": changes}
            for entry, (_, changes) in zip(plan.entries, plan.changes, strict=True)
        ],
    }
    with atomic_write(make_directory(workdir) / NAME) as file:
        file.write(json.dumps(content, indent=1).encode())


def read_history(workdir: epath.PathLike) -> tuple[AnyCorpus, Plan]:
    """The corpus of the run in `workdir`, or its corpora, and its plan made again.

    Raises:
        FileNotFoundError: there is no run.
        ValueError: the file cannot be read, or corpus or plan are no longer what they were.
    """
    workdir = as_path(workdir)
    path = workdir / NAME
    if not path.exists():
        raise Missing(
            f"there is no {NAME} in {os.fspath(workdir)}; give the work directory of a run. "
            "train.py writes that file before its first step, a loop of your own calls "
            "pipeline.history.write_history"
        )
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        changes = [(int(entry["from"]), dict(entry["changes"])) for entry in content["plans"]]
        fingerprints = [str(entry["fingerprint"]) for entry in content["plans"]]
        directory, tokens, view = content["corpus"], content["tokens"], content.get("view")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damage(path, error) from error
    corpus: AnyCorpus
    try:
        if isinstance(directory, dict):
            views = view or {}
            corpus = Corpora(
                {name: _open(workdir / place, views.get(name)) for name, place in directory.items()}
            )
        else:
            corpus = _open(workdir / directory, view)
    except (KeyError, TypeError, AttributeError) as error:
        raise _damage(path, error) from error
    if corpus.fingerprint != tokens:
        raise InvalidValue(
            f"the corpus in {directory} is {corpus.fingerprint}, and the run "
            f"was trained on {tokens}; its batches cannot be planned again without that"
        )
    try:
        plan = Plan.replay(corpus, changes)
    except Exception as error:  # options of any kind and value
        raise _damage(path, error) from error
    for then, now in zip(fingerprints, plan.entries, strict=True):
        if then != now["fingerprint"]:
            raise InvalidValue(
                f"the plan from step {now['from']:,} on was {then} and is now "
                f"{now['fingerprint']}; use the version of Lockstep that the run was made with"
            )
    return corpus, plan


def _absolute(path: epath.PathLike) -> str:
    return os.path.abspath(path) if is_local(path) else os.fspath(path)


def _open(directory: epath.Path, view: dict[str, Any] | None) -> AnyCorpus:
    if not isinstance(view, dict | None):
        raise InvalidType(f"view is {view!r:.80}")
    corpus = open_corpus(directory)
    return view_of(corpus, view) if view else corpus


def _damage(path: epath.Path, error: Exception) -> ValueError:
    return InvalidValue(
        f"{os.fspath(path)} cannot be read: {error!r}. The run writes it anew when it goes on"
    )
