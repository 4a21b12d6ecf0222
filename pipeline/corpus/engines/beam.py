"""Apache Beam: tasks on Dataflow, Flink, or the runner of this machine."""

import dataclasses
import os
import pickle
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from etils import epath

from pipeline.errors import require
from pipeline.fs.atomic import as_path, atomic_write

# Seconds between two looks for new results.
POLL = 0.5


class Beam:
    """Runs tasks as an Apache Beam pipeline (extra `beam`).

    All workers must have this package and see the directories of the source and of the corpus under
    the same paths.

    Args:
        options: flags of a pipeline, as `["--runner=DataflowRunner", "--project=mine"]`, or a dict
            of options, as `{"runner": "DataflowRunner"}`. By default the runner of this machine.
        results: a directory that this process and all workers can write to; each task leaves a
            small file there for a while. Default: the option `temp_location`, or where there is
            none, a temporary directory of this machine.
    """

    def __init__(
        self,
        options: Sequence[str] | Mapping[str, Any] = (),
        *,
        results: epath.PathLike | None = None,
    ):
        self.options, self.results = options, results

    def run(self, function: Callable[[Any], Any], tasks: Sequence[Any]) -> Generator[Any]:
        """The results, as soon as they are there; see `Engine`.

        Raises:
            ImportError: Beam is not installed.
            RuntimeError: the pipeline failed, as the runner says.
        """
        require("apache_beam", extra="beam", purpose="engines.Beam")
        from apache_beam.options.pipeline_options import GoogleCloudOptions, PipelineOptions

        if isinstance(self.options, Mapping):
            options = PipelineOptions.from_dictionary(dict(self.options))
        else:
            options = PipelineOptions(list(self.options))
        shared = self.results or options.view_as(GoogleCloudOptions).temp_location
        if shared is None:
            with tempfile.TemporaryDirectory(prefix="lockstep-") as local:
                yield from _run(function, tasks, options, epath.Path(local))
            return
        place = as_path(shared) / f"lockstep-{os.urandom(8).hex()}"
        place.mkdir(parents=True)
        try:
            yield from _run(function, tasks, options, place)
        finally:
            place.rmtree(missing_ok=True)


def _run(
    function: Callable[[Any], Any], tasks: Sequence[Any], options: Any, place: epath.Path
) -> Generator[Any]:
    import apache_beam as beam

    pipeline = beam.Pipeline(options=options)
    numbered = pipeline | beam.Create(list(enumerate(tasks))) | beam.Reshuffle()
    numbered | beam.Map(Recorded(function, os.fspath(place)))
    errors: list[BaseException] = []

    def work() -> None:
        try:
            pipeline.run().wait_until_finish()
        except BaseException as error:
            errors.append(error)

    # A thread, for some runners return only when all is done.
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    while True:
        alive = thread.is_alive()  # before the look, so that the last look misses nothing
        for path in place.glob("*.result"):
            result = pickle.loads(path.read_bytes())
            path.unlink()
            yield result
        if not alive:
            break
        time.sleep(POLL)
    if errors:
        raise errors[0]


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A function whose results are also stored as files, numbered as the tasks are."""

    function: Callable[[Any], Any]
    place: str

    def __call__(self, numbered: tuple[int, Any]) -> None:
        """Runs a task and stores its result, over that of another attempt."""
        number, task = numbered
        result = self.function(task)
        with atomic_write(as_path(self.place) / f"{number}.result", shared=True) as file:
            pickle.dump(result, file)
