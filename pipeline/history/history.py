"""The history of a run's plans, `plans.json`: all that is needed to plan its batches again."""

import json
import logging
import os
from typing import Any

from etils import epath

from pipeline.corpus.corpora import Corpora
from pipeline.corpus.corpus import Corpus
from pipeline.corpus.interface import AnyCorpus
from pipeline.corpus.pairs import open_corpus
from pipeline.corpus.views import View, view_of
from pipeline.errors import InvalidType, InvalidValue, Missing
from pipeline.fs.atomic import as_path, atomic_write, is_local, make_directory
from pipeline.loading.checkpoint import Checkpoints
from pipeline.planning.plan import Plan

logger = logging.getLogger(__name__)

NAME = "plans.json"


def write_history(workdir: epath.PathLike, corpus: Any, plan: Plan) -> None:
    """Writes which corpus, plans and changes make up the batches of the run in `workdir`.

    A corpus inside the work directory is named relative to it, any other by its whole path. Of a
    view it tells that, too, as `view`; of several corpora, directories and views by name.

    {"corpus": "corpus/train", "tokens": "tokens=…",
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

    def place(one: Any) -> str:
        if not hasattr(one, "directory"):
            raise InvalidValue(
                f"the corpus is {one!r:.80}, which has no directory, so its batches cannot be "
                "planned again for audit and show; prepare a corpus, or write no history"
            )
        return _absolute(one.directory).removeprefix(inside)

    several = isinstance(corpus, Corpora)
    content = {
        "corpus": {name: place(one) for name, one in corpus.corpora.items()}
        if several
        else place(corpus),
        "view": _views(corpus),
        "tokens": corpus.fingerprint,
        "plans": [
            {**entry, "changes": changes}
            for entry, (_, changes) in zip(plan.entries, plan.changes, strict=True)
        ],
    }
    directory = as_path(workdir)
    make_directory(directory)
    with atomic_write(directory / NAME) as file:
        file.write(json.dumps(content, indent=1).encode())


def _absolute(path: epath.PathLike) -> str:
    return os.path.abspath(path) if is_local(path) else os.fspath(path)


def _views(corpus: Any) -> dict[str, Any] | None:
    if isinstance(corpus, Corpora):
        found = {name: _views(one) for name, one in corpus.corpora.items()}
        return {name: view for name, view in found.items() if view} or None
    return corpus.description if isinstance(corpus, View) else None


def _open(directory: epath.Path, view: dict[str, Any] | None) -> AnyCorpus:
    if not isinstance(view, dict | None):
        raise InvalidType(f"view is {view!r:.80}")
    corpus = open_corpus(directory)
    return view_of(corpus, view) if view and isinstance(corpus, Corpus) else corpus


def require_tokenizer(workdir: epath.Path, corpus: AnyCorpus) -> None:
    """Refuses the parameters of a run in `workdir` for a corpus that another tokenizer made.

    Raises:
        ValueError: it was trained on the ids of another tokenizer.
    """
    path = workdir / NAME
    if not path.exists():
        return
    trained_on = json.loads(path.read_text())["tokens"]
    then, now = (" and ".join(_tokenizers(of)) for of in (trained_on, corpus.fingerprint))
    if then != now:
        raise InvalidValue(
            f"{os.fspath(workdir)} was trained on the ids of {then}, and this run has those of "
            f"{now}: the same ids stand for other text. Prepare this corpus with the tokenizer of "
            "that run (config.tokenizer.model)"
        )


def parameters_of(workdir: epath.Path, corpus: AnyCorpus, like: Any) -> Any:
    """The parameters in the latest checkpoint of the run in `workdir`, to begin another run with.

    Args:
        workdir: of a run with an equal model, optimizer and tokenizer.
        corpus: the corpus of the new run.
        like: the state of the new run, as `jax.ShapeDtypeStruct`s with shardings.

    Raises:
        ValueError: there is no checkpoint, or it is of another model or tokenizer.
    """
    require_tokenizer(workdir, corpus)
    checkpoints = Checkpoints(workdir / "checkpoints")
    try:
        if checkpoints.latest is None:
            raise InvalidValue(
                f"start_from is {workdir}, which has no checkpoint; train there first"
            )
        logger.info("parameters are those of step %s of %s", f"{checkpoints.latest:,}", workdir)
        return checkpoints.restore_state(checkpoints.latest, like)["params"]
    finally:
        checkpoints.close()


def _tokenizers(fingerprint: str) -> list[str]:
    parts = (part.partition("=")[::2] for part in fingerprint.split(";"))
    return sorted({value for name, value in parts if name.endswith("tokenizer")})


def read_history(
    workdir: epath.Path,
) -> tuple[AnyCorpus, Plan]:
    """The corpus of the run in `workdir`, or its corpora, and its plan made again.

    Raises:
        FileNotFoundError: there is no run.
        ValueError: the file cannot be read, or corpus or plan are no longer what they were.
    """
    path = workdir / NAME
    if not path.exists():
        raise Missing(
            f"there is no {NAME} in {os.fspath(workdir)}; give the work directory of a run. "
            "train.py writes that file before its first step, a loop of your own calls "
            "pipeline.history.history.write_history"
        )
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        changes = [(int(entry["from"]), dict(entry["changes"])) for entry in content["plans"]]
        fingerprints = [str(entry["fingerprint"]) for entry in content["plans"]]
        directory, tokens, seen_as = content["corpus"], content["tokens"], content.get("view")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damage(path, error) from error
    corpus: AnyCorpus
    try:
        if isinstance(directory, dict):
            views = seen_as or {}
            corpus = Corpora(
                {name: _open(workdir / place, views.get(name)) for name, place in directory.items()}
            )
        else:
            corpus = _open(workdir / directory, seen_as)
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


def _damage(path: epath.Path, error: Exception) -> ValueError:
    return InvalidValue(
        f"{os.fspath(path)} cannot be read: {error!r}. The run writes it anew when it goes on"
    )
