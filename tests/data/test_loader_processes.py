"""Loader processes end when they should, and say why."""

import multiprocessing
import multiprocessing.util
import os
import re
import signal
import threading
import time
import traceback
import warnings
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset

from paceline import Loader
from paceline.errors import DataError
from paceline.monitor.user_code import find_user_line
from paceline.testing import run_processes


class Points(Dataset):
    """Samples, of which some are broken, or never come."""

    def __init__(self, broken=-1, error=None, endless=-1, reading=None):
        self._broken, self._error, self._endless, self._reading = broken, error, endless, reading

    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index == self._broken:
            raise self._error
        if index == self._endless:
            if self._reading:
                self._reading.touch()
            time.sleep(1000)
        return torch.full((2,), index), torch.tensor(0)


HELD = []


def end_process():
    """Do what Python does at the end of a process, and return how many of those it had started are left."""
    multiprocessing.util._exit_function()
    return len(multiprocessing.active_children())


class TwoPartsError(Exception):
    """What pickle cannot make again."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


ERRORS = {"own": ValueError("sample 20 is broken"), "odd": TwoPartsError("one", "two")}


def meet_a_broken_sample(name):
    loader = Loader(Points(broken=20, error=ERRORS[name]), 4, shuffle=False, num_processes=1)
    seen = []
    try:
        for batch in loader:
            seen.append(batch.interval.start)
    except Exception as error:
        num_left = len(multiprocessing.active_children())
        trace = "".join(traceback.format_exception(error))
        return [f"{type(error).__name__}: {error}", trace, find_user_line(error), seen, num_left, end_process()]


@pytest.mark.parametrize(
    ("name", "error"), [("own", "ValueError: sample 20 is broken"), ("odd", "RuntimeError: TwoPartsError: one and two")]
)
def test_an_error_in_a_loader_process_reaches_the_loop_with_its_traceback(name, error):
    (result,) = run_processes(1, meet_a_broken_sample, {"name": name}, timeout_s=40)
    assert result.exit_code == 0, result.output  # it would hang at its end
    raised, trace, line, seen, num_left, num_left_at_end = result.value
    assert raised == error
    assert f'File "{__file__}", line' in trace
    assert "in __getitem__" in trace
    file, _, number = line.rpartition(":")
    assert Path(file).read_text().splitlines()[int(number) - 1].strip() == "raise self._error"
    assert seen == [0, 4, 8, 12, 16]
    assert (num_left, num_left_at_end) == (0, 0)


class Killing(Points):
    """Samples of which one kills the process that reads it, as often as the folder has files."""

    def __init__(self, folder):
        super().__init__()
        self._folder = Path(folder)

    def __getitem__(self, index):
        if index == 20 and (left := sorted(self._folder.glob("kill-*"))):
            left[0].unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def lose_readers(folder, num_micro_batches):
    options = {"seed": 1, "num_epochs": 1, "num_micro_batches": num_micro_batches}
    expected = [batch.inputs[:, 0].int().tolist() for batch in Loader(Points(), 4, **options)]
    loader = Loader(Killing(folder), 4, num_processes=2, **options)
    seen = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for batch in loader:
                seen.append(batch.inputs[:, 0].int().tolist())
        except DataError as error:
            return [str(error), seen, expected, len(multiprocessing.active_children())]
    return [[str(one.message) for one in caught], seen, expected, len(multiprocessing.active_children())]


@pytest.mark.parametrize(("num_kills", "num_micro_batches"), [(0, 2), (1, 1), (2, 2), (3, 1)])
def test_samples_of_a_killed_loader_process_are_read_by_others(tmp_path, num_kills, num_micro_batches):
    for number in range(num_kills):
        (tmp_path / f"kill-{number}").touch()
    options = {"folder": str(tmp_path), "num_micro_batches": num_micro_batches}
    (result,) = run_processes(1, lose_readers, options, timeout_s=60)
    assert result.exit_code == 0, result.output
    words, seen, expected, num_left = result.value
    if num_kills < 3:
        assert seen == expected
        told = r"a process that reads data \(pid \d+\) was killed by SIGKILL; others are started, and read the same .*"
        assert len(words) == num_kills
        assert all(re.fullmatch(told, one) for one in words)
    else:
        assert re.search(
            r"but 3 in a row ended before they had read a step, the last one \(pid \d+\) was killed by SIGK", words
        )
        assert seen == expected[: len(seen)]
    assert num_left == 0


def leave_the_loop_in_the_middle():
    batches = iter(Loader(Points(endless=20), 4, shuffle=False, num_processes=2))
    next(batches)
    HELD.append(batches)  # as a loop's error holds on to its iterator
    num_there, num_left = len(multiprocessing.active_children()), end_process()
    for thread in threading.enumerate():
        if thread.name == "paceline-loader":
            thread.join(10)
    return [num_there, num_left, len(multiprocessing.active_children())]


def test_a_process_ends_though_its_loader_processes_are_under_way():
    (result,) = run_processes(1, leave_the_loop_in_the_middle, timeout_s=40)
    assert result.exit_code == 0, result.output
    assert result.value == [2, 0, 0], "no others are started for those that end"


def be_killed_while_a_sample_is_read(folder):
    reading = Path(folder, "reading")
    batches = iter(Loader(Points(endless=0, reading=reading), 4, shuffle=False, num_processes=1))
    threading.Thread(target=next, args=(batches,), daemon=True).start()
    while not reading.exists():
        time.sleep(0.01)
    (reader,) = multiprocessing.active_children()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(reader.pid, number)
    reader.join(0.5)
    Path(folder, "lives").write_text(f"{reader.pid} {reader.is_alive()}")
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_loader_process_outlives_signals_and_ends_with_its_killed_worker(tmp_path):
    run_processes(1, be_killed_while_a_sample_is_read, {"folder": str(tmp_path)}, timeout_s=40)
    pid, is_alive = (tmp_path / "lives").read_text().split()
    assert is_alive == "True"
    reader = Path("/proc", pid)
    deadline_s = time.monotonic() + 55
    while reader.exists() and "Z" not in reader.joinpath("stat").read_text().rpartition(")")[2][:3]:
        assert time.monotonic() < deadline_s, "a loader process is left behind"
        time.sleep(0.05)
