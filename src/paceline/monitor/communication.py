"""The report's section on communication: its time, the hidden part of it, and the bytes on the wire."""

from collections.abc import Sequence

from paceline.monitor.events import BucketExchanged
from paceline.monitor.formatting import duration, share, size
from paceline.monitor.html_elements import Pictures, picture, safe, section, table
from paceline.monitor.timeline import TimedStep


def describe_step(step: TimedStep) -> str:
    """Return where the time of a step went, in two sentences."""
    whole_s, exposed_s = step.times.duration_s, step.times.waited_s
    exposed = f" ({share(exposed_s / whole_s)})" if whole_s > 0 else ""
    hidden = f" ({share(step.hidden_share)})" if step.hidden_share is not None else ""
    return (
        f"A typical step of rank {step.rank} takes {duration(whole_s)}: {duration(step.computing_s)} computing, "
        f"and {duration(exposed_s)}{exposed} waiting for the exchange. The exchange takes "
        f"{duration(step.exchange_s)}, of which {duration(step.hidden_s)}{hidden} are hidden behind computing."
    )


def render_communication(typical: Sequence[TimedStep], gantt: Pictures) -> str:
    """Return the section of a report's page.

    Args:
        typical: One step per rank, with medians for times.
        gantt: Timeline picture of the first of them.
    """
    first = typical[0]
    shown = "A step in time: computing, and below it the exchange of each bucket"
    sampled = "1 step was sampled" if first.num_steps == 1 else f"medians of {first.num_steps:,} sampled steps"
    parts = [f"<p>{safe(describe_step(first))} ({sampled}.)</p>", picture(gantt, shown)]
    if first.buckets:
        parts.append(_render_buckets(first.buckets))
    if len(typical) > 1:
        parts.append(_render_workers(typical))
    return section("Communication", "".join(parts))


def _render_buckets(buckets: Sequence[BucketExchanged]) -> str:
    rows = [
        [
            str(one.bucket),
            size(one.num_bytes),
            size(one.wire_bytes),
            _ms(one.ready_s),
            _ms(one.began_s - one.ready_s),
            _ms(one.ended_s - one.began_s),
            _rate(one),
            _ms(one.waited_s),
            _name(one),
        ]
        for one in buckets
    ]
    headings = ["bucket", "gradients", "sent", "ready, ms", "queue, ms", "exchange, ms", "sent/s", "exposed, ms"]
    return table([*headings, "parameters"], rows, num_numeric=len(headings))


def _render_workers(typical: Sequence[TimedStep]) -> str:
    rows = [
        [
            str(one.rank),
            *(_ms(value) for value in (one.times.duration_s, one.computing_s, one.exchange_s, one.hidden_s)),
            _ms(one.times.waited_s),
            size(one.wire_bytes),
        ]
        for one in typical
    ]
    headings = ["rank", "step, ms", "computing, ms", "exchange, ms", "hidden, ms", "exposed, ms", "sent"]
    return table(headings, rows, num_numeric=len(headings))


def _ms(value_s: float) -> str:
    return f"{1e3 * value_s:,.2f}"


def _rate(bucket: BucketExchanged) -> str:
    took_s = bucket.ended_s - bucket.began_s
    return f"{size(bucket.wire_bytes / took_s)}/s" if took_s > 0 else "–"


def _name(bucket: BucketExchanged) -> str:
    num_others = bucket.num_parameters - 1
    return f"{bucket.first_parameter} and {num_others:,} more" if num_others > 0 else bucket.first_parameter
