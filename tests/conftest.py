"""What tests of several parts share."""

import gc
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.main import main
from paceline.comm import LocalGroup
from paceline.comm.group import _joined as joined_groups

RunHere = Callable[..., "subprocess.CompletedProcess[str]"]
WaitForStep = Callable[[Path, int, "subprocess.Popen[str]"], None]


def pytest_collection_finish() -> None:
    """Let collections of garbage pass over what is there before the first test: to look through it takes 0.3 s."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def workers_in_threads_share_a_core() -> Iterator[None]:
    """Keep the threads of `LocalGroup.run` on one core, one for each process of pytest.

    They take turns at the interpreter anyway; on several cores, each turn wakes another core, which takes longer than
    most turns. Processes that a test starts use all cores.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    run = LocalGroup.run.__func__  # type: ignore[attr-defined]
    cores = os.sched_getaffinity(0)
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    core = sorted(cores)[number % len(cores)]

    def run_on_one_core(group: type[LocalGroup], *arguments: Any, **options: Any) -> list[Any]:
        os.sched_setaffinity(0, {core})  # of this thread, and of those that it starts
        try:
            return run(group, *arguments, **options)  # type: ignore[no-any-return]
        finally:
            os.sched_setaffinity(0, cores)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalGroup, "run", classmethod(run_on_one_core))
        yield


@pytest.fixture(autouse=True)
def joined_groups_end_with_their_test() -> Iterator[None]:
    """Forget the group of a worker that ran in a thread of this process, which belongs to its test alone."""
    yield
    joined_groups.clear()


@pytest.fixture
def run_here(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> RunHere:
    """Return what runs `paceline` in this process, whose workers are forked: that spares it to import torch twice.

    What it returns is as `subprocess.run` would return it.
    """

    def run(*arguments: object) -> "subprocess.CompletedProcess[str]":
        monkeypatch.setattr(sys, "argv", ["paceline", *map(str, arguments)])
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        capfd.readouterr()
        with warnings.catch_warnings():  # what a person would see is no error here
            warnings.simplefilter("default")
            code = _call_main()
        for number, handler in handlers.items():
            signal.signal(number, handler)
        return subprocess.CompletedProcess(arguments, code, *capfd.readouterr())

    return run


def _call_main() -> int:
    with pytest.raises(SystemExit) as exit_:
        main()
    code = exit_.value.code
    if isinstance(code, str):  # code of the user's called sys.exit with words
        print(code, file=sys.stderr)
        return 1
    return int(code or 0)


@pytest.fixture
def wait_for_step() -> WaitForStep:
    """Return what waits until the log of a run, which a process trains, tells of a step or of a later one."""
    told = re.compile(r'^{"kind":"step_finished".*?"step":(\d+),', re.MULTILINE)

    def wait(directory: Path, step: int, process: "subprocess.Popen[str]") -> None:
        log = directory / "events.jsonl"
        deadline_s = time.monotonic() + 60
        while not (
            log.exists() and any(int(number) >= step for number in told.findall(log.read_text()))
        ):  # to parse it again and again would take a core
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline_s, "the run stands still"
            time.sleep(0.03)

    return wait
