"""The run of the fault campaign: a small language model some of whose workers are hit, each fault once.

The campaign copies this file into the folder of each run. Beside it, `faults.json` holds a list of faults, each with a
number, the rank that is hit, a step, a phase, a kind and a time; a worker that is hit leaves the file
``struck-NUMBER`` there, first.
"""

import ctypes
import errno
import json
import multiprocessing
import os
import random
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint import durable, saver, store, tensor_file
from paceline.comm.control import ControlConnection, ControlError
from paceline.comm.group import joined_group
from paceline.comm.progress import PROGRESS
from paceline.elastic.member import StoreMember
from paceline.recipes.transformer_lm import run as make_run
from paceline.replica.gradients import Gradients
from paceline.replica.healing import GradientComparison
from paceline.sync.outer_parameters import OuterParameters
from paceline.training import Run, session

FOLDER = Path(__file__).parent
_FOR_EVER_S = 100_000.0
_HOUR_S = 3600.0


def strike(phase: str, step: int) -> None:
    """Hit this worker, if a fault of its rank is due in the phase and was not seen yet."""
    for fault in _read_faults():
        if fault["phase"] == phase and _is_due(fault, step) and _claim(fault["number"]):
            _KINDS[fault["kind"]](fault["time_s"])


def _read_faults() -> list[dict[str, Any]]:
    document: list[dict[str, Any]] = json.loads((FOLDER / "faults.json").read_text())
    return document


def _is_due(fault: dict[str, Any], step: int) -> bool:
    """Return whether a fault hits this process now; rank -1 is any worker, and -2 one that joins."""
    is_joiner = "." in multiprocessing.current_process().name
    if fault["rank"] == -2:
        return is_joiner
    group = joined_group()
    rank = group.rank if group is not None else -3
    return step >= fault["step"] and (fault["rank"] == rank or (fault["rank"] == -1 and rank >= 0))


def _claim(number: int) -> bool:
    try:
        with open(FOLDER / f"struck-{number}", "x") as file:
            json.dump({"pid": os.getpid(), "unix_s": time.time()}, file)
        return True
    except FileExistsError:
        return False


def _kill(_: float) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_launcher(_: float) -> None:
    os.kill(int((FOLDER / "launcher.pid").read_text()), signal.SIGKILL)


def _stop(time_s: float) -> None:
    # A program of its own: a fork would keep this worker's connections open.
    subprocess.Popen(["sh", "-c", f"sleep {time_s}; kill -CONT {os.getpid()}"], start_new_session=True)
    os.kill(os.getpid(), signal.SIGSTOP)


def _sleep(time_s: float) -> None:
    time.sleep(time_s or _FOR_EVER_S)


def _hold_interpreter(time_s: float) -> None:
    # A call of PyDLL keeps the interpreter's lock.
    ctypes.PyDLL(None).usleep(int(time_s * 1e6)) if time_s else ctypes.PyDLL(None).sleep(int(_FOR_EVER_S))


def _shift_clock(time_s: float) -> None:
    real = time.time
    time.time = lambda: real() + time_s


def _wait_for_cut(_: float) -> None:
    """Give the campaign, which sees that the time has come, time to cut the link."""
    time.sleep(0.1)


def _fill_disk(_: float) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _break_disk(_: float) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


_KINDS: dict[str, Callable[[float], None]] = {
    "kill": _kill,
    "kill launcher": _kill_launcher,
    "stop": _stop,
    "sleep": _sleep,
    "hold": _hold_interpreter,
    "clock": _shift_clock,
    "link": _wait_for_cut,
    "disk full": _fill_disk,
    "I/O error": _break_disk,
}


def _before(owner: Any, name: str, phase: str) -> None:
    """Strike before a function is called."""
    real = getattr(owner, name)

    def called(*arguments: Any, **options: Any) -> Any:
        strike(phase, PROGRESS.read().step)
        return real(*arguments, **options)

    setattr(owner, name, called)


def _arm() -> None:
    """Strike where phases begin."""
    enter, stamp = PROGRESS.enter, PROGRESS.stamp

    def entered(now_s: float, phase: bytes) -> None:
        enter(now_s, phase)
        strike(phase.decode(), PROGRESS.read().step)

    def stamped(step: int, now_s: float, phase: bytes) -> None:
        stamp(step, now_s, phase)
        strike(phase.decode(), step)

    PROGRESS.enter, PROGRESS.stamp = entered, stamped
    _before(StoreMember, "report_loss", "vote")
    _before(StoreMember, "open_group", "open")
    _before(session, "restore", "heal")
    _before(saver.AsyncSaver, "_copy", "snapshot")
    _before(store, "write_file", "persist")
    _before(tensor_file.os, "fsync", "flush")
    _before(durable.os, "rename", "commit")


def _spoil_gradients() -> None:
    """Change gradients of one worker: one becomes NaN before the sum, or a bit of the sum flips after it."""
    begin, check = Gradients.__init__, GradientComparison.check

    def begun(self: Gradients, *arguments: Any, **options: Any) -> None:
        begin(self, *arguments, **options)
        send = self.before_launch

        def launched(bucket: Any) -> None:
            send(bucket)
            if _is_spoilt("NaN", self._step):
                bucket.buffer[0] = float("nan")

        self.before_launch = launched

    def checked(self: GradientComparison, step: int) -> None:
        if _is_spoilt("flip", step):
            gradient = next(p.grad for p in self._parameters.values() if p.grad is not None)
            gradient.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 29)
        check(self, step)

    Gradients.__init__, GradientComparison.check = begun, checked  # type: ignore[method-assign]


def _is_spoilt(kind: str, step: int) -> bool:
    return any(fault["kind"] == kind and _is_due(fault, step) and _claim(fault["number"]) for fault in _read_faults())


def _lose_messages(share: float) -> None:
    """Lose a share of the requests to the launcher, and of its replies: those requests are sent a second time."""
    real, chance = ControlConnection.request, random.Random(os.getpid())

    def request(self: ControlConnection, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        drawn = chance.random()
        if drawn < share:
            raise ControlError("the request was lost")
        reply = real(self, message, timeout_s)
        if drawn > 1 - share:
            raise ControlError("the reply was lost")
        return reply

    ControlConnection.request = request  # type: ignore[method-assign]


def _record_exchanges() -> None:
    """Write down what workers put into each exchange of outer parameters, and the mean that they get."""
    send, receive = OuterParameters.send, OuterParameters.receive
    numbers: weakref.WeakKeyDictionary[OuterParameters, int] = weakref.WeakKeyDictionary()
    steps: weakref.WeakKeyDictionary[OuterParameters, int] = weakref.WeakKeyDictionary()

    def project(self: OuterParameters, tensors: dict[str, torch.Tensor]) -> float:
        torch_state = torch.Generator().manual_seed(0)
        return sum(
            float(tensors[name].double().flatten() @ torch.randn(tensors[name].numel(), generator=torch_state).double())
            for name in sorted(self.tensors)
        )

    def write(self: OuterParameters, **values: Any) -> None:
        place = {"epoch": self._group.epoch, "name": self._name, "number": numbers[self], "step": steps[self]}
        with open(FOLDER / f"exchanges-{os.getpid()}.jsonl", "a") as file:
            file.write(json.dumps(place | values) + "\n")

    def sent(
        self: OuterParameters,
        weight: float,
        total_weight: float,
        step: int,
        differences: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        numbers[self], steps[self] = numbers.get(self, 0) + 1, step
        difference = differences or {name: self.tensors[name] - self._values[name] for name in self.tensors}
        norm = sum(float(tensor.double().square().sum()) for tensor in difference.values()) ** 0.5
        write(self, weight=weight, total=total_weight, sum=weight * project(self, difference), norm=weight * norm)
        send(self, weight, total_weight, step, differences)

    def received(self: OuterParameters) -> float:
        is_due = bool(self._works)
        waited_s = receive(self)
        if is_due:
            write(self, mean=project(self, self.mean))
        return waited_s

    OuterParameters.send, OuterParameters.receive = sent, received  # type: ignore[method-assign]


def _slow_down(pause_s: float) -> None:
    """Take time for each step, in which the campaign can do something."""
    stamp = PROGRESS.stamp

    def stamped(step: int, now_s: float, phase: bytes) -> None:
        stamp(step, now_s, phase)
        time.sleep(pause_s)

    PROGRESS.stamp = stamped


if (FOLDER / "faults.json").exists():
    _arm()
    _spoil_gradients()
    _record_exchanges()
    for fault in _read_faults():
        if fault["kind"] == "slow steps":
            _slow_down(fault["time_s"])
        if fault["kind"] == "lose messages":
            _lose_messages(fault["time_s"])
        if fault["kind"] == "clock" and fault["rank"] == -4 and multiprocessing.current_process().name == "MainProcess":
            threading.Timer(1.0, _shift_clock, [fault["time_s"]]).start()


def run() -> Run:
    """Return the run, small enough for hundreds of trainings."""
    torch.set_num_threads(1)
    return make_run()
