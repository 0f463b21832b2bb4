"""A training whose workers are killed again and again: what those that stay hold must not grow.

    python tools/faults/reforms.py --num_changes 1000

Each kill makes two changes: the others go on, and a new worker joins. Worker w0 and the launcher live through all of
them; what the kernel says of both is printed twenty times. The exit code is 1 if something grew.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from scenarios import SETTINGS

from paceline.monitor.events import StepFinished, WorkersChanged
from paceline.monitor.reader import follow

_NUM_WORKERS = 3
_NUM_LOOKS = 20
_MORE_BYTES = 8 * 2**20
_PATIENCE_S = 120.0


@dataclass(frozen=True)
class Held:
    """What a process holds.

    Args:
        descriptors: Open files and sockets.
        threads: Number of threads.
        private_bytes: Memory that it shares with no other process.
        segments: Files in shared memory, of all processes.
    """

    descriptors: int
    threads: int
    private_bytes: int
    segments: int

    @classmethod
    def by(cls, pid: int) -> "Held":
        """Return what a process holds now."""
        process = Path(f"/proc/{pid}")
        lines = (process / "smaps_rollup").read_text().splitlines()
        private = sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) * 1024
        counts = (len(os.listdir(process / folder)) for folder in ("fd", "task"))
        return cls(*counts, private, len(os.listdir("/dev/shm")))


def find_worker(folder: Path, stem: str) -> int:
    """Return the process number of the newest worker whose name begins with `stem`."""
    files = sorted((folder / "workers").glob(f"{stem}*.pid"), key=lambda file: file.stat().st_mtime)
    return int(files[-1].read_text().split()[0])


def train(folder: Path) -> subprocess.Popen[bytes]:
    """Start a training without end."""
    settings = {**SETTINGS, "num_steps": 10**7, "checkpoint_interval": 10**6, "evaluate_interval": 10**6}
    options = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "paceline", "train", "transformer_lm", "--out", str(folder), *options]
    command += ["--workers", str(_NUM_WORKERS), "--sync", "every_step", "--min_workers", "1"]
    output = folder.with_suffix(".txt").open("wb")
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)


def hit(folder: Path, launcher: subprocess.Popen[bytes], num_changes: int) -> Iterator[tuple[int, Held, Held]]:
    """Kill the newest worker whenever all are there; yield what launcher and first worker hold, now and then.

    Raises:
        RuntimeError: The training has ended, or does not go on.
    """
    stop, newest_s = threading.Event(), [time.monotonic()]

    def check() -> None:
        if launcher.poll() is not None or time.monotonic() - newest_s[0] > _PATIENCE_S:
            stop.set()

    number, is_whole = 0, True
    for record in follow(folder / "events.jsonl", stop, 0.05, on_pause=check):
        if isinstance(record.event, WorkersChanged):
            newest_s[0], number = time.monotonic(), number + 1
            is_whole = record.event.num_workers == _NUM_WORKERS
            if number % (num_changes // _NUM_LOOKS) == 0:
                yield number, Held.by(launcher.pid), Held.by(find_worker(folder, "w0"))
            if number >= num_changes:
                return
        elif is_whole and isinstance(record.event, StepFinished):
            os.kill(find_worker(folder, "w2"), signal.SIGKILL)
            is_whole = False
    raise RuntimeError(f"the training must go on, but did not: {folder.with_suffix('.txt').read_text()[-300:]}")


def find_growth(looks: list[Held]) -> list[str]:
    """Return what grew between the second quarter of the looks and the last, in words.

    Old groups go when garbage is collected, so that the largest of several looks counts, and some more are allowed.
    """
    quarter = len(looks) // 4
    found = []
    for field in fields(Held):
        before, after = (
            max(getattr(look, field.name) for look in some) for some in (looks[quarter : 2 * quarter], looks[-quarter:])
        )
        if after > before + max(before // 4, 4) or (field.name == "private_bytes" and after > before + _MORE_BYTES):
            found.append(f"{field.name} from {before:,} to {after:,}")
    return found


def main() -> None:
    """Kill, count, and judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_changes", type=int, default=1000, help=f"at least {_NUM_LOOKS}")
    parser.add_argument("--directory", type=Path, help="folder for the run, which stays; a temporary one by default")
    given = parser.parse_args()
    num_changes = max(_NUM_LOOKS, given.num_changes)
    looks: dict[str, list[Held]] = {"launcher": [], "w0": []}
    with tempfile.TemporaryDirectory() as temporary:
        folder = (given.directory or Path(temporary)) / "run"
        folder.parent.mkdir(parents=True, exist_ok=True)
        launcher = train(folder)
        began_s = time.monotonic()
        try:
            for number, *held in hit(folder, launcher, num_changes):
                for (name, before), now in zip(looks.items(), held, strict=True):
                    before.append(now)
                    print(f"{number:5d} changes, {time.monotonic() - began_s:6.0f} s, {name:8s} {now}", flush=True)
        finally:
            launcher.terminate()
            launcher.wait(_PATIENCE_S)
    grown = {name: found for name, held in looks.items() if (found := find_growth(held))}
    print(f"grown: {grown}" if grown else "nothing grew")
    sys.exit(1 if grown else 0)


if __name__ == "__main__":
    main()
