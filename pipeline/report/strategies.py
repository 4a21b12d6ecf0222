"""Strategies: how other libraries make batches, simulated on the same examples."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from pipeline.report import simulations
from pipeline.report.simulations import Simulation
from pipeline.report.stream import Stream

HOSTS = 8

ROWS, WINDOW = 32, 320  # of batches with a fixed number of rows
READ_AHEAD = 10_000
OPEN_ROWS = 64


@dataclasses.dataclass(frozen=True)
class Strategy:
    """A way to make batches of a stream.

    Attributes:
        name: its name in the report.
        about: its parameters, in a phrase.
        function: simulates it; one of `pipeline.report.simulations`.
        shared: arguments that hosts divide among themselves, such as the rows of a batch.
        fixed: arguments that are the same on each host.
    """

    name: str
    about: str
    function: Callable[..., Simulation]
    shared: Mapping[str, int]
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def run(self, stream: Stream, hosts: int) -> Simulation:
        """The batches of a stream on one of `hosts` hosts."""
        shared = {name: max(amount // hosts, 1) for name, amount in self.shared.items()}
        return self.function(stream, **shared, **self.fixed)


def strategies(budget: int, longest: int, longest_example: int) -> list[Strategy]:
    """The strategies of other libraries.

    Some count the positions of a batch, up to `budget`; some fill rows of `longest` positions; and
    some pad to the longest example.
    """
    rows = {"rows": max(budget // longest, 1)}
    ends = tuple(sorted({max(longest >> shift, 1) for shift in range(6)}))
    most = f"at most {budget:,} positions a batch"
    grain = f"Grain: rows of {longest:,}, batches of {rows['rows']}"
    bins = {"length": longest, "open_rows": OPEN_ROWS}
    return [
        Strategy(
            "padded to the longest of all",
            f"batches of {ROWS}, every row {longest_example:,} long",
            simulations.pad_batches,
            {"rows": ROWS, "window": ROWS},
            {"length": longest_example},
        ),
        Strategy(
            "padded to the longest in the batch",
            f"batches of {ROWS} in random order",
            simulations.pad_batches,
            {"rows": ROWS, "window": ROWS},
        ),
        Strategy(
            "sorted windows",
            f"windows of {WINDOW} sorted by length, batches of {ROWS}",
            simulations.pad_batches,
            {"rows": ROWS, "window": WINDOW},
        ),
        Strategy(
            "token budget, read-ahead",
            f"infinibatch: {READ_AHEAD:,} read ahead and sorted, {most}",
            simulations.token_budget,
            {"budget": budget},
            {"window": READ_AHEAD},
        ),
        Strategy(
            "bucket by sequence length",
            f"tf.data: rows padded to {', '.join(map(str, ends))}, {most}",
            simulations.bucket_by_length,
            {"budget": budget},
            {"ends": ends},
        ),
        Strategy(
            "concatenate and split",
            f"one run of tokens, cut every {longest:,}, batches of {rows['rows']}",
            simulations.concatenate_and_split,
            rows,
            {"length": longest},
        ),
        Strategy(f"first fit, {OPEN_ROWS} open rows", grain, simulations.first_fit, rows, bins),
        Strategy(f"best fit, {OPEN_ROWS} open rows", grain, simulations.best_fit, rows, bins),
    ]


def simulate(strategy: Strategy, stream: Stream, *, width: int) -> dict[str, Any]:
    """The figures of a strategy on a stream, scaled up to all data if the stream is a sample."""
    return figures(
        strategy.name,
        strategy.about,
        strategy.run(stream, 1),
        width=width,
        hosts=[len(strategy.run(shard, HOSTS).rows) for shard in stream.shards(HOSTS)],
        sample=len(stream.documents) if stream.scale > 1 else None,
        scale=stream.scale,
    )


def figures(
    name: str,
    about: str,
    simulation: Simulation,
    *,
    width: int,
    hosts: list[int],
    sample: int | None = None,
    scale: float = 1,
) -> dict[str, Any]:
    """What the report's JSON has for a strategy.

    `hosts` has the batches of each host. If only a `sample` of so many examples was simulated,
    these batches are of the sample, and `scale` says how many times as many examples there are.

    Returns:
        For an epoch: `padding` (0 to 1); `batches` and `cut` documents (estimates for a `sample`);
        distinct `shapes`; `positions_per_token`; `attention_flops_per_token` of one layer's scores
        and their use, forward, over whole rows, and `segment_attention_flops_per_token`, inside
        segments; `cost` and `segment_cost`, the work of a layer per token with these two, in units
        of the work at one position without attention (`L + L²/(6·width)` over all rows); `reread`,
        examples to read again to resume, at most; `batches_per_host` and whether they are `equal`.
    """
    tokens = max(simulation.tokens, 1)
    return {
        "name": name,
        "about": about,
        "sample": sample,
        "padding": 1 - simulation.tokens / max(simulation.positions, 1),
        "batches": round(len(simulation.rows) * scale),
        "shapes": simulation.shapes,
        "positions_per_token": simulation.positions / tokens,
        "attention_flops_per_token": 4 * width * simulation.scores / tokens,
        "segment_attention_flops_per_token": 4 * width * simulation.squares / tokens,
        "cost": (simulation.positions + simulation.scores / (6 * width)) / tokens,
        "segment_cost": (simulation.positions + simulation.squares / (6 * width)) / tokens,
        "cut": round(simulation.cut * scale),
        "reread": simulation.reread,
        "batches_per_host": hosts,
        "equal": len(set(hosts)) == 1,
    }
