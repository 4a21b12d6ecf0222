"""Tuning for a run: buckets by measured seconds, stored in its work directory."""

import json
import logging
import math
import os
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath

from pipeline.corpus.corpora import Corpora
from pipeline.corpus.interface import AnyCorpus
from pipeline.errors import InvalidValue, StorageError
from pipeline.fs.atomic import as_path, atomic_write, make_directory
from pipeline.loading.sharding import batch_sharding, multiples
from pipeline.planning.bucket import Bucket
from pipeline.planning.options import list_keywords, select_options
from pipeline.steps import Compiled, tune
from pipeline.trainer.compilation import compile_training
from pipeline.trainer.run_config import list_fields

logger = logging.getLogger(__name__)

NAME = "tuning.json"  # in a work directory

OPTIONS = tuple(name for name in list_keywords(tune) if name != "sharding")

# The fields of a config on which the seconds of a step depend, or the best buckets.
FIELDS = (
    *("model", "optimizer", "batches", "task", "mesh", "context_order", "microbatches"),
    *("memory_budget", "accumulate", "segment_losses"),
)


def tune_run(
    config: Any,
    corpus: AnyCorpus,
    make_steps: Callable[[int | None], tuple[Any, Callable]],
    workdir: epath.PathLike,
    *,
    mesh: jax.sharding.Mesh,
    again: bool = False,
) -> tuple[Bucket, ...]:
    """The buckets of a run, measured now, or read from its work directory.

    All processes measure, since a step needs all of them, and agree on the seconds of the slowest,
    so all make the same choice. Process 0 writes the file. `config.batches` has the options, and
    `steps` decides the epochs. `make_steps` returns `init_state` and `train_step` from the most
    segments in a row, or from None if their losses are not needed. With `again`, a stored result is
    measured again.
    """
    if isinstance(corpus, Corpora):
        raise InvalidValue(
            "config.batches.tune is for one corpus, but this run has several; tune on the largest, "
            "with --mode=tune, and give the buckets that it prints as config.batches.buckets"
        )
    given = {name: value for name, value in config.batches.items() if value is not None}
    if "tokens_per_batch" not in given or "buckets" in given:
        raise InvalidValue(
            "config.batches.tune needs tokens_per_batch and chooses the buckets; remove buckets, "
            "or set tune to False"
        )
    conditions = _conditions(config, corpus)
    if not again and (stored := read_tuned(workdir, conditions)) is not None:
        logger.info(f"buckets as measured before: {', '.join(map(str, stored))}")
        return stored
    options = select_options(OPTIONS, given)
    options["epochs"] = config.steps * given["tokens_per_batch"] / max(corpus.num_tokens, 1)
    _, multiple = multiples(batch_sharding(mesh), config.context_order)
    if multiple > 1:
        options["length_multiple"] = math.lcm(options.get("length_multiple", 128), multiple)
    step = _OwnState(config, make_steps)
    tuned = tune(lambda: step, corpus, sharding=mesh, **options)
    if jax.process_index() == 0:
        make_directory(workdir)
        with atomic_write(as_path(workdir) / NAME) as file:
            buckets = [bucket.as_json for bucket in tuned.buckets]
            lines = f"{tuned}".splitlines()
            content = {"conditions": conditions, "buckets": buckets, "printed": lines}
            file.write(json.dumps(content, indent=1, ensure_ascii=False).encode())
    logger.info(f"{tuned}")
    return tuned.buckets


def read_tuned(workdir: epath.PathLike, conditions: Any = None) -> tuple[Bucket, ...] | None:
    """The stored buckets for a run; None if there are none, or if their conditions differ."""
    path = as_path(workdir) / NAME
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text())
        if conditions is not None and content["conditions"] != conditions:
            logger.info(f"{NAME} is of another config, corpus or device; measuring again")
            return None
        return tuple(Bucket(*shape) for shape in content["buckets"])
    except (KeyError, TypeError, ValueError) as error:
        raise StorageError(
            f"{os.fspath(path)} is damaged: {error!r}; delete it to measure again"
        ) from error


def _conditions(config: Any, corpus: AnyCorpus) -> dict[str, Any]:
    """The conditions of a result, as JSON: config, corpus and devices."""
    fields = list_fields(json.loads(config.to_json()))
    relevant = {name: v for name, v in fields.items() if name.split(".")[0] in FIELDS}
    for name in ("batches.tune", "optimizer.decay_steps"):  # a run sets the latter
        relevant.pop(name, None)
    devices = f"{jax.device_count()} × {jax.devices()[0].device_kind}"
    return {"config": relevant, "corpus": corpus.fingerprint, "devices": devices}


class _OwnState:
    """`step(batch)`: a training step that keeps its state, compiled as in a run."""

    def __init__(self, config: Any, make_steps: Callable[[int | None], tuple[Any, Callable]]):
        self._config, self._make_steps = config, make_steps
        self._state: Any = None
        self._compiled: dict[Bucket, Compiled] = {}

    def lower(self, batch: Mapping[str, jax.Array]) -> Any:
        """Like `lower` of a jitted function."""
        bucket = _bucket_of(batch)
        (program,) = self._compile(bucket, batch).programs.values()
        return types.SimpleNamespace(compile=lambda: program.run)

    def __call__(self, batch: Mapping[str, jax.Array]) -> Any:
        if self._state is None:
            init_state, _ = self._make_steps(None)
            self._state = init_state(jax.random.key(self._config.seed))
        # The state is donated: if the step fails, it is gone.
        state, self._state = self._state, None
        self._state, values = self._compile(_bucket_of(batch), batch)(state, batch)
        return values

    def _compile(self, bucket: Bucket, batch: Mapping[str, jax.Array]) -> Compiled:
        if bucket not in self._compiled:
            ids = batch.get("targets_segment_ids", batch["inputs_segment_ids"])
            most = int(jnp.max(ids)) if self._config.segment_losses else None
            init_state, train_step = self._make_steps(most)
            like = init_state.eval_shape(jax.random.key(0))
            specs = {
                name: jax.ShapeDtypeStruct(field.shape, field.dtype, sharding=field.sharding)
                for name, field in batch.items()
            }
            compiled = compile_training(self._config, train_step, like, {bucket: specs})
            self._compiled[bucket] = compiled
        return self._compiled[bucket]


def _bucket_of(batch: Mapping[str, jax.Array]) -> Bucket:
    rows, length = batch["inputs"].shape
    if "decoder_inputs" not in batch:
        return Bucket(rows, length)
    return Bucket(rows, (length, batch["decoder_inputs"].shape[1]))
