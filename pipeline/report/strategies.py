"""Strategies: ways to make batches, side by side on the same examples."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from pipeline.packing.bucket import Bucket
from pipeline.packing.cascade import PACKINGS
from pipeline.report import packed, padded
from pipeline.report.lockstep import Fitter, simulated
from pipeline.report.simulated import Simulated
from pipeline.report.stream import Stream

HOSTS = 8

ROWS, WINDOW = 32, 320  # of batches with a fixed number of rows
READ_AHEAD = 10_000
OPEN_ROWS = 64
BUCKETS = (1, 2, 3, 4, 6)

# Optimal packing is simulated unasked for so many different lengths, which takes some seconds.
SOLVED = 512


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to make batches of a stream.

    Attributes:
        name: what to call it.
        about: what it does, in a sentence.
        run: makes the batches of a stream for one of so many hosts.
        one_by_one: it goes from example to example, so a sample must do.
    """

    name: str
    about: str
    run: Callable[[Stream, int], Simulated]
    one_by_one: bool = False


def ways(budget: int, longest: int, longest_example: int) -> list[Way]:
    """The strategies of other libraries.

    Args:
        budget: positions in a global batch, where a strategy counts them.
        longest: positions in a row, for those that fill rows.
        longest_example: positions of the longest example, for those that pad.
    """
    rows = max(budget // longest, 1)
    ends = tuple(sorted({max(longest >> shift, 1) for shift in range(6)}))

    def share(amount: int, hosts: int) -> int:
        return max(amount // hosts, 1)

    found = [
        Way(
            "padded to the longest of all",
            f"batches of {ROWS}, every row {longest_example:,} long",
            lambda stream, hosts: padded.to_longest(
                stream, rows=share(ROWS, hosts), longest=longest_example
            ),
        ),
        Way(
            "padded to the longest in the batch",
            f"batches of {ROWS} in random order",
            lambda stream, hosts: padded.to_longest_in_batch(stream, rows=share(ROWS, hosts)),
        ),
        Way(
            "sorted windows",
            f"windows of {WINDOW} sorted by length, batches of {ROWS}",
            lambda stream, hosts: padded.sorted_windows(
                stream, rows=share(ROWS, hosts), window=share(WINDOW, hosts)
            ),
        ),
        Way(
            "token budget, read-ahead",
            f"infinibatch: {READ_AHEAD:,} read ahead and sorted, at most {budget:,} positions a "
            "batch",
            lambda stream, hosts: padded.token_budget(
                stream, budget=share(budget, hosts), window=READ_AHEAD
            ),
        ),
        Way(
            "bucket by sequence length",
            f"tf.data: rows padded to {', '.join(map(str, ends))}, at most {budget:,} positions a "
            "batch",
            lambda stream, hosts: padded.bucket_by_length(
                stream, budget=share(budget, hosts), ends=ends
            ),
        ),
        Way(
            "concatenate and split",
            f"one run of tokens, cut every {longest:,}, batches of {rows}",
            lambda stream, hosts: packed.concatenate_and_split(
                stream, rows=share(rows, hosts), length=longest
            ),
        ),
    ]
    for name, pack in packed.PACKERS.items():
        found.append(
            Way(
                f"{name}, {OPEN_ROWS} open rows",
                f"Grain: rows of {longest:,}, batches of {rows}",
                lambda stream, hosts, pack=pack: pack(  # type: ignore[misc]
                    stream, rows=share(rows, hosts), length=longest, open_rows=OPEN_ROWS
                ),
                one_by_one=True,
            )
        )
    return found


def compare(
    stream: Stream,
    found: list[Way],
    *,
    width: int,
    sample: int,
    tell: Callable[[str], None] = lambda what: None,
) -> Iterator[dict]:
    """The figures of each way on a stream, one after the other.

    Args:
        stream: all examples.
        found: the ways.
        width: of the model, for the cost of attention.
        sample: examples to use where a way goes from one to the next.
        tell: is told what comes next.
    """
    count = len(stream.documents)
    small = stream.first(sample)
    shards = {each: list(each.shards(HOSTS)) for each in (stream, small)}
    for way in found:
        tell(way.name)
        used = small if way.one_by_one else stream
        hosts = [len(way.run(shard, HOSTS).rows) for shard in shards[used]]
        yield figures(
            way.name,
            way.about,
            way.run(used, 1),
            width=width,
            hosts=hosts,
            sample=len(used.documents) if len(used.documents) < count else None,
            scale=count / max(len(used.documents), 1),
        )


def lockstep(
    fitter: Fitter,
    *,
    width: int,
    left_out: list[str],
    optimal: bool = False,
    tell: Callable[[str], None] = lambda what: None,
) -> Iterator[dict]:
    """The figures of Lockstep with several numbers of buckets and every way of packing.

    Args:
        fitter: makes the plans.
        width: of the model.
        left_out: takes a sentence for each way of packing that is not simulated.
        optimal: simulate "optimal" also where there are many different lengths.
        tell: is told what comes next.
    """
    packings = _packings() if isinstance(fitter.longest, int) else ["best_fit", "none"]
    for packing in packings:
        if packing == "optimal" and not optimal and fitter.different > SOLVED:
            left_out.append(
                f"packing {packing!r}, whose linear programs may take minutes for "
                f"{fitter.different:,} different lengths; ask for it with --optimal"
            )
            continue
        seen: set[tuple] = set()
        for most in BUCKETS if packing != "none" else (4,):
            tell(f"Lockstep, at most {most} bucket{'s' * (most > 1)}, {packing}")
            buckets = fitter.buckets(most, packing)
            if buckets in seen:
                continue  # more buckets are allowed than are worth their compilation
            seen.add(buckets)
            try:
                plan = fitter.plan(buckets, packing)
            except ImportError as error:
                left_out.append(str(error))
                break
            # One plan for all hosts: each runs every step, on its own rows.
            shared = fitter.buckets(most, packing, HOSTS)
            batches = (plan if shared == buckets else fitter.plan(shared, packing)).num_batches()
            plural = "s" * (len(buckets) > 1)
            how = {"best_fit": "", "none": ", one example a row"}.get(packing, f", {packing}")
            yield figures(
                f"Lockstep, {len(buckets)} bucket{plural}{how}",
                ", ".join(f"{b.rows} rows × {_length(b)}" for b in buckets),
                simulated(plan, fitter.cut),
                width=width,
                hosts=[batches] * HOSTS,
            ) | {"packing": packing, "buckets": [b.as_json for b in buckets]}


def padded_pairs(fitter: Fitter, *, width: int) -> dict[str, Any]:
    """The figures of pairs that are padded to the longest inputs and targets, one in a row."""
    assert not isinstance(fitter.longest, int), "pairs have two lengths"
    row = sum(fitter.longest)
    bucket = Bucket(max(fitter.options["tokens_per_batch"] // row, 1), fitter.longest)
    plan = fitter.plan((bucket,), "none")
    return figures(
        "padded to the longest of all",
        f"every row {_length(bucket)} long, one pair in a row",
        simulated(plan, 0),
        width=width,
        hosts=[plan.num_batches()] * HOSTS,
    )


def _length(bucket: Bucket) -> str:
    return " + ".join(f"{length:,}" for length in bucket.lengths)


def _packings() -> list[str]:
    """The ways of packing that there are: best fit first, and one example in a row last."""
    first, last = "best_fit", "none"
    return [first, *(name for name in PACKINGS if name not in (first, last)), last]


def figures(
    name: str,
    about: str,
    made: Simulated,
    *,
    width: int,
    hosts: list[int],
    sample: int | None = None,
    scale: float = 1,
) -> dict[str, Any]:
    """What a program reads of a strategy.

    Args:
        name: of the strategy.
        about: what it does.
        made: its batches.
        width: of the model.
        hosts: batches of each host; of the sample, if there is one.
        sample: how many examples were used, if not all.
        scale: how many times as many there are.

    Returns:
        Per epoch: `padding` (0 to 1), `batches` (an estimate if there is a `sample`), distinct
        `shapes`, `cut` documents as a share of all; `positions_per_token`;
        `attention_flops_per_token`, of one layer's scores and their use, forward, over whole rows,
        and `segment_attention_flops_per_token`, inside segments; `cost` and `segment_cost`, the
        work of a layer per token with these two, in units of the work at one position without
        attention (`L + L²/(6·width)` over all rows); `reread`, examples to read again on resuming,
        at most; `batches_per_host` and whether they are `equal`.
    """
    tokens = max(made.tokens, 1)
    return {
        "name": name,
        "about": about,
        "sample": sample,
        "padding": 1 - made.tokens / max(made.positions, 1),
        "batches": round(len(made.rows) * scale),
        "shapes": made.shapes,
        "positions_per_token": made.positions / tokens,
        "attention_flops_per_token": 4 * width * made.scores / tokens,
        "segment_attention_flops_per_token": 4 * width * made.squares / tokens,
        "cost": (made.positions + made.scores / (6 * width)) / tokens,
        "segment_cost": (made.positions + made.squares / (6 * width)) / tokens,
        "cut": round(made.cut * scale),
        "reread": made.reread,
        "batches_per_host": hosts,
        "equal": len(set(hosts)) == 1,
    }
