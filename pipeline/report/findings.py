"""Findings: what the figures say, in sentences."""

from typing import Any

from pipeline.report.table import percent


def findings(figures: dict[str, Any]) -> list[str]:
    """The sentences that stand above everything else, the most important first."""
    return [
        *_padding(figures),
        *about_sources(figures["plan"]),
        *about_buckets(figures["cost"]),
        *_left_over(figures),
    ]


def _padding(figures: dict[str, Any]) -> list[str]:
    worst = figures["strategies"][0]
    plan = figures["plan"]
    used = [bucket for bucket in plan["buckets"] if bucket["batches"]]
    shapes = f"{len(used)} shape{'s' * (len(used) > 1)}"
    return [
        f"With every row {worst['name']}, {percent(worst['padding'])} of all positions would be "
        f"padding. The plan below has {percent(plan['padding'])}, in {shapes}."
    ]


def about_sources(plan: dict[str, Any]) -> list[str]:
    """What share each source of a mixture really has; nothing of a plan of one corpus."""
    said = []
    for each in plan["sources"]:
        weights = " → ".join(percent(weight) for _, weight in each["weights"])
        text = (
            f"{each['name']} has {percent(each['share'])} of the tokens of the first "
            f"{plan['walked']:,} steps (weight {weights}), and an epoch of the mixture goes "
            f"through it {each['epochs']:.2f} times"
        )
        off = each["off"]
        said.append(
            text if off is None else f"{text}; no 200 steps are more than {percent(off)} off"
        )
    return [f"{text}." for text in said]


def about_buckets(cost: dict[str, Any]) -> list[str]:
    """How many buckets are enough, for both kinds of attention."""
    curve = {point["buckets"]: point for point in cost["curve"]}
    one, dense, segment = 1, cost["enough"]["dense"], cost["enough"]["segment"]
    first = curve[min(curve)]
    if dense == one:
        said = (
            f"One bucket is enough, also with attention over whole rows at width "
            f"{cost['width']:,}: more would save less than 1% of the work."
        )
        return [said]
    said = (
        f"With attention over whole rows at width {cost['width']:,}, {dense} buckets take "
        f"{curve[dense]['dense']:.3f} units of work per token where one takes "
        f"{first['dense']:.3f}; more save less than 1%."
    )
    if segment == one:
        return [said, "With attention that skips other segments, one bucket is enough."]
    return [said, f"With attention that skips other segments, {segment} buckets are enough."]


def _left_over(figures: dict[str, Any]) -> list[str]:
    plan, empty = figures["plan"], figures["corpus"]["empty"]
    said = []
    if plan["overlong"]:
        done = {
            "split": "split into pieces, and nothing is lost",
            "truncate": f"truncated, and {plan['lost']:,} positions are lost",
            "drop": f"dropped, and {plan['lost']:,} positions are lost",
        }[plan["overflow"]]
        said.append(f"{plan['overlong']:,} examples longer than the longest bucket are {done}.")
    if empty:
        said.append(f"{empty:,} examples have nothing to train on and are in no batch.")
    return said


def about_samples(figures: dict[str, Any]) -> str:
    """What was simulated on a sample, and what is left out."""
    sampled = [each for each in figures["strategies"] if each["sample"]]
    left_out = "".join(f" Left out: {each}." for each in figures["left_out"])
    if not sampled:
        return f"Each is simulated on all examples.{left_out}"
    names = " and ".join(each["name"] for each in sampled)
    return (
        f"{names[0].upper()}{names[1:]} go from example to example, and are simulated on "
        f"{sampled[0]['sample']:,} examples drawn at random: batches and documents cut are scaled "
        "up (≈), batches on each host and examples read again are those of the sample. The others "
        f"are simulated on all examples.{left_out}"
    )


def about_balance(balance: dict[str, Any]) -> str:
    """How even the hosts' shares of each batch are."""
    if balance["hosts"] == 1:
        return (
            "The rows of these buckets do not divide over several hosts; for that, fit them with "
            "--row-multiple."
        )
    tokens, attention = balance["tokens"], balance["attention"]
    return (
        f"On average over the steps, the busiest of {balance['hosts']} hosts has "
        f"{tokens['mean']:.3f} times the mean of real positions (at worst {tokens['worst']:.2f}), "
        f"and {attention['mean']:.3f} times the mean of attention inside segments (at worst "
        f"{attention['worst']:.2f})."
    )
