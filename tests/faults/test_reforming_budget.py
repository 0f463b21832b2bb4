"""A budget counts over changes of workers, whose new ones know nothing of what was spent."""

import pytest
from reforming_threads import LOST_STEP, WITHOUT_W1, in_a_step, run_threads

from paceline.monitor import ResourcesUsed, StepFinished, Warned, read_log, select
from paceline.training import budget, usage


class PerStep:
    """A meter of a host: each step in the log has used 10 J."""

    part, source, interval_s = "cpu", "scripted", None

    def __init__(self, log):
        self.log, self.before = log, 0
        self.before = self.count()

    def count(self):
        return len(select(read_log(self.log), StepFinished)) if self.log.exists() else 0

    def read_j(self):
        return 10.0 * (self.count() - self.before)


@pytest.mark.parametrize("sync", ["every_step", "local_sgd"])
@pytest.mark.parametrize("change", ["a worker is lost", "a worker joins"])
def test_what_was_spent_before_a_change_counts_after_it(tmp_path, monkeypatch, sync, change):
    log = tmp_path / "events.jsonl"
    meter = lambda site, device, place_here, num_here: ([] if place_here else [PerStep(log)], {})  # noqa: E731
    monkeypatch.setattr(usage, "find_meters", meter)
    monkeypatch.setattr(budget, "_CHECK_S", 0.0)  # at each step
    names = ["w0", "w1", "w2"]
    how = (WITHOUT_W1, in_a_step, "w1") if change == "a worker is lost" else ([[names], [[*names, "w3"], 3]],)
    num_steps = 25
    changes = {"budget": {"energy": 1000, "warn_share": 0.225}, "num_steps": num_steps}
    _, records = run_threads(tmp_path, monkeypatch, {"name": sync}, *how, **changes)
    assert sum(record.event.energy_j for record in select(records, ResourcesUsed)) == 10 * num_steps
    assert {record.epoch for record in select(records, ResourcesUsed)} == {0, 1}
    (warned,) = (record for record in select(records, Warned) if "are spent at" in record.event.message)
    assert warned.event.message.startswith("230 of 1000 J are spent at step 23 of 25")
    assert LOST_STEP < 23
