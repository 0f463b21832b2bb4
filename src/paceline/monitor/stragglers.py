"""What a report says of workers that are slow, and of the shares that workers took."""

from collections.abc import Iterator

from paceline.monitor.formatting import describe_slow, number
from paceline.monitor.html_elements import safe, section, table
from paceline.monitor.reader import Summary

_MAX_ROWS = 20


def describe_stragglers(summary: Summary) -> Iterator[str]:
    """Yield a sentence for each worker that was found slow; the newest of each rank counts."""
    is_following = bool(summary.starts) and summary.starts[-1].event.settings.get("shares") == "measured"
    for record in {one.event.slow_rank: one for one in summary.slow_workers}.values():
        cure = "its share follows its speed" if is_following else "--shares measured would give it fewer samples"
        yield f"{describe_slow(record.event)} (found at step {record.step:,}; {cure})."


def render_stragglers(summary: Summary) -> str:
    """Return the section of a report's page; nothing where no worker was slow and no share changed."""
    parts = [f"<p>{safe(sentence)}</p>" for sentence in describe_stragglers(summary)]
    changes = summary.share_changes
    if changes:
        rows = [
            [
                f"{one.step:,}",
                f"{one.event.start:,}",
                ", ".join(f"{share:,}" for share in one.event.shares),
                ", ".join(number(speed) for speed in one.event.samples_per_s),
            ]
            for one in reversed(changes[-_MAX_ROWS:])
        ]
        number_of = "Shares changed once" if len(changes) == 1 else f"Shares changed {len(changes):,} times"
        newest = f"; the newest {_MAX_ROWS} changes are shown" if len(changes) > _MAX_ROWS else ""
        headings = ["step", "from sample", "shares by rank", "samples/s by rank, while computing"]
        parts.append(f"<p>{number_of}, to follow the speed of workers{newest}.</p>")
        parts.append(table(headings, rows, num_numeric=2))
    return section("Workers", "".join(parts)) if parts else ""
