"""The state of a stream: what its windows depend on, and JSON from which an iterator goes on.

The state after some batches has the state before their window, the batches of the window that were
taken, and a digest. It has no tokens: elements that were held are read again.
"""

import base64
import copy
import dataclasses
import hashlib
import zlib
from collections.abc import Mapping
from typing import Any, Literal, get_args

import numpy as np

from pipeline.errors import InvalidValue
from pipeline.loading.batches import Batches
from pipeline.loading.fitting import Shapes, explain_shapes
from pipeline.planning.bucket import Bucket, Fitted
from pipeline.planning.identity import differences, fingerprint_of
from pipeline.planning.options import VERSION as PLAN_VERSION
from pipeline.planning.options import Options, select_options
from pipeline.text.features import Feature

Ending = Literal["pad", "drop"]
ENDINGS: tuple[Ending, ...] = get_args(Ending)

# The version of the packing of windows. It goes up whenever batches would change.
VERSION = 1

# The parts of a state: whole numbers from 0, and others.
COUNTS = ("window", "step", "within", "lost", "read", "mark", "host")
STATE = (*COUNTS, "carried", "lengths", "identity", "fitted", "source")

RESTORE = (
    ". Give the options, the number of hosts and the host that it was saved with; only a prepared "
    "corpus continues on another number of hosts"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """What the windows of a stream depend on, beside its data.

    Attributes:
        batches: the `Batches` of no example, which make the fields.
        options: those of packing.
        window: the number of elements that a host holds.
        ending: as for `PackedStream`.
        features: the schemas of the columns beside the tokens.
        hosts: the processes that share the rows of batches.
        host: the place of this process among them.
        fitted: how `load` chose the shapes, as in `StateKey`; nothing depends on it.
    """

    batches: Batches
    options: Options
    window: int
    ending: Ending
    features: Mapping[str, Feature]
    hosts: tuple[int, ...]
    host: int
    fitted: dict[str, Any] | None = None

    @property
    def identity(self) -> dict[str, Any]:
        """Everything but the data and the process on which batches depend, as JSON."""
        names = ("buckets", "packing", "overflow", "max_segments", "align", "cost", "seed")
        options = self.options.as_json((*names, "attention", "width"))
        of_stream = {"window": self.window, "ending": self.ending, "hosts": len(self.hosts)}
        versions = {"stream": VERSION, "plan": PLAN_VERSION}
        return {**versions, **options, **of_stream, "positions": self.batches.positions}

    def rows_of(self, bucket: Bucket) -> np.ndarray:
        """The rows of a batch that this process has: int64, ascending."""
        return self.batches.blocks[bucket][0].rows

    @property
    def rows_per_batch(self) -> list[int]:
        """The number of rows that this process has of a batch of each bucket."""
        return [len(self.rows_of(bucket)) for bucket in self.options.buckets]

    def check(self, state: Any) -> dict[str, Any]:
        """A copy of the state of an iterator; one of another stream or host is refused."""
        saved = read_state(state)
        then = {**saved["identity"], "host": saved["host"]}
        if changes := differences(then, {**self.identity, "host": self.host}):
            fitted = explain_shapes(changes, saved["fitted"], self.fitted)
            raise InvalidValue(
                f"the state of step {saved['step']:,} belongs to another stream: "
                f"{'; '.join(changes)}{f'; {fitted}' if fitted else RESTORE}"
            )
        return saved


def read_state(state: Any) -> dict[str, Any]:
    """A copy of the state of an iterator; a `ValueError` if it is none."""
    try:
        if state["digest"] != digest_of_state(state):
            raise ValueError("it was changed")
        saved = {name: copy.deepcopy(state[name]) for name in STATE}
        if not all(type(saved[name]) is int and saved[name] >= 0 for name in COUNTS):
            raise ValueError("a count is no whole number from 0")
        longest = Bucket(*saved["identity"]["buckets"][-1])
        decode_spans(saved["carried"], 2 + len(longest.lengths))
    except (KeyError, TypeError, ValueError, zlib.error) as error:
        raise InvalidValue(
            f"{str(state)[:200]!r} is not the state of a PackedStream; give one that get_state() "
            "of its iterator returned"
        ) from error
    return saved


def saved_setup(state: Any) -> tuple[Shapes, dict[str, Any]]:
    """The shapes of a state, and the options of its `PackedStream`; an error if it is none."""
    names = ("packing", "overflow", "max_segments", "align", "cost", "seed", "window", "ending")
    saved = read_state(state)
    identity = saved["identity"]
    buckets = [Bucket(*shape) for shape in identity["buckets"]]
    model = select_options(("attention", "width"), identity)
    options = select_options((*names, "positions"), identity)
    return Shapes(Fitted.of(buckets, model), saved["fitted"]), options


def digest_of_state(state: Mapping[str, Any]) -> str:
    """A short digest of a state, but for the host, and the source, whose state may be no JSON."""
    return fingerprint_of({name: state[name] for name in STATE if name not in ("source", "host")})


def digest_of(spans: np.ndarray) -> str:
    """A short digest of spans."""
    return hashlib.sha256(spans.astype("<i8").tobytes()).hexdigest()[:16]


def encode_spans(spans: np.ndarray) -> str:
    """Spans as text; their elements ascend.

    >>> decode_spans(encode_spans(np.array([[70, 0, 5], [90, 8, 3]])), 3).tolist()
    [[70, 0, 5], [90, 8, 3]]
    """
    columns = spans.T.copy()
    columns[0] = np.diff(columns[0], prepend=0)
    return base64.b64encode(zlib.compress(columns.astype("<i8").tobytes(), 9)).decode()


def decode_spans(text: str, columns: int) -> np.ndarray:
    """The spans that `encode_spans` made text of."""
    values = np.frombuffer(zlib.decompress(base64.b64decode(text, validate=True)), "<i8")
    spans = values.reshape(columns, -1).T.astype(np.int64)
    spans[:, 0] = spans[:, 0].cumsum()
    return spans
