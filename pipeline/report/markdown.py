"""Markdown: the plan as text for TensorBoard, to be written once, at step 0."""

from pipeline.planning.plan import Plan
from pipeline.report.findings import about_sources
from pipeline.report.planned import planned, runs
from pipeline.report.table import length_of

# Batches that are walked: a run should not wait for its own description.
WALKED = 500


def markdown(plan: Plan) -> str:
    """The plan's figures as a Markdown table and sentences.

    For `SummaryWriter.add_text("plan", markdown(plan), 0)`. Documents a step, the order of
    buckets and the balance of hosts are those of the epoch's first batches.
    """
    figures = planned(plan, walked=WALKED)
    lines = [
        f"**{figures['batches']:,} batches** an epoch, **{figures['padding']:.3%} padding**, "
        f"{figures['tokens']:,} tokens",
        "",
        "| bucket (rows × positions) | batches | fill | tokens a step | documents a step |",
        "| ---: | ---: | ---: | ---: | ---: |",
    ]
    for each in figures["buckets"]:
        name = f"{each['rows']:,} × {length_of(each)}"
        if not each["batches"]:
            lines.append(f"| {name} | 0 | – | – | – |")
            continue
        documents = each["documents_per_step"]
        lines.append(
            f"| {name} | {each['batches']:,} | {each['fill']:.2%} | {each['tokens_per_step']:,.0f} "
            f"| {'–' if documents is None else f'{documents:,.1f}'} |"
        )
    rows = sum(count for _, count in figures["segments_per_row"])
    segments = sum(held * count for held, count in figures["segments_per_row"])
    order = ", ".join(
        f"{count} × {length_of(figures['buckets'][bucket])}"
        for bucket, count in runs(figures["order"])[:12]
    )
    balance = figures["balance"]
    lines += [
        "",
        f"{segments / rows:.2f} segments a row. The epoch begins with batches of length {order}, …",
        "",
        f"Over {balance['hosts']} hosts the busiest has {balance['tokens']['mean']:.3f} times the "
        f"mean of real positions, and {balance['attention']['mean']:.3f} times the mean of "
        "attention inside segments, averaged over steps."
        if balance["hosts"] > 1
        else "The rows of the buckets do not divide over several hosts.",
    ]
    for text in about_sources(figures):
        lines += ["", text]
    if figures["overlong"]:
        lines += [
            "",
            f"{figures['overlong']:,} examples are longer than the longest bucket (overflow: "
            f"{figures['overflow']}); {figures['lost']:,} positions are lost.",
        ]
    lines += ["", f"`{figures['fingerprint']}`"]
    return "\n".join(lines)
