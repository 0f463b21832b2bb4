import json
import threading
from collections import Counter

import pytest
from pydantic import ValidationError

from paceline.benchmarks import StragglersBenchmark, Workers, stragglers
from paceline.benchmarks.stragglers import _TRIALS, Script, _run_trial, average, run_trials, speed
from paceline.comm import LocalGroup
from paceline.errors import SettingsError
from scripted_time import ScriptedTime

TINY = {
    "width": 8, "num_layers": 1, "num_heads": 2, "sequence_length": 8, "samples_per_worker": 2, "max_bytes": 300_000,
}  # fmt: skip


def test_each_worker_is_slow_now_and_then_by_the_same_script_on_every_side():
    script = Script(slow_chance=0.25, slow_factor=4.0)
    factors = [[script.factor("transient", rank, 4, step, seed=1) for step in range(400)] for rank in range(4)]
    for mine in factors:
        assert set(mine) == {1.0, 4.0}
        assert 60 < mine.count(4.0) < 140
    assert factors[0] != factors[1]
    assert factors[0] == [script.factor("transient", 0, 4, step, seed=1) for step in range(400)]
    assert factors[0] != [script.factor("transient", 0, 4, step, seed=2) for step in range(400)]


def test_one_worker_is_slow_always():
    factors = [Script(permanent_factor=3.0).factor("permanent", rank, 4, 0, seed=0) for rank in range(4)]
    assert factors == [1.0, 1.0, 1.0, 3.0]
    assert Script(slow_chance=1.0).factor("healthy", 3, 4, 0, seed=0) == 1.0


def test_speed_counts_from_the_first_step_after_settling():
    steps = [(0.9, 0.0, 100), (1.5, 0.0, 100), (2.5, 0.0, 4), (3.5, 0.0, 6)]
    assert speed(steps, settle_s=1.0) == 5.0
    assert speed(steps, settle_s=1.0, by="steps") == 1.0
    with pytest.raises(SettingsError, match="duration_s must be long enough for two steps of the slowest worker"):
        speed(steps, settle_s=3.0)


def test_losses_are_averaged_over_samples():
    points = average([(0.5, 1.0, 1), (0.9, 4.0, 2), (39.5, 2.0, 1), (40.5, 9.0, 1)], end_s=40.0)
    assert points == [(0.5, 3.0), (39.5, 2.0)]


def steps_of(rate, num_samples=10):
    """A worker's steps in 10 s, so many a second."""
    return [(number / rate, 5 - number / rate / 10, num_samples) for number in range(1, int(10 * rate) + 1)]


RATES = {
    ("healthy", "every_step"): [10, 10],
    ("transient", "alone"): [8, 8],
    ("transient", "every_step"): [4, 4],
    ("transient", "ssp"): [7, 7],
    ("transient", "asgd"): [8, 8],
    ("permanent", "alone"): [10, 5],
    ("permanent", "every_step"): [5, 5],
    ("permanent", "backups"): [9, 2],
    ("permanent", "shares"): [7, 7],
    ("permanent", "ssp"): [6, 6],
    ("permanent", "asgd"): [10, 5],
}


def test_what_was_lost_and_recovered_is_told(monkeypatch, tmp_path):
    def start(workers, function, settings):
        assert function is run_trials
        json.dumps(settings)
        return {rank: [steps_of(RATES[trial][rank]) for trial in _TRIALS] * 2 for rank in range(2)}

    monkeypatch.setattr(Workers, "start", start)
    picture = tmp_path / "losses.svg"
    rows = StragglersBenchmark(num_rounds=2, settle_s=1.0, duration_s=9.0, picture=picture, workers={"num_workers": 2})
    found = {row.case.partition(":")[0] + " " + row.metric: row for row in rows.measure()}
    assert {name: round(row.ratio, 3) for name, row in found.items()} == {
        "ssp recovered of what waiting costs": 0.75,
        "asgd recovered of what waiting costs": 1.0,
        "every_step speed": 0.667,
        "shares speed": 0.933,
        "ssp speed": 0.8,
        "asgd speed": 1.0,
        "backups speed": 0.9,
    }
    assert found["shares speed"].case == "shares: one of 2 3x slower"
    assert found["shares speed"].reference == pytest.approx(150.0)
    assert found["backups speed"].unit == "steps/s"
    text = picture.read_text()
    assert all(words in text for words in ("transient stragglers", "permanent stragglers", "SSP", "synchronous"))


@pytest.mark.parametrize("name", ["losses.pdf", "old.png"])
def test_pictures_that_cannot_be_are_refused(name, tmp_path):
    (tmp_path / "old.png").touch()
    with pytest.raises(ValidationError, match=r"picture must be a new file that ends in \.png or \.svg, but got .*;"):
        StragglersBenchmark(picture=tmp_path / name)


class OvertakenTime(ScriptedTime):
    """Of three threads, that which sleeps longest gets up only when each of the others is two steps ahead of it."""

    def __init__(self):
        super().__init__()
        self.num_sleeps = Counter()
        self.changed = threading.Condition()

    def sleep(self, duration_s):
        super().sleep(duration_s)
        with self.changed:
            self.num_sleeps[threading.get_ident()] += 1
            self.changed.notify_all()
            if duration_s > 0.1:
                assert self.changed.wait_for(self._is_overtaken, timeout=30), "others wait for the slow worker"

    def _is_overtaken(self):
        mine = self.num_sleeps[threading.get_ident()]
        return sum(number >= mine + 2 for number in self.num_sleeps.values()) == 2


@pytest.mark.parametrize("name", ["alone", "every_step", "backups", "shares", "ssp", "asgd"])
def test_sides_train_until_time_is_up(name, monkeypatch):
    """Steps of 40 ms, and of 120 ms for the slow worker, by a clock that other work on the machine does not move."""
    benchmark = StragglersBenchmark(
        task=TINY, script={"sample_s": 0.02}, settle_s=0.0, duration_s=1.01, workers={"num_workers": 3}
    )
    is_together = name in ("every_step", "shares")
    monkeypatch.setattr(stragglers, "time", ScriptedTime() if is_together else OvertakenTime())
    splits = benchmark.task.open()
    results = LocalGroup.run(3, lambda group: _run_trial(benchmark, splits, group, "permanent", name, 0))
    assert max(steps[-1][0] for steps in results) > 1.01
    num_steps = [len(steps) for steps in results]
    if is_together:
        assert num_steps[0] == num_steps[1] == num_steps[2]
    if name in ("ssp", "asgd"):
        assert num_steps == [26, 26, 9]
    if name == "alone":  # one more, in which each learns that it is to stop
        assert num_steps == [27, 27, 10]
