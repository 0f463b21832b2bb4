"""Threads in the background end before the interpreter does."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from paceline.comm import threads
from paceline.comm.channel import Channel
from paceline.comm.threads import end_threads, start_thread

SCRIPT = """
import importlib.util, sys, threading, time
spec = importlib.util.spec_from_file_location("threads", sys.argv[1])  # without torch
threads = importlib.util.module_from_spec(spec)
spec.loader.exec_module(threads)
asked = threading.Event()

def run():
    asked.wait()
    time.sleep(0.2)
    print("has ended")

threads.start_thread(run, name="late", stop=asked.set)
print("main ends")
"""


def test_the_interpreter_waits_for_them() -> None:
    made = subprocess.run([sys.executable, "-c", SCRIPT, threads.__file__], capture_output=True, text=True, timeout=30)
    assert (made.returncode, made.stdout.split("\n")) == (0, ["main ends", "has ended", ""]), made.stderr


def test_channels_that_nobody_closed_or_waited_for_end() -> None:
    ended = []
    begun = threading.Event()
    kept, dropped = Channel("kept"), Channel("dropped")
    before = {thread.name for thread in threading.enumerate()}

    def work() -> None:
        begun.set()
        threading.Event().wait(0.05)
        ended.append(True)

    kept.submit(work)
    dropped.submit(lambda: None)
    dropped.close()
    begun.wait()
    end_threads()
    assert ended == [True]
    assert before >= {"kept"}
    assert not {"kept", "dropped"} & {thread.name for thread in threading.enumerate()}


def test_one_that_cannot_end_holds_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "EXIT_TIMEOUT_S", 0.05)
    released = threading.Event()
    thread = start_thread(released.wait, name="stuck")
    end_threads()
    assert thread.is_alive()
    released.set()
    thread.join()


def test_no_other_file_starts_threads_of_its_own() -> None:
    # Those are pure Python, wait for all of theirs, or end the process themselves.
    known = {
        "comm/threads.py",
        "comm/local_group.py",
        "data/formats/parallel.py",
        "data/read_in_processes.py",
        "launch/launcher_watch.py",
        "launch/worker.py",
        "monitor/energy/meter.py",
        "monitor/live.py",
    }
    source = Path(threads.__file__).parents[1]
    found = {str(path.relative_to(source)) for path in source.rglob("*.py") if "threading.Thread(" in path.read_text()}
    assert {name for name in found if not name.startswith(("benchmarks/", "testing/"))} == known
