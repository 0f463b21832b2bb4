"""The report's section on memory."""

from types import SimpleNamespace

from paceline.monitor.events import MemoryEstimated, MemoryMeasured
from paceline.monitor.memory import render_memory


def render(estimates, measured):
    wrap = [[SimpleNamespace(event=event) for event in events] for events in (estimates, measured)]
    return render_memory(SimpleNamespace(memory_estimates=wrap[0], memory_measured=wrap[1]))


def test_estimate_and_measurement_stand_beside_each_other():
    estimate = MemoryEstimated(
        peak_bytes=3_000_000, bytes_of={"parameters": 1e6, "activations": 2e6}, available_bytes=10**9
    )
    measured = MemoryMeasured(peak_bytes=3_100_000, bytes_of={"parameters": 1e6, "activations": 2.1e6})
    page = render([estimate], [measured])
    assert all(text in page for text in ("estimated", "measured", "2 MB", "2.1 MB", "3.1 MB", "1 GB"))
    assert "estimated" not in render([], [measured])
    assert render([], []) == ""
