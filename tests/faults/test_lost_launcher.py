"""Launchers are killed or stopped, and others take their places while the workers train on."""

import contextlib
import json
import os
import shutil
import signal
import time

import pytest
import test_killed_runs as killed_runs
from test_killed_runs import (
    find_lines,
    find_workers,
    kill,
    losses_of,
    make_arguments,
    newest_step,
    tensors_of,
)

from forked_launcher import ForkedLauncher
from paceline.monitor.events import Failed, Preempted, Restarted, RunFinished, StepFinished, Warned, WorkersChanged
from paceline.monitor.reader import read_log, select

GATED = """
import time
from pathlib import Path
import torch
import paceline
from paceline.comm.progress import PROGRESS
from paceline.recipes.transformer_lm import run as base

GATE = Path(__file__).with_name("gate")


class Gated(torch.nn.Embedding):
    def forward(self, tokens):
        while PROGRESS.read().step >= int(GATE.read_text()):
            time.sleep(0.01)
        return super().forward(tokens)


def build():
    return Gated(256, 256)


def run():
    return base().model_copy(update={"model": paceline.Model.model_validate(build)})
"""
NUM_STEPS, NUM_WORKERS = 160, 3
SETTINGS = {name: value for name, value in killed_runs.SETTINGS.items() if not name.startswith("model.")} | {
    "num_steps": NUM_STEPS,
    "checkpoint_interval": 20,
    "num_virtual_workers": 4,
}


class Lab:
    """A run whose steps wait at a gate, and the processes that were started for it."""

    def __init__(self, folder):
        self.folder, self.run, self.output, self.launchers = folder, folder / "run", folder / "output.txt", []
        (folder / "gated.py").write_text(GATED)
        self.open_gate(10**9)

    def open_gate(self, step):
        """Let steps pass, up to one."""
        new = self.folder / "gate.new"
        new.write_text(str(step))
        new.replace(self.folder / "gate")

    def begin(self, *options):
        return self.launch(*make_arguments(f"{self.folder}/gated.py:run", *self.where, *options, **SETTINGS))

    @property
    def where(self):
        return "--workers", NUM_WORKERS, "--out", self.run

    def launch(self, *words):
        process = ForkedLauncher(words, self.output)
        self.launchers.append(process)
        return process

    def resume(self, *options):
        """Start a launcher, and return it once it has taken the place of the one before."""
        process, num_taken = self.launch("train", "--resume", self.run, *options), self.count_taken()
        self.wait(lambda: self.count_taken() > num_taken, process)
        return process

    def count_taken(self):
        return sum(b"takes the place of a launcher that was lost" in line for line in find_lines(self.run, "warned"))

    def wait(self, condition, process=None):
        """Wait until something is so, while a launcher runs if one is given."""
        deadline_s = time.monotonic() + 90
        while not condition():
            assert process is None or process.poll() is None, self.output.read_text()
            assert time.monotonic() < deadline_s, self.output.read_text()
            time.sleep(0.02)

    def wait_for_step(self, step, process):
        self.wait(lambda: newest_step(self.run) >= step, process)

    def open_until(self, condition, process):
        """Let one step after another pass until something is so, which may take steps."""
        for step in range(newest_step(self.run) + 2, NUM_STEPS - 5):
            if condition():
                return
            self.open_gate(step)
            self.wait(lambda step=step: condition() or newest_step(self.run) >= step - 1, process)
            time.sleep(0.5)
        raise AssertionError("it has not come before the last step")

    def find_names(self):
        return [record.event.names for record in select(read_log(self.run / "events.jsonl"), WorkersChanged)]

    def finish(self, process):
        code = process.wait(timeout=100)
        return code, self.output.read_text()

    def close(self):
        for process in self.launchers:
            process.kill()
            process.wait()
        for pid in find_workers(self.run).values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def lab(tmp_path):
    lab = Lab(tmp_path)
    yield lab
    lab.close()


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The losses and the last checkpoint of the run that nobody disturbs."""
    lab = Lab(tmp_path_factory.mktemp("straight"))
    code, output = lab.finish(lab.begin())
    assert code == 0, output
    return losses_of(lab.run), tensors_of(lab.run, NUM_STEPS)


def kill_while_training(lab):
    first = lab.begin()
    lab.wait_for_step(15, first)
    first.kill()
    first.wait()
    return first


def kill_while_starting(lab):
    first = lab.begin()
    lab.wait(lambda: any(lab.run.glob("workers/*.process")), first)
    first.kill()
    first.wait()
    return first


def kill_while_workers_change(lab):
    """Kill the launcher once it knows that a worker was lost, before or after it has announced who goes on."""
    first = lab.begin()
    lab.wait_for_step(15, first)
    journal = lab.run / "workers" / "membership.jsonl"
    assert kill(lab.run, 2)
    lab.wait(lambda: '"Died"' in journal.read_text(), first)
    first.kill()
    first.wait()
    return first


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "kill_launcher",
    [
        kill_while_training,
        pytest.param(kill_while_starting, marks=pytest.mark.campaign),
        pytest.param(kill_while_workers_change, marks=pytest.mark.campaign),
    ],
)
def test_another_launcher_takes_over_and_replaces_a_killed_worker_to_the_same_bits(
    lab, run_here, straight, kill_launcher
):
    lab.open_gate(40)
    first = kill_launcher(lab)
    second = lab.resume()
    lab.wait_for_step(39, second)
    refused = run_here("train", "--resume", lab.run)
    assert refused.returncode == 2
    assert f"process {second.pid} on" in refused.stderr
    assert kill(lab.run, 1)
    lab.open_until(lambda: bool(lab.find_names()) and {"w0", "w1.2"} <= set(lab.find_names()[-1]), second)
    lab.open_gate(10**9)
    code, output = lab.finish(second)
    assert code == 0, output
    assert first.returncode == -signal.SIGKILL
    records = read_log(lab.run / "events.jsonl")
    assert len(select(records, RunFinished)) == 1
    assert not select(records, Failed) + select(records, Restarted)
    assert "w1 was killed by SIGKILL" in "".join(one.event.reason for one in select(records, WorkersChanged))
    assert [record.step for record in select(records, StepFinished)] == list(range(1, NUM_STEPS + 1))
    assert (losses_of(lab.run), tensors_of(lab.run, NUM_STEPS)) == straight
    left = {path.name for path in (lab.run / "workers").iterdir() if not path.name.startswith("rank")}
    assert left == {"membership.jsonl"}


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_workers_train_on_without_a_launcher_are_scaled_by_the_next_and_stop_as_it_is_asked(lab, run_here):
    lab.open_gate(30)
    kill_while_training(lab)
    (lab.run / "requests" / "w1.leave").write_text("60")
    lab.wait(lambda: newest_step(lab.run) >= 29)
    second = lab.resume("--min_workers", 1)
    (warned,) = select(read_log(lab.run / "events.jsonl"), Warned)
    assert warned.event.message.endswith("kept as begun: no --min_workers, though 1 was given")
    assert run_here("scale", lab.run, 2).returncode == 0
    lab.open_until(lambda: bool(lab.find_names()) and set(lab.find_names()[-1]) == {"w0", "w2"}, second)
    lab.open_gate(10**9)
    second.terminate()
    code, output = lab.finish(second)
    assert code == 75, output
    (preempted,) = select(read_log(lab.run / "events.jsonl"), Preempted)
    steps = [record.step for record in select(read_log(lab.run / "events.jsonl"), StepFinished)]
    assert steps == list(range(1, preempted.step + 1))


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_launcher_that_stood_still_finds_that_it_was_replaced_and_ends(lab):
    lab.open_gate(30)
    first = lab.begin()
    lab.wait_for_step(5, first)
    first.send_signal(signal.SIGSTOP)
    second = lab.resume()
    first.send_signal(signal.SIGCONT)
    assert first.wait(timeout=30) == 2
    assert f"process {second.pid} has taken the place of this one, process {first.pid}" in lab.output.read_text()
    assert sorted(find_workers(lab.run)) == [0, 1, 2]
    lab.wait_for_step(29, second)
    assert kill(lab.run, 1)
    lab.open_until(lambda: bool(lab.find_names()) and "w1.2" in lab.find_names()[-1], second)
    second.terminate()
    lab.open_gate(10**9)
    code, output = lab.finish(second)
    assert code == 75, output
    assert not select(read_log(lab.run / "events.jsonl"), Failed)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_for_other_settings_left_workers_save_and_end_first(lab, run_here):
    kill_while_training(lab)
    seen = newest_step(lab.run)
    resumed = run_here("train", "--resume", lab.run, "--num_steps", NUM_STEPS + 10)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    records = read_log(lab.run / "events.jsonl")
    assert select(records, Preempted)[0].step >= seen
    assert sorted(losses_of(lab.run)) == list(range(1, NUM_STEPS + 11))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_agent_of_another_machine_finds_the_next_launcher(lab):
    lab.open_gate(40)
    first = lab.begin("--listen", "127.0.0.1")
    lab.wait_for_step(3, first)
    token = lab.folder / "token.json"
    shutil.copy(lab.run / "workers" / "control.json", token)
    address = json.loads(token.read_text())["address"]
    agent = lab.launch(
        "agent", address, "--token_file", token, "--workers", 1, "--name", "b", "--out", lab.folder / "b"
    )
    lab.open_until(lambda: bool(lab.find_names()) and "w0@b" in lab.find_names()[-1], first)
    lab.open_gate(newest_step(lab.run) + 15)
    first.kill()
    first.wait()
    second = lab.resume("--listen", "127.0.0.1")
    os.kill(find_workers(lab.folder / "b" / "run")[0], signal.SIGKILL)
    lab.open_until(lambda: "w0.2@b" in lab.find_names()[-1], second)
    second.terminate()
    lab.open_gate(10**9)
    code, output = lab.finish(second)
    assert code == 75, output
    assert agent.wait(timeout=30) == 0, output
    (preempted,) = select(read_log(lab.run / "events.jsonl"), Preempted)
    steps = [record.step for record in select(read_log(lab.run / "events.jsonl"), StepFinished)]
    assert steps == list(range(1, preempted.step + 1))
