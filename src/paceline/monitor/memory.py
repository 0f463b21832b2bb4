"""What a report says of memory: what was estimated before the run, beside what was measured in it."""

from paceline.monitor.formatting import size
from paceline.monitor.html_elements import section, table
from paceline.monitor.reader import Summary


def render_memory(summary: Summary) -> str:
    """Return the section of a report's page; nothing where memory was neither estimated nor measured."""
    estimated = summary.memory_estimates[-1].event if summary.memory_estimates else None
    measured = summary.memory_measured[-1].event if summary.memory_measured else None
    columns = [event for event in (estimated, measured) if event is not None]
    if not columns:
        return ""
    names = list(dict.fromkeys(name for event in columns for name in event.bytes_of))
    rows = [[name, *(size(event.bytes_of[name]) if event.bytes_of else "–" for event in columns)] for name in names]
    rows.append(["in all", *(size(event.peak_bytes) for event in columns)])
    if estimated is not None:
        rows.append(["there is", size(estimated.available_bytes), *[""] * (len(columns) - 1)])
    headings = ["tensors of a rank", *["estimated"] * (estimated is not None), *["measured"] * (measured is not None)]
    return section("Memory", table(headings, rows))
