"""Statistics of a run: seconds by phase, counts, its summary, and the peaks of devices."""

import contextlib
import dataclasses
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.planning.planned import PlannedBatch

# The most that a device can compute: bfloat16 matrix products without sparsity, in FLOP/s per
# device as JAX counts devices. TPUs: Google's "TPU versions" pages; GPUs: NVIDIA's data sheets.
PEAKS = {
    "TPU v3": 61.5e12,  # a core, half a chip
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5p": 459e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "V100": 125e12,  # float16
    "A100": 312e12,
    "L4": 121e12,
    "L40S": 362e12,
    "H100 PCIe": 756e12,
    "TPU7x": 1153.5e12,  # a core, half a chip
    "H100": 989e12,
    "H100 NVL": 835e12,
    "H200": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "B300": 2250e12,
    "GB200": 2500e12,
    "GB300": 2500e12,
}


class Clock:
    """Seconds by phase, added to those given: `with clock("compile"): …`.

    Every second since the clock was made belongs to one phase: the innermost block, or "other".

    >>> clock = Clock({"train": 60.0})
    >>> with clock("plan"):
    ...     pass
    >>> list(clock.seconds())
    ['train', 'other', 'plan']
    """

    def __init__(self, seconds: Mapping[str, float]):
        self._seconds: dict[str, float] = defaultdict(float, seconds)
        self._open, self._since = ["other"], time.perf_counter()

    def seconds(self) -> dict[str, float]:
        """Seconds of each phase up to now; their sum is the time since the clock was made."""
        now = time.perf_counter()
        self._seconds[self._open[-1]] += now - self._since
        self._since = now
        return dict(self._seconds)

    def add(self, phase: str, seconds: float) -> None:
        """Adds seconds that passed elsewhere, if there are any."""
        if seconds:
            self._seconds[phase] += seconds

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Adds the time inside the block to `phase`."""
        self.seconds()
        self._open.append(phase)
        try:
            yield
        finally:
            self.seconds()
            self._open.pop()


@dataclasses.dataclass(kw_only=True)
class RunStats:
    """Counts of a run over all its starts. Every attribute is JSON."""

    tokens: int = 0  # real positions trained on
    positions: int = 0  # all computed positions, padding included
    # Floating-point operations of the model's mathematics, and those that the devices can do in the
    # time that the steps took; 0 if unknown.
    flops: float = 0.0
    capacity: float = 0.0
    sources: dict[str, float] = dataclasses.field(default_factory=dict)  # tokens of each corpus
    skipped: int = 0  # steps without an update: not finite, or left out (skip_steps)
    # By phase, over all starts, each up to its last checkpoint. "lost": steps that are run again.
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    # Since the first step of this start: compilations of the steps, and of other functions.
    compiles_after_start: int = 0
    other_compiles: int = 0

    @property
    def padding(self) -> float:
        """The share of computed positions that were padding."""
        return 1 - self.tokens / max(self.positions, 1)

    def add(self, planned: PlannedBatch) -> None:
        """Counts a batch that was trained on."""
        self.tokens += planned.num_tokens
        self.positions += planned.bucket.positions
        for name, tokens in planned.sources.items():
            self.sources[name] = self.sources.get(name, 0) + tokens

    def summary(self, steps: int, evaluations: Mapping[int, Mapping]) -> dict[str, Any]:
        """The content of `summary.json` after some steps; evaluations are those of `RunLog`."""
        lines = list(evaluations.values()) or [{}]
        waiting = self.seconds.get("wait", 0.0)
        training = max(self.seconds.get("train", 0.0) + waiting, 1e-9)
        return {
            "eval_loss_first": lines[0].get("eval_loss"),
            "eval_loss_last": lines[-1].get("eval_loss"),
            "bits_per_byte": lines[-1].get("bits_per_byte"),
            "steps": steps,
            "tokens": self.tokens,
            "padding": self.padding,
            "shares": {name: tokens / self.tokens for name, tokens in self.sources.items()},
            "tokens_per_second": self.tokens / training,
            "flop_utilisation": self.flops / self.capacity if self.capacity else None,
            "skipped_steps": self.skipped,
            "compiles_after_start": self.compiles_after_start,
            "other_compiles": self.other_compiles,
            "goodput": goodput(self.seconds),
            "waiting": waiting / training,
            "seconds": {name: round(value, 3) for name, value in self.seconds.items()},
        }


def goodput(seconds: Mapping[str, float]) -> float:
    """The share of all time, by phase in `seconds`, that went into training steps."""
    return seconds.get("train", 0.0) / max(sum(seconds.values()), 1e-9)


def peak_of(device_kind: str) -> float:
    """FLOP/s of a device by its `device_kind`; 0 if it is not in the table.

    >>> peak_of("NVIDIA H100 80GB HBM3") == PEAKS["H100"]
    True
    """
    words = f" {device_kind.replace('-', ' ')} "
    known = [name for name in PEAKS if f" {name} " in words]
    return PEAKS[max(known, key=len)] if known else 0.0
