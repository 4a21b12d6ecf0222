"""The parameters of a run, for another run or for scores, if both have the same tokenizer."""

import json
import logging
import os
from typing import Any

import jax
from etils import epath
from ml_collections import ConfigDict

from pipeline.corpus.interface import AnyCorpus
from pipeline.errors import InvalidValue
from pipeline.fs import as_path
from pipeline.history.plans import NAME
from pipeline.planning.identity import flatten
from trainer.checkpoint import Checkpoints

logger = logging.getLogger(__name__)


def require_tokenizer(workdir: epath.Path, corpus: AnyCorpus) -> None:
    """Refuses the parameters of the run in `workdir` for a corpus of another tokenizer."""
    path = workdir / NAME
    if not path.exists():
        return
    trained_on = json.loads(path.read_text())["tokens"]
    then, now = (
        " and ".join(sorted({each for name, each in flatten(of) if name.startswith("tokenizer")}))
        for of in (trained_on, corpus.identity)
    )
    if then != now:
        raise InvalidValue(
            f"{os.fspath(workdir)} was trained on the ids of {then}, but this run has those of "
            f"{now}, in which the same ids stand for other text; prepare this corpus with the "
            "tokenizer of that run (config.tokenizer.model)"
        )


def require_checkpoint(workdir: epath.PathLike) -> None:
    """Refuses a directory that is not the work directory of a run with a checkpoint."""
    directory = as_path(workdir) / "checkpoints"
    if not directory.is_dir() or not any(path.name.isdecimal() for path in directory.iterdir()):
        raise InvalidValue(
            f"there is no checkpoint in {os.fspath(workdir)} to take parameters from; train there "
            "first"
        )


def start_from(config: ConfigDict, state: dict[str, Any], corpus: AnyCorpus) -> dict[str, Any]:
    """A new state, with the parameters of the run `config.start_from` if that is given.

    Its first parameters are then deleted, before the others are read.
    """
    if not config.start_from:
        return state

    def shape(leaf: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)

    like = jax.tree.map(shape, state["params"])
    jax.tree.map(lambda leaf: leaf.delete(), state["params"])
    _, params = restore_parameters(config.start_from, corpus, like)
    return {**state, "params": params}


def restore_parameters(workdir: epath.PathLike, corpus: AnyCorpus, like: Any) -> tuple[int, Any]:
    """The step of the latest checkpoint of the run in `workdir`, and the parameters in it.

    The run must have the model and the tokenizer of `corpus`, and may have any optimizer. `like` is
    the parameters, or `jax.ShapeDtypeStruct`s with shardings in their place.
    """
    place = as_path(workdir)
    require_tokenizer(place, corpus)
    require_checkpoint(place)
    with Checkpoints(place / "checkpoints") as checkpoints:
        step = checkpoints.latest or 0
        params = checkpoints.restore_part(step, {"params": like})["params"]
    logger.info(f"parameters are those of step {step:,} of {place}")
    return step, params
