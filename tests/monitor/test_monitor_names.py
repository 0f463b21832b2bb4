import json
import subprocess
import sys

import pytest

import paceline.monitor


def test_every_public_name_is_there() -> None:
    assert paceline.monitor.__all__ == sorted(paceline.monitor.__all__, key=lambda name: (name[0].islower(), name))
    for name in paceline.monitor.__all__:
        assert getattr(paceline.monitor, name).__module__.startswith("paceline.monitor.")
    with pytest.raises(AttributeError, match="has no attribute 'LiveVeiw'; it has: AnomalyFound"):
        _ = paceline.monitor.LiveVeiw


def test_a_worker_that_only_writes_imports_nothing_heavy() -> None:
    code = "import json, sys, paceline.monitor; print(json.dumps([name for name in sys.modules]))"
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert not {"torch", "rich", "matplotlib", "numpy", "tensorboard"} & set(json.loads(shown))


def test_nothing_that_reads_a_log_imports_torch(tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = str(tmp_path_factory.mktemp("empty"))
    code = f"""
import sys
from pathlib import Path
from paceline.monitor import EventError, LiveView, export_tensorboard, export_trace, write_report
directory = Path({directory!r})
(directory / "events.jsonl").touch()
LiveView()
write_report(directory)
export_tensorboard(directory, directory / "board")
try:
    export_trace(directory, directory / "trace.json")
except EventError:
    pass
else:
    raise AssertionError("an empty log has nothing to trace")
assert "torch" not in sys.modules
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
