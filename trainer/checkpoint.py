"""Checkpoints: a model's state and the data state, written by orbax, with checksums of both."""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from etils import epath

from pipeline.errors import InvalidState, InvalidValue, require
from pipeline.fs import ObjectPath, as_path, is_local, name_full_disk
from pipeline.planning.identity import fingerprint_of
from pipeline.steps.checksum import checksums
from trainer.mirror import Mirror

# The item that marks a folder with the name of a step as a checkpoint of this class.
MARK = "checksums"

CHECKSUMS = {MARK: ocp.args.JsonRestore()}

# Errors that say nothing of the files.
ELSEWHERE = MemoryError, PermissionError, jax.errors.JaxRuntimeError


class Saved(NamedTuple):
    """What a checkpoint holds beside arrays: how many steps are done, the data state, and `run`."""

    step: int
    data: dict[str, Any]
    run: dict[str, Any]

    @property
    def record(self) -> dict[str, Any]:
        """The statistics of the run, of `TrainingLog.save`; empty at the beginning."""
        return self.run.get("record", {})


NOTHING = Saved(0, {}, {})


class CheckpointManager(ocp.CheckpointManager):
    """A manager that leaves signals to `StopSignals`.

    JAX lets processes agree on the number of a call, and orbax would count by steps.
    """

    def reached_preemption(self, step: int) -> bool:
        """Never: the program that saves knows why it does."""
        return False


class Checkpoints:
    """A directory of checkpoints, written by orbax in the background; the latest ones stay.

    A checkpoint has the items `state` (a pytree of arrays, resharded on restore), `data` (the data
    state), `run` (any JSON) and `checksums` of the others, since orbax restores flipped bits. orbax
    reads it without Lockstep: see docs/reports.md. In a `with` statement it closes itself, unless
    the block ends with an error after which other processes may be gone.

    Args:
        directory: local, or in object storage, to which a single process uploads checkpoints in the
            background. Several processes each write their own arrays: to a shared file system, or
            to `gs://…`. What is not a checkpoint of this class stays as it is.
        keep: the number of latest checkpoints that stay.
    """

    def __init__(self, directory: epath.PathLike, *, keep: int = 3):
        place = as_path(directory)
        self._directory = place.absolute() if is_local(directory) else place
        self._mirror = _mirror(place) if isinstance(place, ObjectPath) else None
        self._keep = keep
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self._upload: Future | None = None
        self._manager = CheckpointManager(
            self._mirror.local if self._mirror else self._directory,
            options=ocp.CheckpointManagerOptions(preservation_policy=self, create=True),
        )

    @property
    def latest(self) -> int | None:
        """The step of the latest checkpoint; None if there is no checkpoint."""
        self._wait()
        return self._manager.latest_step()

    def compile(self, state: Any) -> None:
        """Compiles the checksums of `state`, so that the first `save` need not."""
        checksums(state)

    def save(
        self, step: int, state: Any, *, data: dict[str, Any], run: dict[str, Any] | None = None
    ) -> None:
        """Starts to save; returns once the arrays are copied and may be donated.

        `step` steps are behind `state`, a pytree of jax.Arrays, and behind `data`, the state of the
        loader. `run` is any JSON; None: empty.
        """
        self._wait()
        content = {"data": data, "run": run or {}}
        content["checksums"] = {"state": checksums(state), "json": fingerprint_of(content)}
        items = {name: ocp.args.JsonSave(each) for name, each in content.items()}
        with name_full_disk(self._directory):
            composite = ocp.args.Composite(state=ocp.args.StandardSave(state), **items)
            if not self._manager.save(step, args=composite):
                raise InvalidState(
                    f"{self._directory} holds step {self.latest}, and step {step} is not later; "
                    "resume from that step, or save into another directory"
                )
        if self._mirror:
            self._upload = self._thread.submit(self._push, self._mirror)

    def read(self, step: int | None = None) -> Saved:
        """A checkpoint without its arrays, by default the latest; `NOTHING` if there is none."""
        if step is None and (step := self.latest) is None:
            return NOTHING
        items = {name: ocp.args.JsonRestore() for name in ("data", "run", "checksums")}
        content = self._restore(step, **items)
        data, run = content["data"], content["run"]
        if (seen := data.get("step") if isinstance(data, dict) else None) != step:
            raise self._damaged(step, f"its data state is that of step {seen!r}")
        if _checksums(content).get("json") != fingerprint_of({"data": data, "run": run}):
            raise self._damaged(step, "its JSON is not what was saved")
        return Saved(step, data, run)

    def restore_state(self, step: int, like: Any) -> Any:
        """The `state` item of the checkpoint of `step`, with the shardings of `like`.

        `like` is a pytree with the shapes, dtypes and shardings of the state: the initial state, or
        its `jax.eval_shape` with shardings. A damaged checkpoint is refused.
        """
        content = self._restore(step, state=ocp.args.StandardRestore(like), **CHECKSUMS)
        return self._require_saved(step, content["state"], content)

    def restore_part(self, step: int, like: Mapping[str, Any]) -> Any:
        """Some entries of a state that is a dict, such as `params` alone; others are not read."""
        content = self._restore(step, **CHECKSUMS)
        arrays = ocp.checkpoint_utils.construct_restore_args(like)
        args = ocp.args.PyTreeRestore(like, restore_args=arrays, partial_restore=True)
        # The manager reads each item in the way that it was saved.
        with self._explain(step), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            state = reader.restore(self._manager.directory / str(step) / "state", args=args)
        return self._require_saved(step, state, content)

    def _require_saved(self, step: int, state: Any, content: Mapping[str, Any]) -> Any:
        """The arrays, if they have the checksums that they were saved with."""
        then, now = _checksums(content)["state"], checksums(state)
        for path, value in now.items():
            dtype, _, _ = value.partition(":")  # a cast array cannot be compared
            if then.get(path, "").startswith(f"{dtype}:") and then[path] != value:
                raise self._damaged(step, f"its array {path} is not what was saved")
        return state

    def wait(self) -> None:
        """Waits until everything is saved."""
        self._wait()
        with name_full_disk(self._directory):
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits until everything is saved, and releases the directory."""
        self.wait()
        with name_full_disk(self._directory):
            self._manager.close()
        self._thread.shutdown()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # A loss that is not finite stops all processes at the same step, so a save that has begun
        # can end. After another error, other processes may be gone, and waiting for them would
        # hang.
        if kind is None or issubclass(kind, FloatingPointError):
            self.close()

    def _push(self, mirror: Mirror) -> None:
        with name_full_disk(self._directory):
            self._manager.wait_until_finished()
        mirror.push()

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """For orbax: whether each checkpoint stays, in order; it begins to save the last."""
        *steps, last = (each.step for each in checkpoints)
        where = self._manager.directory
        ours = [*(step for step in steps if (where / str(step) / MARK).exists()), last]
        return [step not in ours[: -self._keep] for step in (*steps, last)]

    def _wait(self) -> None:
        """Waits for an upload; while it runs, nothing else may use the manager."""
        if upload := self._upload:
            self._upload = None
            upload.result()

    def _restore(self, step: int, **items: Any) -> Any:
        """Items of a checkpoint."""
        self._wait()
        if self._mirror:
            self._mirror.fetch(str(step))
        with self._explain(step):
            return self._manager.restore(step, args=ocp.args.Composite(**items))

    @contextlib.contextmanager
    def _explain(self, step: int) -> Iterator[None]:
        """Errors of orbax name the checkpoint, and the one before it."""
        try:
            yield
        except ELSEWHERE:
            raise
        except Exception as error:
            what = str(error).strip("'").partition("\n")[0][:200]
            raise InvalidValue(
                f"{self._directory / str(step)} cannot be restored: {what}. If the model or the "
                "optimizer is not the one that it was saved with, use that one; if files are "
                f"missing or damaged, {self._advice(step)}"
            ) from error

    def _damaged(self, step: int, what: str) -> ValueError:
        """The error of a checkpoint that is not as it was saved."""
        directory = self._directory / str(step)
        return InvalidValue(f"{directory} is damaged: {what}; {self._advice(step)}")

    def _advice(self, step: int) -> str:
        earlier = [each for each in self._manager.all_steps() if each < step]
        resume = f"resume from step {max(earlier):,}" if earlier else "start again"
        return f"delete that directory to {resume}"


def _mirror(directory: ObjectPath) -> Mirror | None:
    """The local mirror of object storage for a single process; None for several processes."""
    if (count := jax.process_count()) == 1:
        return Mirror(directory, MARK)
    if not os.fspath(directory).startswith("gs://"):
        raise InvalidValue(
            f"{count} processes cannot write checkpoints to {directory}: orbax writes those of "
            "several processes only to file systems and gs://. Give a directory there, such as on "
            "a file system that all processes share"
        )
    # orbax needs it to look up the bucket.
    require("google.cloud.storage", extra="gcs", purpose=f"writing {directory} from {count} hosts")
    return None


def _checksums(content: Mapping[str, Any]) -> dict[str, Any]:
    stored = content["checksums"]
    whole = isinstance(stored, dict) and isinstance(stored.get("state"), dict)
    return stored if whole else {"state": {}}
