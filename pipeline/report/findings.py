"""Findings: what the figures say, in sentences, the most important first."""

from typing import Any

from pipeline.report.figures import RUN, length_of
from pipeline.report.tables import percent


def findings(figures: dict[str, Any]) -> list[str]:
    """The sentences at the top of the report: what to do, and what it saves."""
    plan = figures["plan"]
    return [
        about_plan(plan),
        about_rival(figures),
        *about_buckets(figures["cost"]),
        *about_sources(plan),
        *about_lengths(plan["mean_length"]),
        *about_losses(plan, figures["corpus"]["empty"]),
    ]


def about_plan(plan: dict[str, Any]) -> str:
    """Which buckets to train with, and what they cost."""
    used = [bucket for bucket in plan["buckets"] if bucket["batches"]]
    shapes = _listed([f"{each['rows']:,} × {length_of(each['length'])}" for each in used])
    return (
        f"Train with {len(used)} bucket{'s' * (len(used) > 1)} of rows × positions: {shapes}. An "
        f"epoch takes {plan['batches']:,} batches, and {percent(plan['padding'])} of their "
        "positions are padding."
    )


def ours(figures: dict[str, Any]) -> dict[str, Any]:
    """Lockstep's row of the comparison: with the plan's buckets, or else with least work."""
    shapes = [[bucket["rows"], bucket["length"]] for bucket in figures["plan"]["buckets"]]
    packing = figures["options"]["packing"]
    rows = [row for row in figures["strategies"] if "packing" in row]
    rows = [row for row in rows if row["packing"] == packing] or rows
    same = [row for row in rows if row["buckets"] == shapes]
    return min(same or rows, key=lambda row: row["cost"])


def rivals(figures: dict[str, Any]) -> list[dict[str, Any]]:
    """The other libraries' rows of the comparison, the one with least work first."""
    cost = cost_key(figures)
    others = [row for row in figures["strategies"] if "packing" not in row]
    return sorted(others, key=lambda row: row[cost])


def cost_key(figures: dict[str, Any]) -> str:
    """The figure of a strategy that counts its work, for the attention that is trained with."""
    return "segment_cost" if figures["options"]["attention"] == "segment" else "cost"


def about_rival(figures: dict[str, Any]) -> str:
    """Lockstep compared with the strategy of another library that needs least work."""
    cost, mine, rival = cost_key(figures), ours(figures), rivals(figures)[0]
    ratio = mine[cost] / rival[cost]
    how = f"{percent(abs(1 - ratio))} {'less' if ratio < 1 else 'more'}"
    drawbacks = []
    if rival["shapes"] > mine["shapes"]:
        drawbacks.append(f"compiles {rival['shapes']:,} shapes instead of {mine['shapes']:,}")
    if rival["cut"] > mine["cut"]:
        drawbacks.append(f"cuts {rival['cut']:,} documents instead of {mine['cut']:,}")
    if not rival["equal"]:
        drawbacks.append(
            f"gives {len(rival['batches_per_host'])} hosts different numbers of batches, so a step "
            "waits for ever"
        )
    text = (
        f"{mine['name']} needs {how} work per token than the strongest other strategy on this "
        f"data, {rival['name']}: {mine[cost]:.3f} against {rival[cost]:.3f} units, "
        f"{percent(mine['padding'])} against {percent(rival['padding'])} padding."
    )
    return text + (f" That strategy also {_listed(drawbacks)}." if drawbacks else "")


def about_sources(plan: dict[str, Any]) -> list[str]:
    """The share that each source of a mixture really gets; empty for a single corpus."""
    found = []
    for source in plan["sources"]:
        weights = " → ".join(percent(weight) for _, weight in source["weights"])
        off = f"; no {RUN} steps are more than {percent(source['off'] or 0)} off"
        found.append(
            f"{source['name']} has {percent(source['share'])} of the tokens of the first "
            f"{plan['walked']:,} steps (weight {weights}), and an epoch of the mixture goes "
            f"through it {source['epochs']:.2f} times{'' if source['off'] is None else off}."
        )
    return found


def about_buckets(cost: dict[str, Any]) -> list[str]:
    """How many buckets are enough, for both kinds of attention."""
    curve = {point["buckets"]: point for point in cost["curve"]}
    dense, segment, least = cost["enough"]["dense"], cost["enough"]["segment"], min(curve)
    if dense == 1:
        return [
            "One bucket is enough, also with attention over whole rows at width "
            f"{cost['width']:,}: more would save less than 1% of the work."
        ]
    tried = dense == cost["most"]
    more = f"more than {dense} were not tried" if tried else "more save less than 1%"
    enough = "one bucket is" if segment == 1 else f"{segment} buckets are"
    return [
        f"With attention over whole rows at width {cost['width']:,}, {dense} buckets take "
        f"{curve[dense]['dense']:.3f} units of work per token where {least} takes "
        f"{curve[least]['dense']:.3f}; {more} (--max-buckets {dense}).",
        f"With attention that skips other segments, {enough} enough.",
    ]


def about_lengths(mean_length: dict[str, float | None]) -> list[str]:
    """How much the mean length of a batch varies; empty if too few batches tell."""
    if mean_length["ratio"] is None:
        return []
    return [
        "The mean length of the documents in a batch varies "
        f"{mean_length['ratio']:.2f} times as much as in random batches (standard deviation within "
        f"a bucket), and neighbouring batches correlate by {mean_length['correlation']:.2f}."
    ]


def about_losses(plan: dict[str, Any], empty: int = 0) -> list[str]:
    """Examples that are split, truncated, dropped or empty."""
    found = []
    if plan["overlong"]:
        how = {
            "split": "split into pieces, and nothing is lost",
            "truncate": f"truncated, and {plan['lost']:,} positions are lost",
            "drop": f"dropped, and {plan['lost']:,} positions are lost",
        }[plan["overflow"]]
        found.append(f"{plan['overlong']:,} examples longer than the longest bucket are {how}.")
    if empty:
        found.append(f"{empty:,} examples have nothing to train on and are in no batch.")
    return found


def about_strategies(figures: dict[str, Any]) -> str:
    """Where the figures of the strategies come from, and which are left out."""
    text = "Lockstep's figures are counts over its plans"
    if "targets" not in figures:
        text += "; those of the other strategies are what is expected of a random order"
    return f"{text}." + "".join(f" Left out: {each}." for each in figures["excluded"])


def about_balance(balance: dict[str, Any]) -> str:
    """How even the hosts' shares of each batch are."""
    if balance["hosts"] == 1:
        return (
            "The rows of these buckets do not divide over several hosts; fit them with a "
            "row_multiple (--row-multiple) for that."
        )
    tokens, attention = balance["tokens"], balance["attention"]
    text = (
        f"On average over the steps, the busiest of {balance['hosts']} hosts has "
        f"{tokens['mean']:.3f} times the mean of real positions (at worst {tokens['worst']:.2f}), "
        f"and {attention['mean']:.3f} times the mean of attention inside segments (at worst "
        f"{attention['worst']:.2f})."
    )
    return f"{text} {about_tiers(balance['over_ideal'])}".strip()


def about_tiers(over_ideal: list[dict[str, Any]]) -> str:
    """Which number of tiers to choose; empty if the rows of no batch can be grouped."""
    if not over_ideal:
        return ""
    groups = max(each["groups"] for each in over_ideal)
    ratios = {each["tiers"]: each["ratio"] for each in over_ideal if each["groups"] == groups}
    least = min(ratios)
    enough = min(tiers for tiers in ratios if ratios[tiers] <= min(ratios.values()) * 1.01)
    text = (
        f"With attention that skips other segments, steps of {groups:,} groups of rows take "
        f"{ratios[least]:.3f} times the least time"
    )
    if enough > least:
        text += f", and {ratios[enough]:.3f} times with tiers={enough}"
    elif least == 1:
        text += ", and tiers gain nothing"
    else:
        text += f" (tiers={least})"
    return f"{text}. Attention over whole rows needs no tiers: all rows cost the same."


def _listed(items: list[str]) -> str:
    """A list in words.

    >>> _listed(["one", "two", "three"])
    'one, two and three'
    """
    return " and ".join(filter(None, [", ".join(items[:-1]), items[-1]]))
