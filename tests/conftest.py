"""What tests of several parts share."""

import gc
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable

import pytest

from paceline.cli.main import main

RunHere = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run_here(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> RunHere:
    """Return what runs `paceline` in this process, whose workers are forked: that spares it to import torch twice.

    What it returns is as `subprocess.run` would return it.
    """

    def run(*arguments: object) -> "subprocess.CompletedProcess[str]":
        monkeypatch.setattr(sys, "argv", ["paceline", *map(str, arguments)])
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        capfd.readouterr()
        with warnings.catch_warnings():  # torch's launcher leaves files open
            warnings.simplefilter("default")
            code = _call_main()
            gc.collect()
        for number, handler in handlers.items():
            signal.signal(number, handler)
        return subprocess.CompletedProcess(arguments, code, *capfd.readouterr())

    return run


def _call_main() -> int:
    with pytest.raises(SystemExit) as exit_:
        main()
    return int(exit_.value.code or 0)
