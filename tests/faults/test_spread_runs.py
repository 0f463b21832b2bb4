"""Workers that leave by themselves, and workers of other machines, in whole runs."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from faults.test_killed_runs import (
    arguments_of_run,
    find_lines,
    find_workers,
    finish,
    newest_step,
    wait_until,
)
from forked_launcher import ForkedLauncher
from paceline.monitor.events import Failed, Preempted, Restarted, StepFinished, WorkersChanged
from paceline.monitor.reader import read_log, select
from paceline.testing import Netlab, netlab_missing
from paceline.testing.netlab import address


def start_run(lab, directory, num_workers, *options):
    command = [*arguments_of_run(directory, 10_000, num_workers, {"checkpoint_interval": 0}), *options]
    return start_command(lab, 0, *command)


def start_command(lab, host, *words):
    directory = Path(words[words.index("--out") + 1])
    if lab is None:
        return ForkedLauncher(words, directory.with_name(f"{directory.name}.txt"))
    command, folder = [sys.executable, "-m", "paceline", *map(str, words)], directory.parent

    def start():
        return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    return lab._network.hosts[host].call(start)


def list_names(directory):
    return [record.event.names for record in select(read_log(directory / "events.jsonl"), WorkersChanged)]


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_with_a_notice_a_worker_that_gets_sigterm_leaves_alone(tmp_path, wait_for_step):
    left = tmp_path / "left"
    process = start_run(None, left, 2, "--notice_s", "60")
    try:
        wait_for_step(left, 5, process)
        os.kill(find_workers(left)[0], signal.SIGTERM)
        wait_until(lambda: any("w0" not in names for names in list_names(left)), process)
        (left / "requests" / "w1.leave").write_text("60")
        wait_until(lambda: any("w1" not in names and len(names) == 2 for names in list_names(left)), process)
        wait_for_step(left, newest_step(left) + 5, process)
    finally:
        process.terminate()
        code, output = finish(process)
    assert code == 75, output
    records = read_log(left / "events.jsonl")
    assert not select(records, Restarted) + select(records, Failed)
    reasons = [record.event.reason for record in select(records, WorkersChanged)]
    assert any("w0 left" in reason for reason in reasons)
    assert not any("killed" in reason for reason in reasons)
    (preempted,) = select(records, Preempted)
    assert [record.step for record in select(records, StepFinished)] == list(range(1, preempted.step + 1))


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(bool(netlab_missing()), reason=netlab_missing() or "a netlab can be made")
def test_workers_of_other_machines_join_die_with_their_agent_leave_and_are_lost_with_the_link(tmp_path):
    run, token = tmp_path / "run", tmp_path / "token.json"
    at = f"{address(0)}:29600"
    with Netlab(4, 1e9) as lab:
        process = start_run(lab, run, 2, "--min_workers", "1", "--listen", at, "--launcher_timeout_s", "5")
        agents = {}

        def start_agent(host, name):
            there = ("--token_file", token, "--workers", 1, "--name", name, "--out", tmp_path / name)
            agents[name] = start_command(lab, host, "agent", at, *there)

        def is_training(*names):
            return bool(found := list_names(run)) and set(found[-1]) == set(names)

        try:
            wait_until(lambda: newest_step(run) >= 3, process)
            shutil.copy(run / "workers" / "control.json", token)
            token.chmod(0o600)
            for host, name in enumerate("bcd", 1):
                start_agent(host, name)
            wait_until(lambda: bool(list_names(run)) and len(list_names(run)[-1]) == 5, process, timeout_s=150)
            assert set(list_names(run)[-1]) == {"w0", "w1", "w0@b", "w0@c", "w0@d"}
            agents["b"].kill()
            wait_until(lambda: is_training("w0", "w1", "w0@c", "w0@d"), process)
            agents["c"].terminate()
            wait_until(lambda: is_training("w0", "w1", "w0@d"), process)
            code, output = finish(agents["c"])
            assert (code, output.splitlines()[-1]) == (0, "its workers have left")
            lab._network._bridge.batch("ip", "link set host3 down")
            wait_until(lambda: is_training("w0", "w1"), process)
            code, output = finish(agents["d"])
            assert code == 69, output
            assert "the launcher of run must answer, but no longer does, so the workers of this machine" in output
        finally:
            process.terminate()
            code, output = finish(process)
            for agent in agents.values():
                with agent:
                    agent.kill()
    assert code == 75, output
    records = read_log(run / "events.jsonl")
    assert not select(records, Restarted)
    (preempted,) = select(records, Preempted)
    assert [record.step for record in select(records, StepFinished)] == list(range(1, preempted.step + 1))
    assert b"d was lost: no sign of life for" in b"".join(find_lines(run, "workers_changed"))
