"""The launcher's calls of a policy of scaling."""

import itertools
import threading
import time

import pytest

from paceline.elastic.facts import Ready, Scaled, Voted
from paceline.elastic.protocol import Coordinator, MembershipSettings
from paceline.errors import SettingsError
from paceline.launch import scaling as scaling_module
from paceline.launch.scaling import PolicyCaller, PolicySettings
from paceline.monitor.events import StepFinished
from paceline.monitor.log import EventLog

POLICIES = """
import json, threading, pathlib
asked = []
def note(facts):
    asked.append(facts)
    return 3
def fail(facts): raise KeyError("price")
def nonsense(facts): return facts.size + 0.5
def hang(facts): threading.Event().wait(1000)
def once(facts):
    asked.append(facts)
    return 3 if len(asked) == 1 else exit("no more")
def takes_none(): return 2
"""


class Lab:
    """A run of two workers that has trained for a while, and a caller of a policy of it."""

    def __init__(self, tmp_path, policy, **settings):
        (tmp_path / "mine.py").write_text(POLICIES)
        self.now_s, self.warnings, self.log = 0.0, [], tmp_path / "events.jsonl"
        self.write_steps(0, 0.5, first_position=0)  # of an earlier time
        self.coordinator = Coordinator(MembershipSettings(2, first_epoch=1))
        self.coordinator.begin()
        for name in ("w0", "w1"):
            self.coordinator.handle(Ready(name))
        scaling = PolicySettings(f"{tmp_path}/mine.py:{policy}", 10.0, **settings)
        self.caller = PolicyCaller(scaling, self.log, 8, self.warnings.append, clock=lambda: self.now_s)

    def write_steps(self, epoch, step_s, num_steps=5, first_position=100):
        seconds = iter(step_s * step for step in range(num_steps))
        with EventLog(self.log, run="lab", rank=0, epoch=epoch, clock=lambda: next(seconds)) as log:
            for step in range(num_steps):
                position = first_position + 12 * step
                event = StepFinished(
                    loss=1.0,
                    weight=12.0,
                    num_samples=12,
                    learning_rate=0.1,
                    duration_s=step_s,
                    communication_s=0.0,
                    position=position,
                )
                log.write(event, step=step)

    def call(self):
        """Return the facts that follow from one call."""
        self.now_s += 11
        assert self.caller.read_facts(self.coordinator) == []
        deadline_s = time.monotonic() + 10
        while self.caller._thread is not None and self.caller._thread.is_alive() and time.monotonic() < deadline_s:
            time.sleep(0.005)
        return self.caller.read_facts(self.coordinator)


def test_a_policy_is_told_what_workers_bring_and_its_answer_counts(tmp_path):
    prices = tmp_path / "prices.json"
    prices.write_text('{"price_per_hour": 3}')
    lab = Lab(tmp_path, "note", prices=prices)
    assert lab.call() == [], "no step was measured"
    lab.write_steps(1, 0.5)
    assert lab.caller.read_facts(lab.coordinator) == [], "it is not time yet"
    assert lab.call() == [Scaled(3)]
    (facts,) = lab.caller._policy.__globals__["asked"]
    assert (facts.size, facts.most_workers, facts.samples_per_s, facts.prices) == (2, 8, 24.0, {"price_per_hour": 3.0})
    assert facts.samples_per_s_by_size == {2: 24.0}
    lab.coordinator.handle(Scaled(3))
    lab.write_steps(1, 0.5)
    assert lab.call() == [], "a worker is about to join"
    lab.coordinator.handle(Ready("w2"))
    for name in ("w0", "w1"):
        lab.coordinator.handle(Voted(name, 1, 5))
    lab.write_steps(2, 0.25)
    assert lab.call() == [], "it wants what there is"
    assert lab.caller._policy.__globals__["asked"][-1].samples_per_s_by_size == {2: 24.0, 3: 48.0}
    assert lab.warnings == []


def test_a_policy_that_exits_is_told_of_and_its_answer_of_before_does_not_count_again(tmp_path):
    lab = Lab(tmp_path, "once")
    for answer in ([Scaled(3)], []):
        lab.write_steps(1, 0.5)
        assert lab.call() == answer
    (warning,) = lab.warnings
    assert warning.endswith("once failed: SystemExit: no more")


@pytest.mark.parametrize(
    ("policy", "words"),
    [("fail", "failed: KeyError: 'price'"), ("nonsense", "from 1 to 8, but returned 2.5; mend the function")],
)
def test_a_policy_that_fails_changes_nothing_and_is_told_of_once(tmp_path, policy, words):
    lab = Lab(tmp_path, policy)
    for _ in range(3):
        lab.write_steps(1, 0.5)
        assert lab.call() == []
    (warning,) = lab.warnings
    assert words in warning


def test_a_policy_that_hangs_holds_up_nobody(tmp_path, monkeypatch):
    lab = Lab(tmp_path, "hang")
    lab.write_steps(1, 0.5)
    lab.now_s += 11
    for _ in range(5):
        assert lab.caller.read_facts(lab.coordinator) == []
        lab.now_s += 8
    (warning,) = lab.warnings
    assert "has not returned for two intervals" in warning


def test_prices_that_cannot_be_read_change_nothing(tmp_path):
    prices = tmp_path / "prices.json"
    prices.write_text("{}")
    lab = Lab(tmp_path, "note", prices=prices)
    prices.write_text("{")
    lab.write_steps(1, 0.5)
    assert lab.call() == []
    (warning,) = lab.warnings
    assert warning.startswith(f"the workers stay as they are, since {prices} must hold prices as JSON")


def test_a_disk_of_prices_that_does_not_answer_holds_up_nobody(tmp_path, monkeypatch):
    prices = tmp_path / "prices.json"
    prices.write_text("{}")
    lab = Lab(tmp_path, "note", prices=prices)
    monkeypatch.setattr(scaling_module, "read_prices", lambda path: threading.Event().wait(1000))
    lab.write_steps(1, 0.5)
    lab.now_s += 11
    for _ in range(5):
        assert lab.caller.read_facts(lab.coordinator) == []
        lab.now_s += 8
    (warning,) = lab.warnings
    assert f"note, which reads {prices} first, has not returned for two intervals" in warning


def test_throughput_is_that_of_the_monotonic_clock_and_a_damaged_line_is_passed_over(tmp_path, monkeypatch):
    lab = Lab(tmp_path, "note")
    monkeypatch.setattr(time, "time", itertools.count(0, 3_600).__next__)  # somebody sets the clock forward
    with lab.log.open("a") as file:
        file.write('{"kind":"step_finished","run":"l\n')
    lab.write_steps(1, 0.5)
    assert lab.call() == [Scaled(3)]
    assert lab.caller._policy.__globals__["asked"][-1].samples_per_s == 24.0


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("cheap", "must be one of efficient, or file.py:function, but got cheap"),
        ("{}:takes_none", "must take one argument, the ScaleFacts, but"),
        ("{}:none_such", "must define the function 'none_such'"),
    ],
)
def test_what_is_no_policy_is_refused_at_the_start(tmp_path, policy, words):
    (tmp_path / "mine.py").write_text(POLICIES)
    with pytest.raises(SettingsError, match=words):
        PolicySettings(policy.format(tmp_path / "mine.py")).find_policy()
    assert callable(PolicySettings("efficient").find_policy())


def test_a_log_that_somebody_has_removed_gives_no_throughput_until_it_grows_again(tmp_path):
    lab = Lab(tmp_path, "note")
    lab.write_steps(1, 0.5)
    assert lab.call() == [Scaled(3)]
    lab.log.unlink()
    assert lab.call() == []
    lab.write_steps(1, 0.5, num_steps=3)
    assert lab.call() == [Scaled(3)]
    assert lab.warnings == []
