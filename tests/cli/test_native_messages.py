"""Messages of torch and Python: a lost process is told of in one line, a warning of ours is its sentence alone."""

import os
import subprocess
import sys
import warnings

import pytest

from paceline.cli import main
from paceline.data import NoIndexWarning


def test_torch_prints_errors_only(monkeypatch, capsys):
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "")  # so that it is as before afterwards
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL")
    monkeypatch.setattr("sys.argv", ["paceline", "--version"])
    with pytest.raises(SystemExit):
        main()
    assert os.environ["TORCH_CPP_LOG_LEVEL"] == "ERROR"
    assert "torch" in capsys.readouterr().out


def test_a_warning_of_ours_shows_no_line_of_our_code(monkeypatch, capsys):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # so that it is as before afterwards
    monkeypatch.setattr("sys.argv", ["paceline", "--version"])
    with pytest.raises(SystemExit):
        main()
    shown = [warnings.formatwarning("say so", one, "mine.py", 3, "x = 1") for one in (NoIndexWarning, UserWarning)]
    assert shown == ["warning: NoIndexWarning: say so\n", "mine.py:3: UserWarning: say so\n  x = 1\n"]


def test_standard_streams_that_were_closed_are_open_before_anything_else_is_opened():
    code = (
        "import os, sys\n"
        "from paceline.cli import main\n"
        "sys.argv = ['paceline', '--version']\n"
        "for descriptor in (0, 2):\n"
        "    os.close(descriptor)\n"
        "try:\n"
        "    main()\n"
        "except SystemExit:\n"
        "    print(os.readlink('/proc/self/fd/0'), os.readlink('/proc/self/fd/2'))\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    assert said.splitlines()[-1] == "/dev/null /dev/null", "a worker would put its output in the place of a socket"
