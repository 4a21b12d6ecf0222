"""How a run begins with the parameters of another, if both have the same tokenizer."""

import json
import logging
import os
from typing import Any

from etils import epath

from pipeline.corpus.interface import AnyCorpus
from pipeline.errors import InvalidValue
from pipeline.history.plans import NAME
from pipeline.loading.checkpoint import Checkpoints

logger = logging.getLogger(__name__)


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
