"""CUDA, which does not survive a fork, is used in no process that workers are forked from."""

import subprocess
import sys

import pytest
import torch

import paceline
from paceline.errors import SettingsError
from paceline.launch.forking import _PRELOADED

TOUCHES = """
import torch
touched = []
for name in ("_lazy_init", "init", "device_count", "current_device", "is_available", "get_device_properties"):
    setattr(torch.cuda, name, lambda *_, name=name, **__: touched.append(name) or 0)
for module in {modules!r}:
    __import__(module)
raise SystemExit(",".join(touched))
"""


def test_a_worker_that_was_forked_from_a_user_of_cuda_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    with pytest.raises(SettingsError, match="CUDA must not be initialised before a worker is forked"):
        paceline.join()


@pytest.mark.slow
def test_what_is_imported_before_workers_are_forked_leaves_cuda_alone():
    ours = [name for name in _PRELOADED if name.startswith("paceline")]
    ended = subprocess.run(
        [sys.executable, "-c", TOUCHES.format(modules=ours)], capture_output=True, text=True, check=False
    )
    assert ended.stderr.strip() == ""
