"""`paceline bench` from the shell."""

import os
import signal
from unittest.mock import Mock

import pytest

from paceline.cli.bench import print_rows
from paceline.registry import Settings


def test_who_is_asked_to_stop_ends_what_it_started() -> None:
    ended = []

    def measure(_: Settings) -> list[object]:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            raise AssertionError("the signal must interrupt")
        finally:
            ended.append("processes")

    with pytest.raises(SystemExit) as caught:
        print_rows(Settings(), measure, Mock(args=[]), None, None, None, None)
    assert caught.value.code == 128 + signal.SIGTERM
    assert ended == ["processes"]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
