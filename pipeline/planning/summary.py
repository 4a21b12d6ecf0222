"""The summary: a plan as a table, for `print(plan)`."""

from collections.abc import Iterable

import numpy as np

# Of how many hosts the printed plan shows the busiest, against their mean.
HOSTS = 8

SIDES = "inputs", "targets"  # of pairs


def table(plan) -> str:
    """What an epoch of a `Plan` comes to: each bucket's batches, rows, fill and tokens.

    Beneath: the padding, beside that of one example in a row of the longest bucket; with "optimal"
    the share of positions used and its bound; and what became of empty and of overlong examples.
    """
    lines = _buckets(plan)
    row = sum(plan.buckets[-1].lengths)
    lines.append(
        f"padding {plan.padding:.3%}; padded to the longest bucket, one example in a row, the "
        f"same data would take {plan.num_pieces:,} rows of {_longest(plan)} and "
        f"{1 - plan.num_tokens / (plan.num_pieces * row):.1%} padding"
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
    return "\n".join(lines + _left_out(plan, [plan]))


def mixture_table(mixture) -> str:
    """What an epoch of a `Mixture` comes to: its buckets, and the share that each corpus has.

    A corpus's weight is what was asked for, over all phases; its share is what the epoch gives it
    of all real positions.
    """
    lines = _buckets(mixture)
    steps = mixture.num_batches()
    shares, passes = mixture.shares(0, steps), mixture.passes(steps)
    lines.append(
        f"{'corpus':>14}{'weight':>12}{'share':>14}{'epochs':>10}{'tokens of one':>18}"
        f"{'examples':>16}"
    )
    for name, plan in mixture.sources.items():
        weights = " → ".join(f"{phase[name]:.4g}" for _, phase in mixture.phases)
        lines.append(
            f"{name:>14}{weights:>12}{shares[name]:>14.3%}{passes[name]:>10.2f}"
            f"{plan.num_tokens:>18,}{plan.num_examples:>16,}"
        )
    if len(mixture.phases) > 1:
        starts = ", ".join(f"{start:,}" for start, _ in mixture.phases)
        lines.append(f"weights begin at steps {starts}")
    how = "all its steps" if mixture.finite else "steps until each has been through"
    lines.append(f"an epoch is {how}: {steps:,}; padding {mixture.padding:.3%}")
    return "\n".join(lines + _left_out(mixture, mixture.sources.values()))


def _buckets(plan) -> list[str]:
    lines = [
        f"{'bucket':>14}{'batches':>12}{'rows':>14}{'fill':>10}{'tokens':>18}"
        f"{f'busiest of {HOSTS}':>16}"
    ]
    busiest = plan.imbalance(HOSTS)
    total = np.zeros(4, np.int64)
    for index, (bucket, batches) in enumerate(plan.batches_per_bucket.items()):
        packed = plan.packed()
        counts = np.array(
            [
                batches,
                round(sum(number * each.rows(index) for number, each in packed)),
                round(sum(number * each.real(index) for number, each in packed)),
                batches * bucket.positions,
            ]
        )
        even = f"{busiest[bucket]:.3f}×" if bucket in busiest else "–"
        lines.append(f"{_line(str(bucket), counts)}{even:>16}")
        total += counts
    lines.append(_line("epoch", total))
    return lines


def _left_out(plan, parts: Iterable) -> list[str]:
    """What became of empty and of overlong examples, of a plan that has these parts."""
    lines = []
    asked = sum(getattr(part.lengths, "num_left_out", 0) for part in parts)
    if asked:
        lines.append(f"{asked:,} examples are left out, as asked")
    if empty := plan.num_empty - asked:
        lines.append(f"{empty:,} examples have nothing to train on and are left out")
    if plan.overlong:
        done = {"split": "split", "truncate": "truncated", "drop": "dropped"}[plan.overflow]
        lines.append(
            f"{plan.overlong:,} examples longer than {_longest(plan)} are {done}, "
            f"{plan.lost:,} positions lost"
        )
    return lines


def _longest(plan) -> str:
    return " and ".join(f"{length:,}" for length in plan.buckets[-1].lengths)


def _line(name: str, counts: np.ndarray) -> str:
    batches, rows, tokens, positions = counts.tolist()
    fill = f"{tokens / positions:.2%}" if positions else "–"
    return f"{name:>14}{batches:>12,}{rows:>14,}{fill:>10}{tokens:>18,}"
