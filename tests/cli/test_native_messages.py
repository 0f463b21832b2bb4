"""Torch's own messages: a lost process is told of in one line, and not in a native stack trace."""

import os

import pytest

from paceline.cli import main


def test_torch_prints_errors_only(monkeypatch, capsys):
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "")  # so that it is as before afterwards
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL")
    monkeypatch.setattr("sys.argv", ["paceline", "--version"])
    with pytest.raises(SystemExit):
        main()
    assert os.environ["TORCH_CPP_LOG_LEVEL"] == "ERROR"
    assert "torch" in capsys.readouterr().out
