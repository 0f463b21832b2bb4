"""Workers and launchers are killed at any instant; the run must end as if nothing had happened."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forked_launcher import ForkedLauncher
from paceline.monitor.events import Failed, Preempted, Restarted, RunFinished, StepFinished, WorkersChanged
from paceline.monitor.reader import read_log, select

SETTINGS = {
    "global_batch": 12,
    "checkpoint_interval": 4,
    "evaluate_interval": 0,
    "evaluate_samples": 8,
    "hash_interval": 10,
    "num_threads": 1,
    "keep_checkpoints": 2,
    "schedule.warmup_steps": 2,
    "loss.sample_tokens": 0,
    "model.width": 32,
    "model.num_layers": 1,
    "model.num_heads": 2,
    "data.sequence_length": 32,
    "data.max_bytes": 300_000,
    "bucket_bytes": 4000,
}


def make_arguments(*arguments, **settings):
    overrides = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    return ["train", *map(str, arguments), *overrides]


def arguments_of_run(directory, num_steps, num_workers, settings):
    every = SETTINGS | {"num_steps": num_steps} | settings
    return make_arguments("transformer_lm", "--workers", num_workers, "--out", directory, **every)


def start(directory, num_steps, num_workers=3, **settings):
    words = arguments_of_run(directory, num_steps, num_workers, settings)
    return ForkedLauncher(words, directory.with_name(f"{directory.name}.txt"))


def finish(process, timeout_s=200):
    output, _ = process.communicate(timeout=timeout_s)
    return process.returncode, output


def find_workers(directory):
    """Return the process number of each rank that is alive: what it prints goes to a file of its own in the run."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            output = (folder / "fd" / "1").readlink()
        except OSError:
            continue
        if output.is_relative_to(directory / "workers"):
            found[int(output.stem.removeprefix("rank"))] = int(folder.name)
    return found


def kill(directory, rank):
    pid = find_workers(directory).get(rank)
    if pid is not None:
        os.kill(pid, signal.SIGKILL)
    return pid is not None


def find_lines(directory, kind):
    """Return the log's whole lines of a kind as they are: to read all of it, again and again, would take a core."""
    log = directory / "events.jsonl"
    lines = log.read_bytes().split(b"\n")[:-1] if log.exists() else []
    return [line for line in lines if line.startswith(f'{{"kind":"{kind}"'.encode())]


def newest_step(directory):
    steps = find_lines(directory, "step_finished")
    return json.loads(steps[-1])["step"] if steps else -1


def is_writing_checkpoint(directory):
    return any(not (path / "COMMITTED").exists() for path in directory.glob("checkpoints/step-*"))


def wait_until(condition, process, timeout_s=60, poll_s=0.02):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the run stands still"
        assert process.poll() is None, process.communicate()[0]
        time.sleep(poll_s)


def losses_of(directory):
    return {record.step: record.event.loss for record in select(read_log(directory / "events.jsonl"), StepFinished)}


def tensors_of(directory, step):
    return sorted(path.read_bytes() for path in directory.glob(f"checkpoints/step-{step:08}*/*.safetensors"))


def run_straight(run_here, directory, num_steps, **settings):
    done = run_here(*arguments_of_run(directory, num_steps, 3, settings))
    assert done.returncode == 0, done.stdout + done.stderr
    return losses_of(directory), tensors_of(directory, num_steps)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_kills", [4, pytest.param(10, marks=pytest.mark.campaign)])
def test_a_run_survives_many_kills_and_equals_the_uninterrupted_one(tmp_path, run_here, num_kills):
    """Half of the kills hit a random worker at a random step, half the writer in a checkpoint's making."""
    num_steps = 10 * num_kills
    chance = random.Random(0)
    killed = tmp_path / "killed"
    process = start(killed, num_steps, min_workers=3)  # so that all start again
    num_lines = 0
    try:
        for number in range(num_kills):
            target = (number + 1) * num_steps // (num_kills + 1)
            # Workers that have just been started again take a step first: before it they may not be there.
            wait_until(lambda n=num_lines: len(find_lines(killed, "step_finished")) > n, process)
            wait_until(lambda target=target: newest_step(killed) >= target - chance.randrange(8), process)
            if number % 2:
                wait_until(lambda: is_writing_checkpoint(killed), process, poll_s=0.002)
                time.sleep(chance.random() * 0.01)
                rank = 0
            else:
                rank = chance.randrange(3)
            assert kill(killed, rank), f"rank {rank} was not there to be killed"
            num_restarts = number + 1
            wait_until(lambda n=num_restarts: len(find_lines(killed, "restarted")) == n, process)
            num_lines = len(find_lines(killed, "step_finished"))
        code, output = finish(process)
    finally:
        process.kill()
    assert code == 0, output
    records = read_log(killed / "events.jsonl")
    assert all("was killed by SIGKILL" in record.event.reason for record in select(records, Restarted))
    assert len(select(records, RunFinished)) == 1
    losses, tensors = run_straight(run_here, tmp_path / "straight", num_steps)
    assert losses_of(killed) == losses
    assert tensors_of(killed, num_steps) == tensors


@pytest.mark.timeout(120)
def test_where_the_first_worker_is_killed_the_others_go_on_and_a_new_one_joins(tmp_path, wait_for_step):
    killed = tmp_path / "killed"
    process = start(killed, 10_000, checkpoint_interval=0)
    wait_for_step(killed, 10, process)
    assert kill(killed, 0)
    wait_until(lambda: any(b"w0.2" in line for line in find_lines(killed, "workers_changed")), process)
    wait_for_step(killed, newest_step(killed) + 5, process)
    process.terminate()
    code, output = finish(process)
    assert code == 75, output
    records = read_log(killed / "events.jsonl")
    assert not select(records, Restarted)
    assert not select(records, Failed)
    assert "w0 was killed by SIGKILL" in select(records, WorkersChanged)[0].event.reason
    (preempted,) = select(records, Preempted)
    steps = [record.step for record in select(records, StepFinished)]
    assert steps == list(range(1, preempted.step + 1)), "no step is done twice, and none is left out"


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_workers_join_and_leave_a_run_as_a_person_asks(tmp_path, run_here, wait_for_step):
    scaled = tmp_path / "scaled"
    process = start(scaled, 10_000, num_workers=2, checkpoint_interval=0)
    try:
        wait_for_step(scaled, 5, process)
        assert run_here("scale", scaled, 3).returncode == 0
        wait_until(lambda: len(find_lines(scaled, "workers_changed")) == 1, process)
        assert "epoch 1: w0, w1, w2; wanted: 3" in run_here("scale", scaled).stdout
        assert run_here("scale", scaled, "--leave", "w1").returncode == 0
        wait_until(lambda: any(b'"w3"' in line for line in find_lines(scaled, "workers_changed")), process)
        refused = run_here("scale", scaled, 13)
        assert refused.returncode == 2
        assert "must be from 1 to 12, the samples of a global batch, but got 13" in refused.stderr
    finally:
        process.terminate()
        code, output = finish(process)
    assert code == 75, output
    sizes = [record.event.num_workers for record in select(read_log(scaled / "events.jsonl"), WorkersChanged)]
    assert sizes[0] == sizes[-1] == 3
    late = run_here("scale", scaled, 2)
    assert late.returncode == 2
    assert "must be a run that trains now" in late.stderr


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_killed_launcher_takes_its_workers_along_and_resume_goes_on(tmp_path, run_here, wait_for_step):
    killed = tmp_path / "killed"
    process = start(killed, 1000, num_workers=2, launcher_timeout_s=0.5)
    wait_for_step(killed, 10, process)
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 30
    while find_workers(killed):
        assert time.monotonic() < deadline, "workers outlive their launcher"
        time.sleep(0.1)
    (preempted,) = select(read_log(killed / "events.jsonl"), Preempted)
    num_steps = preempted.step + 5
    resumed = run_here(*make_arguments("--resume", killed, num_steps=num_steps))
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert sorted(losses_of(killed)) == list(range(1, num_steps + 1))


def signal_launcher(process, terminal):
    process.send_signal(signal.SIGINT)


def signal_group(process, terminal):
    """Do as `timeout`, systemd or Slurm do: workers, and the process that they are forked from, get it too."""
    os.killpg(process.pid, signal.SIGTERM)


def close_terminal(process, terminal):
    os.close(terminal)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("stop", "name"),
    [
        pytest.param(signal_launcher, "SIGINT", marks=pytest.mark.slow),
        (signal_group, "SIGTERM"),
        pytest.param(close_terminal, "SIGHUP", marks=pytest.mark.slow),
    ],
)
def test_a_signal_saves_and_exits_with_75(tmp_path, stop, name, wait_for_step):
    stopped = tmp_path / "stopped"
    terminal, inside = os.openpty()
    command = arguments_of_run(stopped, 10_000, 2, {"checkpoint_interval": 0})
    starter = "import fcntl, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); from paceline.cli import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", starter, *command],
        stdin=inside,
        stdout=inside if stop is close_terminal else subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    os.close(inside)
    wait_for_step(stopped, 5, process)
    stop(process, terminal)
    code, output = finish(process, timeout_s=60)
    assert code == 75, output
    (preempted,) = select(read_log(stopped / "events.jsonl"), Preempted)
    assert preempted.event.signal == name
    assert not select(read_log(stopped / "events.jsonl"), Failed)
    checkpoint = Path(preempted.event.checkpoint)
    assert (checkpoint / "COMMITTED").exists()
    assert json.loads((checkpoint / "state.json").read_text())["step"] == preempted.step == newest_step(stopped)
    assert output is None or "--resume" in output
    assert not find_workers(stopped)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_signal_to_one_worker_stops_all_in_the_same_step(tmp_path, wait_for_step):
    stopped = tmp_path / "stopped"
    process = start(stopped, 10_000, num_workers=2, checkpoint_interval=0)
    wait_for_step(stopped, 5, process)
    os.kill(find_workers(stopped)[1], signal.SIGTERM)
    code, output = finish(process)
    assert code == 75, output
    assert len(select(read_log(stopped / "events.jsonl"), Preempted)) == 1


@pytest.mark.timeout(120)
def test_a_worker_that_dies_again_and_again_ends_the_run(tmp_path, run_here):
    script = tmp_path / "dying.py"
    script.write_text(
        "import os, signal\n"
        "from paceline.recipes.transformer_lm import run as base\n"
        "def build():\n"
        "    if os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)\n"
        "    import torch\n"
        "    return torch.nn.Embedding(256, 256)\n"
        "def run():\n"
        "    return base().model_copy(update={'model': __import__('paceline').Model.model_validate(build)})\n"
    )
    where = ("--workers", 2, "--max-restarts", 1, "--out", tmp_path / "run")
    done = run_here(*make_arguments(f"{script}:run", *where, **{"data.max_bytes": 100_000}))
    assert done.returncode == 1, done.stdout + done.stderr
    records = read_log(tmp_path / "run" / "events.jsonl")
    (restarted,) = select(records, Restarted)
    assert (restarted.event.attempt, restarted.event.reason) == (1, "w1 was killed by SIGKILL")
    assert (
        "gave up after 1 restarts without progress: w1.2 was killed by SIGKILL"
        in select(records, Failed)[-1].event.message
    )
