"""The summary: a plan as a table, for `print(plan)`."""

import numpy as np

# Of how many hosts the printed plan shows the busiest, against their mean.
HOSTS = 8

SIDES = "inputs", "targets"  # of pairs


def table(plan) -> str:
    """What an epoch of a `Plan` comes to: each bucket's batches, rows, fill and tokens.

    Beneath: the padding, beside that of one example in a row of the longest bucket; with "optimal"
    the share of positions used and its bound; and what became of empty and of overlong examples.
    """
    lines = [
        f"{'bucket':>14}{'batches':>12}{'rows':>14}{'fill':>10}{'tokens':>18}"
        f"{f'busiest of {HOSTS}':>16}"
    ]
    busiest = plan.imbalance(HOSTS)
    total = np.zeros(4, np.int64)
    for index, bucket in enumerate(plan.buckets):
        counts = np.zeros(4, np.int64)  # batches, rows, tokens, positions
        for number, packed in plan.packed():
            batches = packed.batches(index)
            counts += number * np.array(
                [batches, packed.rows(index), packed.real(index), batches * bucket.positions]
            )
        even = f"{busiest[bucket]:.3f}×" if bucket in busiest else "–"
        lines.append(f"{_line(str(bucket), counts)}{even:>16}")
        total += counts
    lines.append(_line("epoch", total))
    row = sum(plan.buckets[-1].lengths)
    longest = " and ".join(f"{length:,}" for length in plan.buckets[-1].lengths)
    count = plan.num_examples - plan.num_empty
    lines.append(
        f"padding {plan.padding:.3%}; padded to the longest bucket, one example in a row, the "
        f"same data would take {count:,} rows of {longest} and "
        f"{1 - total[2] / (max(count, 1) * row):.1%} padding"
    )
    for name, used, bound in zip(SIDES, plan.side_fills, plan.side_bounds, strict=False):
        lines.append(
            f"{name}: {used:.2%} of positions used; the ratio of inputs to targets allows at most "
            f"{bound:.2%}"
        )
    if plan.bound is not None:
        lines.append(
            f"{1 - plan.padding:.4%} of positions used; no packing can use more than "
            f"{plan.bound:.4%}"
        )
    if plan.num_empty:
        lines.append(f"{plan.num_empty:,} examples have nothing to train on and are left out")
    if plan.overlong:
        done = {"split": "split", "truncate": "truncated", "drop": "dropped"}[plan.overflow]
        lines.append(
            f"{plan.overlong:,} examples longer than {longest} are {done}, "
            f"{plan.lost:,} positions lost"
        )
    return "\n".join(lines)


def _line(name: str, counts: np.ndarray) -> str:
    batches, rows, tokens, positions = counts.tolist()
    fill = f"{tokens / positions:.2%}" if positions else "–"
    return f"{name:>14}{batches:>12,}{rows:>14,}{fill:>10}{tokens:>18,}"
