"""What the launcher makes of how workers ended: the last line names the one that is to blame."""

import errno
import io
import signal
from pathlib import Path

import pytest

from paceline.errors import SettingsError, StorageError
from paceline.launch import local
from paceline.launch.exit_codes import ExitCode, leave
from paceline.launch.local import _tell, _tell_restart
from paceline.launch.processes import Ended
from paceline.launch.verdict import describe_killed, judge
from paceline.launch.worker import _code_of
from paceline.monitor.events import Failed, Preempted, Record, Restarted, RunFinished, Warned, WorkersChanged
from paceline.monitor.reader import read_log, select
from paceline.training.run_file import RunFile

FROZEN = "operation 7 'control' on rank 0 must finish within 5 s, but did not: rank 1 (host a, pid 5) is dead or frozen"


def record(rank, event, step=3):
    return Record(run="r", rank=rank, epoch=0, step=step, time_s=0.0, unix_s=0.0, event=event)


def fail(rank, error, message):
    return record(rank, Failed(error=error, message=message, traceback=""))


LOST = ExitCode.PEERS_LOST


@pytest.mark.parametrize(
    ("failures", "ended", "reason"),
    [
        (
            [fail(2, "CommunicationError", "rank 0 is gone"), fail(0, "PeerTimeoutError", FROZEN)],
            Ended(exit_codes={2: LOST, 0: LOST, 1: -signal.SIGKILL}, ended_here={1}),
            f"rank 0: {FROZEN}",
        ),
        (
            [fail(0, "CommunicationError", "lost its peers: rank 1 is dead")],
            Ended(exit_codes={1: -signal.SIGKILL, 0: LOST}),
            "rank 1 was killed by SIGKILL",
        ),
        (
            [fail(0, "CommunicationError", "lost its peers: rank 1 is dead")],
            Ended(exit_codes={1: 3, 0: LOST}),
            "rank 1 exited with code 3",
        ),
        (
            [fail(0, "CommunicationError", "lost its peers: rank 1 is dead")],
            Ended(exit_codes={0: LOST, 1: -signal.SIGTERM}, ended_here={1}),
            "rank 0: lost its peers: rank 1 is dead",
        ),
        ([], Ended(), "the workers ended without an error message"),
    ],
    ids=["frozen", "killed", "exited", "told to end", "nothing"],
)
def test_the_reason_of_a_restart_names_the_guilty(tmp_path, failures, ended, reason):
    outcome = judge(failures, ended, signalled=False, output=tmp_path)
    assert (outcome.code, outcome.reason) == (ExitCode.PEERS_LOST, reason)
    outcome = judge(failures, ended, signalled=False, output=tmp_path, killed=["w0 was killed", "w1.2 was killed"])
    assert (outcome.code, outcome.reason) == (ExitCode.PEERS_LOST, "w0 was killed; w1.2 was killed")


def test_restarts_are_numbered_whatever_other_changes_there_were(tmp_path):
    (tmp_path / "events.jsonl").touch()
    for epoch in (3, 7):
        _tell_restart(tmp_path, tmp_path / "events.jsonl", epoch, "w1 was killed")
    told = select(read_log(tmp_path / "events.jsonl"), Restarted)
    assert [(record.event.attempt, record.epoch) for record in told] == [(1, 3), (2, 7)]


@pytest.mark.parametrize(
    ("records", "signalled", "code"),
    [
        ([record(0, Preempted(checkpoint="c", signal="SIGTERM"))], True, ExitCode.PREEMPTED),
        ([fail(0, "SettingsError", "no")], False, ExitCode.REFUSED),
        ([fail(0, "DivergenceError", "they differ")], False, ExitCode.FAILED),
        ([fail(0, "NonFiniteError", "NaN")], False, ExitCode.FAILED),
        ([fail(0, "StorageError", "the disk is full")], False, ExitCode.FAILED),
        ([fail(0, "MismatchError", "they differ"), fail(1, "CommunicationError", "gone")], False, ExitCode.FAILED),
        ([fail(0, "KeyError", "no"), fail(1, "CommunicationError", "gone")], False, ExitCode.FAILED),
        ([record(0, RunFinished(held_out_loss=1.0, metrics={}, duration_s=1.0, samples_per_s=1.0))], True, 0),
        (
            [
                fail(2, "MemoryError", "a replacement could not be built"),
                record(0, RunFinished(held_out_loss=1.0, metrics={}, duration_s=1.0, samples_per_s=1.0)),
            ],
            False,
            ExitCode.FINISHED,
        ),
        ([], True, ExitCode.PREEMPTED),
    ],
)
def test_the_exit_code_says_how_it_ended(tmp_path, records, signalled, code):
    assert judge(records, Ended(), signalled, tmp_path).code == code


ABORTED = """
---- started again, 2026-01-01 ----
terminate called after throwing an instance of 'gloo::EnforceNotMet'
  what():  [enforce fail at pair.cc:456] op.preamble.length <= op.nbytes. 3184 vs 1072. Received data size doesn't match
Fatal Python error: Aborted
  File "torch/distributed/distributed_c10d.py", line 4387 in all_gather_single
"""


def test_a_rank_that_gloo_aborts_ran_another_operation_and_is_no_lost_one(tmp_path):
    (tmp_path / "rank0.err").write_text(ABORTED)
    (tmp_path / "rank1.err").write_text("")
    failures = [fail(1, "CommunicationError", "rank 1 of 2 lost others, in all_gather of [[796]] Float")]
    mismatch = judge(failures, Ended(exit_codes={0: -signal.SIGABRT, 1: LOST}), False, tmp_path).mismatch
    assert "rank 0, in all_gather_single, got 3184 bytes where it expected 1072; rank 1: rank 1 of 2 lost" in mismatch
    assert judge(failures, Ended(exit_codes={1: -signal.SIGABRT, 0: LOST}), False, tmp_path).mismatch == ""
    assert judge(failures, Ended(exit_codes={0: -signal.SIGKILL, 1: LOST}), False, tmp_path).mismatch == ""


def test_a_launcher_that_cannot_write_its_log_does_not_start_again(tmp_path):
    """Or a full disk would be met again at once, and nothing would tell of it."""
    with pytest.raises(StorageError, match="/dev/full could not be written: No space left on device; free space there"):
        _tell(tmp_path, Path("/dev/full"), 1, Restarted(attempt=1, reason="rank 0 exited with code 1"))


@pytest.mark.parametrize(
    ("records", "end"),
    [
        ([record(0, Preempted(checkpoint="c-4", signal="SIGTERM"))], "the others saved c-4"),
        ([], "no checkpoint was written for the stop"),
    ],
)
def test_who_was_killed_at_a_stop_is_told_with_what_was_saved(records, end):
    words = describe_killed({"w1": "w1 is in phase forward", "w2": "w2 is too"}, records, 0)
    said = "w1, w2 did not stop as asked, and had to be killed"
    assert words == f"{said}; {end}; w1 is in phase forward; w2 is too"
    assert "no checkpoint" in describe_killed({"w1": ""}, records, 1), "that was an earlier start"


FREEZING = """
import os, signal
import torch
import paceline
from paceline.recipes.transformer_lm import run as base


class Freezing(torch.nn.Embedding):
    def forward(self, tokens):
        if os.environ.get("RANK") == "1" and torch.is_grad_enabled():
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().forward(tokens)


def build():
    return Freezing(256, 256)


def run():
    return base().model_copy(update={"model": paceline.Model.model_validate(build)})
"""


@pytest.mark.timeout(120)
def test_the_last_line_of_a_hang_names_who_hangs(tmp_path, run_here, monkeypatch):
    monkeypatch.setattr("paceline.launch.workforce.GRACE_S", 0.5)
    (tmp_path / "freezing.py").write_text(FREEZING)
    where = ("--out", tmp_path / "run", "--max-restarts", 0, "--timeout_s", 1, "--memory.check", "false")
    done = run_here("train", tmp_path / "freezing.py", *where, "--data.max_bytes", 100_000)
    assert done.returncode == 1, done.stdout + done.stderr
    failed = select(read_log(tmp_path / "run" / "events.jsonl"), Failed)[-1]
    assert failed.rank == -1
    reason = "w1 stands still: no sign of life for"
    assert f"gave up after 0 restarts without progress: {reason}" in failed.event.message


ASLEEP = """
import os, pathlib, time
import torch
import paceline
from paceline.comm.progress import PROGRESS
from paceline.recipes.transformer_lm import run as base

MARK = pathlib.Path(__file__).with_suffix(".mark")


class Asleep(torch.nn.Embedding):
    def forward(self, tokens):
        if os.environ.get("RANK") == "1" and not MARK.exists():
            time.sleep(0.3)  # so that heartbeats see its first steps
            if PROGRESS.read().step >= 4:
                MARK.touch()
                time.sleep(1000)
        return super().forward(tokens)


def build():
    return Asleep(256, 256)


def run():
    return base().model_copy(update={"model": paceline.Model.model_validate(build)})
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("sync", ["every_step", pytest.param("asgd", marks=pytest.mark.slow)])
def test_training_goes_on_without_a_worker_that_sleeps_though_it_beats(tmp_path, run_here, sync):
    (tmp_path / "asleep.py").write_text(ASLEEP)
    where = (
        "--out",
        tmp_path / "run",
        "--hang_timeout_s",
        2,
        "--memory.check",
        "false",
        "--num_steps",
        8,
        "--sync",
        sync,
    )
    done = run_here("train", tmp_path / "asleep.py", *where, "--data.max_bytes", 100_000, "--workers", 2)
    assert done.returncode == 0, done.stdout + done.stderr
    records = read_log(tmp_path / "run" / "events.jsonl")
    assert not select(records, Restarted)
    reason = select(records, WorkersChanged)[0].event.reason
    assert reason.startswith("w1 hangs: ")
    assert "lives, but has made no progress for" in reason


SLEEPING = """
import pathlib, time
import torch
import paceline
from paceline.recipes.transformer_lm import run as base

LOG = pathlib.Path(__file__).parent / "run" / "events.jsonl"


class Sleeping(torch.nn.Embedding):
    calls = 0

    def forward(self, tokens):
        self.calls += 1
        while self.calls == 2 and "in forward; stacks" not in LOG.read_text():
            time.sleep(0.05)
        return super().forward(tokens)


def build():
    return Sleeping(256, 256)


def run():
    return base().model_copy(update={"model": paceline.Model.model_validate(build)})
"""


@pytest.mark.timeout(120)
def test_a_warning_names_the_line_at_which_all_workers_stand_still(tmp_path, run_here):
    (tmp_path / "sleeping.py").write_text(SLEEPING)
    where = ("--out", tmp_path / "run", "--hang_timeout_s", 1.5, "--memory.check", "false", "--num_steps", 3)
    done = run_here("train", tmp_path / "sleeping.py", *where, "--data.max_bytes", 100_000, "--workers", 2)
    assert done.returncode == 0, done.stdout + done.stderr
    warned = [one.event.message for one in select(read_log(tmp_path / "run" / "events.jsonl"), Warned)]
    told = next(words for words in warned if "in forward; stacks" in words)
    assert told.startswith("no worker has made progress for ")
    lines = SLEEPING.splitlines()
    asleep = [number for number, line in enumerate(lines, 1) if "LOG.read_text" in line or "time.sleep" in line]
    assert any(f"sleeping.py:{line} in forward" in told for line in asleep)
    assert "w0 is in phase forward of step" in told
    assert "w1 is in phase forward of step" in told


class Processes:
    """What stands for the workers of this machine, and counts what they are told."""

    def __init__(self):
        self.told, self.ended = [], Ended()

    def end_all(self):
        self.told.append("end_all")

    def kill_all(self):
        self.told.append("kill_all")

    def signal(self, number):
        self.told.append(number)


@pytest.fixture
def faked(tmp_path, monkeypatch):
    """The folder of a run whose launcher has faked workers, and ends by an error."""

    def fail_unexpectedly(self, *, takes_over):
        raise RuntimeError("a bug of the launcher")

    processes = Processes()
    monkeypatch.setattr(local, "_open_workforce", lambda *_: processes)
    monkeypatch.setattr(local, "_find_most_workers", lambda *_: (8, "the samples"))
    monkeypatch.setattr(local.Supervisor, "run", fail_unexpectedly)
    RunFile(recipe="transformer_lm", num_workers=1, run={}).save(tmp_path)
    (tmp_path / "events.jsonl").touch()
    (tmp_path / "workers").mkdir()
    return tmp_path, processes


def test_an_error_of_the_launcher_lets_workers_save_before_it_ends(faked):
    directory, processes = faked
    with pytest.raises(RuntimeError, match="a bug of the launcher"):
        local.launch(directory, 1)
    assert processes.told[0] == "end_all"
    assert processes.told[-1] == "kill_all"


def test_a_signal_that_ended_one_worker_before_it_could_tell_the_others_asks_all_to_stop(faked, monkeypatch):
    directory, processes = faked

    def be_told(self, *, takes_over):
        processes.tell_asked(signal.SIGTERM)
        assert self.is_stopping

    monkeypatch.setattr(local.Supervisor, "run", be_told)
    assert local.launch(directory, 1) is ExitCode.PREEMPTED
    assert processes.told[0] == signal.SIGTERM


def test_what_a_killed_launcher_left_is_cleared(faked):
    directory, _ = faked
    of_processes = (
        "w0.pid",
        "w1.2.pid",
        "w0.process",
        ".w0.process.7",
        "requests.log",
        ".requests.log.7",
        ".launcher.json.7",
    )
    for name in ("control.json", ".control.json.7", *of_processes, "rank0.err"):
        (directory / "workers" / name).write_text("left")
    with pytest.raises(RuntimeError, match="a bug of the launcher"):
        local.launch(directory, 1)
    assert {path.name for path in (directory / "workers").iterdir()} == {"rank0.err", "membership.jsonl"}


def test_as_many_min_workers_as_workers_are_all_that_makes_sense_and_spares_do_not_help_then(faked):
    directory, _ = faked
    with pytest.raises(SettingsError, match="--min_workers must be at most the 2 workers, but got 3"):
        local.launch(directory, 2, min_workers=3)
    for min_workers in (1, 2):
        with pytest.raises(RuntimeError, match="a bug of the launcher"):
            local.launch(directory, 2, min_workers=min_workers, num_spares=1)
    (record,) = read_log(directory / "events.jsonl")
    assert "--spares 1 cannot avoid the restart from the checkpoint at each loss that --min_w" in record.event.message


class FullDisk(io.StringIO):
    """A stream to a disk that is full."""

    def write(self, text):
        raise OSError(errno.ENOSPC, "No space left on device")

    def flush(self):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_worker_that_cannot_print_its_error_ends_with_its_code_and_without_another_error(monkeypatch):
    monkeypatch.setattr("sys.stderr", FullDisk())
    monkeypatch.setattr("sys.stdout", FullDisk())
    assert _code_of(StorageError("the disk is full")) is ExitCode.FAILED
    assert _code_of(KeyError("mine")) is ExitCode.FAILED
    codes = []
    monkeypatch.setattr("os._exit", codes.append)
    monkeypatch.setattr("atexit._run_exitfuncs", lambda: None)
    leave(ExitCode.FAILED)
    assert codes == [ExitCode.FAILED]
