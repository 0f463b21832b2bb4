"""`bench resilience`: what is read off the updates around a fault, and a training that torchft's side stands for."""

import json
import os
import signal

import pytest
from pydantic import ValidationError

from paceline.benchmarks import ResilienceBenchmark
from paceline.benchmarks.resilience.benchmark import Recovery, judge
from paceline.benchmarks.resilience.sides import PacelineSide, TorchftSide, Update
from paceline.monitor.events import StepFinished, WorkersChanged
from paceline.monitor.log import EventLog


def updates_of(*lines):
    return [Update(*line) for line in lines]


CALM = [(0.1 * number, number, 3) for number in range(1, 11)]
"""Ten updates of three workers, one each 0.1 s."""


def test_the_pause_is_the_longest_time_between_updates_after_the_fault():
    # One more update ends just after the fault; then two workers go on, and the third is back at 3 s.
    after = [(1.05, 11, 3), (1.85, 12, 2), (1.95, 13, 2), (3.0, 14, 3), (3.1, 15, 3)]
    recovery = judge(updates_of(*CALM, *after), 1.01, 3)
    assert recovery.next_s == pytest.approx(0.84)
    assert recovery.pause_s == pytest.approx(1.05)
    assert recovery.full_s == pytest.approx(1.99)
    assert recovery.num_again == 0


def test_updates_that_are_done_again_are_counted_once_each():
    after = [(4.0, 8, 3), (4.1, 9, 3), (4.2, 10, 3), (4.3, 11, 3)]
    recovery = judge(updates_of(*CALM, *after), 1.01, 3)
    assert recovery == Recovery(pytest.approx(2.99), pytest.approx(2.99), pytest.approx(2.99), 3)


def test_a_fault_that_nobody_feels_costs_a_step():
    after = [(1.0 + 0.1 * number, 10 + number, 3) for number in range(1, 6)]
    assert judge(updates_of(*CALM, *after), 1.01, 3).pause_s == pytest.approx(0.1)


def spread():
    """Eleven recoveries of each side, ours within 0.05 to 1 s."""
    times = [Recovery(0.1 * number, 1.0, 1.0, 0) for number in range(1, 11)] + [Recovery(0.05, 1.0, 1.0, 0)]
    return {"paceline": times, "torchrun": [Recovery(1.0, 1.0, 1.0, 0)] * 11}


def test_rows_compare_the_first_side_with_each_other():
    bench = ResilienceBenchmark(sides=("paceline", "torchrun"))
    found = {"paceline": [Recovery(0.4, 0.5, 2.0, 0)] * 3, "torchrun": [Recovery(5.0, 5.0, 8.0, 4)] * 3}
    rows = bench._describe(found, {"paceline": [0.97], "torchrun": []})
    ratios = {row.metric: row.ratio for row in rows}
    assert ratios["next update"] == pytest.approx(0.08)
    assert ratios["pause"] == pytest.approx(0.1)
    assert ratios["longest time to full strength"] == pytest.approx(0.25)
    assert ratios["updates done again"] == 0
    times = {row.metric: row.ours for row in bench._describe(spread(), {"paceline": [], "torchrun": []})}
    assert times["p99 next update"] == pytest.approx(0.99)
    assert times["longest next update"] == 1.0
    assert ratios["goodput"] == 0.97


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sides": ("paceline", "torchft")}, "give --torchft_path"),
        ({"sides": ("paceline", "paceline")}, "name each once"),
        ({"global_batch": 10}, "multiple of num_workers"),
    ],
)
def test_what_cannot_be_measured_is_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        ResilienceBenchmark(**settings)


def test_updates_are_read_from_torchft_workers_the_first_that_tells_counts(tmp_path):
    side = TorchftSide(2, tmp_path, {})
    lines = {0: [(1.0, 1, 2), (2.5, 2, 2)], 1: [(1.1, 1, 2), (2.4, 2, 2)]}
    for number, told in lines.items():
        texts = [json.dumps({"time": time_s, "step": step, "workers": n}) for time_s, step, n in told]
        (tmp_path / f"worker{number}.jsonl").write_text("\n".join(texts) + '\n{"time": 3.')
    assert side.read_updates() == updates_of((1.0, 1, 2), (2.4, 2, 2))


def test_updates_of_fewer_workers_are_told_from_those_of_all(tmp_path):
    (tmp_path / "run").mkdir()
    changed = {"names": ["w0"], "reason": "w1 was killed by SIGKILL", "num_sent": 0, "duration_s": 0.1}
    with EventLog(tmp_path / "run" / "events.jsonl", run="run", rank=0) as log:
        for step, num_workers in ((1, 1), (2, 2)):
            log.write(WorkersChanged(num_workers=num_workers, **changed), step=step)
            step_fields = dict.fromkeys(("loss", "weight", "learning_rate", "gradient_norm", "duration_s"), 1.0)
            event = StepFinished(**step_fields, communication_s=0.0, num_samples=1, position=step)
            log.write(event, step=step)
    updates = PacelineSide(2, tmp_path, {}).read_updates()
    assert [(each.step, each.num_workers) for each in updates] == [(1, 1), (2, 2)]


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_worker_is_killed_and_training_goes_on():
    bench = ResilienceBenchmark(sides=("paceline",), num_rounds=1, num_faults=1, steps_between=5)
    rows = {row.metric: row.ours for row in bench.measure()}
    assert 0 < rows["pause"] <= rows["time to full strength"]


def test_the_workers_of_a_training_are_found_by_their_output(tmp_path):
    side = PacelineSide(1, tmp_path, dict(os.environ))
    (tmp_path / "run" / "workers").mkdir(parents=True)
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(tmp_path / "run" / "workers" / "rank2.out", os.O_WRONLY | os.O_CREAT), 1)
        signal.pause()
    try:
        found = {}
        while not found:
            found = side.find_workers()
        assert found == {2: pid}
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        side.stop()
