"""Markdown: the plan as text for TensorBoard, to be written once, at step 0."""

from pipeline.planning.plan import Plan
from pipeline.report import findings, tables
from pipeline.report.epoch import measure_epoch, runs
from pipeline.report.table import length_of

# Batches that are built for the text, at most: a run should not wait for it.
MOST_BATCHES = 500


def markdown(plan: Plan) -> str:
    """The plan's figures as a Markdown table and sentences.

    For `SummaryWriter.add_text("plan", markdown(plan), 0)`. Documents a step, the order of
    buckets and the balance of hosts are those of the epoch's first batches.
    """
    figures = measure_epoch(plan, MOST_BATCHES)
    rows = sum(count for _, count in figures["segments_per_row"])
    segments = sum(held * count for held, count in figures["segments_per_row"])
    order = ", ".join(
        f"{count} × {length_of(figures['buckets'][bucket]['length'])}"
        for bucket, count in runs(figures["order"])[:12]
    )
    paragraphs = [
        f"**{figures['batches']:,} batches** an epoch, **{figures['padding']:.3%} padding**, "
        f"{figures['tokens']:,} tokens",
        "\n".join(tables.buckets(figures).markdown()),
        f"{segments / rows:.2f} segments a row. The epoch begins with batches of length {order}, …",
        findings.about_balance(figures["balance"]),
        *findings.about_sources(figures),
    ]
    if figures["overlong"]:
        paragraphs.append(
            f"{figures['overlong']:,} examples are longer than the longest bucket (overflow: "
            f"{figures['overflow']}); {figures['lost']:,} positions are lost."
        )
    return "\n\n".join([*paragraphs, f"`{figures['fingerprint']}`"])
